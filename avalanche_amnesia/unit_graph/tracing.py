"""Tracing of a backbone: its masked form and its unit graph."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any, Literal, get_args

import torch
from avalanche.models import MultiHeadClassifier
from torch import fx, nn

from avalanche_amnesia.unit_graph import rules
from avalanche_amnesia.unit_graph.backbones import undisturbed
from avalanche_amnesia.unit_graph.exported import Exported
from avalanche_amnesia.unit_graph.exporting import declaring, export, export_both
from avalanche_amnesia.unit_graph.findings import Finding, ModelError, bake_in, drop
from avalanche_amnesia.unit_graph.graph import Draft, UnitGraph
from avalanche_amnesia.unit_graph.inputs import Inputs, inputs_of
from avalanche_amnesia.unit_graph.program import Program, Sizes
from avalanche_amnesia.unit_graph.structure import Known, structure_of
from avalanche_amnesia.unit_graph.task_owned import OwnedSpec
from avalanche_amnesia.unit_graph.walk import Walk

NormChoice = Literal["task", "batch"]
_ = rules  # imported for its registrations


@dataclass
class Trace:
    """Masked graphs and unit graph of a backbone, without its parameters: for every backbone that is built alike."""

    programs: dict[bool, Program]
    graph: UnitGraph
    owned: dict[str, OwnedSpec]
    constants: dict[str, torch.Tensor]
    frozen_modules: tuple[str, ...]
    classifier: str | None
    tried: bool = False


_known: Known[Trace] = Known(32)


def trace(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> Trace:
    """Export a feature extractor and put a mask behind every weighted layer; arguments as of :func:`examine`."""
    found, findings = examine(backbone, input_shape, **options)
    if found is None:
        more = f" (and {len(findings) - 1} more: validate(model) lists them)" if len(findings) > 1 else ""
        raise ModelError(f"{findings[0]}{more}")
    return found


def examine(
    backbone: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    *,
    example: Any = None,
    classifier: str | None = None,
    norm: NormChoice = "task",
    frozen: Collection[str] = (),
    task_owned: Collection[str] = (),
) -> tuple[Trace | None, list[Finding]]:
    """Read a feature extractor, and find everything that stands in the way of its masks."""
    if norm not in get_args(NormChoice):
        raise ValueError(f"norm must be one of {', '.join(map(repr, get_args(NormChoice)))}, got {norm!r}")
    if classifier is None:
        classifier = next((n for n, m in backbone.named_modules() if isinstance(m, MultiHeadClassifier)), None)
    _check_names(backbone, [*frozen, *task_owned, *([] if classifier is None else [classifier])])
    options = (classifier, norm, tuple(frozen), tuple(task_owned), input_shape)
    structure = None if example is not None else structure_of(backbone, options)
    known = _known.get(structure)
    if known is not None:
        return known, []
    with without(backbone, classifier):
        inputs = inputs_of(backbone, input_shape, example)
    with _notice(f"MaskedModel: torch.export is still reading {type(backbone).__name__}; large networks take a minute"):
        found, findings = _Tracing(backbone, inputs, classifier, norm, frozen, task_owned).run()
    if found is not None:
        _known.put(structure, found)
    return found, findings


@contextmanager
def without(backbone: nn.Module, classifier: str | None) -> Iterator[None]:
    """A backbone whose classifier passes on what it is given, for the length of a block."""
    with undisturbed(backbone):
        if classifier is not None:
            vars(backbone.get_submodule(classifier))["forward"] = lambda features, *labels: features
        yield


_PATIENCE = 10.0


@contextmanager
def _notice(text: str) -> Iterator[None]:
    """Tell the user what takes so long, after some seconds."""
    timer = Timer(_PATIENCE, lambda: sys.stderr.write(f"{text}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Tracing:
    """One backbone on its way to a trace; arguments as of :func:`examine`."""

    def __init__(
        self,
        backbone: nn.Module,
        inputs: Inputs,
        classifier: str | None,
        norm: str,
        frozen: Collection[str],
        task_owned: Collection[str],
    ) -> None:
        self.backbone, self.inputs, self.classifier = backbone, inputs, classifier
        self.norm, self.frozen, self.task_owned = norm, frozen, task_owned
        self.draft = Draft()
        self.constants: dict[str, torch.Tensor] = {}

    def run(self) -> tuple[Trace | None, list[Finding]]:
        """Both modes; the trace, or what stands in its way."""
        draft, outputs, programs = self.draft, {}, {}
        with without(self.backbone, self.classifier):
            both = export_both(self.backbone, self.inputs, (*self.frozen, *self.task_owned))
        for training in (True, False):
            before = len(draft.findings)
            with without(self.backbone, self.classifier):
                exported = self._exported(training, both)
            if len(draft.findings) > before:
                return None, draft.findings
            walk = Walk(
                self.backbone,
                exported,
                draft,
                training=training,
                owned=self.task_owned,
                frozen=self.frozen,
                norm=self.norm,
            )
            places = [node for node in exported.graph.nodes if node.op == "placeholder"]
            outputs[training] = walk.run(places)
            programs[training] = self._program(exported, walk.values)
            if not exported.batch and not draft.findings:
                reason = "it can be exported only for batches of one size (len(x), int(x.shape[0]), a list of samples)"
                fix = "take the number of samples as x.shape[0], and keep samples apart"
                draft.findings.append(Finding(f"forward of {type(self.backbone).__name__}", reason, fix))
        learning, evaluation = outputs[True], outputs[False]
        if learning is not None and evaluation is not None and not torch.equal(learning, evaluation):
            reason = "its features differ in training and in evaluation mode"
            draft.findings.append(Finding("forward", reason, "return the same in both"))
        owned = _owned_names(self.backbone, draft)
        if learning is not None:
            draft.findings += _uncovered(self.backbone, draft, owned, self.classifier)
        if draft.findings or learning is None:
            return None, draft.findings
        frozen_names = frozenset(n for n in draft.factors if any(f"{n}.".startswith(f"{p}.") for p in self.frozen))
        graph = UnitGraph(draft.layers, draft.sets, draft.factors, learning, owned, frozen_names, self.inputs)
        constants = {**self.constants, **draft.indices}
        return Trace(programs, graph, draft.owned, constants, tuple(sorted(draft.frozen_modules)), self.classifier), []

    def _exported(self, training: bool, both: Mapping[bool, Exported] | None) -> Exported:
        backbone, draft = self.backbone, self.draft
        declared = {"frozen": self.frozen, "task_owned": self.task_owned}
        exported = export(backbone, self.inputs, training=training, **declared) if both is None else both[training]
        for name in exported.written:
            holder = name.rpartition(".")[0]
            reason = f"writes to buffer {name!r}, which all tasks would share"
            fix = f"keep what changes in a norm of torch.nn, or {declaring(holder, 'task_owned')}"
            computed, _, inside = holder.partition(".parametrizations")
            change = bake_in(computed) if inside else None
            if inside:
                fix = "bake the parametrisation in: torch.nn.utils.parametrize.remove_parametrizations, or fix(model)"
            draft.findings.append(Finding(f"forward of {type(backbone).__name__}", reason, fix, change))
        names = {}
        for name, value in exported.constants.items():
            same = (known for known, held in self.constants.items() if _equal(held, value))
            names[name] = next(same, f"_constant_{len(self.constants)}")
            self.constants[names[name]] = value
        for node in exported.graph.nodes:
            if node.op == "get_attr" and node.target in names:
                node.target = names[node.target]
        draft.indices.update(self.constants)
        return exported

    def _program(self, exported: Exported, values: dict[fx.Node, Any]) -> Program:
        real = [(n, p.dtype) for n, p in self.backbone.named_parameters() if p.is_floating_point()]
        name, dtype = real[0] if real else ("", torch.get_default_dtype())
        return Program(exported.graph, values, Sizes(exported.shapes, exported.guards), dtype, name)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors are the same in all that they hold, NaN included."""
    same = first.dtype == second.dtype and first.shape == second.shape
    return same and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


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


def _owned_names(backbone: nn.Module, draft: Draft) -> frozenset[str]:
    parameters = [name for name, _ in backbone.named_parameters(remove_duplicate=False)]
    owned = {name for spec in draft.owned.values() for name in spec.parameters if name is not None}
    modules = tuple(f"{spec.name}." for spec in draft.owned.values() if spec.kind is None)
    owned |= {name for name in parameters if name in draft.owned or (modules and name.startswith(modules))}
    if any(spec.kind is not None and spec.parameters == (None, None) for spec in draft.owned.values()):
        norms = tuple(f"{name}." for name, spec in draft.owned.items() if spec.kind is not None)
        owned |= {name for name in parameters if name.startswith(norms)}  # norm="batch": left out of the network
    return frozenset(owned)


def _uncovered(backbone: nn.Module, draft: Draft, owned: frozenset[str], classifier: str | None) -> list[Finding]:
    """Parameters that no rule covers."""
    cut = None if classifier is None else f"{classifier}."
    loose = [
        name
        for name, _ in backbone.named_parameters()
        if name not in draft.factors and name not in owned and not (cut and name.startswith(cut))
    ]
    if not loose:
        return []
    return [
        Finding(
            f"parameters {loose} of {type(backbone).__name__}",
            "they are in no masked layer, so that no mask would protect them",
            "use them in forward, take them out of the backbone (fix(model) removes modules that forward never "
            "reads), or leave its classifier out: classifier='its name'",
            change=drop(loose),
        )
    ]
