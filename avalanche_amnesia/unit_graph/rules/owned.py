"""Rules for parts with a copy per task (task-owned): norms, which apply masks, and modules that the user declares."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from avalanche_amnesia.unit_graph.declared_calls import DECLARED, with_nodes
from avalanche_amnesia.unit_graph.exporting import PLAIN_AVERAGE, module_of
from avalanche_amnesia.unit_graph.findings import Unsupported
from avalanche_amnesia.unit_graph.masking import call_owned, tensor_in
from avalanche_amnesia.unit_graph.task_owned import NormKind, OwnedSpec
from avalanche_amnesia.unit_graph.values import ALWAYS, Masked, ParameterValue, Value, always_in_use, compact, filled
from avalanche_amnesia.unit_graph.walk import NORMS_BY_CHANNEL, Walk, rule

A: Any = torch.ops.aten


@rule(A.batch_norm.default, A.instance_norm.default)
def channel_norm(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    """Replace a batch or instance norm in the graph by the task's own copy, unless all tasks may share the norm."""
    own, momentum, eps = options[2:5]  # after the running statistics
    kind: NormKind = "batch" if node.target is A.batch_norm.default else "instance"
    statistics = tuple(str(given.target) for given in node.args[3:5] if isinstance(given, fx.Node))
    if any(name not in walk.buffers for name in statistics):
        raise Unsupported("a norm's running statistics are computed", "keep them in buffers of the norm itself")
    if any(user.target not in NORMS_BY_CHANNEL for given in node.args[3:5] for user in getattr(given, "users", ())):
        raise Unsupported("a norm's running statistics are read elsewhere", "every task has its own: leave them to it")
    if statistics and own and not walk.training:
        raise Unsupported(
            "a norm goes by the batch's statistics in evaluation, although it keeps running ones",
            "make it without them: track_running_stats=False",
        )
    names = _parameter_names(walk, node, weight, bias)
    name = _module_name(walk, node, (*names, *statistics))
    # A task gets a copy of statistics that change. Only the walk in training mode, the first, sees if they change.
    stay = not statistics or (not own if walk.training else name not in walk.draft.owned)
    if stay and _is_common(x, weight, bias):
        return walk.conservative(node)
    spec = OwnedSpec(
        name,
        names,
        kind,
        eps=eps,
        momentum=None if momentum == PLAIN_AVERAGE else momentum,
        statistics=statistics,
        fixed=bool(statistics) and walk.training and not own,
    )
    return _use_task_copy(walk, node, x, spec)


_OVER_UNITS: dict[Any, NormKind] = {
    A.layer_norm.default: "layer",
    A.rms_norm.default: "rms",
    A.group_norm.default: "group",
}


@rule(*_OVER_UNITS, zeros=True)
def layer_or_group_norm(walk: Walk, node: fx.Node, x: Any, over: Any, weight: Any = None, *rest: Any) -> Any:
    """Replace a layer, RMS or group norm in the graph by the task's own copy, unless all tasks may share the norm."""
    kind = _OVER_UNITS[node.target]
    bias, *left = (None, *rest) if kind == "rms" else rest or (None,)  # an RMS norm has no bias
    if _is_common(x, weight, bias):
        return walk.conservative(node)
    eps = left[0] if left else None
    if eps is None:
        eps = torch.finfo(node.all_input_nodes[0].meta["val"].dtype).eps if kind == "rms" else 1e-5
    names = _parameter_names(walk, node, weight, bias)
    axes: dict[str, Any] = {"groups": over} if kind == "group" else {"shape": tuple(over)}
    return _use_task_copy(walk, node, x, OwnedSpec(_module_name(walk, node, names), names, kind, eps=eps, **axes))


def _is_common(x: Any, *parameters: Any) -> bool:
    """Return True if all tasks may share a norm: its parameters have no gradients, and its input is never masked."""
    given = [parameter for parameter in parameters if parameter is not None]
    still = bool(given) and all(isinstance(p, ParameterValue) and not p.parts for p in given)
    return still and isinstance(x, Value) and x.always


def _use_task_copy(walk: Walk, node: fx.Node, x: Any, spec: OwnedSpec) -> Any:
    """Replace a norm in the graph by the task's own copy of it, and return the traced result of the copy."""
    if isinstance(x, ParameterValue):
        raise Unsupported("a parameter is normalised together with a value", "use it as it is")
    x = walk.value(x)
    if any(walk.is_frozen(name) for name in (spec.name, *spec.parameters) if name is not None):
        raise Unsupported(
            "a norm can't be frozen in part", "declare all of it frozen=[…], or nothing: every task has its own"
        )
    by_position = spec.kind in ("layer", "rms")
    last = x.ids.dim() - len(spec.shape)
    dims = [dim for dim in range(x.ids.dim()) if (dim < last if by_position else dim != 1)]
    sets = filled(walk.draft.sets.union_along(x.ids, dims))  # a norm's statistics and shifts affect padding too
    if walk.norm == "batch":
        spec = replace(spec, parameters=(None, None), statistics=())  # use the statistics of the current batch
    mask = walk.masks.emit(sets)
    _record_norm(walk, replace(spec, sets=None if mask is None else compact(sets)))
    own = walk.insert_behind(node, call_owned, (walk.tasks_own, spec.name, node.args[0], mask))
    node.replace_all_uses_with(own)
    shape = sets.shape if by_position else (1, len(sets), *(1,) * (x.ids.dim() - 2))
    result = x.like(sets.reshape(shape).expand(x.shape), Masked.ZERO)
    walk.values[own] = result
    return result


def _record_norm(walk: Walk, spec: OwnedSpec) -> None:
    """Record that tasks have their own copies of a norm; unite the units of all calls of the norm."""
    known = walk.draft.owned.get(spec.name)
    if known is None:
        walk.draft.owned[spec.name] = spec
        return
    if replace(known, sets=None, fixed=False) != replace(spec, sets=None, fixed=False):
        raise Unsupported(f"norm {spec.name!r} is used in two unlike ways", "use two norms")
    apart = known.sets is None or spec.sets is None
    sets = None if apart else compact(walk.draft.sets.union(known.sets, spec.sets))  # type: ignore[arg-type]
    fixed = known.fixed or spec.fixed  # the evaluation graph has no information about it
    walk.draft.owned[spec.name] = replace(known, sets=sets, fixed=fixed)


def _parameter_names(walk: Walk, node: fx.Node, *parameters: Any) -> tuple[str | None, ...]:
    still = {id(walk.values.get(n)): str(n.target) for n in node.all_input_nodes if n.op == "get_attr"}
    return tuple(still.get(id(p)) if isinstance(p, ParameterValue) and not p.parts else _name_of(p) for p in parameters)


def _name_of(parameter: Any) -> str | None:
    if parameter is None:
        return None
    if not isinstance(parameter, ParameterValue) or len(parameter.parts) != 1 or not parameter.parts[0].is_identity:
        raise Unsupported("a norm's weight or bias is computed", "use parameters of the norm itself")
    return parameter.parts[0].name


def _module_name(walk: Walk, node: fx.Node, names: tuple[str | None, ...]) -> str:
    known = next((name for name in names if name is not None), "")
    return known.rpartition(".")[0] or module_of(node) or known or node.name


# Declared modules -----------------------------------------------------------------------------------------------------


@rule(DECLARED)
def declared_call(walk: Walk, node: fx.Node, tensors: Any, sizes: Any, like: Any, number: int) -> Any:
    """Replace a placeholder in the graph by a call of the frozen or task-owned module for which it stands."""
    name, arguments = walk.exported.calls[number]
    walk.zero_inputs(node, dirty_only=True)
    given: Any = node.args
    args, kwargs = with_nodes(arguments, iter(given[0][1:]), iter(given[1]))
    if name in walk.owned:
        walk.draft.owned.setdefault(name, OwnedSpec(name))
        made = walk.insert_behind(node, call_owned, (walk.tasks_own, name, *args), kwargs)
    else:
        walk.draft.frozen_modules.add(name)
        for inner, parameter in walk.backbone.get_submodule(name).named_parameters():
            walk.draft.record(walk.parameter_value(f"{name}.{inner}"), torch.full((1,) * parameter.dim(), ALWAYS))
        with walk.graph.inserting_after(node):
            made = walk.graph.call_module(name, args, kwargs)
    for user in list(node.users):
        if user is not made:
            user.args = (made, user.args[1])
            user.target = tensor_in
    walk.values[made] = [always_in_use(result) for result in walk.result(node)]
    return walk.values[made]
