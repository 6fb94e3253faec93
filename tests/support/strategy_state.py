"""Comparable states of strategies and models, and checks of them after an unlearning."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia import MaskedModel, TrajectoryPlugin, UnlearningPlugin
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.trajectory import Trajectory


def unlearning_plugin(strategy: Any) -> UnlearningPlugin:
    plugin = find_plugin(strategy, UnlearningPlugin)
    assert plugin is not None
    return plugin


def backups(strategy: Any) -> BackupPlugin:
    plugin = find_plugin(strategy, BackupPlugin)
    assert plugin is not None
    return plugin


def trajectory(strategy: Any) -> Trajectory:
    plugin = find_plugin(strategy, TrajectoryPlugin)
    assert plugin is not None
    return plugin.trajectory


def bits(model: nn.Module) -> dict[str, str]:
    """Hash of every tensor of a model; a dict compares without regard to order, see :func:`fingerprint`."""
    return {name: tensor_hash(value) for name, value in model.state_dict().items()}


def hashes(model: nn.Module) -> list[tuple[str, str]]:
    """As :func:`bits`, in the order of the state."""
    return list(bits(model).items())


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors, by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters by name, those of finished tasks too."""
    with register_all(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def same_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if two states have the same names and values."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fingerprint(strategy: Any, *stores: Any) -> Any:
    """Everything that an unlearning may change, deeply, as comparable values."""
    model, optimizer, plugin = strategy.model, strategy.optimizer, unlearning_plugin(strategy)
    with register_all(model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        modules = [(name, type(module)) for name, module in model.named_modules()]
    recorder = find_plugin(strategy, TrajectoryPlugin)
    assert recorder is not None
    return frozen(
        {
            "model": list(bits(model).items()),
            "identity": list(names),
            "known": getattr(model, "known_train_tasks_labels", None),
            "modules": modules,
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                | {"params": [names.get(id(p)) for p in group["params"]]}
                for group in optimizer.param_groups
            ],
            "state": {names.get(id(p)): dict(entry) for p, entry in optimizer.state.items()},
            "optimized": {name: id(p) for name, p in (strategy.optimized_param_id or {}).items()},
            "logs": [
                (t, {n: (e.chosen, e.values) for n, e in log.items()}) for t, log in recorder.trajectory.logs.items()
            ],
            "before": None if recorder.snapshot is None else recorder.snapshot.values,
            "ledger": plugin.ledger.state_dict(),
            "tainted": plugin.claims.tainted,
            "records": [record.to_json() for record in plugin.records],
            "current": (plugin.current, plugin.current_task),
            "stores": stores,
        }
    )


def frozen(value: Any) -> Any:
    """A value as nested comparable tuples, tensors as hashes."""
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor):
        return tensor_hash(value)
    if isinstance(value, nn.Module):
        return frozen(bits(value)), frozen(getattr(value, "known_train_tasks_labels", ()))
    if isinstance(value, dict):
        return tuple((frozen(k), frozen(v)) for k, v in sorted(value.items(), key=lambda item: str(item[0])))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    if hasattr(value, "data") and hasattr(value, "shape"):  # Avalanche's ParamData
        return tensor_hash(value.data)
    return repr(value)


@contextmanager
def unchanged(look: Callable[[], Any]) -> Iterator[None]:
    """Check that a value is the same before and after the block."""
    before = look()
    yield
    assert look() == before


def same(one: Any, other: Any) -> bool:
    """Return True if two nested values are the same: tensors in type, shape and bits."""
    return bool(frozen(one) == frozen(other))


def owned(model: MaskedModel) -> dict[str, Tensor]:
    """Backbone parameter → entries that some remaining task's mask owns."""
    use = model.graph.parameter_use(model.by_layer(model.cumulative_mask()))
    free = torch.zeros(())  # no task owns the norms of the backbone, which tasks copy
    return {name: (use.get(name, free) > 0).expand_as(p) for name, p in model.backbone.named_parameters()}


def stray(model: MaskedModel, initial: dict[str, Tensor]) -> list[str]:
    """Backbone parameters with an entry that no task owns and that differs from its initial bits."""
    result = []
    for name, value in model.backbone.named_parameters():
        free = ~owned(model)[name]
        if not torch.equal(value.detach()[free].view(torch.int32), initial[name][free].view(torch.int32)):
            result.append(name)
    return result


def initial_values(model: MaskedModel) -> dict[str, Tensor]:
    return values(model.backbone)


def assert_requests_leave_nothing_stray(
    strategy: Any, initial: dict[str, Tensor], requests: Iterable[Sequence[int]]
) -> None:
    """Unlearn: after every request, entries without an owner have their bits from before the first training."""
    for request in requests:
        strategy.unlearn(request)
        assert stray(strategy.model, initial) == []


def assert_economical(strategy: Any, lossless: Any, initial: dict[str, Tensor]) -> None:
    """Check that a log of three tasks is smaller than a lossless one, with the same claims and no stray entries."""
    assert trajectory(strategy).nbytes() < trajectory(lossless).nbytes()
    assert strategy.plan_unlearning([1]).claim == lossless.plan_unlearning([1]).claim
    assert strategy.plan_unlearning([2]).claim != "approximate"  # a script's own plugin makes it conditional
    assert_requests_leave_nothing_stray(strategy, initial, ([1], [0, 2]))
    assert trajectory(strategy).nbytes() == 0


def mark(strategy: Any, task: int, size: float = 8.0) -> None:
    """Add a mark to a task's recorded update, as if its training had made it: in the model and in every later log."""
    store = trajectory(strategy)
    later = store.tasks[store.tasks.index(task) + 1 :]
    logs = dict(store.logs)
    with torch.no_grad():
        for name, where in store.moved(task).items():
            strategy.model.get_parameter(name).add_(size * where)
            for other in later:
                if name in logs[other]:
                    entry = logs[other][name]
                    inside = where.reshape(-1)[entry.where.reshape(-1)]
                    values = entry.values + size * inside
                    logs[other] = logs[other].with_entries({**logs[other], name: entry.rebase(values, values)})
    store.logs = logs


def assert_marks_go(plain: Any, marked: Any, requests: list[list[int]], atol: float = 2e-5) -> None:
    """Obey requests in a strategy and in its twin with marked tasks: no mark may be left in the model."""
    for strategy in (plain, marked):
        for request in requests:
            strategy.unlearn(request)
    a, b = values(plain.model.backbone), values(marked.model.backbone)
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=atol), name
