"""Compensation by weight copies as in the AmnesiacHAT paper: copies of whole units, with new weights and a joint loss.

    from experiments.published_copies import PublishedCopies
    strategy = AmnesiacHAT(model=model, optimizer=optimizer, masks=HardAttention(), compensation=PublishedCopies())

In layer ``l`` a copy ``B`` computes ``x ← a ⊙ B_l(x) + (1 − a) ⊙ W_l(x)``, followed by the current task's mask and the
activation function. Unlike in the paper, a copy also has its own norms and dropout masks.
"""

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.contrib.shadows.shadow import Shadow, method_plugins
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.seeding import derive_seed, preserved_rng, seed_all
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training import AmnesiacHAT
from avalanche_amnesia.trajectory.removal import Removal, Revision, Revisions
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.trajectory.undo_log import entries_from_state, entries_state
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.graph import ALWAYS
from experiments.streams import accuracy_on

Scope = Literal["unit", "own_unit"]


class JointShadow(Shadow):
    """Shadow (weight copy) whose loss also trains main weights, head and mask; stores values, not updates."""

    def logits(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, classes)`` with gradients for the shadow, main weights, head and mask."""
        weights: dict[str, Tensor] = dict(self.model.backbone.named_parameters())
        for name, values in self._values.items():
            weights[name] = torch.where(self.region[name], values, weights[name])
            if name in self.offset:
                weights[name] = weights[name] - self.offset[name]
        features = functional_call(self.model.backbone, weights, (x, self.parts, self.model.gate.leaves))
        logits: Tensor = self.model.head(self.task)(features)
        return logits

    def learned_change(self, use: Mapping[str, Tensor]) -> dict[str, SparseValues]:
        """Return parameter name → the shadow's values at entries of its region that are True in ``use``."""
        return {
            name: SparseValues.select(self._values[name].data, inside & use[name])
            for name, inside in self.region.items()
        }


class PublishedCopies(BackupPlugin):
    """Compensation plugin with copies of whole units; unlearning writes the copies' values into later tasks' entries.

    These values may overwrite entries of tasks before the unlearned task. Permanent tasks have copies too, but only for
    the loss: copies train the main weights, so they must not depend on which tasks may be unlearned. Deadlines count
    unlearned tasks, so a retrained model could have other copies.

    Args:
        scope: units in a copy, with all their weights and biases: units of all tasks up to the earlier task (``unit``,
            as in the paper's text), or only of the earlier task (``own_unit``, as in the authors' code).
        seed: seed of the new weights, together with the task and the earlier task.

    Attributes:
        placed: task → parameter name in the backbone → values that unlearnings wrote into the main network.

    Raises:
        ValueError: for an invalid value; before a training, if a module with parameters has no ``reset_parameters``.
    """

    shadow_class = JointShadow

    def __init__(self, scope: Scope = "unit", seed: int = 0) -> None:
        super().__init__()
        checks.one_of("scope", scope, Scope)
        self.scope, self.seed = scope, checks.whole_number("seed", seed, None)
        self.placed: dict[int, dict[str, SparseValues]] = {}

    def state(self) -> dict[str, Any]:
        """Return the state to save: the stored copies, and the values that unlearnings wrote."""
        return super().state() | {"placed": {task: entries_state(values) for task, values in self.placed.items()}}

    def load_state(self, state: Any) -> None:
        """Load a state that :meth:`state` returned."""
        kept, placed = checked(state, kept=dict, placed=dict)
        super().load_state({"kept": kept})
        self.placed = {task: entries_from_state(values) for task, values in placed.items()}

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check the other plugins, and that all backbone modules can draw new weights."""
        super().before_train_dataset_adaptation(strategy, **kwargs)
        model = strategy.model
        undrawn = sorted(model.graph.factors.keys() - fresh_weights(model.backbone, 0))
        if undrawn:
            raise ValueError(
                f"published copies draw weights by reset_parameters, which the modules of {undrawn} do not have: write "
                "that method, or take BackupPlugin()"
            )

    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Before a task's training: create a copy for every remaining earlier task."""
        _, recorder = method_plugins(strategy, "PublishedCopies()")
        super().begin(strategy, task, recorder.trajectory.tasks)

    def _entries_to_train(self, model: MaskedModel, tasks: Sequence[int], other: int) -> dict[str, Tensor]:
        earlier = tasks[: tasks.index(other)] if self.scope == "unit" else ()
        return units_used(model, [*earlier, other])

    def _initial_values(
        self, model: MaskedModel, trajectory: Trajectory, task: int, other: int, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return fresh_weights(model.backbone, derive_seed(self.seed, "shadow", task, other))

    # Copies contain values, not updates, so later unlearnings of earlier tasks must not subtract updates from them.
    # Therefore every unlearning writes these values again, over the values that it has computed there.

    def revise(self, model: MaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Return revisions that replace remaining tasks' values by their copies' values; at most one per entry."""
        tasks = trajectory.tasks
        first = min(map(tasks.index, gone), default=len(tasks))
        result: dict[int, dict[str, Revision]] = {}
        for task, name, stands, lost, values in self._standing(tasks, gone):
            where = stands | lost
            if tasks.index(task) > first and bool(where.any()):
                revision = Revision(where, factor=0.0, added=values[where].double(), base=(~stands)[where].double())
                result.setdefault(task, {})[f"backbone.{name}"] = revision
        return result

    def _standing(
        self, tasks: Sequence[int], gone: Collection[int]
    ) -> Iterator[tuple[int, str, Tensor, Tensor, Tensor]]:
        """Yield (remaining task, parameter name, three tensors): values written by copies, if ``gone`` is unlearned.

        The tensors have the parameter's shape. Two are bool: the entries with values of the task's copies, and the
        entries overwritten by another task's copies. The third contains the values of the former, and 0 elsewhere.
        """
        newest = self._newest_updates(tasks, gone)
        for task in tasks:
            if task in gone:
                continue
            asked, old, new = self._updates_without(task, gone), self.placed.get(task, {}), newest.get(task, {})
            for name in sorted({*asked, *old}):
                like = asked[name] if name in asked else old[name]
                values, stands = torch.zeros(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)
                for part in (of[name] for of in (old, new) if name in of):
                    values[part.where], stands = part.values, stands | part.where
                lost = torch.zeros_like(stands)
                if name in asked:
                    lost = asked[name].where & ~new[name].where if name in new else asked[name].where
                stands &= ~lost
                yield task, name, stands, lost, values * stands

    def compensate(self, model: Any, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Copy the copies' norms to remaining tasks, delete copies of unlearned tasks, and store the written values."""
        placed: dict[int, dict[str, SparseValues]] = {}
        for task, name, stands, _, values in self._standing(tuple(self.kept), gone):
            if bool(stands.any()):
                placed.setdefault(task, {})[name] = SparseValues.select(values, stands)
        change.keep(self, "placed")
        self.placed = placed
        return super().compensate(model, gone, removal, change)


def units_used(model: MaskedModel, tasks: Sequence[int]) -> dict[str, Tensor]:
    """Return the entries of all units in the tasks' masks: backbone parameter name → bool tensor of its shape."""
    units = torch.stack([model.binary_mask(task) for task in tasks]).any(0)
    in_sets = model.graph.sets.use(units.float())
    in_sets[ALWAYS] = 0
    shapes = {name: parameter.shape for name, parameter in model.backbone.named_parameters()}
    return {
        name: (in_sets[factors[0].to(in_sets.device)] > 0).expand(shapes[name])
        for name, factors in model.graph.factors.items()
    }


@torch.no_grad()
def fresh_weights(backbone: nn.Module, seed: int) -> dict[str, Tensor]:
    """Draw parameter name → new values of its shape, by ``reset_parameters`` of the parameter's module."""
    drawn: dict[str, Tensor] = {}
    with preserved_rng():
        seed_all(seed)
        for path, module in backbone.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and any(True for _ in module.parameters(recurse=False)):
                twin = copy.deepcopy(module)
                twin.reset_parameters()
                own = twin.named_parameters(recurse=False)
                drawn |= {f"{path}.{name}".removeprefix("."): value.detach() for name, value in own}
    return drawn


# Effect on the accuracy of the remaining tasks ------------------------------------------------------------------------

OUTPUT = Path("experiments/results/published_copies.json")
NOTES = """`python -m experiments.published_copies`: five tasks of permuted digits, AmnesiacHAT with AdaHAT's rule,
fitted heads, MLP 64-100-50, ten epochs, Adam 1e-3. Task 1 is unlearned at the end. Mean accuracy (%), seeds 0 to 2."""
COMPENSATIONS = {
    "none": lambda: "none",
    "BackupPlugin()": BackupPlugin,
    "PublishedCopies()": PublishedCopies,
    "counterfactual": lambda: "counterfactual",
}


def left_over(compensation: str, seed: int) -> dict[str, list[float]]:
    """Return state (never unlearned, unlearned, retrained) → accuracies of the earlier task and of the later ones."""
    benchmark = PermutedDigits(seed=seed)
    found = {}
    for name, tasks in (("unlearned", range(5)), ("retrained", (0, 2, 3, 4))):
        torch.manual_seed(seed)
        model = MaskedModel(MLP(64, hidden=(100,), features=50))
        options = {"adjustment": "adahat", "compensation": COMPENSATIONS[compensation](), "seed": seed}
        size = {"train_mb_size": 32, "train_epochs": 10}
        strategy = AmnesiacHAT(model=model, optimizer=Adam(model.parameters(), lr=1e-3), **options, **size)
        for task in tasks:
            strategy.train(benchmark.train_stream[task])
        for state in ("never unlearned", name) if name == "unlearned" else (name,):
            if state == "unlearned":
                strategy.unlearn([1])
            read = {task: accuracy_on(model, benchmark.test_stream[task]) for task in (0, 2, 3, 4)}
            found[state] = [read[0], mean(read[task] for task in (2, 3, 4))]
    return found


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        {"compensation": name, "seed": seed} | left_over(name, seed) for name in COMPENSATIONS for seed in (0, 1, 2)
    ]
    OUTPUT.write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["# What an unlearning leaves of the other tasks", "", NOTES, ""]
    lines += ["| compensation | the task before | the three tasks after |", "|---|---|---|"]
    for label, name, state in [
        *((state, "none", state) for state in ("never unlearned", "retrained")),
        *((f"`{name}`", name, "unlearned") for name in COMPENSATIONS),
    ]:
        read = zip(*(row[state] for row in rows if row["compensation"] == name), strict=True)
        lines.append(f"| {label} | {' | '.join(f'{100 * mean(values):.1f}' for values in read)} |")
    OUTPUT.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
