"""Measures of a run, and their form on the page: one table for the page, the tables of studies and the demo.

To show a metric is an entry of ``metrics_of`` in ``lab/runs/measuring.py``, and here of :data:`COLUMNS`,
:data:`READINGS` or both.
"""

from collections.abc import Callable
from dataclasses import dataclass

from avalanche_amnesia.evaluation.functional import distance_in_words, floor_ratio
from avalanche_amnesia.lab.report.charts import Axis
from avalanche_amnesia.lab.report.reading import Get, Moment, number
from avalanche_amnesia.lab.report.wording import percent, points, share, times


@dataclass(frozen=True)
class Column:
    """A number of a moment: its title in tables of studies and of the demo, the one on the page, and its words."""

    title: str
    page: str
    of: Get
    words: Callable[[float], str]


@dataclass(frozen=True)
class Reading:
    """A number of each unlearned task; where a model that never saw the task has less, it is a trace.

    Attributes:
        metric: name in the log; with ``_reference`` that of the retrained model, with ``_chance`` that of guessing.
        check: what is made of it, as the page calls it.
        words: of the evidence, around ``{here}`` and ``{there}``.
        axis: of its chart.
        key: of its section.
        title: the question that the section answers.
        lead: how to read the section.
    """

    metric: str
    check: str
    words: str
    axis: Axis
    key: str
    title: str
    lead: str = ""


def jsd_name(moment: Moment) -> str | None:
    """The JSD that is shown: through the unlearned tasks' own masks where it was measured, else the first one."""
    counts = (name for name in moment.numbers if name.startswith("JSD_") and name.endswith("_tasks"))
    names = sorted(name.removesuffix("_tasks") for name in counts)
    return "JSD_own" if "JSD_own" in names else names[0] if names else None


def jsd_of(suffix: str = "") -> Get:
    """Getter of the JSD that is shown, or with a suffix of one of its floors."""
    return lambda moment: moment.number(f"{jsd_name(moment)}{suffix}")


def ratio_of(name: str) -> Get:
    """Getter of a distance in units of its order floor."""

    def ratio(moment: Moment) -> float | None:
        distance, floor = moment.number(name), moment.number(f"{name}_floor_order")
        return None if distance is None or floor is None else floor_ratio(distance, floor)

    return ratio


def mean_accuracy(moment: Moment) -> float | None:
    """Mean test accuracy of the remaining tasks."""
    found = moment.accuracy.values()
    return sum(found) / len(found) if found else None


def capacity_before(moment: Moment) -> float | None:
    """Capacity before the first request since the moment before."""
    return moment.first.get("CapacityBefore", {}).get(None)


COLUMNS = {
    "remaining": Column("remaining", "accuracy on remaining tasks", mean_accuracy, percent),
    "difference": Column("AD", "against never unlearning", number("AccuracyDifference"), points),
    "control": Column("AD control", "its control", number("AccuracyDifference_control"), points),
    "jsd": Column("JSD", "JSD (bit)", jsd_of(), distance_in_words),
    "order": Column("floor: order", "JSD floor: order", jsd_of("_floor_order"), distance_in_words),
    "ratio": Column("JSD / floor", "JSD / order floor", lambda moment: ratio_of(f"{jsd_name(moment)}")(moment), times),
    "seed": Column("floor: seed", "JSD floor: seed", jsd_of("_floor_seed"), distance_in_words),
    "unlearned": Column("old head", "old head", number("UnlearnedAccuracy"), percent),
    "reference": Column(
        "old head, retrained", "old head, retrained model", number("UnlearnedAccuracy_reference"), percent
    ),
    "capacity": Column("capacity", "free capacity", number("Capacity"), percent),
}
"""Name in ``results.csv`` of a study → how it is shown."""
MEANINGS = {
    "remaining": "test accuracy of the tasks that remain, %",
    "difference": "accuracy difference to the model that never unlearned, points",
    "control": "what that model gains with its heads fitted again: only what AD has beyond it is due to unlearning",
    "jsd": "bits between the features here and in the retrained model; below detection: under 1e-9",
    "ratio": "the same in units of its order floor, two retrained models apart; about 1: no more than chance",
    "unlearned": "accuracy on the unlearned tasks through the head and mask that they had, %",
    "reference": "what the same heads read from the retrained model, %: what old head has beyond it is a trace",
    "capacity": "share of the network that is free, %",
}
"""Lines under the tables of a study and of the demo; a column without one is not in them."""
MEASURES = {key: COLUMNS[key] for key in MEANINGS}
_SHARES = Axis("accuracy", percent, "{:.0%}".format, (0.0, 1.0))
READINGS = (
    Reading(
        "UnlearnedAccuracy",
        "old classifier",
        "{here} of the test samples, on the retrained model {there}",
        _SHARES,
        "old-head",
        "Can the old classifier still read what was forgotten?",
        "An unlearned task's own classifier, kept only by the evaluation, reads its test data. What it reads more "
        "than on the retrained model is a trace of the task, where tasks and seeds agree. Means that differ by up "
        "to 5 points count as the same.",
    ),
    Reading(
        "Relapse",
        "relapse",
        "a new linear classifier reaches {here}, on the retrained model {there}",
        _SHARES,
        "relapse",
        "Does what was forgotten come back?",
        "A new linear classifier is trained on the model's features of the forgotten tasks' data, after every "
        "later task. Features are useful in general, so that the retrained model's are read as well: what counts "
        "is the difference.",
    ),
    Reading(
        "FewShot",
        "few-shot relearning",
        "a new linear classifier fitted to a few samples reaches {here}, on the retrained model {there}",
        _SHARES,
        "few_shot",
        "How much of it do a few samples bring back?",
        "The same with a few samples of every class, the same for this model and for the retrained one. Many "
        "samples make up for features that never saw a task; a few do not.",
    ),
    Reading(
        "Membership",
        "membership inference",
        "guessing which samples were trained on has AUC {here}, on the retrained model {there} (0.5 is chance)",
        Axis("AUC", share, "{:g}".format, (0.0, 1.0)),
        "membership",
        "Can one guess which samples were trained on?",
        "Membership inference by the loss of the old head: the area under the curve (AUC) is 0.5 for guessing. "
        "Where it is near 0.5 for models that did learn the task, this attack is no evidence of forgetting.",
    ),
    Reading(
        "ForgottenSamples_accuracy",
        "forgotten samples",
        "{here} of the forgotten samples are classified right, by the retrained model {there}",
        _SHARES,
        "forgotten_samples",
        "Are forgotten samples still known?",
        "Samples that a remaining task forgot, read by the task's classifier. The retrained model, which never had "
        "them, reads many of them too, as it knows others like them: what counts is the difference.",
    ),
    Reading(
        "ForgottenSamples_membership",
        "membership of forgotten samples",
        "telling them from test samples has AUC {here}, on the retrained model {there} (0.5 is chance)",
        Axis("AUC", share, "{:g}".format, (0.0, 1.0)),
        "forgotten_samples_membership",
        "Can one guess that the forgotten samples were trained on?",
        "Membership inference by the loss, on the samples that a remaining task forgot.",
    ),
)
