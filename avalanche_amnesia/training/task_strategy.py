"""Base class of this package's strategies: Avalanche's supervised training, with the plugins of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn
from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, refuse_incremental, single_task, stream_of, unpack_batch
from avalanche_amnesia.models.multi_head import MultiHeadModel
from avalanche_amnesia.optimizers import check_optimizer, follow_model
from avalanche_amnesia.processes import ProcessError
from avalanche_amnesia.seeding import preserved_rng
from avalanche_amnesia.strategy import Autocast, Strategy, autocast, autocast_now
from avalanche_amnesia.training import task_faults
from avalanche_amnesia.training.host import arguments
from avalanche_amnesia.training.host.lookup import (
    ListenerDispatch,
    refuse_unfinished,
    remaining_experiences,
    unlearning_of,
)
from avalanche_amnesia.training.host.rollback import abort_training
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin, NonEmptyBatches, TensorBatches
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.task_mask import TaskEndPlugin
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unit_graph.backbones import as_batch

if TYPE_CHECKING:  # a strategy that does not unlearn imports none of these
    from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
    from avalanche_amnesia.benchmarks.requests import UnlearningRequest
    from avalanche_amnesia.models.task_inference import InferenceRule, Prediction, TaskInference
    from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin


_AS_IT_IS = nullcontext()  # entering autocast in every step takes longer


class StrategyOptions(TypedDict, total=False):
    """Keyword arguments that every strategy takes; :class:`TaskStrategy` documents them."""

    reset_optimizer: bool
    criterion: Any
    train_mb_size: int
    train_epochs: int
    eval_mb_size: int | None
    device: str | torch.device
    plugins: Sequence[SupervisedPlugin] | None
    evaluator: EvaluationPlugin | Callable[[], EvaluationPlugin] | None
    eval_every: int
    peval_mode: arguments.PeriodicMode


class TaskPlugin(SupervisedPlugin):
    """Optional base class of plugins: adds events around an unlearning, and after loading a saved state."""

    def before_unlearning(self, strategy: Strategy) -> Any:
        """Before an unlearning: called before the tasks are removed from the model."""

    def after_unlearning(self, strategy: Strategy) -> Any:
        """Called when an unlearning has removed tasks from the model; an error raised here undoes the removal."""

    def after_loading(self, strategy: Any) -> Any:
        """After a load: called when a saved state has been loaded into all parts of the strategy."""


class TaskStrategy(arguments.OwnArguments, ListenerDispatch, SupervisedTemplate):
    """Supervised strategy that trains one task after another, seeds each by its label, and unlearns on request.

    Base of this package's strategies, which choose the plugins.

    Args:
        model: a :class:`MultiHeadModel`, of the kind that a plugin of ``method`` masks (:class:`MaskedModel`,
            :class:`SubnetModel`).
        optimizer: any torch optimizer over ``model.parameters()``; with several parameter groups, parameters that
            tasks add (heads, norms) join the first, and copies of a DisjointModel's backbone join its groups.
        method: the plugins that make the strategy, in order: those that learn, then those that record and unlearn.
        seed: every random draw derives from it and the task.
        reset_optimizer: whether every task starts with a new optimizer state, which is then not saved either
            (``train(…, reset_optimizer_state=…)`` overrides it).
        criterion: loss of logits and labels; cross-entropy by default.
        train_mb_size: samples of a mini-batch, at least 1.
        train_epochs: passes over a task's samples, at least 1.
        eval_mb_size: samples of a mini-batch in an evaluation, at least 1; None: as for training.
        device: device of model and data.
        plugins: further plugins, called after this package's; only when a task ends (``after_training_exp``) they are
            called first, so that weights that they write (an average) are recorded as the task's.
        evaluator: Avalanche's EvaluationPlugin, or a function that makes it; by default one without loggers.
        eval_every: number of epochs (or the unit in ``peval_mode``) between two evaluations; 0: evaluate only at the
            end of a task; -1: never.
        peval_mode: ``experience``, ``epoch`` or ``iteration``.

    Raises:
        TypeError: if ``model`` is of another kind, for an unknown option, or for an object that is no optimizer,
            plugin, evaluator or loss.
        ValueError: for an invalid value, and for an optimizer that can't train the model: over other
            parameters, for sparse gradients, only for matrices, or one that needs a closure.
    """

    PLUGIN_CLASS = TaskPlugin  # Avalanche warns of a plugin with further events
    composed = ("method",)
    plugins: list[Any]
    dataloader: Any
    mbatch: Any

    def __init__(
        self,
        *,
        model: MultiHeadModel,
        optimizer: Optimizer,
        method: Sequence[SupervisedPlugin] = (),
        seed: int = 0,
        reset_optimizer: bool = True,
        criterion: Any = None,
        train_mb_size: int = 1,
        train_epochs: int = 1,
        eval_mb_size: int | None = None,
        device: str | torch.device = "cpu",
        plugins: Sequence[SupervisedPlugin] | None = None,
        evaluator: EvaluationPlugin | Callable[[], EvaluationPlugin] | None = None,
        eval_every: int = -1,
        peval_mode: arguments.PeriodicMode = "epoch",
    ) -> None:
        kinds = (plugin.model_class for plugin in method if isinstance(plugin, TaskEndPlugin))
        arguments.check_model(model, next(kinds, MultiHeadModel))
        checks.one_of("peval_mode", peval_mode, arguments.PeriodicMode)
        check_optimizer(optimizer, model.parameters(), model.head_parameters())
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=arguments.checked_criterion(nn.CrossEntropyLoss() if criterion is None else criterion),
            plugins=[SeedingPlugin(seed), InMemoryLoaderPlugin(), *method, *arguments.checked_plugins(plugins)],
            evaluator=arguments.checked_evaluator(evaluator),
            device=arguments.checked_device(device),
            train_mb_size=checks.whole_number("train_mb_size", train_mb_size),
            train_epochs=checks.whole_number("train_epochs", train_epochs),
            eval_mb_size=None if eval_mb_size is None else checks.whole_number("eval_mb_size", eval_mb_size),
            eval_every=checks.whole_number("eval_every", eval_every, -1),
            peval_mode=peval_mode,
        )
        self.seed = checks.whole_number("seed", seed, None)
        checks.one_of("reset_optimizer", reset_optimizer, Literal[True, False])
        self.reset_optimizer = reset_optimizer
        self._trains = False
        self._placed: int | None = None  # number of experiences in streams without task labels
        self.autocast: Autocast = ()
        """Autocast setting around the call that trains, evaluates or unlearns; only forward and loss run under it."""
        self.optimizer_always_fresh = reset_optimizer
        """True as long as every task started with new optimizer state, without which no unlearning is exact."""

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Train on experiences as Avalanche does; afterwards restore the global random generators, even after an error.

        Args:
            experiences: one, or a stream or list of them.
            eval_streams: list of streams or experiences to evaluate during training; by default the trained
                ones.
            kwargs: options of Avalanche's ``train``, for loaders and optimizer.

        Raises:
            TypeError: for objects that are no experiences, for example a benchmark.
            TaskError: for an experience that can't be trained as a task: NaN among its samples, samples of a shape
                that the model can't run on, labels that its head has no class for; the task was undone.
        """
        if not torch.is_grad_enabled():
            raise TaskError("gradients are switched off by torch.no_grad() or inference_mode(): train outside of it")
        arguments.check_train_options(kwargs, type(self))
        given = self._with_labels(arguments.as_list(experiences, "strategy.train"))
        held_out = {getattr(stream_of(experience), "name", "") for experience in given} & {"test", "valid"}
        if held_out:
            warnings.warn(
                f"strategy.train is given the stream {sorted(held_out)[0]!r}, not benchmark.train_stream",
                stacklevel=2,
            )
        streams = None
        if eval_streams is not None:
            if not isinstance(eval_streams, Iterable):
                raise TypeError(f"eval_streams must be a list, [benchmark.test_stream], got {eval_streams!r}")
            streams = [self._with_labels(arguments.as_list(one, "train(eval_streams=…)")) for one in eval_streams]
        with preserved_rng(), self._full_precision():
            try:
                self._trains = True
                plugin = unlearning_of(self)
                if plugin is not None and given:  # waiting requests may need data before the first task begins
                    plugin.stream.remember(given[0])
                return super().train(given, streams, **kwargs)
            except TaskError:
                self.abort_training()
                raise
            finally:
                self._trains = False
                for plugin in self.plugins:
                    if isinstance(plugin, SeedingPlugin):
                        plugin.leave_step()
                self._listeners = {}  # after an error too: Avalanche's evaluator returns objects that can't be pickled

    def _before_training_exp(self, **kwargs: Any) -> None:
        fault = task_faults.fault_in_memory(getattr(self.experience, "samples", None))
        fault = fault if len(self.experience.dataset) else "it has no samples"
        if fault is not None:
            raise TaskError(f"task {single_task(self.experience)}: {fault}")
        requests = getattr(self.experience, "requests", ())
        if requests and unlearning_of(self) is None:
            warnings.warn(
                f"{type(self).__name__} obeys no request, and this stream has {len(requests)} at task "
                f"{self.experience.task_label}: use AmnesiacHAT, or plugins=[TrajectoryPlugin(), UnlearningPlugin()] "
                "(with obey=False to decline them knowingly)",
                stacklevel=2,
            )
        super()._before_training_exp(**kwargs)

    def check_model_and_optimizer(self, reset_optimizer_state: bool | None = None, **kwargs: Any) -> None:
        """Call Avalanche's method, with ``reset_optimizer`` as the default of ``reset_optimizer_state``."""
        fresh = self.reset_optimizer if reset_optimizer_state is None else reset_optimizer_state
        self.optimizer_always_fresh &= fresh
        super().check_model_and_optimizer(reset_optimizer_state=fresh, **kwargs)

    def make_optimizer(self, reset_optimizer_state: bool = False, **kwargs: Any) -> None:
        """Add new model parameters to the optimizer and drop deleted ones; empty its state if so requested."""
        follow_model(self, fresh=reset_optimizer_state)
        if kwargs.get("remove_params") or kwargs.get("verbose_optimizer"):
            super().make_optimizer(False, **kwargs)

    def eval(self, exp_list: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate the experiences of all tasks trained and not unlearned; skip all further experiences.

        Returns:
            The last value of every metric; an empty dict if no task remains, because then nothing is evaluated.

        Raises:
            TypeError: for objects that are no experiences, for example a benchmark.
        """
        refuse_unfinished(self)
        given = self._with_labels(arguments.as_list(exp_list, "strategy.eval"))
        known = remaining_experiences(self, given)
        with self._full_precision():
            return super().eval(known, **kwargs) if known else {}

    @contextmanager
    def _full_precision(self) -> Iterator[None]:
        """In a ``with`` block, turn autocast off except in forward and loss, because masks need full precision."""
        now = autocast_now() or self.autocast
        with Transaction() as kept, autocast(()):
            kept.set(self, autocast=now)
            yield

    def _with_labels(self, experiences: Sequence[Any]) -> list[Any]:
        """Return the experiences, each with a task label: its own, or else its position in the stream."""
        found = list(experiences)
        if not all(hasattr(experience, "task_labels") and stream_of(experience) for experience in found):
            from avalanche_amnesia.benchmarks.stream_labels import relabel  # lazy: most streams have labels

            found = relabel(found, parts=self.model.additive)
        for n in {e.labelled_by_place for e in found if hasattr(e, "labelled_by_place")}:
            if self._placed is None:
                warnings.warn(
                    f"this stream has no task labels: each of its {n} experiences is taken as the task of its place, "
                    "from 0. task_incremental_benchmark(benchmark) gives them these labels",
                    stacklevel=3,
                )
                self._placed = n
            if n != self._placed:
                raise TaskError(
                    f"streams of {self._placed} and of {n} experiences have no task labels, nor equal places: "
                    "label both, by task_incremental_benchmark(benchmark, reset_task_labels=True)"
                )
        if found and not (self.model.tasks or self.model.additive):
            refuse_incremental(found[0])
        return found

    def predict(
        self, x: Tensor | Mapping[str, Tensor], task: int | None = None, rule: InferenceRule = "entropy"
    ) -> Prediction:
        """Return the predicted task, class and certainty of each sample; without ``task`` the task is inferred.

        Args:
            x: ``(batch, …)``, on any device; or several such tensors by the names of the backbone's arguments.
            task: label of all samples' task; None: inferred for each sample
                (:class:`~avalanche_amnesia.models.task_inference.TaskInference`), at the cost of one pass per task.
            rule: of the inference, ``entropy`` or ``confidence``.

        Raises:
            TypeError: if ``x`` is no batch.
            UnknownTaskError: if the task has no head: it was never trained, or was unlearned.
            ValueError: if no task is left, for an unknown rule, and for samples that the model can't process.
        """
        refuse_unfinished(self)
        x, infer = as_batch(x).to(self.device), self._inference(rule)
        if fault := task_faults.fault_of_inputs(x):
            raise ValueError(f"x can't be predicted: {fault}")
        try:
            return infer(x, task)
        except Exception as error:  # any error of the model
            of = next(iter(self.model.tasks), None) if task is None else checks.integer(task)
            fault = task_faults.fault_of_single(x, self.model, error)
            if of in self.model.tasks:
                fault = fault or task_faults.fault_of_forward(x, self.model, error, of)
            if fault is None:
                raise
            raise ValueError(f"x can't be predicted, as a batch of {len(x)}: {fault}") from error

    def _inference(self, rule: InferenceRule) -> TaskInference:
        from avalanche_amnesia.models.task_inference import TaskInference  # lazy: most trainings predict nothing

        return TaskInference(self.model, rule)

    # The first mini-batch of a task: faults are named, and the task is undone --------------------------------------

    def training_epoch(self, **kwargs: Any) -> None:
        """Train for one epoch; skip empty mini-batches."""
        with Transaction() as kept:
            if not isinstance(self.dataloader, TensorBatches):
                kept.set(self, dataloader=NonEmptyBatches(self.dataloader))
            super().training_epoch(**kwargs)

    def _unpack_minibatch(self) -> None:
        self.mbatch = unpack_batch(self.mbatch)
        super()._unpack_minibatch()

    def forward(self) -> Any:
        """Return the model's output; raise TaskError (which undoes the task) if the model can't process the inputs."""
        later = self.is_training and self.clock.train_exp_iterations > 0  # later mini-batches are like the first
        if self.is_training and not later:
            fault = task_faults.fault_of_inputs(self.mb_x)
            self._refuse(None if fault is None else f"in its first mini-batch {fault}")
        try:
            with autocast(self.autocast) if self.autocast else _AS_IT_IS:
                return super().forward()
        except ProcessError:
            raise
        except Exception as error:  # any error of the model
            of_model = str(error) if isinstance(error, TaskError) else None  # in words for the user
            self._refuse(of_model or task_faults.fault_of_single(self.mb_x, self.model, error), error)
            if not later:
                self._refuse(task_faults.fault_of_forward(self.mb_x, self.model, error, self.mb_task_id), error)
            raise

    def criterion(self) -> Any:
        """Return the loss; raise TaskError for labels outside of the head's classes."""
        parts = self.mb_y, self.mb_output
        if self.is_training and not self.clock.train_exp_iterations:  # such a label would crash an accelerator
            self._refuse(task_faults.fault_of_labels(*parts, self._criterion))
        try:
            with autocast(self.autocast) if self.autocast else _AS_IT_IS:
                return super().criterion()
        except Exception as error:  # any error of the loss
            self._refuse(task_faults.fault_of_labels(*parts, self._criterion), error)
            raise

    def _refuse(self, fault: str | None, cause: Exception | None = None) -> None:
        """Raise TaskError with message ``fault``, unless it is None; :meth:`train` then undoes the task's training."""
        if fault is not None:
            undone = " Its training was undone" if self.is_training else ""
            raise TaskError(f"task {single_task(self.experience)}: {fault}.{undone}") from cause

    def plan_unlearning(
        self,
        tasks: Iterable[int] | UnlearningRequest = (),
        *,
        task: int | None = None,
        samples: Iterable[int] = (),
        classes: Iterable[int] = (),
        data: Any = None,
    ) -> UnlearningPlan:
        """Return the plan of an unlearning, a list of the changes that it would make; change nothing.

        Args:
            tasks, task, samples, classes, data: as for :meth:`unlearn`.

        Raises:
            RequestError: if the tasks can't be requested now.
        """
        with self._full_precision():
            return self._unlearning().plan(self, tasks, task=task, samples=samples, classes=classes, data=data)

    def unlearn(
        self,
        tasks: Iterable[int] | UnlearningRequest = (),
        *,
        task: int | None = None,
        samples: Iterable[int] = (),
        classes: Iterable[int] = (),
        data: Any = None,
        keep_probes: bool = False,
        allow_unknown: bool | None = None,
        strict: bool = False,
        reproduce: bool | None = None,
    ) -> UnlearningRecord:
        """Unlearn tasks, or samples or classes of one task, completely or not at all; call it outside of ``train``.

        For samples or classes the task is trained again without them, on its own weights, and remains: this costs two
        trainings (see ``reproduce``). It needs a method in which no task depends on another: DisjointSubnets or
        Independent. RanPAC subtracts the samples instead.

        Args:
            tasks: labels of remaining, not permanent tasks; or a request.
            task: instead of ``tasks``: the task to retrain without ``samples`` and ``classes``.
            samples: positions in the task's original training data, from 0; over its parts in the order of training.
            classes: labels in the task's training data; they are predicted no more.
            data: the task's experience, or the list of its parts; by default from the stream trained last.
            keep_probes: whether metrics may keep the tasks' masks and heads for measuring.
            allow_unknown: accept plugins that keep learned state and have no purger; the record names them. By default
                as the strategy's :class:`UnlearningPlugin` does.
            strict: raise if anything but this strategy's trainings and unlearnings changed the model (a weight
                changed by hand, a loaded state), instead of a note in the record.
            reproduce: before a task is trained again without some samples, train it again with them, and refuse the
                request if its bits differ from before: data, code or settings have changed then. False saves that
                training, and the record's claim rests on them. By default as the strategy's :class:`UnlearningPlugin`.

        Raises:
            RequestError: if the tasks can't be requested now; nothing changed.
            UnknownStateError: if a plugin keeps learned state and has no purger; nothing changed.
            TamperedError: only with ``strict``; nothing changed.
        """
        parts: Any = {"task": task, "samples": samples, "classes": classes, "data": data}
        parts |= {"keep_probes": keep_probes, "allow_unknown": allow_unknown, "strict": strict, "reproduce": reproduce}
        with self._full_precision():
            return self._unlearning().unlearn(self, tasks, **parts)

    @property
    def records(self) -> list[UnlearningRecord]:
        """Return the records of all requests, also of those in streams; :meth:`prove` proves the last one."""
        return [*self._unlearning().records]

    def prove(
        self,
        make_strategy: Callable[..., Any],
        benchmark: Any,
        *,
        tasks: Iterable[int] = (),
        train_options: Mapping[str, Any] | None = None,
        store: Any = None,
    ) -> UnlearningRecord:
        """Train a new model without the unlearned data, and compare its tensors with this model's, bit by bit.

        The last record gets its ``proof``, and the claim ``exact``. A ``conditional`` claim stays, unless this process
        never trained the unlearned data: save the strategy, load it in a new process, and prove it there.

        Args:
            make_strategy: as of :class:`~avalanche_amnesia.evaluation.References`.
            benchmark: the benchmark of the run; its requests are ignored.
            tasks: only these remaining tasks, if no task's weights depend on another task; by default all.
            train_options: keyword arguments of ``train``; by default those of the first training.
            store: a :class:`~avalanche_amnesia.lab.runs.RunStore`, so that an interrupted proof can continue.

        Returns:
            The record.

        Raises:
            ProofError: if a tensor has other bits. The record is ``approximate`` then, and so are later ones as long
                as the task remains.
            ReferencesError: if the arguments are not those of the run; nothing changed.
            RequestError: without a record, for one that is ``approximate``, and during a training; nothing changed.
        """
        from avalanche_amnesia.evaluation.references import References  # lazy: only a proof trains references

        plugin = self._unlearning()
        options = plugin.claims.train_options() if train_options is None else train_options
        references = References(make_strategy, benchmark, train_options=options, store=store)
        return plugin.prove(self, references, tasks=tasks)

    def save(self, path: str | Path, *, key: Any = None) -> Path:
        """Save the strategy between tasks: all that later trainings and unlearnings depend on, as tensors and JSON.

        An interrupted training is aborted first (:meth:`abort_training`): the state is that of the task's start.

        Args:
            path: a directory, made if it does not exist; a state in it is replaced as a whole, or not at all.
            key: private key that signs the state, as of :meth:`UnlearningRecord.sign`.

        Returns:
            The directory.

        Raises:
            RequestError: from inside a training; save before it or after.
            SigningError: if the key is none, or ``cryptography`` is not installed (extra ``sign``).
            StateError: if a plugin stores values that can't be saved, or the directory contains other files.
            OSError: if the state can't be written; an older state in the directory does not change.
        """
        from avalanche_amnesia.training.host.saving import save_state  # lazy: most trainings save nothing

        if not self._trains:
            self.abort_training()
        return save_state(self, path, key)

    @classmethod
    def load(cls, path: str | Path, *, key: Any = None, **arguments: Any) -> Self:
        """Build a strategy and load the state that :meth:`save` saved, without running code from the files.

        Args:
            path: the directory.
            key: public key of the state's signer; see :func:`~avalanche_amnesia.training.load_state`.
            arguments: those of the saved strategy: ``model``, ``optimizer``, settings, ``evaluator``.

        Raises:
            StateError: if there is no state, it is damaged, of another format, or of another strategy, model or
                settings, or its signature is not that of the key; the message says which.
        """
        from avalanche_amnesia.training.host.saving import load_state

        strategy = cls(**arguments)
        load_state(strategy, path, key)
        return strategy

    def mark_permanent(self, tasks: Iterable[int]) -> None:
        """Declare trained tasks permanent: they can never be unlearned, and this can't be reversed.

        Raises:
            RequestError: if one of them does not remain.
        """
        self._unlearning().mark_permanent(tasks)

    def abort_training(self) -> None:
        """Undo a training interrupted by an exception; between tasks do nothing."""
        abort_training(self)

    def _unlearning(self) -> UnlearningPlugin:
        plugin: UnlearningPlugin | None = unlearning_of(self)
        if plugin is None:
            from avalanche_amnesia.ledger import RequestError  # lazy: HAT needs no ledger

            raise RequestError(
                f"{type(self).__name__} does not unlearn: plugins=[TrajectoryPlugin(), UnlearningPlugin()] do"
            )
        return plugin
