"""A slow twin of the trajectory that keeps every state and update, and random tasks and removals for both."""

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory import Trajectory

SHAPES = {"w": (3, 4), "b": (5,), "scalar": ()}


class DenseTwin:
    """Keeps the updates of every task; a removal computes the state again from the start."""

    def __init__(self, initial: dict[str, Tensor]) -> None:
        self.initial = {name: value.clone() for name, value in initial.items()}
        self.writers: list[tuple[int, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = []

    def record(self, task: int, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        moved = {name: ~same_bits(before[name], after[name]) for name in before}
        delta = {name: after[name].double() - before[name].double() for name in before}
        self.writers.append((task, moved, delta, {name: value.clone() for name, value in after.items()}))

    def remove(self, tasks: set[int]) -> None:
        """A task that starts from equal bits ends at equal bits."""
        starts = self._states_before()
        kept = [(w, start) for w, start in zip(self.writers, starts, strict=True) if w[0] not in tasks]
        state = {name: value.clone() for name, value in self.initial.items()}
        self.writers = []
        for (task, moved, delta, after), start in kept:
            new = {}
            for name, value in state.items():
                added = (value.double() + delta[name]).float()
                written = torch.where(same_bits(value, start[name]), after[name], added)
                new[name] = torch.where(moved[name], written, value)
            # its update is now the difference to the new values before it
            self.writers.append((task, moved, {n: new[n].double() - state[n].double() for n in new}, new))
            state = {name: value.clone() for name, value in new.items()}

    def _states_before(self) -> list[dict[str, Tensor]]:
        return [self.initial, *(after for *_, after in self.writers)][: len(self.writers)]

    @property
    def state(self) -> dict[str, Tensor]:
        return self.writers[-1][3] if self.writers else self.initial


def drawn(generator: torch.Generator, share: float) -> dict[str, Tensor]:
    """Random updates of a share of the entries."""
    return {
        name: torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < share)
        for name, shape in SHAPES.items()
    }


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in b:
        assert same_bits(a[name], b[name]).all(), (name, a[name], b[name])


LEARN = st.tuples(st.just("learn"), st.floats(0.1, 1.0))
EVENTS = st.lists(LEARN | st.tuples(st.just("remove"), st.sets(st.integers(0, 9))), min_size=2, max_size=10)


def states(*values: list[float]) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(value)} for value in values]


def recorded(*rows):
    """Return a trajectory whose tasks lead from each of these states to the next one, and the states."""
    store, found = Trajectory(), states(*rows)
    for task, (before, after) in enumerate(pairwise(found)):
        store.record(task, before, after)
    return store, found
