"""Streams of token sequences from small grammars: generated, no download."""

from itertools import permutations

import torch
from avalanche.benchmarks import CLScenario
from torch import Tensor

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.tasks import task_benchmark
from avalanche_amnesia.seeding import derive_seed

PADDING = 0
WORDS = 12  # of a task
GROUPS = 4  # that they come in
GRAMMATICAL = 0.95  # share of the steps that follow the grammar; the others go to any group
_CYCLES = list(permutations(range(1, GROUPS)))


def MarkovSentences(
    n_tasks: int = 3,
    *,
    seed: int = 0,
    n_classes: int = 2,
    n_train: int = 768,
    n_test: int = 128,
    length: int = 20,
    vocabulary: int = 64,
) -> CLScenario:
    """Sentences whose classes differ in the order of their words; token ids int64 (length,), 0 as padding behind them.

    A task has 12 words in 4 groups. It shares half of its words with the next task, whose groups are others. A class
    is a cycle through the groups: a sentence begins in the first group, and 19 in 20 words come from the group that
    follows the last word's in the cycle, the others from any group. Counts of words separate classes a little, their
    order almost surely. A task depends on its number, the seed and the arguments below, not on the other tasks.

    Args:
        n_tasks: at least 1.
        seed: draws each task's groups and cycles, and the sentences.
        n_classes: of every task, 1 to 6.
        n_train: sentences per task, in equal parts per class (within one), at least ``n_classes``.
        n_test: the same of the test set.
        length: of the longest sentences, at least 4; none is shorter than half of it.
        vocabulary: number of ids with the padding, at least 13; tasks for which no new words are left take the first
            ones again.

    Raises:
        ValueError: a value that is not allowed; the message names those that are.
    """
    n_tasks = checks.whole_number("n_tasks", n_tasks)
    n_classes = checks.whole_number("n_classes", n_classes)
    if n_classes > len(_CYCLES):
        raise ValueError(f"n_classes must be an int from 1 to {len(_CYCLES)}, got {n_classes}")
    length = checks.whole_number("length", length, 4)
    vocabulary = checks.whole_number("vocabulary", vocabulary, WORDS + 1)
    parts = []
    for name, given in (("train", n_train), ("test", n_test)):
        n = checks.whole_number(f"n_{name}", given, n_classes)
        labels = torch.arange(n) % n_classes
        sentences = [_task(seed, task, name, labels, n_classes, length, vocabulary) for task in range(n_tasks)]
        parts.append((torch.cat(sentences), torch.cat([labels + task * n_classes for task in range(n_tasks)])))
    classes = [range(task * n_classes, (task + 1) * n_classes) for task in range(n_tasks)]
    return task_benchmark(parts[0], parts[1], classes)


def _task(seed: int, task: int, part: str, labels: Tensor, n_classes: int, length: int, vocabulary: int) -> Tensor:
    """The sentences of one task, one per label: int64 ``(n, length)``."""
    words, following = _grammar(seed, task, n_classes, vocabulary)
    generator = torch.Generator().manual_seed(derive_seed(seed, "sentences", part, task))
    shape = (len(labels), length)
    anywhere = torch.randint(GROUPS, shape, generator=generator)
    grammatical = torch.rand(shape, generator=generator) < GRAMMATICAL
    groups = torch.zeros(shape, dtype=torch.int64)
    for step in range(1, length):
        groups[:, step] = torch.where(grammatical[:, step], following[labels, groups[:, step - 1]], anywhere[:, step])
    tokens = words[groups, torch.randint(WORDS // GROUPS, shape, generator=generator)]
    ends = torch.randint((length + 1) // 2, length + 1, (len(labels), 1), generator=generator)
    return torch.where(torch.arange(length) < ends, tokens, PADDING)


def _grammar(seed: int, task: int, n_classes: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A task's words by group ``(groups, words)``, and the group behind each in every class ``(classes, groups)``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "grammar", task))
    places = task * WORDS // 2 + torch.randperm(WORDS, generator=generator)
    following = torch.zeros(n_classes, GROUPS, dtype=torch.int64)
    for label, chosen in enumerate(torch.randperm(len(_CYCLES), generator=generator)[:n_classes].tolist()):
        cycle = torch.tensor([0, *_CYCLES[chosen]])
        following[label, cycle] = cycle.roll(-1)
    return 1 + places.reshape(GROUPS, -1) % (vocabulary - 1), following
