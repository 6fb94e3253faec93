"""Checks of constructor and ``train`` arguments that Avalanche does not check."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from avalanche.benchmarks import CLExperience
from avalanche.core import BasePlugin
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin, GDumbPlugin
from torch import nn

from avalanche_amnesia import checks
from avalanche_amnesia.processes import rank

PeriodicMode = Literal["experience", "epoch", "iteration"]
_OURS = __name__.split(".")[0]


# ``**options`` of an ``__init__`` stands for the arguments of the base class, except those that only a strategy
# chooses (``composed``). Avalanche's own check of arguments does not know these names, so it is removed.
class OwnArguments:
    """Mixin that shows inherited constructor arguments in a class's signature; unknown ones raise TypeError."""

    composed: ClassVar[Collection[str]] = ()
    """Arguments that a strategy passes to its base class and that a user can't pass (``method``)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        init = inspect.unwrap(cls.__init__)
        takes = dict(inspect.signature(init).parameters)
        names = list(takes.values())
        if names[-1].kind is inspect.Parameter.VAR_KEYWORD:
            inherited = inspect.signature(super(cls, cls).__init__).parameters.values()
            names[-1:] = [taken for taken in inherited if taken.name not in {*takes, *cls.composed}]
        known = [taken.name for taken in names[1:]]
        kinds = [(taken.name, kind) for taken in names for kind in (taken.annotation, *get_args(taken.annotation))]
        settings = [(option, kind) for option, kind in kinds if getattr(kind, "__module__", "").startswith(_OURS)]

        @functools.wraps(init)
        def with_known_names(self: Any, *unnamed: Any, **given: Any) -> None:
            if unnamed:
                raise TypeError(f"{cls.__name__} takes its options by name: {cls.__name__}(model=…, optimizer=…)")
            for name in (name for name in given if name not in known):
                for option, kind in settings:
                    if name in inspect.signature(kind).parameters:
                        place = f"{option}={kind.__name__}({name}=…)"
                        raise TypeError(f"{cls.__name__} has no option {name!r}: write {place}")
                checks.known_options([name], known, cls.__name__)
            init(self, **given)

        with_known_names.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        cls.__init__ = with_known_names  # type: ignore[method-assign]


def check_model(model: nn.Module, kind: type[nn.Module]) -> None:
    """Raise TypeError unless ``model`` is an instance of ``kind``, the class that a strategy or plugin needs."""
    if not isinstance(model, kind):
        raise TypeError(f"model must be a {kind.__name__}, got {type(model).__name__}: give {kind.__name__}(backbone)")


def checked_plugins(plugins: Sequence[Any] | None) -> list[Any]:
    """Return the user's ``plugins`` as a list; raise TypeError for an entry that is no plugin, and for GDumbPlugin."""
    if plugins is None:
        return []
    if isinstance(plugins, str) or not isinstance(plugins, Iterable):
        raise TypeError(f"plugins must be a list of plugins, got {plugins!r}: plugins=[TrajectoryPlugin(), …]")
    given = list(plugins)
    for plugin in given:
        if isinstance(plugin, type) or not any(name.startswith(("before_", "after_")) for name in dir(plugin)):
            raise TypeError(f"plugins holds {plugin!r}, which is no plugin: plugins=[TrajectoryPlugin(), …]")
        if isinstance(plugin, GDumbPlugin):
            raise TypeError("GDumbPlugin replaces the strategy's model at each task: use Avalanche's GDumb strategy")
    return given


def checked_device(device: Any) -> torch.device:
    """Return ``device`` as a ``torch.device`` (None: the CPU); raise ValueError if this machine does not have it."""
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's, such as 'cpu', 'cuda' or 'cuda:0', got {device!r}") from None
    there = torch.cuda.device_count() if found.type == "cuda" else None
    if there is not None and there <= (found.index or 0):
        raise ValueError(f"device={device!r}: torch finds {there} CUDA devices here; device='cpu' is always there")
    return found


def check_train_options(options: Mapping[str, Any], strategy: type) -> None:
    """Raise an error for a misnamed or invalid option of ``train``, because Avalanche ignores unknown options."""
    own = inspect.signature(strategy).parameters
    for name in options:
        meant = _MEANT.get(name, name)
        if meant in own:
            raise TypeError(
                f"strategy.train has no option {name!r}: it is one of the strategy, {strategy.__name__}(…, {meant}=…), "
                f"and can be changed between trainings, strategy.{meant} = …"
            )
        near = difflib.get_close_matches(meant, _TRAIN_OPTIONS, 1, 0.8) if name not in _TRAIN_OPTIONS else ()
        if near:  # Avalanche passes unknown options on to plugins
            raise TypeError(f"strategy.train has no option {name!r}; did you mean {near[0]!r}?")
    checks.whole_number("num_workers", options.get("num_workers", 0), 0)
    for name in ("drop_last", "shuffle"):
        if not isinstance(options.get(name, False), (bool, type(None))):
            raise TypeError(f"{name} must be True or False, got {options[name]!r}")


_TRAIN_OPTIONS = ("eval_streams", "drop_last", "num_workers", "persistent_workers", "pin_memory", "shuffle")
"""Options of ``train``; all but the first are those of Avalanche's data loaders."""
_MEANT = {"epochs": "train_epochs", "batch_size": "train_mb_size", "mb_size": "train_mb_size"} | dict.fromkeys(
    ("eval", "eval_stream_list", "eval_exps", "test_stream", "test_streams", "valid_stream"), "eval_streams"
)
"""Name of an option in other libraries → its name here, for options of a strategy and of ``train``."""


def checked_evaluator(evaluator: Any) -> EvaluationPlugin:
    """Return ``evaluator``, or its result if it is a function; for None, return an evaluator that logs nothing."""
    if evaluator is None:
        return EvaluationPlugin(loggers=[] if rank() else [BaseLogger()])  # Avalanche refuses them in other processes
    made = evaluator if isinstance(evaluator, BasePlugin) or not callable(evaluator) else evaluator()
    checks.instance("evaluator", made, EvaluationPlugin, "EvaluationPlugin(accuracy_metrics(stream=True), loggers=[…])")
    return made


def checked_criterion(criterion: Any) -> Callable[..., Any]:
    """Return ``criterion``, the loss function; raise TypeError if it is a class or can't be called."""
    if isinstance(criterion, type) or not callable(criterion):
        raise TypeError(
            f"criterion must be a loss of logits and labels, got {criterion!r}: criterion=torch.nn.CrossEntropyLoss()"
        )
    return criterion


def as_list(experiences: Any, call: str) -> list[Any]:
    """Return an experience, stream or list of experiences as a list; raise TypeError for any other value."""
    if _is_experience(experiences):
        return [experiences]
    way_out = "give an experience, or a stream or list of them, such as benchmark.train_stream"
    if hasattr(experiences, "streams"):
        streams = ", ".join(f"{name}_stream" for name in experiences.streams)
        raise TypeError(f"{call} takes experiences, got a benchmark: give one of its streams, {streams}")
    if isinstance(experiences, str) or not isinstance(experiences, Iterable):
        raise TypeError(f"{call} takes experiences, got {experiences!r}: {way_out}")
    given = list(experiences)
    for position, experience in enumerate(given):
        if not _is_experience(experience):
            raise TypeError(f"{call} takes experiences, and number {position} is {experience!r:.200}: {way_out}")
    return given


def _is_experience(obj: object) -> bool:
    if isinstance(obj, type):
        return False
    return isinstance(obj, CLExperience) or (hasattr(obj, "dataset") and hasattr(obj, "origin_stream"))
