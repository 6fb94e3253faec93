"""Task labels for streams without any: the task labels of their samples, or the positions of the experiences."""

from collections.abc import Sequence
from copy import copy
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

from avalanche.benchmarks import CLExperience, CLScenario, EagerCLStream, ExperienceAttribute
from avalanche.benchmarks.utils import ConstantSequence, TaskLabels

from avalanche_amnesia.benchmarks.data import HOW_TO_LABEL, TaskError, refuse_part, stream_of

_LABELLED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Stream without task labels → its labelled copy, which stays in memory as long."""


def copy_of(experience: CLExperience) -> CLExperience:
    """Return a copy of an experience that can join another stream without a change of the original."""
    twin = copy(experience)
    for name, value in list(vars(twin).items()):
        if isinstance(value, ExperienceAttribute):
            # A plain copy shares this object: placing the copy in a stream would renumber the original.
            vars(twin)[name] = ExperienceAttribute(value.value, value.use_in_train, value.use_in_eval)
    return twin


def scenario_like(benchmark: CLScenario, streams: Sequence[Any]) -> CLScenario:
    """Return a scenario of ``streams`` with all public attributes of ``benchmark``."""
    result = CLScenario(list(streams))
    for name, value in vars(benchmark).items():
        if not name.startswith("_") and name not in vars(result):
            setattr(result, name, value)
    return result


def labelled_benchmark(benchmark: CLScenario) -> CLScenario:
    """Return ``benchmark``, or a labelled copy if experiences lack task labels; see :func:`labelled_stream`."""
    given = list(benchmark.streams.values())
    streams = [labelled_stream(stream) for stream in given]
    return benchmark if streams == given else scenario_like(benchmark, streams)


def relabel(experiences: Sequence[Any], *, parts: bool) -> list[Any]:
    """Return the experiences, as labelled copies if they lack task labels; ``parts=True`` accepts parts of a task."""
    found = []
    for experience in experiences:
        stream = stream_of(experience)
        if stream is not None and hasattr(experience, "task_labels"):
            found.append(experience)
            continue
        if not parts:
            refuse_part(experience)
        if stream is None:  # the host asks for its name
            experience = copy_of(experience)
            stream = EagerCLStream("train", [experience])
        if stream not in _LABELLED:
            _LABELLED[stream] = labelled_stream(stream)
        found.append(_LABELLED[stream][experience.current_experience])
    return found


def labelled_stream(stream: Any) -> Any:
    """Return a stream whose experiences have task labels: ``stream`` if it has labels, else a copy.

    In the copy an experience has the task labels of its samples, if all experiences have some; else its position in
    the stream, and an attribute ``labelled_by_place``, the number of experiences.
    """
    experiences = list(stream)
    if all(hasattr(experience, "task_labels") for experience in experiences):
        return stream
    if empty := [place for place, experience in enumerate(experiences) if not len(experience.dataset)]:
        raise TaskError(f"experience {empty[0]} has no samples: perhaps all of them were split off for another stream")
    of_samples: list[Any] = [getattr(experience.dataset, "targets_task_labels", None) for experience in experiences]
    by_place = any(labels is None for labels in of_samples)
    if by_place:
        _refuse_unlabelled(stream, experiences)
    twins = []
    for place, (experience, labels) in enumerate(zip(experiences, of_samples, strict=True)):
        twin: Any = copy_of(experience)
        if by_place:
            of_all = TaskLabels(ConstantSequence(place, len(twin.dataset)))
            twin._dataset = twin.dataset.update_data_attribute(name="targets_task_labels", new_value=of_all)
            twin.task_labels, twin.labelled_by_place = [place], len(experiences)
        else:
            twin.task_labels = sorted(int(label) for label in labels.uniques)
        if len(twin.task_labels) == 1:
            twin.task_label = twin.task_labels[0]
        twins.append(twin)
    return EagerCLStream(stream.name, twins)


def _refuse_unlabelled(stream: Any, experiences: Sequence[Any]) -> None:
    """Raise TaskError if a stream without task labels is class-incremental (disjoint classes) or domain-incremental."""
    classes = []
    for place, experience in enumerate(experiences):
        targets = getattr(experience.dataset, "targets", None)
        if targets is None:
            raise TaskError(f"the data set of experience {place} has no targets: use as_classification_dataset(data)")
        classes.append({int(label) for label in targets})
    if len(classes) == 1 and hasattr(stream, "__len__"):
        return
    # The host gives no length to streams of new instances alone.
    if not hasattr(stream, "__len__") or not any(one & other for one, other in combinations(classes, 2)):
        raise TaskError(f"the {len(classes)} experiences of this stream have no task labels. {HOW_TO_LABEL}")
