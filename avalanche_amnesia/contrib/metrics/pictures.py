"""Pictures of a run: the capacity after every event, and the masks; what other pictures of it look like.

Colours, dashes and marks belong to roles (``here``, ``retrained``, ``never``, ``chance``, ``order``, ``seed``), which
mean the same in every figure.
"""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from avalanche.evaluation.metric_results import MetricValue
from matplotlib.figure import Figure

from avalanche_amnesia.contrib.metrics.masks_figure import layer_masks, layers_figure
from avalanche_amnesia.evaluation.capacity import network_capacity, trajectory_bytes
from avalanche_amnesia.evaluation.event_metric import CallbackMetric
from avalanche_amnesia.evaluation.figures import COLOURS, WIDTH, Picture, house_style, name_ticks, new_figure
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import unlearning_of

ROLES: dict[str, dict[str, Any]] = {
    "here": {"color": COLOURS["here"], "marker": "o", "linestyle": "-"},
    "retrained": {"color": COLOURS["retrained"], "marker": "s", "linestyle": (0, (3.5, 1.5))},
    "never": {"color": COLOURS["never"], "marker": "^", "linestyle": "-."},
    "chance": {"color": COLOURS["quiet"], "marker": "|", "markersize": 15, "markeredgewidth": 3},
    "order": {"color": COLOURS["order"], "marker": "D", "linestyle": ":"},
    "seed": {"color": COLOURS["seed"], "marker": "x", "markeredgewidth": 2, "linestyle": "--"},
}
"""Role → how its lines and marks look."""
REQUEST: dict[str, Any] = {"color": COLOURS["bad"], "linewidth": 1, "linestyle": (0, (2, 3)), "zorder": 1}


@house_style
def as_png(figure: Figure) -> bytes:
    """A figure as a file; the same figure gives the same bytes."""
    picture = io.BytesIO()
    dots_per_inch = min(130, 2600 / figure.get_figheight())  # a figure of many panels stays a file for a page
    figure.savefig(picture, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return picture.getvalue()


@house_style
def capacity_figure(
    names: Sequence[str], capacity: Sequence[float], trajectory_bytes: Sequence[float], requested: Sequence[bool]
) -> Figure:
    """Free capacity and bytes of trajectory after every event; requests are marked."""
    room = 3.5 * max(map(len, names), default=0)  # for slanted names
    figure = new_figure(270 + room, min(max(WIDTH, 32 * len(names) + 80), 1440))
    above, below = axes = figure.subplots(2, 1, sharex=True)
    above.plot(capacity, **ROLES["here"])
    above.set(ylabel="free capacity", ylim=(0, 1.02))
    below.plot([size / 1024 for size in trajectory_bytes], **ROLES["order"])
    below.set(ylabel="trajectory (KiB)", xlabel="after")
    below.set_ylim(bottom=0)
    name_ticks(below.xaxis, names, most=40, rotation=30, ha="right", rotation_mode="anchor")
    for ax in axes:
        ax.grid(axis="y")
        for place in np.flatnonzero(requested):
            ax.axvline(place, **REQUEST)
    figure.align_ylabels()
    return figure


class CapacityPictures(CallbackMetric):
    """Masks and capacity as pictures, after every training and unlearning of a model with masks.

    Emits ``Figure/Masks`` (a panel per layer, a row per remaining task) and ``Figure/Capacity`` (all events so far),
    which are drawn only for loggers that show them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, float, int, bool]] = []

    def after_training_exp(self, strategy: Strategy) -> list[MetricValue]:
        """Pictures once a task is trained."""
        return self._pictures(strategy, f"task {strategy.experience.task_label}", False)

    def after_unlearning(self, strategy: Strategy) -> list[MetricValue]:
        """Pictures once tasks are unlearned."""
        plan = getattr(unlearning_of(strategy), "current", None)
        gone = () if plan is None else plan.tasks
        return self._pictures(strategy, f"unlearned {', '.join(map(str, gone))}", True)

    def _pictures(self, strategy: Strategy, event: str, requested: bool) -> list[MetricValue]:
        capacity, model = network_capacity(strategy), strategy.model
        if capacity is None or not isinstance(model, TaskMaskedModel):
            return []
        self._events.append((event, capacity, trajectory_bytes(strategy) or 0, requested))
        pictures = {
            "Figure/Masks": Picture(layers_figure, list(model.masks), layer_masks(model.masks)),
            "Figure/Capacity": Picture(capacity_figure, *zip(*self._events, strict=True)),
        }
        return self.emit(strategy, pictures)

    def reset(self, strategy: Strategy | None = None) -> None:
        """Forget the events so far."""
        self._events = []

    def __str__(self) -> str:
        return "CapacityPictures"


def capacity_pictures_metrics() -> list[CapacityPictures]:
    """Pictures of masks and capacity."""
    return [CapacityPictures()]
