"""Contents of the page: all sections in their order, and what was not measured."""

from __future__ import annotations

from collections.abc import Sequence

from avalanche_amnesia.lab.report.reading import Entry, Results
from avalanche_amnesia.lab.report.sections import forgetting, masks, remaining, run, stream
from avalanche_amnesia.lab.report.sections.section import Section

_MEASURED = {
    "old-head": "old heads",
    "jsd": "JSD against its floors",
    "relapse": "relapse",
    "few_shot": "few-shot relearning",
    "membership": "membership inference",
    "difference": "accuracy difference",
    "transfer": "forgetting and backward transfer",
    "capacity": "capacity",
    "owners": "owners of units",
    "overlap": "overlap of masks",
    "distances": "other distances",
    "cost": "seconds",
}


def sections(groups: Sequence[Sequence[Results]], entries: Sequence[Entry]) -> list[Section]:
    """All sections with something in them, in the order of the page."""
    made = (
        stream.timelines(entries),
        stream.accuracy(entries),
        forgetting.old_head(entries),
        forgetting.jsd(entries),
        forgetting.relapse(entries),
        forgetting.few_shot(entries),
        forgetting.membership(entries),
        remaining.difference(entries),
        remaining.transfer(entries),
        masks.capacity(entries),
        masks.owners(entries),
        masks.overlap(entries),
        forgetting.distances(entries),
        run.cost(entries),
        run.settings(groups),
    )
    return [section for section in made if section.charts or section.tables]


def not_measured(found: Sequence[Section]) -> list[str]:
    """Titles of what these runs did not measure."""
    there = {section.key for section in found}
    return [title for key, title in _MEASURED.items() if key not in there]
