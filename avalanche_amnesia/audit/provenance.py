"""Origin of a strategy's model, for records: method, settings, seed and data."""

from collections.abc import Mapping

from avalanche_amnesia.audit.record import Provenance
from avalanche_amnesia.saving.strategy_settings import settings_of
from avalanche_amnesia.strategy import Strategy


def provenance_of(strategy: Strategy, data: Mapping[int, str]) -> Provenance:
    """Origin of a strategy's model, as a record states it."""
    seeding = next((plugin for plugin in strategy.plugins if getattr(plugin, "seeds_tasks", False)), None)
    return Provenance(
        method=type(strategy).__name__,
        options=settings_of(strategy),
        seed=None if seeding is None else seeding.seed,
        data={str(task): digest for task, digest in sorted(data.items())},
    )
