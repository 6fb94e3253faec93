"""Compensation by scaling: enlarge later tasks' updates where an earlier task is unlearned (an ablation)."""

from collections.abc import Collection
from typing import Any, Literal

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.contrib.shadows.shadow import entries_in_use, method_plugins
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import backbone_entries
from avalanche_amnesia.saving.values import checked
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.trajectory.removal import Removal, Revision, Revisions
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.trajectory.store import Trajectory
from avalanche_amnesia.trajectory.undo_log import entries_from_state, entries_state
from avalanche_amnesia.transaction import Transaction

Scaling = Literal["rate", "draft"]


class ScaledUpdatesPlugin(SupervisedPlugin):
    """Compensation plugin that scales a remaining task's update at entries that an unlearned task was first to use.

    The first task's update of an entry is large. Later updates are multiplied by the adjustment rate, so little is left
    of the entry after the first task is unlearned. ``rate`` divides the update of the first remaining task that changed
    the entry by its adjustment rate (without layer sparsity, κ = 0). ``draft`` multiplies this update by α, as in the
    literal text of the method's first draft. With ``adjustment="hat"`` no other task changes such an entry, so both
    have no effect; with AdaHAT both were measured to be harmful (results/ablation).

    Needs a :class:`HATPlugin` and a :class:`TrajectoryPlugin` before it in the list of plugins, and an
    :class:`UnlearningPlugin`.

    Args:
        by: ``rate`` or ``draft``.
        alpha: α of ``draft``, above 0; by default the α of the adjustment rule (``adahat``, ``constant``), or 1 if the
            rule has none.

    Attributes:
        rates: task → parameter name in the backbone → adjustment rates, float16, at entries that earlier tasks used and
            that the task changed.

    Raises:
        ValueError: invalid value, or a required plugin is missing.
        TypeError: before a training, if the model is not a :class:`MaskedModel`.
    """

    def __init__(self, by: Scaling = "rate", *, alpha: float | None = None) -> None:
        super().__init__()
        checks.one_of("by", by, Scaling)
        if alpha is not None:
            checks.above("alpha", alpha, 0)
        self.by, self.alpha, self._alpha = by, alpha, 1.0
        self.rates: dict[int, dict[str, SparseValues]] = {}
        self._damped: dict[str, SparseValues] = {}

    def state(self) -> dict[str, Any]:
        """Return the state to save: the adjustment rates, and α."""
        return {"rates": {task: entries_state(rates) for task, rates in self.rates.items()}, "alpha": self._alpha}

    def load_state(self, state: Any) -> None:
        """Load a state that :meth:`state` returned."""
        rates, alpha = checked(state, rates=dict, alpha=float)
        self.rates, self._alpha = {task: entries_from_state(of_task) for task, of_task in rates.items()}, alpha

    def before_train_dataset_adaptation(self, strategy: Strategy, **kwargs: Any) -> None:
        """Before a task's training: check that the model is a MaskedModel and that the required plugins are present."""
        method_plugins(strategy, "ScaledUpdatesPlugin('rate')")[0].model_of(strategy)

    @torch.no_grad()
    def begin(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """Before a task's training: store the adjustment rates of entries that earlier tasks use."""
        masking, _ = method_plugins(strategy, "ScaledUpdatesPlugin('rate')")
        use = masking.task_use(masking.model_of(strategy))
        self._damped = {
            name: SparseValues.select((1 - masking.rule.expected_share(use, name)).half(), covered > 0)
            for name, covered in use.covered.items()
        }
        self._alpha = float(getattr(masking.rule, "alpha", 1.0)) if self.alpha is None else self.alpha

    def prepare(self, strategy: Strategy, task: int, unlearnable: Collection[int]) -> None:
        """After a task's training: keep the adjustment rates only of entries that the task changed."""
        _, recorder = method_plugins(strategy, "ScaledUpdatesPlugin('rate')")
        moved = backbone_entries(recorder.trajectory.moved(task))
        kept = {n: rates.restrict(moved[n].reshape(-1)) for n, rates in self._damped.items() if n in moved}
        self.rates[task] = {name: rates for name, rates in kept.items() if len(rates.low)}
        self._damped = {}

    def undo_training(self, strategy: Strategy) -> None:
        """After an interrupted training: delete the adjustment rates of its task."""
        self._damped = {}

    # As a compensation ----------------------------------------------------------------------------------------

    def covers(self, task: int, gone: Collection[int]) -> bool:
        """Return False: scaling updates does not fully compensate any task."""
        return False

    def revise(self, model: MaskedModel, trajectory: Trajectory, gone: Collection[int]) -> Revisions:
        """Return revisions that scale the first remaining task's update of entries that ``gone`` used first."""
        result: dict[int, dict[str, Revision]] = {}
        orphaned: dict[str, Tensor] = {}
        occupied: dict[str, Tensor] = {}
        for task in trajectory.tasks:
            use = entries_in_use(model, task)
            if task in gone:
                for name, used in use.items():
                    first = used.cpu() & ~occupied.get(name, torch.zeros(used.shape, dtype=torch.bool))
                    orphaned[name] = first | orphaned.get(name, first)
                continue
            occupied = {name: used.cpu() | occupied.get(name, used.cpu()) for name, used in use.items()}
            for name, rates in self.rates.get(task, {}).items():
                where = rates.where & orphaned.get(name, torch.zeros_like(rates.where))
                if bool(where.any()):
                    inverse = 1 / rates.restrict(where.reshape(-1)).values.double()
                    factor = self._alpha if self.by == "draft" else inverse
                    result.setdefault(task, {})[f"backbone.{name}"] = Revision(where, factor=factor)
            moved = backbone_entries(trajectory.moved(task))
            orphaned = {name: where & ~moved[name] if name in moved else where for name, where in orphaned.items()}
        return result

    def compensate(self, model: MaskedModel, gone: Collection[int], removal: Removal, change: Transaction) -> list[str]:
        """Delete the adjustment rates of the tasks in ``gone``; return no lines for the record."""
        change.set(self, rates={task: rates for task, rates in self.rates.items() if task not in gone})
        return []
