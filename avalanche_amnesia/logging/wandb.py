"""Avalanche logger for Weights & Biases that works with today's wandb and knows about unlearning events."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from avalanche.evaluation.metric_results import MetricValue
from avalanche.logging import BaseLogger

from avalanche_amnesia.logging.axes import AXES, EVENT, ITERATION, TASK, UNLEARNING_CALLBACKS, axis_of
from avalanche_amnesia.logging.offline import is_finished
from avalanche_amnesia.logging.run_mode import resolve_mode
from avalanche_amnesia.logging.values import SUPPORTED, flattened, to_wandb
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.provenance import provenance_of

_DEFAULT_PROJECT = "avalanche-amnesia"
_FLUSH_SECONDS = 30.0
_OF_UNLEARNED_TASKS = ("JSD", "UnlearnedAccuracy")
"""Metrics whose values of tasks that are gone are what they measure."""


class WandBLogger(BaseLogger):
    """Logs every metric to one W&B run, over `iteration`, `task` or `event` (see `axes.py`).

    All three axes are values of every row; W&B's own step is only the number of the row, so nothing is
    overwritten. A copy of the logger (and so that of a copied strategy) is the logger itself. A pickled
    logger leaves its run behind; give the loaded one a run with `attach`.

    The run says by itself what it is: its configuration is what a record's provenance says of the strategy (method,
    seed, settings, versions), and without a name it is called by method and seed. Each unlearning's record is an
    artefact of the run. In the run's summary stand the values as they are at its end: none of a task that was
    unlearned, unless it is measured on (`JSD`, `UnlearnedAccuracy`); of every number the smallest and largest too.

    Args:
        run: a W&B run to log to, which stays the caller's to finish; None: make a run of our own.
        project: project of our own run.
        name: its name; None: method and seed of the strategy.
        group: its group, e.g. one experiment with several seeds.
        job_type: its part in the group: "main", "reference", "full", "audit", or another word.
        config: further settings of it, beside those of the strategy.
        dir: folder for its files (W&B makes `wandb/` there); made if missing.
        mode: "online", "offline", "disabled", or None: WANDB_MODE if set, else online where an API key is
            configured and offline elsewhere, never a prompt.
        tags: its tags.

    Raises:
        ValueError: unknown `mode` or WANDB_MODE, or arguments of a new run beside `run`.
        TypeError: `run` is not a W&B run, or `tags` is one string.
        NotADirectoryError: `dir` is a file.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str = _DEFAULT_PROJECT,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | Path | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if isinstance(tags, str):
            raise TypeError(f"tags={tags!r} is one string: pass a sequence of tags, e.g. tags=[{tags!r}]")
        self._run: Any = None
        self._run_id: str | None = None
        self._to_be_named = run is None and name is None
        self._described = False
        self._finished = False
        self._iteration = 0
        self._task = 0
        self._event = 0
        self._tasks_ended: int | None = None
        self._epochs_over = False
        self._pending: list[MetricValue] = []
        self._defined: set[str] = set()
        self._warned: set[str] = set()
        if run is not None:
            given = {
                "project": project != _DEFAULT_PROJECT,
                "name": name is not None,
                "group": group is not None,
                "job_type": job_type is not None,
                "config": config is not None,
                "dir": dir is not None,
                "mode": mode is not None,
                "tags": len(tags) > 0,
            }
            if beside := [argument for argument, is_given in given.items() if is_given]:
                raise ValueError(
                    f"{', '.join(beside)} given beside run: these make a new run. "
                    "Pass them to wandb.init yourself, or leave run out"
                )
            self.attach(run)
            return

        import wandb

        run_mode = resolve_mode(mode)
        if dir is not None and Path(dir).exists() and not Path(dir).is_dir():
            raise NotADirectoryError(f"dir={str(dir)!r} is a file: pass a folder, which is made if missing")
        self.attach(
            wandb.init(
                project=project,
                name=name,
                group=group,
                job_type=job_type or "main",
                config=None if config is None else dict(config),
                dir=None if dir is None else str(dir),
                mode=run_mode,
                tags=list(tags),
                reinit="create_new",  # a second logger in the process gets a second run
            )
        )

    @property
    def run(self) -> Any:
        """The W&B run.

        Raises:
            RuntimeError: the run is finished, or was left behind by pickling.
        """
        if self._finished:
            raise RuntimeError(
                f"the W&B run {self._run_id} of this logger is finished and takes no more values: "
                "call finish() last, or log to a new WandBLogger"
            )
        if self._run is None:
            raise RuntimeError(
                f"this logger was loaded without its W&B run {self._run_id}: "
                f"attach(wandb.init(id={self._run_id!r}, resume='allow')) goes on in it, "
                "attach(wandb.init()) in a new one"
            )
        return self._run

    @property
    def run_id(self) -> str | None:
        """Identifier of the run, known also after `finish` and after loading."""
        return self._run_id

    def attach(self, run: Any) -> None:
        """Log to `run` from now on, counting on; for a logger that was loaded without its run.

        Args:
            run: a W&B run, as `wandb.init` returns it.

        Raises:
            TypeError: `run` is not a W&B run.
            RuntimeError: the logger has or had a run already.
        """
        import wandb

        if not isinstance(run, wandb.Run):
            raise TypeError(f"run is a {type(run).__name__}: pass what wandb.init returns, or None to have a run made")
        if self._run is not None:
            raise RuntimeError(f"this logger writes to the run {self._run_id}: make another WandBLogger for {run.id}")
        for axis in AXES:
            run.define_metric(axis, hidden=True)  # an axis is no plot of its own
        self._run, self._run_id, self._finished = run, run.id, False
        self._defined.clear()

    def log_metrics(self, metric_values: list[MetricValue]) -> None:
        """Take values that are written with the callback that Avalanche sends right after them.

        Raises:
            RuntimeError: there are values and the run is finished or missing.
        """
        if not metric_values and not self._pending:
            return
        _ = self.run  # no value is taken that can't be written
        self._write_pending()  # values handed over by hand, which no callback followed
        self._pending = list(metric_values)

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        """Write one value at once; `x_plot` is its iteration.

        Raises:
            RuntimeError: the run is finished or missing.
        """
        self.log_metrics([MetricValue(None, name, value, x_plot)])
        self._write_pending()

    def finish(self, exit_code: int = 0) -> None:
        """End the run, passed in or our own, and return when all of it is stored; again does nothing.

        Args:
            exit_code: 0 for success; anything else marks the run as failed.
        """
        if self._finished or self._run is None:
            return
        self._write_pending()
        self._finished = True
        self._run.finish(exit_code=exit_code)
        if self._run.offline and not self._run.disabled:
            _wait_until_written(Path(self._run.settings.sync_file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a run can't be copied, and a copied strategy has one dashboard

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_pending": []}

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Avalanche forwards any before_* and after_* event, those of plugins included: hear them all.
        if name.startswith(("before_", "after_")):
            return partial(self._on_callback, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _on_callback(self, callback: str, strategy: Any, metric_values: object = None, **kwargs: Any) -> None:
        if callback == "before_training_exp":
            self._describe(strategy)
        clock = getattr(strategy, "clock", None)
        self._count(callback, strategy, self._task if clock is None else clock.train_exp_counter)
        if clock is not None:
            self._iteration = clock.train_iterations
        self._write_pending(callback, has_clock=clock is not None)
        if callback == "after_unlearning":
            self._unlearned(strategy)

    def _describe(self, strategy: Any) -> None:
        """Give the run the strategy's settings and, where it has none, its name."""
        if self._described or not hasattr(strategy, "optimizer"):  # some other host: nothing is known of it
            return
        self._described = True
        origin = asdict(provenance_of(strategy, {}))
        del origin["data"]  # by task, and not known yet
        self.run.config.update({key: value for key, value in origin.items() if key not in self.run.config})
        if self._to_be_named:
            self.run.name = origin["method"] + ("" if origin["seed"] is None else f", seed {origin['seed']}")

    def _unlearned(self, strategy: Any) -> None:
        """Keep the record of an unlearning, and take the tasks that are gone out of the summary."""
        import wandb

        plugin = unlearning_of(strategy) if hasattr(strategy, "plugins") else None
        if plugin is None or not plugin.records:
            return
        record = plugin.records[-1]
        gone = tuple(f"/Task{task:03d}" for task in record.tasks)
        for name in [name for name in self.run.summary.keys() if any(end in name for end in gone)]:  # noqa: SIM118
            if not name.startswith(_OF_UNLEARNED_TASKS):
                del self.run.summary[name]
        number = len(plugin.records)
        artefact = wandb.Artifact(
            f"unlearning-{self._run_id}-{number}", type="unlearning-record", description=str(record)
        )
        with artefact.new_file("record.json") as file:
            file.write(record.to_json())
        self.run.log_artifact(artefact)

    def _count(self, callback: str, strategy: Any, tasks_before: int) -> None:
        """Keep `task` and `event` right at `callback`; Avalanche's own counter moves after its loggers."""
        if callback == "before_training_exp":
            self._tasks_ended, self._epochs_over = None, False
        elif callback == "before_training_epoch":
            # A stopped training announces an epoch that never comes.
            self._epochs_over = self._epochs_over and getattr(strategy, "_stop_training", False)
        elif callback == "after_training_epoch":
            self._epochs_over = True
        # A plugin that stands before the loggers and unlearns when a task ends is heard before that end.
        ends = callback == "after_training_exp" or (callback in UNLEARNING_CALLBACKS and self._epochs_over)
        if ends and self._tasks_ended is None:
            self._tasks_ended, self._epochs_over = tasks_before + 1, False
            self._event += 1
        if callback == "after_unlearning":
            self._event += 1
        self._task = max(tasks_before, self._tasks_ended or 0)

    def _write_pending(self, callback: str | None = None, *, has_clock: bool = False) -> None:
        """Write the values taken, in as few rows as keep two values of one name apart."""
        values, self._pending = self._pending, []
        rows: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        axes: dict[str, str] = {}
        for metric in values:
            if not has_clock:
                self._iteration = metric.x_plot
            for name, value in flattened(metric.name, metric.value):
                _refuse_axis_name(name)
                payload = to_wandb(value)
                if payload is None:
                    self._warn_unsupported(name, value)
                elif isinstance(payload, str):
                    texts[name] = payload
                else:
                    axes[name] = axis_of(name, callback, metric.origin)
                    self._place(rows, name, payload)
        if texts:
            self.run.summary.update(texts)
        self._log_rows(rows, axes)

    def _place(self, rows: list[dict[str, Any]], name: str, payload: Any) -> None:
        """Put a value into the first row of its iteration that has none of its name."""
        for row in rows:
            if row[ITERATION] == self._iteration and name not in row:
                row[name] = payload
                return
        rows.append({name: payload, ITERATION: self._iteration, TASK: self._task, EVENT: self._event})

    def _log_rows(self, rows: list[dict[str, Any]], axes: Mapping[str, str]) -> None:
        for name, axis in axes.items():
            if name not in self._defined:
                self.run.define_metric(name, step_metric=axis, summary="min,max,last")
                self._defined.add(name)
        for row in rows:
            self.run.log(row)

    def _warn_unsupported(self, name: str, value: Any) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        warnings.warn(
            f"metric {name!r} is a {kind} that W&B can't show and is left out. Supported: {SUPPORTED}",
            stacklevel=2,
        )


def _refuse_axis_name(name: str) -> None:
    if name in AXES:
        raise ValueError(f"{name!r} is an axis of the logger, as {AXES} are: log it under another name")


def _wait_until_written(file: Path) -> None:
    """Wait for W&B's writer, which may still be at work when `Run.finish` returns (seen with 0.31)."""
    deadline = time.monotonic() + _FLUSH_SECONDS
    while file.exists() and not is_finished(file):
        if time.monotonic() > deadline:
            warnings.warn(f"W&B has not completed {file} within {_FLUSH_SECONDS:.0f} s of its end", stacklevel=3)
            return
        time.sleep(0.01)
