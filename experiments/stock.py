"""Stock strategies on the comparison's streams: they forget on request, and have the settings that were found for them.

``experiments/baselines.py`` searches the settings, and ``results/baselines.md`` has all that were tried.
"""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from avalanche_amnesia.lab.study.building import make_stock as make_built
from avalanche_amnesia.lab.study.settings import MethodSettings
from experiments.streams import STREAMS
from experiments.trials import Settings

TRIALS = Path(__file__).parent / "results" / "baselines.json"


def make_stock(method: str, stream: str, seed: int, settings: Settings | None = None, **kwargs: Any) -> Any:
    """A fresh strategy with the same initial bits every time, norms of each task's own, and requests obeyed.

    Args:
        method: a kind in :data:`~avalanche_amnesia.lab.study.building.STOCK`.
        stream: a name in :data:`~experiments.streams.STREAMS`: its network, epochs and batches.
        seed: every draw derives from it and the task.
        settings: by default those that were found for the stream.
        kwargs: of the strategy (``evaluator``, ``device``).

    Raises:
        LookupError: where the settings were not searched.
    """
    settings = chosen(stream, method) if settings is None else settings
    setup = STREAMS[stream]
    built = MethodSettings(method, settings.optimizer, settings.lr, dict(settings.options))
    return make_built(built, setup.network, setup.n_tasks, seed, **dict(setup.training) | kwargs)


def ranking(rows: list[dict[str, Any]]) -> list[tuple[Settings, float, list[dict[str, Any]]]]:
    """Settings with their mean accuracy over the seeds and their rows, best first; on a tie the one tried first."""
    most = max((row["n_train"] or inf for row in rows), default=inf)
    rows = [row for row in rows if (row["n_train"] or inf) == most]  # of others the accuracies can't be compared
    tried = {str(settings): settings for settings in map(_settings, rows)}
    found = []
    for settings in tried.values():
        mine = [row for row in rows if _settings(row) == settings]
        found.append((settings, mean(row["remaining"] for row in mine), mine))
    return sorted(found, key=lambda entry: -entry[1])


def chosen(stream: str, method: str, trials: Path = TRIALS) -> Settings:
    """Settings with the best mean accuracy on held out training images.

    Raises:
        LookupError: where none were tried.
    """
    rows = [row for row in json.loads(trials.read_text()) if (row["stream"], row["method"]) == (stream, method)]
    if not rows:
        raise LookupError(f"no settings of {method!r} on {stream!r} were tried: python -m experiments.baselines does")
    return ranking(rows)[0][0]


def _settings(row: Mapping[str, Any]) -> Settings:
    return Settings(row["optimizer"], row["lr"], row["options"])
