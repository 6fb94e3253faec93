"""Base class of the loggers that write a run to W&B or to JSON lines."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metric_results import MetricValue
from avalanche.logging import BaseLogger

from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.evaluation.picture import Picture
from avalanche_amnesia.logging.axes import AXES, Position, axis_of
from avalanche_amnesia.logging.configuration import configuration_of
from avalanche_amnesia.logging.event_table import EventTable
from avalanche_amnesia.logging.names import EVENT, EVENTS, ITERATION
from avalanche_amnesia.logging.payloads import SUPPORTED, Payload, flatten_value, payload_of
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import EVENTS_OF_ITERATIONS, unlearning_of

DEFAULT_PROJECT = "avalanche-amnesia"


def is_about(name: str, tasks: tuple[int, ...]) -> bool:
    """Return True if a value's name contains the label of one of ``tasks``, as in ``/Task003``."""
    return any(f"/Task{task:03d}" in name for task in tasks)


class RunLogger(BaseLogger, ABC):
    """Base class of loggers of metrics over iterations, tasks or events (trainings, unlearnings), and an event table.

    All three axes are values of every row, so nothing is overwritten. A copy of the logger (and so that of a copied
    strategy) is the logger itself. A run without a name is named after method and seed (see `configuration.py`).

    The run's summary has the values at its end, without values of a task from before its unlearning. Rows, and rows of
    tables, are not deleted: they contain the values of a task from before its unlearning.
    """

    # ``writer`` describes, defines, logs, notes, keeps, forgets and finishes: a JSONWriter or a WandBWriter.
    def __init__(self, writer: Any, *, named: bool, pictures: bool = True) -> None:
        super().__init__()
        self._writer = writer
        self._named = named
        self._pictures = pictures
        self._described = False
        self._finished = False
        self._position = Position()
        self._events = EventTable()
        self._pending: list[MetricValue] = []
        self._defined: set[str] = set()
        self._warned: set[str] = set()
        self._kept: tuple[str, UnlearningRecord] | None = None

    @abstractmethod
    def _no_run_text(self) -> str:
        """Return an error text: the reason why the logger has no run to write to, and the remedy."""

    def _get_writer(self) -> Any:
        if self._writer is None or self._finished:
            raise RuntimeError(self._no_run_text())
        return self._writer

    def log_metrics(self, metric_values: list[MetricValue]) -> None:
        """Store metric values until the next callback of Avalanche, which writes these values."""
        if not metric_values and not self._pending:
            return
        if self._finished:  # no error: an unlearning must not fail for a dashboard
            self._warn_once("", self._no_run_text())
            return
        self._get_writer()  # no value is taken that can't be written
        self._write_pending()  # values logged by the user, or in an iteration: no callback followed
        self._pending = list(metric_values)

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        """Write one value at once, not at Avalanche's next callback; `x_plot` is its iteration."""
        self._get_writer()
        self.log_metrics([MetricValue(None, name, value, x_plot)])
        self._write_pending()

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Write a dict of name to value, for values that no metric emits, as one row at the current event number."""
        self._get_writer()
        origin, at = SimpleNamespace(axis=EVENT), self._position.iteration
        self.log_metrics([MetricValue(origin, name, value, at) for name, value in values.items()])
        self._write_pending()

    def log_events(self) -> None:
        """Write the table of events (trainings, unlearnings) if it has changed; do nothing during a training."""
        if self._events.changed and not self._position.in_training:
            self._log_rows([{EVENTS: self._events.table(), **self._position.on_axes()}], {EVENTS: EVENT})

    def finish(self, exit_code: int = 0) -> None:
        """End the run, also one that the caller created, and wait until it is stored. A second call does nothing."""
        if self._finished or self._writer is None:
            return
        self._write_pending()
        self.log_events()
        self._finished = True
        self._writer.finish(exit_code)

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
        return {**self.__dict__, "_writer": None, "_pending": []}

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Avalanche forwards every before_* and after_* event, also those of plugins: each calls _on_callback.
        if name.startswith(("before_", "after_")):
            return partial(self._on_callback, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _on_callback(self, callback: str, strategy: Strategy, metric_values: object = None, **kwargs: Any) -> None:
        if self._finished:
            return
        events = self._position.event
        self._position.update(callback, strategy)
        self._describe(callback, strategy)
        if self._position.event > events:
            self._add_event(callback, strategy)
        self._write_pending(callback)
        if callback == "after_unlearning":
            self._log_record(strategy)
        elif callback in ("after_eval", "after_proof"):
            self._update_record(strategy)
            self.log_events()

    def _describe(self, callback: str, strategy: Strategy) -> None:
        """Write the strategy's settings to the run once; name the run if it has no name."""
        if self._described or not hasattr(strategy, "optimizer"):  # not a strategy with settings
            return
        if getattr(strategy, "experience", None) is None and callback != "after_unlearning":
            return  # the stream is known with the first experience, which a loaded strategy may lack
        writer = self._get_writer()
        self._described = True
        settings = configuration_of(strategy)
        name = settings["method"] + ("" if settings["seed"] is None else f", seed {settings['seed']}")
        writer.describe(settings, None if self._named else name)

    def _add_event(self, callback: str, strategy: Strategy) -> None:
        """Add a row to the event table for the training or unlearning that has just ended."""
        at, plugin = self._position, unlearning_of(strategy)
        if callback == "after_unlearning":
            self._events.add_unlearning(at.event, at.task, plugin.records[-1] if plugin and plugin.records else None)
            return
        remaining = None
        if plugin is not None:
            remaining = tuple(dict.fromkeys((*plugin.ledger.remaining, at.task)))  # the ledger lacks the task yet
        self._events.add_training(at.event, at.task, remaining)

    def _log_record(self, strategy: Strategy) -> None:
        """Store the last unlearning's record as file and text, and remove its tasks' values from the run's summary."""
        plugin = unlearning_of(strategy)
        if plugin is not None and plugin.records:
            writer, record = self._get_writer(), plugin.records[-1]
            self._kept = f"Record/event {self._position.event}", record
            writer.forget(record.tasks)
            writer.keep(record)
            writer.note({self._kept[0]: str(record)})

    def _update_record(self, strategy: Strategy) -> None:
        """Store the last unlearning's record again if it now has a proof, or a failed proof made it ``approximate``."""
        if self._kept is not None and (plugin := unlearning_of(strategy)).records[-1] != self._kept[1]:
            name, record = self._kept[0], plugin.records[-1]
            self._kept = name, record
            self._get_writer().keep(record, again=True)
            self._get_writer().note({name: str(record)})
            self._events.update_claim(record)

    def _write_pending(self, callback: str | None = None) -> None:
        """Write the values that :meth:`log_metrics` stored, in as few rows as possible, one value per row and name."""
        values, self._pending = self._pending, []
        rows: list[dict[str, Payload]] = []
        texts: dict[str, str] = {}
        axes: dict[str, str] = {}
        for metric in values:
            if callback is None:
                self._position.iteration = metric.x_plot
            for name, value in flatten_value(metric.name, metric.value):
                if name in AXES:
                    raise ValueError(f"{name!r} is an axis of the logger, as {AXES} are: log it under another name")
                if isinstance(value, Picture) and not self._pictures:
                    continue
                payload = payload_of(value)
                if payload is None:
                    kind = f"{type(value).__module__}.{type(value).__qualname__}"
                    text = f"metric {name!r} is a {kind} that no dashboard can show and is left out."
                    self._warn_once(name, f"{text} Supported: {SUPPORTED}")
                elif isinstance(payload, str):
                    texts[name] = payload
                else:
                    axis = axes[name] = axis_of(name, callback, metric.origin)
                    at = self._position.on_axes()
                    fits = (row for row in rows if row[ITERATION] == at[ITERATION] and name not in row)
                    if (row := next(fits, None)) is None:
                        rows.append(row := at)
                    row[name] = payload
                    if isinstance(payload, float) and not self._position.in_training:
                        self._events.add_number(name, payload, axis)
        if texts:
            self._get_writer().note(texts)
        self._log_rows(rows, axes)

    def _log_rows(self, rows: list[dict[str, Payload]], axes: Mapping[str, str]) -> None:
        if not rows:
            return
        writer = self._get_writer()
        for name, axis in axes.items():
            if name not in self._defined:
                writer.define(name, axis)
                self._defined.add(name)
        for row in rows:
            writer.log(row)

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3)


# The logger does nothing at these events: their values are written with the next values. A strategy that checks which
# events are overridden then does not call the loggers at each of the eight events of an iteration.
for _event in EVENTS_OF_ITERATIONS:
    setattr(RunLogger, _event, getattr(SupervisedPlugin, _event))
