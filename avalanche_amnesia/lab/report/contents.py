"""Contents of the page: all sections in their order."""

from __future__ import annotations

from collections.abc import Sequence

from avalanche_amnesia.lab.report.measures import READINGS
from avalanche_amnesia.lab.report.reading import Entry, Run
from avalanche_amnesia.lab.report.sections import forgetting, masks, remaining, run, stream
from avalanche_amnesia.lab.report.sections.section import Section


def sections(runs: Sequence[Run], entries: Sequence[Entry]) -> list[Section]:
    """All sections in the order of the page, also those with nothing in them."""
    return [
        stream.timelines(entries),
        stream.accuracy(entries),
        forgetting.old_head(entries),
        forgetting.jsd(entries),
        *(forgetting.reading(entries, shown) for shown in READINGS if shown.key is not None),
        remaining.difference(entries),
        remaining.transfer(entries),
        masks.capacity(entries),
        masks.owners(entries),
        masks.overlap(entries),
        forgetting.distances(entries),
        run.cost(entries),
        run.settings(runs),
    ]
