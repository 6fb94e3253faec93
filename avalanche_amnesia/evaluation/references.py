"""Reference models, retrained without the unlearned tasks, and full models, which learned all and unlearned none."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NoReturn

import torch
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates.base import BaseTemplate
from torch import nn
from tqdm import tqdm

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.benchmarks.data import data_difference
from avalanche_amnesia.benchmarks.requests import join, join_if, tasks_after_each, without_positions, without_requests
from avalanche_amnesia.benchmarks.stream_labels import labelled_benchmark
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.evaluation.proving import provable_tasks, refuse_approximate, with_proof
from avalanche_amnesia.evaluation.retraining import Retraining
from avalanche_amnesia.isolation.pools import CapacityWarning, Pools
from avalanche_amnesia.processes import n_processes, rank
from avalanche_amnesia.saving.strategy_settings import learning_settings
from avalanche_amnesia.seeding import derive_seed, preserved_rng
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin, unlearning_of
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskEndPlugin
from avalanche_amnesia.training.task_faults import MaskWarning
from avalanche_amnesia.unlearning.claims import data_fingerprint

Expected = Literal["full", "same", "order", "seed"]
_OF_REMAINING: tuple[Expected, ...] = ("same", "order", "seed")
_QUIET = (MaskWarning, CapacityWarning)
"""Warnings that the measured run has given already; ignored while references are trained."""


class ReferencesError(ValueError):
    """Error raised if reference models can't be trained or compared with the run, e.g. if settings differ."""


class References:
    """Trainer and store of reference models (retrained on tasks not unlearned) and full models (nothing unlearned).

    A reference is trained by a fresh strategy on the benchmark's experiences without their requests. As every draw
    of a task derives from (seed, task), two runs that begin with the same tasks share those bits. The shared tasks are
    trained once.

    A copy is the object itself, because its models are the same for every run.

    Args:
        make_strategy: called as ``make_strategy(evaluator=…)``; must return a new strategy with the same initial bits
            every time (seed it inside), with a :class:`SeedingPlugin` among its plugins (the strategies of this
            package have one), at the same settings as the measured run.
        benchmark: the benchmark of that run; its requests are ignored.
        train_options: keyword arguments of every call of ``strategy.train``.
        store: a :class:`~avalanche_amnesia.lab.runs.RunStore`: shares trainings with other runs and
            processes; None: trainings are kept for this process only.
        workers: :class:`~avalanche_amnesia.lab.runs.ReferenceWorkers`, processes that train references into the store
            in the background, with the same bits; None: the run waits for its references.

    Attributes:
        trainings: number of single-task trainings so far, without those found in the store.
        in_passing: True: metrics prove records by the references that they need anyway.

    Raises:
        ReferencesError: if ``make_strategy`` can't be called so, or returns no strategy; if two calls of it differ,
            or its strategy is not seeded by task; if ``benchmark`` has no streams; for workers without a store.
    """

    def __init__(
        self,
        make_strategy: Callable[..., Any],
        benchmark: Any,
        *,
        train_options: Mapping[str, Any] | None = None,
        store: Any = None,
        workers: Any = None,
    ) -> None:
        _check_make_strategy(make_strategy)
        if workers is not None and store is None:
            raise ReferencesError("workers= need a store to share with the run: store=RunStore() or RunStore(path)")
        if store is not None and n_processes() > 1:
            raise ReferencesError(f"store= is for one process, and here are {n_processes()}: leave it out")
        if not hasattr(benchmark, "streams"):
            raise ReferencesError(f"the second argument is the benchmark of the run, got {benchmark!r}")
        self.make_strategy = make_strategy
        self.benchmark = benchmark = labelled_benchmark(benchmark)
        self.train_options = dict(train_options or {})
        self._parts: dict[int, list[Any]] = {}
        for experience in without_requests(benchmark).train_stream:
            self._parts.setdefault(int(experience.task_label), []).append(experience)
        self._experiences = {task: join(parts) for task, parts in self._parts.items()}
        self._models: dict[tuple[Expected, tuple[int, ...]], nn.Module] = {}
        self._seconds: dict[tuple[Expected, tuple[int, ...]], float] = {}
        self._company: dict[tuple[int, ...], frozenset[str]] = {}
        self.store, self.workers = store, workers
        self._ahead, self.in_passing = False, True
        self._expected: set[Expected] = set()
        self.trainings = 0
        self._runs: dict[Expected, Any] = {}
        self._trained: dict[tuple[int, str], Any] = {}
        self._without: dict[Any, References] = {}
        with preserved_rng():  # around both calls: an unseeded function draws other values in the second
            made = self.fresh_strategy("same")
            first, second = (state_hashes(m.state_dict()) for m in (made.model, self.fresh_strategy("same").model))
        differing = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
        # Slots planned from requests are too few for a model that unlearns nothing.
        pooled = _pool_plugin(made)
        dealt = pooled is not None and isinstance(pooled.isolation.slots, Mapping)
        self._full_variant: Expected = "full" if dealt else "same"
        if differing:
            raise ReferencesError(
                f"two calls of make_strategy give different initial values of {differing}: no comparison with a "
                "reference would mean anything. Seed inside make_strategy: torch.manual_seed(seed) before the model"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> References:
        return self

    def check(self, experience: Any) -> None:
        """Raise ReferencesError if an experience differs from the one that references train on for the same task.

        Compares ``permanent``, ``deadline``, labels, and a few samples with evaluation transforms. If a metric has
        called :meth:`expect`, the first successful call starts the ``workers``; later calls warn if one failed.
        """
        task = int(experience.task_label)
        own = self.train_experience(task)
        differences = [data_difference(part, experience) for part in self._parts[task]]
        if None not in differences:
            self._refuse_data(f"task {task}: {differences[0]}")
        for name, default in (("permanent", False), ("deadline", None)):
            here, there = (getattr(e, name, default) for e in (experience, own))
            if here != there:
                self._refuse_data(f"task {task}: {name}={here!r} in the run, and {name}={there!r} there")
        if self.workers is not None and self._expected:
            self._train_ahead()

    def train_experience(self, task: int) -> Any:
        """Return the benchmark's training experience of a task, without requests to unlearn."""
        if task not in self._experiences:
            self._refuse_data(f"task {task} is not among their tasks {sorted(self._experiences)}")
        return self._experiences[task]

    @staticmethod
    def _refuse_data(difference: str) -> NoReturn:
        raise ReferencesError(
            f"the references were made of another benchmark than the run's ({difference}) and can't be compared: "
            "References(make_strategy, benchmark) with the benchmark on whose train_stream the strategy is trained"
        )

    def reference(self, remaining_tasks: Sequence[int], variant: Expected = "same") -> nn.Module:
        """Return the reference model that learned only ``remaining_tasks``, in this order; train it if necessary.

        Args:
            remaining_tasks: task labels of the benchmark, each once; may be empty (the initial model).
            variant: ``same``; for noise floors ``order`` (another data order and dropout) or ``seed`` (another
                initialisation as well); ``full``: with a slot for each task, see :meth:`full`.

        Returns:
            A model in evaluation mode. It is stored and returned again: do not change it.

        Raises:
            ReferencesError: for an unknown task, or a task named twice.
        """
        checks.one_of("variant", variant, Expected)
        path = checks.integers("remaining_tasks", remaining_tasks, "tasks", ReferencesError)
        unknown = [task for task in path if task not in self._experiences]
        if unknown or len(set(path)) < len(path):
            raise ReferencesError(
                f"remaining_tasks={list(path)} must be distinct tasks of the benchmark: {sorted(self._experiences)}"
            )
        if (variant, path) not in self._models:
            with preserved_rng(), torch.enable_grad():  # a metric may call this inside an evaluation
                run = self.train_along(path, variant)
                self.put(path, deepcopy(run.strategy.model), variant)  # a copy, because the run trains further tasks
                if variant == "same" and (plugin := unlearning_of(run.strategy)) is not None:
                    self._company[path] = plugin.claims.company
        return self._models[variant, path]

    def put(self, tasks: Sequence[int], model: nn.Module, variant: Expected = "same") -> None:
        """Store a model, trained elsewhere on ``tasks`` in this order, as the reference for these tasks.

        The model is from a strategy that ``make_strategy`` made. It is stored without a copy, in evaluation mode.
        ``variant``: as of :meth:`reference`.
        """
        self._models[variant, tuple(tasks)] = model.eval()

    def full(self, tasks: int | Sequence[int]) -> nn.Module:
        """Return the reference model that learned ``tasks`` and unlearned none; an int n means the first n tasks.

        If slots are planned by the requests (``Pools.planned``), this model has one slot per task of the stream.

        Raises:
            ReferencesError: for tasks that the benchmark does not have.
        """
        if isinstance(tasks, int):
            if not 0 <= tasks <= len(self._experiences):
                raise ReferencesError(f"the number of tasks must lie in 0..{len(self._experiences)}, got {tasks}")
            tasks = list(self._experiences)[:tasks]
        return self.reference(tasks, self._full_variant)

    def seconds(self, remaining_tasks: Sequence[int]) -> float:
        """Return the wall-clock seconds to train the reference model that learned only ``remaining_tasks``.

        Trainings that several references share were computed once, and count in each reference.
        """
        self.reference(remaining_tasks)
        path = tuple(map(int, remaining_tasks))
        return sum(self._seconds["same", path[: n + 1]] for n in range(len(path)))

    def prove(
        self, record: UnlearningRecord, *, tasks: Iterable[int] = (), strategy: Strategy | None = None
    ) -> UnlearningRecord:
        """Retrain without the unlearned data; return the record with a proof that all bits equal the retrained ones.

        ``TaskStrategy.prove`` and ``UnlearningPlugin.prove`` do so with the last record of a strategy, and store the
        result.

        Args:
            record: ``exact`` or ``conditional``. For unlearned samples: ``references.without(…).prove(record)``.
            tasks: remaining tasks to prove, if no task's weights depend on another task's; by default all remaining.
            strategy: strategy whose current tensors are compared; None: the tensors' hashes in the record are compared.

        Returns:
            A copy of the record with its proof.

        Raises:
            ProofError: if a tensor has other bits.
            ReferencesError: if the strategy has other settings or data; if these references have the unlearned samples.
            RequestError: for a record that is ``approximate``, and for tasks that can't be proved.
        """
        refuse_approximate(record)
        with preserved_rng():
            made = self.fresh_strategy()
        if strategy is None:
            remaining, hashes = record.remaining, record.after
            if record.task is not None and not getattr(self.train_experience(record.task), "left_out", ()):
                self._refuse_data(f"task {record.task}: it has the unlearned samples there; use references.without(…)")
        else:
            self._check_settings(made, strategy)
            known, ours = dict(made.model.named_parameters()), strategy.model.named_parameters()
            other = [name for name, p in ours if not (p.requires_grad or torch.equal(p, known.get(name, p)))]
            if other:
                self._refuse_data(f"make_strategy builds other frozen weights ({other[0]}), which no training changes")
            remaining = unlearning_of(strategy).ledger.remaining
            hashes = state_hashes(strategy.model.state_dict())
        wanted = provable_tasks(tuple(tasks), remaining, made.model)
        path = tuple(task for task in remaining if task in wanted or self._may_be_permanent(task, made))
        with preserved_rng(), torch.enable_grad():
            todo = () if ("same", path) in self._models else range(1, len(path) + 1)
            for n in tqdm(todo, desc="prove", unit="task", leave=False, disable=None):
                self.train_along(path[:n], "same")
        model, allowed = self.reference(path), {data_fingerprint(self.train_experience(task)) for task in path}
        apart = path in self._company and self._company[path] <= allowed
        return with_proof(record, hashes, model, wanted, apart=apart, seconds=self.seconds(path))

    def _check_settings(self, made: Strategy, strategy: Strategy) -> None:
        """Raise ReferencesError if ``strategy`` has other settings than ``made``, which ``make_strategy`` built."""
        new, old = (
            learning_settings(each, [p for p in each.plugins if not getattr(p, "answers_requests", False)])
            for each in (made, strategy)
        )
        if differ := sorted(of for of in {*new, *old} if new.get(of) != old.get(of)):
            raise ReferencesError(
                f"make_strategy has other settings of {', '.join(differ)} than this strategy: give the one that made it"
            )

    def _may_be_permanent(self, task: int, made: Strategy) -> bool:
        """Return True if a task is or may become permanent (never unlearned): later tasks may read its weights."""
        experience, plugin = self.train_experience(task), unlearning_of(made)
        deadlines = getattr(experience, "deadline", None), getattr(plugin, "deadline", None)
        return getattr(experience, "permanent", False) or any(deadlines)

    def without(self, left_out: Mapping[int, Collection[int]]) -> References:
        """Return reference models trained without the ``left_out`` samples. Equal calls return the same object.

        Args:
            left_out: task → positions in its training data, from 0; without any position this object is returned.

        Raises:
            ReferencesError: for a task that the benchmark does not have.
        """
        key = tuple((task, tuple(sorted(left_out[task]))) for task in sorted(left_out) if left_out[task])
        return self._with_data(key, lambda task, positions: without_positions(self.train_experience(task), positions))

    def _with_data(self, key: tuple[Any, ...], experience_of: Callable[..., Any]) -> References:
        """Copy this object, with the data ``experience_of(task, x)`` for each pair ``(task, x)`` in ``key``."""
        if key and key not in self._without:
            twin = self._without[key] = object.__new__(References)
            empty: Any = {name: {} for name in ("_models", "_seconds", "_runs", "_without", "_company")}
            vars(twin).update(vars(self), workers=None, trainings=0, **empty)
            twin._experiences = self._experiences | {task: experience_of(task, what) for task, what in key}
        return self._without[key] if key else self

    def trained(self, plugin: Any) -> References:
        """Return these references for just the data trained in ``plugin``'s run; ReferencesError if labels differ."""
        for task, digest in plugin.data.items():
            self.train_experience(task)
            if (task, digest) not in self._trained:
                self._trained[task, digest] = join_if(digest, self._parts[task]) or self._refuse_data(
                    f"task {task}: its training data have other labels, or another number of samples"
                )
        key = tuple(of for of in plugin.data.items() if self._trained[of] is not self._experiences[of[0]])
        return self._with_data(key, lambda *of: self._trained[of])

    def of(self, plugin: Any) -> References:
        """Return a :class:`References` for the training data of ``plugin``'s run, minus the samples unlearned there."""
        here = self.trained(plugin)
        sizes = {task: len(experience.dataset) for task, experience in here._experiences.items()}
        return here.without(plugin.forgotten.positions_by_task(sizes))

    def expect(self, *kinds: Expected) -> None:
        """Register the ``kinds`` of reference model that a metric needs, so that workers can train them in advance."""
        self._expected |= set(kinds)

    def expected(self) -> list[tuple[Expected, tuple[int, ...]]]:
        """List the reference models that metrics of a run will need, as (variant, tasks): ``("same", (0, 2))``, …"""
        paths: list[tuple[Expected, tuple[int, ...]]] = []
        for trained, remaining in tasks_after_each(self.benchmark.train_stream):
            if trained != remaining:  # before the first unlearning metrics have nothing to compare
                paths += [(self._full_variant, trained)] if "full" in self._expected else []
                paths += [(variant, remaining) for variant in _OF_REMAINING if variant in self._expected]
        return list(dict.fromkeys(paths))

    def _train_ahead(self) -> None:
        """Start the workers that train references in advance. In later calls, only warn if a worker has failed."""
        if self._ahead:
            error = self.workers.failure()
            if error is not None:
                warnings.warn(f"a worker that trains references failed, the run trains them: {error!r}", stacklevel=4)
            return
        with preserved_rng():
            run = self._new_run("same")
            run.keys_of(self._experiences.values(), **self.train_options)
            if not run.stored:
                self.workers = None  # without stored states no result of another process can be loaded
                return
        self.workers.begin(self, self.expected())
        self._ahead = True

    def train_along(self, path: tuple[int, ...], variant: Expected) -> Any:
        """Train the tasks of ``path`` one after another; return the run, with the trained model in ``run.strategy``."""
        run = self._runs.pop(variant, None)  # removed while it trains: an interrupted run is not continued
        if run is None or not (run.stored or run.trained == path[: len(run.trained)]):
            run = self._new_run(variant)
        if run.trained != path[: len(run.trained)]:  # the common beginning of two paths is not trained again
            run.restart()
        for task in path[len(run.trained) :]:
            computed = run.computed
            with warnings.catch_warnings():
                for category in _QUIET:
                    warnings.simplefilter("ignore", category)
                run.train(self._experiences[task], **self.train_options)
            self.trainings += run.computed - computed
            self._seconds[variant, run.trained] = run.seconds()
        self._runs[variant] = run
        return run

    def _new_run(self, variant: Expected) -> Any:
        strategy = self.fresh_strategy(variant)
        return Retraining(strategy) if self.store is None else self.store.run(strategy)

    def fresh_strategy(self, variant: Expected = "same") -> Any:
        """Return a new strategy for the reference ``variant``; ReferencesError if ``make_strategy`` is unfit."""
        # No metrics: the run's metrics would need references. The logger writes nothing; without one Avalanche warns.
        strategy = self.make_strategy(evaluator=EvaluationPlugin(loggers=[] if rank() else [BaseLogger()]))
        if not isinstance(strategy, BaseTemplate):
            raise ReferencesError(f"make_strategy must return a strategy, and returned {strategy!r}")
        seeding = find_plugin(strategy, SeedingPlugin)
        if seeding is None:
            raise ReferencesError(
                "make_strategy draws from a running random stream: plugins=[SeedingPlugin(seed), …] must come first"
            )
        pooled = _pool_plugin(strategy)
        if pooled is not None and variant == "full":
            pooled.isolation = Pools()  # one slot per task: the full model may keep more tasks than there are slots
        if variant == "order":
            seeding.order_seed = derive_seed(seeding.order_seed, "another order")
        elif variant == "seed":
            _draw_again(strategy, seeding, derive_seed(seeding.seed, "another seed"))
        return strategy


def _check_make_strategy(make_strategy: object) -> None:
    """Raise ReferencesError unless ``make_strategy`` accepts ``evaluator=…``; only its signature is checked."""
    wanted = "give a function, def make_strategy(**kwargs), that makes a new strategy with these keyword arguments"
    if isinstance(make_strategy, BaseTemplate) or not callable(make_strategy):
        raise ReferencesError(f"make_strategy={make_strategy!r} can't be called: {wanted}")
    try:
        signature = inspect.signature(make_strategy)
    except ValueError:  # a builtin has none
        return
    try:
        signature.bind(evaluator=None)
    except TypeError as error:
        raise ReferencesError(f"make_strategy can't be called with evaluator=… ({error}): {wanted}") from error


def _pool_plugin(strategy: Strategy) -> Any:
    """Return the strategy's plugin that assigns weight pools (parts of the weights) to tasks, or None."""
    return next((p for p in strategy.plugins if isinstance(getattr(p, "isolation", None), Pools)), None)


def _draw_again(strategy: Strategy, seeding: SeedingPlugin, seed: int) -> None:
    """Initialise all parameters of a new strategy again from ``seed``, and set this seed in its plugins."""
    torch.manual_seed(seed)
    for module in strategy.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    seeding.seed = seeding.order_seed = seed
    masking = find_plugin(strategy, TaskEndPlugin)
    if masking is not None:
        masking.seed = seed
