"""Sections on the remaining tasks: what they lost and gained."""

from collections.abc import Iterator, Sequence

from avalanche_amnesia.lab.report.charts import Axis
from avalanche_amnesia.lab.report.reading import Entry, Moment, Run, number
from avalanche_amnesia.lab.report.sections.section import Row, Section, lines, table_of_moments, table_of_seeds
from avalanche_amnesia.lab.report.tables import number as cell
from avalanche_amnesia.lab.report.wording import points

_GAIN, _CONTROL = "AccuracyDifference", "AccuracyDifference_control"


def difference(entries: Sequence[Entry]) -> Section:
    """Accuracy against a model that never unlearned; one scale for all strategies."""
    moments = [moment for entry in entries for run in entry.runs for moment in run.moments]
    found = [moment.number(name) or 0.0 for moment in moments for name in (_GAIN, _CONTROL)]
    axis = Axis("points of accuracy", points, _signed, (min(found), max(found)))
    charts = lines(
        entries,
        "accuracy difference",
        axis,
        ("here", "against the model that never unlearned", number(_GAIN)),
        ("never", "control: only heads fitted again", number(_CONTROL)),
    )
    return Section(
        "difference",
        "What did it cost the other tasks?",
        (
            "AD, the accuracy difference: accuracy on the remaining tasks minus that of the same method where it "
            "ignored every request. Below 0 is a loss, above 0 a gain. The control is what the model that ignored "
            "every request gains when its heads are fitted again and nothing is unlearned: only what AD has beyond it "
            "is due to the unlearning.",
        ),
        "accuracy difference",
        charts,
        table_of_moments("Accuracy difference", entries, _difference_rows),
    )


def transfer(entries: Sequence[Entry]) -> Section:
    """Forgetting and backward transfer at the end of the stream."""
    return Section(
        "transfer",
        "What else was forgotten, unasked?",
        (
            "Accuracy that remaining tasks lost since their best moment (average forgetting, 0 is none), and what they "
            "gained since they were learned (backward transfer), at the end of the stream.",
        ),
        "forgetting and backward transfer",
        tables=table_of_seeds("Remaining tasks", entries, _transfer_rows),
    )


def _difference_rows(moment: Moment) -> Iterator[Row]:
    if moment.number(_GAIN) is not None:
        yield {
            "AD": cell(moment.number(_GAIN), points),
            "AD, control": cell(moment.number(_CONTROL), points),
        }


def _transfer_rows(run: Run) -> Iterator[Row]:
    forgetting, transferred = run.last.number("Forgetting"), run.last.number("BackwardTransfer")
    if forgetting is not None or transferred is not None:
        yield {"average forgetting": cell(forgetting, points), "backward transfer": cell(transferred, points)}


def _signed(value: float) -> str:
    return f"{100 * value:+.3g}" if value else "0"
