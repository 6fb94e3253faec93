"""Register how attributes of Avalanche's plugins and strategies, and of two plugins of this package, are saved."""

from collections import Counter
from collections.abc import Iterator
from copy import copy, deepcopy
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset, make_avalanche_dataset
from avalanche.benchmarks.utils.classification_dataset import TaskAwareSupervisedClassificationDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.flat_data import FlatData
from avalanche.training import DER, ER_ACE, Cumulative
from avalanche.training import plugins as stock
from avalanche.training.storage_policy import ParametricBuffer, ReservoirSamplingBuffer, _ParametricSingleBuffer
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import ParamData
from torch import Tensor, nn

from avalanche_amnesia.benchmarks.data import TensorTask
from avalanche_amnesia.saving.values import StateError, checked
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.states import Conversion, load_model_state, model_state, refill, register_state
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.unlearning.purging.samples import flat_data


def _dump_data(data: AvalancheDataset) -> dict[str, Any]:
    """Return the samples of a data set and its attributes per sample, as tensors and lists."""
    nested = list(_nested_data(data._flat_data))
    others = sorted({type(inner).__name__ for inner in nested if not isinstance(inner, (FlatData, TensorTask))})
    groups = [found for inner in nested if (found := getattr(inner, "_transform_groups", None)) is not None]
    pairs = [pair for group in groups for pair in group.transform_groups.values()]
    if others or any(any(pair or ()) for pair in pairs):  # None: a requested group without transforms
        raise StateError(
            f"a replay buffer holds samples of {', '.join(others) or 'transformed data'}, perhaps another one at "
            "every call: only data in tensors (task_benchmark with pairs of tensors) can be saved"
        )
    rows = [data[i] for i in range(len(data))]
    return {
        "task_aware": isinstance(data, TaskAwareSupervisedClassificationDataset),
        "x": torch.stack([row[0] for row in rows]) if rows else None,
        "y": [int(row[1]) for row in rows],
        "attributes": {
            name: (list(attribute), attribute.use_in_getitem) for name, attribute in data._data_attributes.items()
        },
    }


def _load_data(values: dict[str, Any]) -> AvalancheDataset:
    """Build a data set from ``values``, a result of :func:`_dump_data`, with the samples in the same order."""
    if values["x"] is None:
        return AvalancheDataset([])
    samples = TensorTask(values["x"], torch.arange(len(values["y"])), values["y"])
    attributes = [
        DataAttribute(flat_data(items), name, use_in_getitem=use) for name, (items, use) in values["attributes"].items()
    ]
    if values["task_aware"]:
        return TaskAwareSupervisedClassificationDataset([samples], data_attributes=attributes)
    return make_avalanche_dataset(AvalancheDataset([samples]), data_attributes=attributes)


def _nested_data(data: Any) -> Iterator[Any]:
    """Yield a data set and all data sets inside it."""
    yield data
    for inner in data._datasets if isinstance(data, FlatData) else ():
        yield from _nested_data(inner)


def _to_tensors(held: Any) -> Any:
    """Return nested dicts and tuples with every ``ParamData`` of Avalanche replaced by its tensor."""
    if isinstance(held, dict):
        return {key: _to_tensors(value) for key, value in held.items()}
    if isinstance(held, tuple):
        return tuple(map(_to_tensors, held))
    return held.data if isinstance(held, ParamData) else held


def _to_parameters(state: Any, held: Any, strategy: Strategy, name: str = "") -> Any:
    if isinstance(state, dict):
        found = {key: _to_parameters(value, None, strategy, str(key)) for key, value in state.items()}
        return refill(held, found) if isinstance(held, dict) else found
    if isinstance(state, tuple):
        return tuple(_to_parameters(value, None, strategy) for value in state)
    return ParamData(name, state.shape, init_tensor=state, device=state.device) if isinstance(state, Tensor) else state


def _dump_teacher(model: nn.Module | None) -> Any:
    return None if model is None else model_state(model)


def _load_teacher(state: Any, held: Any, strategy: Strategy) -> nn.Module | None:
    if state is None:
        return None
    teacher = deepcopy(strategy.model)
    if isinstance(teacher, nn.Module):
        load_model_state(teacher, state)
    return teacher


def _dump_lwf(method: Any) -> dict[str, Any]:
    classes = {task: set(map(int, seen)) for task, seen in method.prev_classes_by_task.items()}
    return {"teacher": _dump_teacher(method.prev_model), "count": method.expcount, "classes": classes}


def _load_lwf(state: Any, method: Any, strategy: Strategy) -> Any:
    teacher, count, classes = checked(state, teacher=dict | None, count=int, classes=dict)
    method = copy(method)
    method.prev_model, method.expcount = _load_teacher(teacher, None, strategy), count
    method.prev_classes_by_task = refill(method.prev_classes_by_task, classes)
    return method


def _dump_policy(policy: Any) -> dict[str, Any]:
    """Return a replay memory's storage policy as values to save: samples, numbers and sets, of nested policies too."""
    state = {name: value for name, value in vars(policy).items() if type(value) in (bool, int, str, set, Tensor)}
    if hasattr(policy, "buffer_groups"):
        return {**state, "groups": {key: _dump_policy(group) for key, group in policy.buffer_groups.items()}}
    return {**state, "samples": _dump_data(policy.buffer)}


def _load_policy(state: Any, policy: Any, strategy: Strategy) -> Any:
    state, new = dict(state), copy(policy)
    if "groups" in state:
        new.buffer_groups = {
            key: _load_policy(of, _empty_buffer(policy, of), strategy) for key, of in state.pop("groups").items()
        }
    else:
        new.buffer = _load_data(state.pop("samples"))
    vars(new).update({name: value for name, value in state.items() if type(value) is type(vars(new).get(name))})
    return new


def _empty_buffer(policy: Any, state: Any) -> Any:
    if isinstance(policy, ParametricBuffer):
        return _ParametricSingleBuffer(state["max_size"], policy.selection_strategy)
    return ReservoirSamplingBuffer(state["max_size"])


def _dump_schedule(scheduler: Any) -> dict[str, Any]:
    found = {name: value for name, value in scheduler.state_dict().items() if not callable(value)}
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in found.items()}


def _load_schedule(state: Any, scheduler: Any, strategy: Strategy) -> Any:
    own = _dump_schedule(scheduler)
    if any(hasattr(scheduler, name) and name not in own for name in state):
        raise StateError(f"invalid value in state: {list(state)} where {list(own)} should be")
    held = vars(scheduler)
    counted = {name: Counter(of) for name, of in state.items() if isinstance(held.get(name), Counter)}  # milestones
    scheduler.load_state_dict(state | counted)
    return scheduler


_PARAMETERS = Conversion(_to_tensors, _to_parameters)
_TEACHER = Conversion(_dump_teacher, _load_teacher)
_POLICY = Conversion(_dump_policy, _load_policy)

register_state(stock.EWCPlugin, saved_params=_PARAMETERS, importances=_PARAMETERS)
register_state(stock.SynapticIntelligencePlugin, ewc_data=_PARAMETERS, syn_data=_PARAMETERS)
register_state(stock.MASPlugin, params=_PARAMETERS, importance=_PARAMETERS)
register_state(stock.LwFPlugin, lwf=Conversion(_dump_lwf, _load_lwf))
register_state(stock.LFLPlugin, prev_model=_TEACHER)
register_state(stock.ReplayPlugin, storage_policy=_POLICY)
register_state(stock.GDumbPlugin, storage_policy=_POLICY, init_model=_TEACHER)
register_state(stock.MIRPlugin, storage_policy=_POLICY, replay_loader=None)
register_state(DER, storage_policy=_POLICY, replay_loader=None)
register_state(ER_ACE, storage_policy=_POLICY, replay_loader=None, ace_criterion=None)
register_state(
    Cumulative,
    dataset=Conversion(lambda data: data and _dump_data(data), lambda state, *_: state and _load_data(state)),
)
register_state(stock.LRSchedulerPlugin, scheduler=Conversion(_dump_schedule, _load_schedule), rolling_metric=None)
register_state(stock.EarlyStoppingPlugin, operator=None, best_state=None, best_val=None, best_step=None)
register_state(PeriodicEval, _is_eval_updated=None, do_final=None)
register_state(SeedingPlugin, _outside=None, _evaluations=None, _steps=None)
register_state(InMemoryLoaderPlugin, _adapted=None)
