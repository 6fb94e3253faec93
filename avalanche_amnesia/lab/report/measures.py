"""Titles, formats and explanations of a run's metrics, for the report page, the tables of studies and the demo.

To add a metric, add it to ``metrics_of`` in ``lab/runs/measuring.py``, and here to :data:`COLUMNS` or
:data:`TRACE_TESTS` for the page; add it to :data:`MEANINGS`, too, for a column in the tables and the demo.
"""

from collections.abc import Callable
from dataclasses import dataclass

from avalanche_amnesia.evaluation.resolution import distance_in_words, floor_ratio
from avalanche_amnesia.lab.report.charts import Axis
from avalanche_amnesia.lab.report.reading import Evaluation, Get, number
from avalanche_amnesia.lab.report.wording import percent, points, share, times


@dataclass(frozen=True)
class Column:
    """A table column: title in studies and the demo, title in the report, function that returns the number, format."""

    title: str
    page: str
    get: Get
    words: Callable[[float], str]


@dataclass(frozen=True)
class TraceTest:
    """A test for traces of unlearned tasks: it compares a metric with its value on the retrained model.

    Attributes:
        metric: name of the metric in the log; the metric's chance level has this name with the suffix ``_chance``.
        check: name of the test on the page.
        axis: axis of its chart.
        key: key of its section.
        title: the question that the section answers.
        compare_to: suffix of the metric to compare with, measured on the retrained model (for a distance, between two
            retrained models); or the full name of that metric.
        tolerance: largest excess that counts as equal, because a test set of 100 samples varies by as much.
        in_floors: if True, the tolerance is a multiple of the compared metric.
        wider_floor: suffix of a larger noise floor; the metric is a trace only if it also exceeds this floor.
        of_samples: True for forgotten samples, False for whole tasks.
    """

    metric: str
    check: str
    axis: Axis
    key: str
    title: str
    compare_to: str = "_reference"
    tolerance: float = 0.05
    in_floors: bool = False
    wider_floor: str = ""
    of_samples: bool = False

    @property
    def compared_metric(self) -> str:
        """Return the name of the metric to compare with: usually ``<metric>_reference``, of the retrained model."""
        return f"{self.metric}{self.compare_to}" if self.compare_to.startswith("_") else self.compare_to


def jsd_names(moment: Evaluation) -> list[str]:
    """Return the names of all measured Jensen–Shannon divergences, ``JSD_own`` (through the tasks' own masks) first."""
    counts = (name for name in moment.numbers if name.startswith("JSD_") and name.endswith("_tasks"))
    return sorted((name.removesuffix("_tasks") for name in counts), key=lambda name: (name != "JSD_own", name))


def jsd_name(moment: Evaluation) -> str:
    """Return the name of the JSD that the report shows: the first of :func:`jsd_names`; empty if there is none."""
    return next(iter(jsd_names(moment)), "")


def jsd_of(suffix: str = "") -> Get:
    """Return a function that reads an evaluation's JSD or (``suffix="_floor_…"``) the JSD of two retrained models."""
    return lambda moment: moment.number(jsd_name(moment) + suffix)


def ratio_of(moment: Evaluation, name: str) -> float | None:
    """Return a distance to the retrained model, divided by that of two models retrained in different data orders."""
    distance, floor = moment.number(name), moment.number(f"{name}_floor_order")
    return None if distance is None or floor is None else floor_ratio(distance, floor)


def mean_accuracy(moment: Evaluation) -> float | None:
    """Return an evaluation's mean test accuracy over tasks not unlearned, or None if no such task was tested."""
    found = moment.accuracy.values()
    return sum(found) / len(found) if found else None


COLUMNS = {
    "remaining": Column("remaining", "accuracy on remaining tasks", mean_accuracy, percent),
    "difference": Column("AD", "against never unlearning", number("AccuracyDifference"), points),
    "control": Column("AD control", "its control", number("AccuracyDifference_control"), points),
    "jsd": Column("JSD", "JSD (bit)", jsd_of(), distance_in_words),
    "order": Column("floor: data order", "JSD floor: data order", jsd_of("_floor_order"), distance_in_words),
    "ratio": Column("JSD / floor", "JSD / data-order floor", lambda moment: ratio_of(moment, jsd_name(moment)), times),
    "seed": Column("floor: seed", "JSD floor: seed", jsd_of("_floor_seed"), distance_in_words),
    "unlearned": Column("old head", "old head", number("UnlearnedAccuracy"), percent),
    "reference": Column(
        "old head, retrained", "old head, retrained model", number("UnlearnedAccuracy_reference"), percent
    ),
    "capacity": Column("capacity", "free capacity", number("Capacity"), percent),
}
"""Column name in the file ``results.csv`` of a study → column."""
MEANINGS = {
    "remaining": "test accuracy of the tasks that remain, %",
    "difference": "accuracy difference to the model that never unlearned, points",
    "control": "what that model gains with its heads fitted again: only what AD has beyond it is due to unlearning",
    "jsd": "bits between the features here and in the retrained model; below detection: under 1e-9",
    "ratio": "the same in units of its data-order floor (of two retrained models); about 1: no more than chance",
    "unlearned": "accuracy on the unlearned tasks through the head and mask that they had, %",
    "reference": "what the same heads read from the retrained model, %: what old head reads beyond it may be a trace",
    "capacity": "share of the network that is free, %",
}
"""Column name → explanation under the tables of studies and the demo; the tables omit columns without one."""
MEASURES = {key: COLUMNS[key] for key in MEANINGS}
_SHARES = Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0))
_AUC = Axis("AUC", share, "{:g}".format, (0.0, 1.0))
OLD_HEAD = TraceTest(
    "UnlearnedAccuracy",
    "old head",
    _SHARES,
    "old-head",
    "Can the old head still read what was forgotten?",
)
TRACE_TESTS = (
    OLD_HEAD,
    TraceTest("Relapse", "relapse", _SHARES, "relapse", "Does what was forgotten come back?"),
    TraceTest("FewShot", "few-shot relearning", _SHARES, "few_shot", "How much of it do a few samples bring back?"),
    TraceTest("Membership", "membership inference", _AUC, "membership", "Can one guess which samples were trained on?"),
    TraceTest(
        "ForgottenSamples_accuracy",
        "forgotten samples",
        _SHARES,
        "forgotten_samples",
        "Are forgotten samples still known?",
        of_samples=True,
    ),
    TraceTest(
        "ForgottenSamples_membership",
        "membership of forgotten samples",
        _AUC,
        "forgotten_samples_membership",
        "Can one guess that the forgotten samples were trained on?",
        of_samples=True,
    ),
)
JSD = TraceTest(
    "JSD_own",
    "JSD",
    Axis(
        "JSD (bit)",
        distance_in_words,
        lambda value: f"{value:g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-"),
        is_logarithmic=True,
    ),
    "jsd",
    "How far is it from a model that never saw the tasks?",
    compare_to="_floor_order",
    tolerance=1.0,  # floors of two seeds differ by a factor of two and more
    in_floors=True,
    wider_floor="_floor_seed",
)
KEPT = TraceTest("Top1_Acc_Exp", "accuracy on remaining tasks", _SHARES, "", "", compare_to="Accuracy_reference")
"""Test of the accuracy on remaining tasks; if unlearning is exact, it equals the retrained model's accuracy."""
