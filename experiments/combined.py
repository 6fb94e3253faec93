"""One stream of several data sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avalanche.benchmarks import CLScenario, EagerCLStream
from torch import Tensor
from torch.nn.functional import interpolate

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import Chain, LazyTask, TensorTask
from avalanche_amnesia.benchmarks.tasks import TaskExperience, scenario_of
from avalanche_amnesia.contrib.streams import SplitCIFAR10, SplitFashionMNIST, SplitMNIST
from experiments.omniglot import SplitOmniglot


@dataclass(frozen=True)
class Fit:
    """Images of one size and number of colours: bilinear with antialiasing; grey is repeated, colours are averaged."""

    size: int | None
    channels: int | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.channels == 1 < x.shape[1]:
            x = x.mean(1, keepdim=True)
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)
        if self.channels is not None and x.shape[1] < self.channels:
            x = x.expand(-1, self.channels, -1, -1)
        return x


def combined_benchmark(
    benchmarks: Sequence[CLScenario], *, size: int | None = 32, channels: int | None = 3
) -> CLScenario:
    """The tasks of several benchmarks as one stream, in images of one size.

    The first benchmark's tasks come first, then the second's; task labels count through.

    Args:
        benchmarks: of :func:`task_benchmark`, or of the functions that end in it (``SplitMNIST``, ``SplitOmniglot`` …).
        size: pixels of a side to which all images are resized (bilinear); None: inputs stay as they are.
        channels: colours of all images, 1 or 3: grey ones are repeated, others are averaged; None: as they are.

    Raises:
        ValueError: no benchmark, tasks that come from elsewhere, or lazy data sets where images are to be changed.
    """
    given = list(benchmarks)
    if not given:
        raise ValueError("benchmarks is empty; give at least one, e.g. [SplitMNIST(1), SplitFashionMNIST(1)]")
    if size is not None:
        checks.whole_number("size", size)
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1, 3 or None, got {channels!r}")
    change = None if size is channels is None else Fit(size, channels)
    streams = []
    for name in ("train", "test"):
        experiences = [experience for benchmark in given for experience in benchmark.streams[name]]
        for position, experience in enumerate(experiences):
            if not isinstance(experience, TaskExperience):
                raise ValueError(
                    f"{name} task {position} is a {type(experience).__name__}: build each benchmark with task_benchmark"
                )
        n_classes = [len(experience.original_classes) for experience in experiences]
        placed = [placed_as(task, one, n_classes, change) for task, one in enumerate(experiences)]
        streams.append(EagerCLStream(name, placed))
    return scenario_of(streams, n_classes)


def placed_as(task: int, given: TaskExperience, n_classes: Sequence[int], change: Fit | None) -> TaskExperience:
    """Return the data of an experience as a task of another stream, with a further transform."""
    samples = given._samples
    if change is not None:
        if isinstance(samples, LazyTask):
            raise ValueError(
                "a lazy data set's samples can't be changed here: transform them in the data set, and ask for no "
                "change (size=None, channels=None)"
            )
        steps = (change,) if samples.transform is None else (samples.transform, change)
        samples = TensorTask(samples.base, samples.index, samples.targets, Chain(steps))
    return TaskExperience(samples, task, n_classes, given.original_classes)


def Combined(
    n_tasks: int = 5,
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    root: str | Path | None = None,
    download: bool = False,
    jpeg: bool = False,
) -> CLScenario:
    """Return the first ``n_tasks`` of five tasks from different data sets, as colour images of 32 × 32 pixels."""
    given: dict[str, Any] = {"seed": seed, "n_train": n_train, "n_test": n_test, "root": root, "download": download}
    makers: list[Callable[[], CLScenario]] = [
        lambda: SplitMNIST(1, **given),
        lambda: SplitCIFAR10(1, **given, jpeg=jpeg),
        lambda: SplitFashionMNIST(1, **given),
        lambda: SplitOmniglot(1, root=root),
        lambda: SplitDigits(1, seed=seed),
    ]
    if not 1 <= n_tasks <= len(makers):
        raise ValueError(f"Combined has 1 to {len(makers)} tasks, got n_tasks={n_tasks}")
    return combined_benchmark([make() for make in makers[:n_tasks]])
