"""Data without some samples: of one experience, and of a benchmark, which a model that never had them is trained on."""

from collections.abc import Collection, Mapping
from typing import Any

from avalanche.benchmarks import CLScenario

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import targets_of
from avalanche_amnesia.benchmarks.requests import rearranged
from avalanche_amnesia.benchmarks.stream_labels import own_copy
from avalanche_amnesia.benchmarks.tasks import TaskExperience


def experience_without(experience: Any, positions: Collection[int]) -> Any:
    """A copy of an experience without the samples at some positions, and without requests; the labels stay.

    Its ``closed_classes`` are those that lost all of their samples: the rows of the head stay, and are closed. Its
    ``left_out`` are the positions.
    """
    gone, labels, twin = frozenset(positions), targets_of(experience).tolist(), own_copy(experience)
    kept = [position for position in range(len(labels)) if position not in gone]
    samples = twin.samples if isinstance(twin, TaskExperience) else None
    if samples is None:
        twin._dataset = experience.dataset.subset(kept)
    else:
        twin.take(samples.part(kept))
    if getattr(twin, "classes_in_this_experience", None) is None:  # the head is as wide as with all of them
        twin.classes_in_this_experience = sorted(set(labels))
    twin.closed_classes = tuple(sorted(set(labels) - {labels[position] for position in kept}))
    twin.left_out, twin.requests = tuple(sorted(gone)), ()
    return twin


def without_samples(benchmark: CLScenario, left_out: Mapping[int, Collection[int]]) -> CLScenario:
    """A new benchmark whose train stream lacks some samples; everything else stays.

    Args:
        benchmark: each train experience has exactly one task label.
        left_out: task → positions in its training data, from 0.

    Raises:
        ValueError: for a task that the benchmark does not have, or a position that its data does not have.
    """
    result = rearranged(benchmark, range(len(benchmark.train_stream)))
    stream = list(result.train_stream)
    sizes = {int(e.task_labels[0]): len(e.dataset) for e in stream}
    for task, positions in left_out.items():
        wrong = [p for p in positions if task not in sizes or checks.integer(p) not in range(sizes[task])]
        if task not in sizes or wrong:
            raise ValueError(f"left_out: task {task!r} has no samples {wrong}; the tasks have so many: {sizes}")
    for experience in stream:
        positions = left_out.get(int(experience.task_labels[0]), ())
        if positions:
            requests = getattr(experience, "requests", ())
            vars(experience).update(vars(experience_without(experience, positions)) | {"requests": requests})
    return result
