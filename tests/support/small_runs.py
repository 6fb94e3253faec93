"""Short runs on real digits, and their logits."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from avalanche_amnesia import HAT, MLP, MaskedModel, SplitDigits
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.optimizers import can_restart
from support import strategies
from support.strategies import logits
from support.strategy_state import initial_values

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adam decay": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=1e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True, weight_decay=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=3e-3, foreach=True, amsgrad=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, weight_decay=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
if not can_restart(OPTIMIZERS["adagrad"]([torch.nn.Parameter(torch.zeros(1))])):  # that of torch 2.9 is refused
    del OPTIMIZERS["adagrad"]


class StubbornSGD(torch.optim.SGD):
    """Changes every parameter at every step, also without a gradient."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99).add_(1e-3)
        return super().step(closure)


def split(n_train: int = 260):
    return SplitDigits(n_train=n_train, n_test=100)


def permuted(n_tasks: int = 3, n_train: int = 160):
    return PermutedDigits(n_tasks, n_train=n_train, n_test=100)


def masked_mlp() -> MaskedModel:
    torch.manual_seed(0)
    return MaskedModel(MLP(64, hidden=(40,), features=30))


def make(kind=HAT, *, optimizer="sgd", dropout: float = 0.0, **options):
    """A strategy of short batches; ``options`` are those of :func:`support.strategies.make`."""
    optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    net = partial(MLP, 64, hidden=(40,), features=30, dropout=dropout)
    options = {"net": net, "train_mb_size": 16, "eval_mb_size": 64, "seed": 3, **options}
    return strategies.make(kind, optimizer=optimizer, **options)


def logits_of(strategy, benchmark, tasks) -> dict[int, Tensor]:
    """Logits of the test data of each task, in evaluation mode."""
    return {task: logits(strategy, benchmark.test_stream[task]) for task in tasks}


def retained(
    strategy, benchmark, n_tasks: int | None = None, *, must_move: bool = True, **kwargs
) -> Iterator[dict[int, Tensor]]:
    """Train task after task, and yield the logits of all tasks after each of them.

    The logits of every earlier task must keep their bits, and something must be learned.
    """
    kept: dict[int, Tensor] = {}
    for task, experience in enumerate(benchmark.train_stream[: n_tasks or len(benchmark.train_stream)]):
        start = initial_values(strategy.model)
        strategy.train(experience, **kwargs)
        now = logits_of(strategy, benchmark, range(task + 1))
        assert all(found.isfinite().all() for found in now.values())
        for earlier, expected in kept.items():
            assert torch.equal(now[earlier], expected), f"task {earlier} drifted by training task {task}"
        kept = now
        moved = any(not torch.equal(p, start[name]) for name, p in strategy.model.backbone.named_parameters())
        assert moved or (task > 0 and not must_move), "nothing was learned: the test proves nothing"
        yield kept


def assert_retained(*given, **options) -> None:
    """Check what :func:`retained` checks."""
    assert len(list(retained(*given, **options))) > 1


def use_of_entries(model: MaskedModel, name: str, tasks, between=min) -> Tensor:
    """For every entry of an MLP's parameter: the smaller number of these tasks that use one of its units, by a loop.

    With ``between=max`` it is the larger number, and the network's input is no end of a weight.
    """
    layers, (layer, kind) = list(model.graph.layers), name.rsplit(".", 1)
    masks = [model.masks[task] for task in tasks]
    counts = {
        n: [sum(bool(mask[n][unit]) for mask in masks) for unit in range(model.graph.layers[n].units)] for n in layers
    }
    index, result = layers.index(layer), torch.zeros(model.backbone.get_parameter(name).shape, dtype=torch.float64)
    for place in itertools.product(*map(range, result.shape)):
        at = [counts[layer], counts[layers[index - 1]]] if kind == "weight" and index > 0 else [counts[layer]]
        result[place] = between(of_units[unit] for of_units, unit in zip(at, place, strict=False))
    return result
