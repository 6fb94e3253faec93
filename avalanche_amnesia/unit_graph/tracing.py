"""Tracing of a backbone: returns its form with masks and its unit graph, or all reasons why it can't be masked."""

import copy
import enum
import functools
import itertools
import types
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from avalanche.models import MultiHeadClassifier
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from avalanche_amnesia import checks
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.unit_graph import rules
from avalanche_amnesia.unit_graph.backbones import Inputs, check_backbone, first_float, inputs_of, preserve_state
from avalanche_amnesia.unit_graph.exporting import Exported, advice_to_declare, export, features_of
from avalanche_amnesia.unit_graph.findings import Finding, ModelError, make_bake_fix, make_drop_fix
from avalanche_amnesia.unit_graph.graph import Draft, UnitGraph
from avalanche_amnesia.unit_graph.masked_backbone import MaskedBackbone, Program, Sizes, Trace
from avalanche_amnesia.unit_graph.trial import check_masks, compare
from avalanche_amnesia.unit_graph.walk import Walk

NormChoice = Literal["task", "batch"]
Item = TypeVar("Item")
_ = rules  # imported for its registrations
_LARGEST = 1 << 22
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"} | {"training"}


class Cache(Generic[Item]):
    """Cache of up to ``most`` items by key, which drops the least recently used item when it is full."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, Item] = {}

    def get(self, key: Hashable | None) -> Item | None:
        """Return the item stored under ``key``, or None if there is no such item in the cache."""
        found = self._held.pop(key, None)
        if found is not None:
            self._held[key] = found  # move the latest access to the end
        return found

    def put(self, key: Hashable | None, item: Item) -> None:
        """Store an item, and drop the least recently used one if the cache is full; do nothing if ``key`` is None."""
        if key is not None:
            self._held[key] = item
            if len(self._held) > self._most:
                del self._held[next(iter(self._held))]


_known: Cache[Trace] = Cache(32)


def trace_backbone(
    backbone: nn.Module, input_shape: tuple[int, ...] | None = None, *, trial: bool = True, **options: Any
) -> tuple[MaskedBackbone, UnitGraph]:
    """Return a backbone rewritten to take unit masks, and its unit graph; ``trial``: whether to test random masks."""
    check_backbone(backbone)
    found, findings = examine(backbone, input_shape, **options)
    if found is None:
        more = f" (and {len(findings) - 1} more: validate(model) lists them)" if len(findings) > 1 else ""
        raise ModelError(f"{findings[0]}{more}")
    masked = MaskedBackbone(backbone, found)
    if trial:
        # Checked for cached traces too, because forward may read globals.
        if options.get("norm", "task") == "task":
            with bypass(backbone, found.classifiers):
                compare(backbone, masked, found.graph)
        if not found.tried:
            check_masks(masked, found.graph)
        found.tried = masked.tried = True
    return masked, found.graph


def examine(
    backbone: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    *,
    example: Any = None,
    classifier: str | Sequence[str] | None = None,
    norm: NormChoice = "task",
    frozen: Collection[str] = (),
    task_owned: Collection[str] = (),
) -> tuple[Trace | None, list[Finding]]:
    """Trace a backbone; return the :class:`Trace` (None if it can't be masked) and a list of all reasons against it."""
    checks.one_of("norm", norm, NormChoice)
    if input_shape is not None:
        if isinstance(input_shape, str) or not isinstance(input_shape, Iterable):
            raise TypeError(f"input_shape must be a tuple of sizes, such as (1, 28, 28), got {input_shape!r}")
        input_shape = tuple(checks.whole_number("a size in input_shape", size) for size in input_shape)
    for argument, names in (("frozen", frozen), ("task_owned", task_owned), ("classifier", classifier or ())):
        if not isinstance(names, Collection) or (isinstance(names, str) and argument != "classifier"):
            raise TypeError(f"{argument} must be a list of names of modules, {argument}=['layer'], got {names!r}")
    left_out = [classifier] if isinstance(classifier, str) else list(classifier or ())
    if classifier is None:
        left_out = [name for name, module in backbone.named_modules() if isinstance(module, MultiHeadClassifier)][:1]
    _check_names(backbone, [*frozen, *task_owned, *left_out])
    classifiers = tuple(inner for name in left_out for inner in _inner_names(backbone, name))
    structure = structure_of(backbone, (classifiers, norm, tuple(frozen), tuple(task_owned), input_shape), example)
    known = _known.get(structure)
    if known is not None:
        return known, []
    with bypass(backbone, classifiers):
        inputs = inputs_of(backbone, input_shape, example)
    found, findings = _Tracing(backbone, inputs, classifiers, norm, frozen, task_owned).run()
    if found is not None:
        _known.put(structure, found)
    return found, findings


@contextmanager
def bypass(backbone: nn.Module, classifiers: Sequence[str]) -> Iterator[None]:
    """Make the classifiers of a backbone return their input during the block."""
    with preserve_state(backbone):
        for classifier in classifiers:
            vars(backbone.get_submodule(classifier))["forward"] = lambda features, *labels: features
        yield


def _inner_names(backbone: nn.Module, name: str) -> list[str]:
    """Return the names of all modules inside a ModuleList or ModuleDict, or ``[name]`` for any other module."""
    module = backbone.get_submodule(name) if name in dict(backbone.named_modules()) else None
    if not isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        return [name]
    return [inner for held, _ in module.named_children() for inner in _inner_names(backbone, f"{name}.{held}")]


@dataclass
class _Tracing:
    """Arguments (as of :func:`examine`) and results of tracing a backbone, once in training and once in eval mode."""

    backbone: nn.Module
    inputs: Inputs
    classifiers: tuple[str, ...]
    norm: str
    frozen: Collection[str]
    task_owned: Collection[str]
    draft: Draft = field(default_factory=Draft)
    constants: dict[str, Tensor] = field(default_factory=dict)
    known: dict[bool, Exported] = field(default_factory=dict)

    def run(self) -> tuple[Trace | None, list[Finding]]:
        """Trace training and evaluation mode; return the trace (or None) and the reasons why masking is impossible."""
        trace, findings = self._trace_both()
        if trace is None or all(parameter.requires_grad for parameter in self.backbone.parameters()):
            return trace, findings
        # If parts of the network have no gradients, some gates control nothing: trace again without those gates.
        ungated, biases = self.draft.layers_without_mask(trace.graph.output)
        biases |= self.draft.loose
        if not ungated and not biases:
            return trace, findings
        self.task_owned = (*self.task_owned, *sorted(biases))
        self.draft = Draft(ungated, indices=dict(self.constants))
        return self._trace_both()

    def _trace_both(self) -> tuple[Trace | None, list[Finding]]:
        draft, outputs, programs, sizes = self.draft, {}, {}, {}
        real = ((name, p.dtype) for name, p in self.backbone.named_parameters() if p.is_floating_point())
        name, dtype = next(real, ("", torch.get_default_dtype()))
        for training in (True, False):
            before = len(draft.findings)
            if training not in self.known:
                with bypass(self.backbone, self.classifiers):
                    self.known[training] = self._export_mode(training)
            if len(draft.findings) > before:
                return None, draft.findings
            exported = self.known[training].copied()
            walk = Walk(self.backbone, exported, draft, training, self.task_owned, self.frozen, self.norm)
            outputs[training] = walk.run()
            programs[training] = Program(exported.graph, dtype, name)
            sizes[training] = Sizes(exported.shapes, exported.guards)
            if not exported.batch and not draft.findings:
                reason = "it can be exported only for batches of one size (len(x), int(x.shape[0]), a list of samples)"
                fix = "take the number of samples as x.shape[0], and keep samples apart"
                draft.findings.append(Finding(f"forward of {type(self.backbone).__name__}", reason, fix))
        learning, evaluation = outputs[True], outputs[False]
        if learning is not None and evaluation is not None and not torch.equal(learning, evaluation):
            reason = "its features differ in training and in evaluation mode"
            draft.findings.append(Finding("forward", reason, "return the same in both"))
        owned = _task_owned_parameters(self.backbone, draft) | draft.loose
        if learning is not None:
            draft.findings += _find_uncovered(self.backbone, draft, owned, self.classifiers)
        if draft.findings or learning is None:
            return None, draft.findings
        frozen_names = frozenset(n for n in draft.factors if any(f"{n}.".startswith(f"{p}.") for p in self.frozen))
        graph = UnitGraph(draft.layers, draft.sets, draft.factors, learning, owned, frozen_names, self.inputs)
        constants = {**self.constants, **draft.indices}
        frozen_modules = tuple(sorted(draft.frozen_modules))
        return Trace(programs, sizes, graph, draft.owned, constants, frozen_modules, self.classifiers), []

    def _export_mode(self, training: bool) -> Exported:
        backbone, draft = self.backbone, self.draft
        exported = export(backbone, self.inputs, training=training, frozen=self.frozen, task_owned=self.task_owned)
        for name in exported.written:
            holder = name.rpartition(".")[0]
            reason = f"writes to buffer {name!r}, which all tasks would share"
            fix = f"keep what changes in a norm of torch.nn, or {advice_to_declare(holder, 'task_owned')}"
            computed, _, inside = holder.partition(".parametrizations")
            change = make_bake_fix(computed) if inside else None
            if inside:
                fix = "bake the parametrisation in: torch.nn.utils.parametrize.remove_parametrizations, or fix(model)"
            draft.findings.append(Finding(f"forward of {type(backbone).__name__}", reason, fix, change))
        self.constants |= exported.constants
        draft.indices.update(self.constants)
        return exported


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


def _task_owned_parameters(backbone: nn.Module, draft: Draft) -> frozenset[str]:
    parameters = [name for name, _ in backbone.named_parameters(remove_duplicate=False)]
    owned = {name for spec in draft.owned.values() for name in spec.parameters if name is not None}
    modules = tuple(f"{spec.name}." for spec in draft.owned.values() if spec.kind is None)
    owned |= {name for name in parameters if name in draft.owned or (modules and name.startswith(modules))}
    if any(spec.kind is not None and spec.parameters == (None, None) for spec in draft.owned.values()):
        norms = tuple(f"{name}." for name, spec in draft.owned.items() if spec.kind is not None)
        owned |= {name for name in parameters if name.startswith(norms)}  # norm="batch": not part of the network
    return frozenset(owned)


def _find_uncovered(backbone: nn.Module, draft: Draft, owned: frozenset[str], left_out: Sequence[str]) -> list[Finding]:
    """Return a list with one finding about all trainable parameters that no mask protects, or an empty list."""
    cut = tuple(f"{name}." for name in left_out)
    loose = [
        name
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad and name not in draft.factors and name not in owned and not name.startswith(cut)
    ]
    if not loose:
        return []
    return [
        Finding(
            f"parameters {loose} of {type(backbone).__name__}",
            "they are in no masked layer, so that no mask would protect them",
            "use them in forward, take them out of the backbone (fix(model) removes modules that forward never "
            "reads), or leave its classifier out: classifier='its name'",
            change=make_drop_fix(loose),
        )
    ]


# Validation and fixes --------------------------------------------------------------------------------------------


def validate(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> list[Finding]:
    """Return the reasons why a backbone can't be masked; empty if ``MaskedModel`` accepts the backbone.

    Args:
        backbone: any module.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: ``example``, ``classifier``, ``norm``, ``frozen``, ``task_owned`` as for that class.

    Raises:
        ValueError: for an unknown norm or name.
    """
    try:
        check_backbone(backbone)
        return examine(backbone, input_shape, **options)[1]
    except ModelError as error:  # there is no graph, or no input to run it on
        return [Finding(type(backbone).__name__, str(error), "see the message")]


def fix(backbone: nn.Module, input_shape: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """Return a copy of a backbone, changed so that it can be masked, without changes that would alter its features.

    Stateful parametrisations (spectral norm) are baked in, and modules that forward never reads are removed.
    A fix is kept only if features of random inputs stay equal. ``validate(fix(model))`` lists the other findings.

    Args:
        backbone: any module; not changed.
        input_shape: as for :class:`~avalanche_amnesia.models.MaskedModel`.
        options: as for :func:`validate`.

    Raises:
        ModelError: if the backbone can't be copied, or if no input is known to compare features on.
    """
    check_backbone(backbone)
    try:
        model = copy.deepcopy(backbone)
    except RuntimeError as error:  # tensors that are computed from parameters
        raise ModelError(f"{type(backbone).__name__} can't be copied ({error}); fix it by hand") from error
    inputs = inputs_of(backbone, input_shape, options.get("example"))
    expected = _features(model, inputs)
    tried: set[str] = set()
    while True:
        findings = [(str(finding), finding.change) for finding in validate(model, input_shape, **options)]
        changes = [(text, change) for text, change in findings if change is not None and text not in tried]
        if not changes:
            return model
        text, change = changes[0]
        tried.add(text)
        fixed = copy.deepcopy(model)
        change(fixed)
        if torch.allclose(_features(fixed, inputs), expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            model = fixed


_SAMPLES = 4


@torch.no_grad()
def _features(model: nn.Module, inputs: Inputs) -> Tensor:
    batch = inputs.batch(_SAMPLES, like=first_float(model))
    return features_of(copy.deepcopy(model).eval(), inputs, inputs.tensors(batch))


# Structure: backbones with equal structure are traced once -----------------------------------------------------------


def structure_of(backbone: nn.Module, options: Hashable, example: Any = None) -> Hashable | None:
    """Return a backbone's cache key (module types, attributes, tensor shapes), or None if an attribute has no key."""
    parts: list[Hashable] = [options, torch.get_default_dtype()]
    numbers = defaultdict[int, int](itertools.count().__next__)  # of modules and parameters, which may be shared
    try:
        parts.append(_attribute_key(dict(example) if isinstance(example, Mapping) else example))
        for name, module in backbone.named_modules(remove_duplicate=False):
            parts.append((name, type(module), numbers[id(module)]))
            for key, parameter in module._parameters.items():
                parts.append((key, None if parameter is None else (_type_of(parameter), numbers[id(parameter)])))
            for key, buffer in module._buffers.items():
                statistic = isinstance(module, _NormBase) and key in _STATISTICS
                parts.append((key, None if buffer is None else _type_of(buffer) if statistic else _content(buffer)))
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE:
                    parts.append((key, _attribute_key(value)))
    except _NoKeyError:
        return None
    return tuple(parts)


class _NoKeyError(Exception):
    """Error for an attribute that can't be compared, so that the backbone has no cache key."""


def _type_of(tensor: Tensor) -> Hashable:
    return type(tensor), tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.requires_grad


def _content(tensor: Tensor) -> Hashable:
    """Return a cache key from a tensor's type and values, because the traced graph may depend on the values."""
    if tensor.numel() > _LARGEST:
        raise _NoKeyError
    return (*_type_of(tensor), tensor_hash(tensor))  # type: ignore[misc]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def _attribute_key(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_attribute_key, value))
    if isinstance(value, dict):
        return type(value), tuple((_attribute_key(key), _attribute_key(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_attribute_key, value))
    if isinstance(value, Tensor):
        return _content(value)
    if type(value) is functools.partial:  # vision transformers store their norm type as a partial
        return type(value), *map(_attribute_key, (value.func, value.args, value.keywords))
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return value
    if isinstance(value, types.FunctionType) and value.__closure__ is None:  # reads only arguments and its module
        return value
    raise _NoKeyError
