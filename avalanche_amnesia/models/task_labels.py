"""Task labels of mini-batches: one per sample, mostly of one task."""

from collections.abc import Callable

import torch
from torch import Tensor

from avalanche_amnesia import checks

_KNOWN = "known_label"


class OneTask:
    """Labels of mini-batches of one task.

    Of these :func:`single_task` knows the task without a look at the tensor, for which an accelerator would have to be
    waited for, in every step.
    """

    def __init__(self, task: int, device: torch.device) -> None:
        self.task, self._label = task, torch.full((1,), task, device=device)

    def labels(self, n: int) -> Tensor:
        """Labels of a mini-batch, ``(n,)``: one number in memory."""
        labels = self._label.expand(n)
        if not labels.is_inference():  # these don't count what is written into them
            setattr(labels, _KNOWN, (self.task, labels._version))
        return labels


def single_task(task_labels: int | Tensor) -> int | None:
    """The one task of a batch, None where it mixes several."""
    label = checks.integer(task_labels)
    if label is not None:
        return label
    assert isinstance(task_labels, Tensor)
    known: tuple[int, int] | None = getattr(task_labels, _KNOWN, None)
    if known is not None and task_labels._version == known[1]:  # nobody has written into it since
        return known[0]
    if task_labels.stride(0) == 0:  # one value, expanded: nothing to compare
        return int(task_labels[0])
    lowest, highest = (int(label) for label in task_labels.aminmax())
    return lowest if lowest == highest else None


def by_task(x: Tensor, task_labels: int | Tensor, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply a function of samples and their task to a batch in which tasks may be mixed."""
    single = single_task(task_labels)
    if single is not None:
        return run(x, single)
    assert isinstance(task_labels, Tensor)
    rows = [(task_labels == label).nonzero()[:, 0] for label in task_labels.unique()]
    parts = [run(x[of_task], int(task_labels[of_task[0]])) for of_task in rows]
    return torch.cat(parts)[torch.cat(rows).argsort()]
