"""Unlearn samples or classes of a task: check the request, store hashes of the samples, and retrain the task."""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from avalanche.training.plugins import EarlyStoppingPlugin, EvaluationPlugin, LRSchedulerPlugin
from avalanche.training.templates.base_sgd import PeriodicEval
from blake3 import blake3
from torch import Tensor

from avalanche_amnesia.audit.record import UnlearningPlan
from avalanche_amnesia.benchmarks.data import targets_of, task_data
from avalanche_amnesia.benchmarks.requests import UnlearningRequest, check_part, join_if, without_positions
from avalanche_amnesia.benchmarks.stream_labels import relabel
from avalanche_amnesia.bits import model_hashes, tensor_hash
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.optimizers import follow_model
from avalanche_amnesia.processes import from_first
from avalanche_amnesia.seeding import comparable_rng_state, preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.arguments import as_list
from avalanche_amnesia.training.host.lookup import dispatch_to, set_attributes
from avalanche_amnesia.training.host.rollback import Snapshot
from avalanche_amnesia.training.plugins.task_mask import DivergedError
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.applying import TrainAgain
from avalanche_amnesia.unlearning.context import UnlearningContext

_AT_A_TIME = 256  # samples in memory while copies are searched


@dataclass
class ForgottenPositions:
    """Salted hashes of the positions of unlearned samples, for tasks that lost only some of their samples.

    Attributes:
        salt: drawn at the first request; no record contains it.
        hashes: task → hashes of positions in its data.
    """

    salt: str = ""
    hashes: dict[int, frozenset[str]] = field(default_factory=dict)

    def hashes_of(self, task: int, positions: Collection[int]) -> list[str]:
        """Return a salted hash of each number in ``positions``, the positions of samples in a task's data."""
        return [blake3(f"{self.salt}/{task}/{position}".encode()).hexdigest() for position in positions]

    def positions(self, task: int, n: int) -> list[int]:
        """Return the positions, among ``n``, of a task's unlearned samples: those whose hash is stored."""
        there = self.hashes.get(task, frozenset())
        return [at for at, digest in enumerate(self.hashes_of(task, range(n))) if digest in there] if there else []

    def positions_by_task(self, sizes: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the positions of unlearned samples, by task; ``sizes``: number of samples of each task."""
        return {task: self.positions(task, sizes[task]) for task in sorted(self.hashes)}

    def without_tasks(self, tasks: Collection[int]) -> Self:
        """Return a copy without the sample-position hashes of ``tasks``."""
        return type(self)(self.salt, {task: held for task, held in self.hashes.items() if task not in tasks})


class PartRequest:
    """Checked request to unlearn samples or classes of a task; ``labels``: position → label of the task's samples now.

    Attributes: ``hashes`` of the requested samples; ``closed``: labels without remaining samples; ``forgotten``: hashes
    of all unlearned samples, these included; ``requested``, ``earlier`` and ``learned``: positions of the requested
    samples, of samples unlearned earlier, and of all others.
    """

    def __init__(
        self, forgotten: ForgottenPositions, task: int, request: UnlearningRequest, labels: dict[int, int], event: str
    ) -> None:
        n, there = len(labels) + len(forgotten.hashes.get(task, ())), set(labels.values())
        check_part(request, task, n, there, event)
        self.learned, self.earlier = list(labels), set(range(n)) - labels.keys()
        self.requested = {*request.samples, *(at for at in labels if labels[at] in request.classes)} - self.earlier
        if not self.requested:
            raise RequestError(f"{event}: all of these samples of task {task} are forgotten already")
        if len(self.requested) == len(labels):
            raise RequestError(f"{event}: task {task} would be left without samples: unlearn it as a whole, [{task}]")
        salted = forgotten if forgotten.salt else replace(forgotten, salt=from_first(secrets.token_hex(16)))
        self.hashes = tuple(sorted(salted.hashes_of(task, self.requested)))
        held = salted.hashes.get(task, frozenset()).union(self.hashes)
        self.forgotten = replace(salted, hashes={**salted.hashes, task: held})
        self.closed = tuple(sorted(there - {labels[at] for at in labels if at not in self.requested}))

    def copies(self, experience: Any) -> list[int]:
        """Return the positions of remaining samples that are bit-identical to a sample to be unlearned."""
        rows: list[str] = []
        with preserved_rng():
            for some in torch.arange(len(experience.dataset)).split(_AT_A_TIME):
                x, _ = task_data(experience, some)
                rows += map(tensor_hash, x) if isinstance(x, Tensor) else ()
        requested = {rows[at] for at in self.requested if rows}
        return [at for at, row in enumerate(rows) if row in requested and at not in self.requested | self.earlier]


def warn_of_copies(copies: Sequence[int], task: int, event: str) -> None:
    """Warn if there are ``copies``, positions of samples that stay but equal a sample to be unlearned."""
    if copies:
        warnings.warn(
            f"{event}: copies of the requested samples remain in task {task}, at {copies[:10]}: request them as well",
            stacklevel=2,
        )


class LastStream:
    """Weak reference to the stream of the last training, to find tasks' data; pickled copies do not contain it."""

    def __init__(self) -> None:
        self._held: Any = lambda: None

    def __reduce__(self) -> Any:
        return LastStream, ()

    def __deepcopy__(self, memo: Any) -> LastStream:
        twin = LastStream()
        twin._held = self._held
        return twin

    def remember(self, experience: Any) -> None:
        """Store a weak reference to an experience, so that its stream can be found later."""
        self._held = weakref.ref(experience)

    def experience_of(self, task: int, given: Any, fingerprint: str, event: str) -> Any:
        """Find a task's experience in ``given`` or the last stream; raise RequestError if none has the same labels."""
        last = self._held()
        found = getattr(last, "origin_stream", None) or [last]
        if given is not None:
            found = relabel(as_list(given, "unlearn(data=…)"), parts=True) if isinstance(given, Iterable) else [given]
        of_task = [e for e in found if list(getattr(e, "task_labels", ())) == [task]]
        if not of_task:
            others = ", ".join(dict.fromkeys(f"task {t}" for e in found for t in getattr(e, "task_labels", ())))
            raise RequestError(
                f"{event}: for this request to task {task} its data is needed (in a shell, --benchmark): give its "
                f"experience, data=train_stream[…], or parts{'' if given is None else f', not {others or given}'}"
            )
        same = join_if(fingerprint, of_task)
        if same is None:
            raise RequestError(
                f"{event}: not the data of task {task}, its labels differ: give its experience, or all of its parts, "
                "with all samples in the same order"
            )
        return same


class TrialDone(Exception):
    """Exception that ends a test retraining, so that it is undone; carries the hashes of the retrained tensors."""

    def __init__(self, hashes: Mapping[str, str], place: str) -> None:
        super().__init__()
        self.hashes, self.place = hashes, place

    def check(self, task: int, before: Mapping[str, str], place: str, event: str) -> None:
        """Raise RequestError if the trial gave hashes unlike ``before``, on the same share of weights (``place``)."""
        other = [name for name in {**before, **self.hashes} if before.get(name) != self.hashes.get(name)]
        if other and self.place == place:
            raise RequestError(
                f"{event}: task {task}, trained again with all of its samples, has other bits than before, first in "
                f"{other[0]}. Nothing was unlearned. Restore data, code and settings, or give reproduce=False: the "
                "claim then rests on them"
            )


def make_retraining(
    plugin: Any,
    strategy: Strategy,
    request: Iterable[int] | UnlearningRequest,
    context: UnlearningContext,
    data: Any,
    *,
    reproduce: bool = True,
) -> tuple[TrainAgain | None, TrainAgain | None]:
    """Check and plan an unlearning of samples or classes; return functions to retrain the task without and with them.

    The first retrains the task without the samples, inside the unlearning. The second retrains it with them and raises
    :class:`TrialDone`, which undoes its changes. Both use ``data`` or the stream's; they are None for whole tasks.
    """
    if not isinstance(request, UnlearningRequest) or not request.is_partial:
        return None, None
    (task,), event = context.tasks, context.event
    parts = (strategy.model, *strategy.plugins)
    subtracts = getattr(strategy.model, "additive", False)
    if plugin.obey is not True or not (subtracts or any(getattr(part, "trains_again", False) for part in parts)):
        here = "" if plugin.obey is True else f" with obey={plugin.obey!r}"
        raise RequestError(
            f"{event}: {type(strategy).__name__}{here} can't train task {task} again, as "
            "DisjointSubnets, Independent and RanPAC can"
        )
    kept = strategy.model.heads[task].kept if subtracts and data is None else torch.zeros(0)
    stored, forgotten = bool(kept.numel()), plugin.forgotten
    experience = None if stored else plugin.stream.experience_of(task, data, plugin.data[task], event)
    n = len(kept) + len(forgotten.hashes.get(task, ())) if stored else len(targets_of(experience))
    held = sorted(set(range(n)).difference(forgotten.positions(task, n)))
    labels = (kept[:, -1] if stored else targets_of(experience)[held]).tolist()
    left = PartRequest(forgotten, task, request, dict(zip(held, labels, strict=True)), event)
    first = plugin.claims.training_of(task)
    if not_kept := [name for name, value in first.options.items() if isinstance(value, tuple)]:
        raise RequestError(
            f"{event}: task {task} was trained with train({', '.join(not_kept)}=…), not kept: unlearn it as a whole"
        )
    kinds = EarlyStoppingPlugin, LRSchedulerPlugin  # a schedule by steps or by train_loss needs no evaluation
    reads = [p for p in strategy.plugins if isinstance(p, kinds) and getattr(p, "metric", "val_loss") == "val_loss"]
    if reads and not subtracts:
        lacks = f"{type(reads[0]).__name__} reads evaluations, which a retraining lacks"
        raise RequestError(f"{event}: {lacks}: unlearn task {task} as a whole")
    plan = replace(
        context.plan, tasks=(), removed=(), trajectory_bytes=0, **plugin.claims.fields_after_retraining(context, first)
    )
    context.plan = replace(plan, task=task, samples=left.hashes, classes=left.closed)

    if subtracts:
        return _subtraction(plugin, context, task, left, experience), None

    def retrain(data: Any, how: str, context: UnlearningContext, change: Transaction) -> None:
        plugin.forget(strategy, context.tasks, change)
        try:
            train_again(strategy, data, first.options, change)
        except (ValueError, DivergedError) as error:
            raise RequestError(f"{event}: task {task} can't be trained {how}: {error}. Nothing was changed") from error

    def retrain_without(context: UnlearningContext, change: Transaction) -> UnlearningPlan:
        retrain(without_positions(experience, left.requested | left.earlier), "without these samples", context, change)
        warn_of_copies(left.copies(experience), task, event)  # last, because some data sets change when they are read
        change.set(plugin, forgotten=left.forgotten)
        if not reproduce:
            plugin.claims.assume(task, f"code and data of task {task}, unchanged since its training", change)
        return replace(context.plan, **plugin.claims.fields_after_retraining(context, first))

    def reproduce_training(context: UnlearningContext, change: Transaction) -> UnlearningPlan:
        first_data = without_positions(experience, left.earlier)  # without requests, which were obeyed long ago
        retrain(first_data, "again with all of its samples (reproduce=False leaves that out)", context, change)
        hashes = model_hashes(strategy.model)
        raise TrialDone(hashes, plugin.claims.training_of(task).place)

    return retrain_without, reproduce_training


def _subtraction(plugin: Any, context: UnlearningContext, task: int, left: PartRequest, experience: Any) -> TrainAgain:
    """Return a function that unlearns samples by subtracting their terms from the sums of a ridge regression."""
    strategy, event, model = context.strategy, context.event, context.strategy.model
    sums, logs = model.task_state(), context.trajectory.logs

    def refusal(why: str) -> RequestError:
        return RequestError(
            f"{event}: {why}, so that they can't be subtracted. Nothing was unlearned. Restore the data, network and "
            f"settings with which the task was learned, or unlearn the whole task, [{task}]"
        )

    def read(indices: Tensor) -> Tensor:
        """Return the features and label of each learned sample at the positions ``indices``."""
        if experience is None:
            return model.heads[task].kept[indices]
        with preserved_rng():
            before = comparable_rng_state()
            try:
                x, y = task_data(experience, torch.tensor(left.learned)[indices], training=True)
                rows = model.rows(model.features(x.to(strategy.device)), y.to(strategy.device))
            except Exception as error:  # raised by the user's data, or by a network that can't run on them
                raise refusal(f"the samples can't be read ({type(error).__name__}: {error})") from error
            if comparable_rng_state() != before:
                raise refusal(f"the data of task {task} draw random numbers")
        return rows

    def subtract_samples(context: UnlearningContext, change: Transaction) -> UnlearningPlan:
        plugin.forget(strategy, context.tasks, change)
        model.restore_task_state(sums)  # the task was removed as a whole
        context.trajectory.logs = logs
        hashes, hashes_of = model.heads[task].hashes, model.heads[task].hashes_of
        if len(hashes) != len(left.learned):
            raise refusal(f"task {task} learned {len(hashes)} samples, and its data has {len(left.learned)} by now")
        indices = torch.tensor([place for place, at in enumerate(left.learned) if at in left.requested])
        asked = torch.isin(hashes.cpu(), hashes.cpu()[indices]).nonzero()[:, 0]  # also their copies
        requested = torch.isin(asked, indices)
        rows = torch.cat([read(some) for some in asked.split(_AT_A_TIME)])
        if other := [left.learned[at] for at in asked[(hashes_of(rows) != hashes[asked]).cpu()]]:
            why = "have other features than in its training, or a loader or plugin repeated samples there"
            raise refusal(f"samples {other[:10]} of task {task} {why}")
        model.subtract(task, indices, rows[requested])
        warn_of_copies([left.learned[at] for at in asked[~requested]], task, event)
        change.set(plugin, forgotten=left.forgotten)
        return context.plan

    return subtract_samples


def train_again(strategy: Strategy, experience: Any, options: dict[str, Any], change: Transaction) -> None:
    """Retrain one task inside an unlearning, with Avalanche's own loop, without metrics and loggers.

    It may run between the end of one experience's training and the start of the next.
    """
    host: Any = strategy
    model, clock = strategy.model, strategy.clock
    plugins = [plugin for plugin in strategy.plugins if not isinstance(plugin, (EvaluationPlugin, PeriodicEval))]
    attributes, counts, mode = dict(vars(strategy)), dict(vars(clock)), model.training
    change.call(Snapshot(strategy, complete=True).restore)
    with preserved_rng(), torch.enable_grad():
        dispatch_to(strategy, plugins)
        vars(strategy).update(experience=experience, is_training=True, _stop_training=False)
        model.train().to(strategy.device)
        host._before_training_exp(**options)
        host._train_exp(experience, [], **options)
        host._after_training_exp(**options)
    model.zero_grad()
    follow_model(strategy, fresh=True)
    set_attributes(strategy, attributes | {"optimized_param_id": strategy.optimized_param_id})
    vars(clock).update(counts)
    model.train(mode)
