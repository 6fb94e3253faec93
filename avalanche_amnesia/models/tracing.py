"""From a backbone to its masked form and its unit graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import torch
from avalanche.models import MultiHeadClassifier
from torch import fx, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from avalanche_amnesia.models import rules
from avalanche_amnesia.models.book import Book
from avalanche_amnesia.models.dry_run import dry_run
from avalanche_amnesia.models.findings import Finding
from avalanche_amnesia.models.graph import ModelError, UnitGraph
from avalanche_amnesia.models.input_shape import input_like
from avalanche_amnesia.models.masked_backbone import MaskedBackbone
from avalanche_amnesia.models.mends import bake_in, drop, unhook, untie
from avalanche_amnesia.models.multi_head import check_backbone
from avalanche_amnesia.models.tracer import trace_modes
from avalanche_amnesia.models.values import always_in_use
from avalanche_amnesia.models.walk import Walk

_BATCH, _OTHER_BATCH = 2, 3
NormChoice = Literal["task", "batch"]
_ = rules  # imported for its registrations


def trace_backbone(
    backbone: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    *,
    classifier: str | None = None,
    norm: NormChoice = "task",
    frozen: Collection[str] = (),
    task_owned: Collection[str] = (),
) -> tuple[MaskedBackbone, UnitGraph]:
    """Trace a feature extractor and put a mask behind every weighted layer.

    Args:
        backbone: any traceable module with one tensor input ``(batch, …)`` and one output ``(batch, features)``.
        input_shape: shape of one input without the batch; found by trying where it does not matter.
        classifier: name of the backbone's own classifier, which is left out: the features are what it was given.
            Avalanche's multi-head classifier is found by itself.
        norm: ``task`` or ``batch``, see :class:`~avalanche_amnesia.models.MaskedModel`.
        frozen: names of modules or parameters that the first task alone trains.
        task_owned: names of modules or parameters of which each task has a copy.

    Returns:
        The rewritten backbone, called as ``module(x, own, {layer name: mask})``, with the same parameter names and
        the same parameter objects; and its :class:`UnitGraph`.

    Raises:
        ModelError: for anything without a rule. Nothing is masked half.
        ValueError: for a norm or a name that is not known.
    """
    module, graph, findings = examine(
        backbone, input_shape, classifier=classifier, norm=norm, frozen=frozen, task_owned=task_owned
    )
    if findings:
        more = f" (and {len(findings) - 1} more: validate(model) lists them)" if len(findings) > 1 else ""
        raise ModelError(f"{findings[0]}{more}")
    assert module is not None
    assert graph is not None
    return module, graph


def examine(
    backbone: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    *,
    classifier: str | None = None,
    norm: NormChoice = "task",
    frozen: Collection[str] = (),
    task_owned: Collection[str] = (),
) -> tuple[MaskedBackbone | None, UnitGraph | None, list[Finding]]:
    """As :func:`trace_backbone`, with everything that stands in the way instead of an error about the first of it."""
    if norm not in get_args(NormChoice):
        raise ValueError(f"norm must be one of {', '.join(map(repr, get_args(NormChoice)))}, got {norm!r}")
    check_backbone(backbone)
    if classifier is None:
        classifier = next((n for n, m in backbone.named_modules() if isinstance(m, MultiHeadClassifier)), None)
    _check_names(backbone, [*frozen, *task_owned, *([] if classifier is None else [classifier])])
    book = Book(findings=_unmaskable_parts(backbone))
    if book.findings:  # what else there is can be told only once those are mended
        return None, None, book.findings
    shape, dtype = input_like(_without(backbone, classifier), input_shape)
    leaves = {*frozen, *task_owned, *([] if classifier is None else [classifier])}
    traces = trace_modes(backbone, leaves)
    book.indices.update(traces.constants)

    def walk(graph: fx.Graph) -> torch.Tensor | None:
        return Walk(backbone, graph, book, owned=task_owned, frozen=frozen, classifier=classifier, norm=norm).run(
            always_in_use((_BATCH, *shape), dtype)
        )

    output = walk(traces.training)
    if traces.evaluation is not traces.training:
        in_evaluation = walk(traces.evaluation)
        if output is not None and in_evaluation is not None and not torch.equal(output, in_evaluation):
            book.findings.append(
                Finding("forward", "its features differ in training and in evaluation mode", "return the same in both")
            )
    owned = _owned_names(backbone, book)
    if output is not None:
        book.findings += _uncovered(backbone, book, owned, classifier)
    if book.findings or output is None:
        return None, None, book.findings
    frozen_names = _frozen_names(book, frozen)
    own_graph = UnitGraph(book.layers, book.sets, book.factors, output, owned, frozen_names, shape, dtype)
    graphs = {True: traces.training, False: traces.evaluation}
    masked = MaskedBackbone(backbone, graphs, book, classifier)
    finding = _bound_to_a_batch(masked, own_graph)
    return (masked, own_graph, []) if finding is None else (None, None, [finding])


class _WithOwn(nn.Module):
    """A masked backbone with what a task has of its own."""

    def __init__(self, backbone: MaskedBackbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.own = nn.ModuleList(spec.make(backbone) for spec in backbone.owned.values())

    def forward(self, x: torch.Tensor, masks: Mapping[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.backbone(x, dict(zip(self.backbone.owned, self.own, strict=True)), masks)
        return result


def _bound_to_a_batch(backbone: MaskedBackbone, graph: UnitGraph) -> Finding | None:
    """Whether masks are right for batches of one size alone: where samples and units were folded into one axis."""
    x = torch.empty((_OTHER_BATCH, *graph.input_shape), dtype=graph.input_dtype, device="meta")
    masks = {name: torch.empty(layer.units, device="meta") for name, layer in graph.layers.items()}
    try:
        result = dry_run(_WithOwn(backbone), (x, masks))
        if tuple(result.shape) != (_OTHER_BATCH, len(graph.output)):
            return Finding("output", "the number of features depends on the size of the batch", "keep samples apart")
    except Exception as error:  # whatever a mask of another shape leads to
        return Finding(
            f"forward of {backbone.original}",
            f"masked, it runs on batches of {_BATCH} and not of {_OTHER_BATCH} ({error})",
            "keep the samples on an axis of their own where units are folded (x.reshape(x.shape[0], -1, …))",
        )
    return None


def _check_names(backbone: nn.Module, names: Collection[str]) -> None:
    kind, buffers = type(backbone).__name__, {name for name, _ in backbone.named_buffers()}
    known = {name for name, _ in (*backbone.named_modules(), *backbone.named_parameters())} - {""}
    for name in names:
        if name in buffers:
            holder = name.rpartition(".")[0]
            way_out = f"name the module that holds it, {holder!r}" if holder else "put it into a module and name that"
            raise ValueError(f"{name!r} is a buffer of {kind}, neither a module nor a parameter: {way_out}")
        if name in ("", kind) and name not in known:
            raise ValueError(
                f"{name!r}: the backbone itself can't be declared, as no unit would be left to mask; put the part that "
                "is meant into a module of its own and name that, or use SubnetModel(backbone), which traces nothing"
            )
        if name not in known:
            raise ValueError(f"{kind} has no module or parameter {name!r}; it has {sorted(known)}")


def _without(backbone: nn.Module, classifier: str | None) -> nn.Module:
    """The backbone for a trial run: a module that is left out passes its input on."""
    if classifier is None:
        return backbone
    return _PassingOn(backbone, classifier)


class _PassingOn(nn.Module):
    def __init__(self, backbone: nn.Module, classifier: str) -> None:
        super().__init__()
        self.backbone, self._classifier = backbone, classifier
        self.known_train_tasks_labels = getattr(backbone, "known_train_tasks_labels", None)
        if self.known_train_tasks_labels is None:
            del self.known_train_tasks_labels

    def forward(self, x: torch.Tensor, *rest: object) -> torch.Tensor:
        target = self.backbone.get_submodule(self._classifier)
        plain = target.forward
        target.forward = lambda features, *labels: features
        try:
            return self.backbone(x, *rest)
        finally:
            target.forward = plain
            del target.__dict__["forward"]


_OLD_NORMS = (WeightNorm, SpectralNorm)


def _unmaskable_parts(backbone: nn.Module) -> list[Finding]:
    """What no graph shows: hooks, parametrisations, one parameter under two names."""
    kind = type(backbone).__name__
    found = []
    for name, module in backbone.named_modules():
        if getattr(module, "parametrizations", None):
            found.append(
                Finding(
                    f"module {name!r} of {kind}",
                    "its weights are computed from others (a parametrisation), which no mask would protect",
                    "bake them in: torch.nn.utils.parametrize.remove_parametrizations, or fix(model)",
                    mends=bake_in(name),
                )
            )
        elif any(isinstance(hook, _OLD_NORMS) for hook in module._forward_pre_hooks.values()):
            found.append(
                Finding(
                    f"module {name!r} of {kind}",
                    "its weight is computed from others (weight_norm or spectral_norm of torch.nn.utils)",
                    "bake it in: torch.nn.utils.remove_weight_norm or remove_spectral_norm",
                )
            )
        elif module._forward_hooks or module._forward_pre_hooks:
            found.append(
                Finding(
                    f"module {name!r} of {kind}",
                    "it has forward hooks, which masks can't see through",
                    "remove them, or fix(model)",
                    mends=unhook(name),
                )
            )
    names: dict[int, list[str]] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    modules_of: dict[int, list[str]] = {}
    for name, module in backbone.named_modules(remove_duplicate=False):
        modules_of.setdefault(id(module), []).append(name)
    same_module = {frozenset(n) for n in modules_of.values()}
    for shared in names.values():
        owners = frozenset(name.rpartition(".")[0] for name in shared)
        if len(shared) > 1 and owners not in same_module and not any(owners <= group for group in same_module):
            found.append(
                Finding(
                    f"parameters {shared} of {kind}",
                    "one parameter under two names: a mask could protect only one of them",
                    "call one module twice instead, or give each its own parameter: fix(model)",
                    mends=untie(shared),
                )
            )
    return found


def _owned_names(backbone: nn.Module, book: Book) -> frozenset[str]:
    parameters = [name for name, _ in backbone.named_parameters(remove_duplicate=False)]
    owned = {name for spec in book.owned.values() for name in spec.parameters if name is not None}
    modules = tuple(f"{spec.name}." for spec in book.owned.values() if spec.kind is None)
    owned |= {name for name in parameters if name in book.owned or (modules and name.startswith(modules))}
    if any(spec.kind is not None and spec.parameters == (None, None) for spec in book.owned.values()):
        norms = tuple(f"{name}." for name, spec in book.owned.items() if spec.kind is not None)
        owned |= {name for name in parameters if name.startswith(norms)}  # norm="batch": left out of the network
    return frozenset(owned)


def _frozen_names(book: Book, frozen: Collection[str]) -> frozenset[str]:
    return frozenset(name for name in book.factors if any(f"{name}.".startswith(f"{part}.") for part in frozen))


def _uncovered(backbone: nn.Module, book: Book, owned: frozenset[str], classifier: str | None) -> list[Finding]:
    """Parameters that no rule covers."""
    cut = None if classifier is None else f"{classifier}."
    loose = [
        name
        for name, _ in backbone.named_parameters()
        if name not in book.factors and name not in owned and not (cut and name.startswith(cut))
    ]
    if not loose:
        return []
    return [
        Finding(
            f"parameters {loose} of {type(backbone).__name__}",
            "they are in no masked layer, so that no mask would protect them",
            "use them in forward, take them out of the backbone (fix(model) removes modules that forward never "
            "reads), or leave its classifier out: classifier='its name'",
            mends=drop(loose),
        )
    ]
