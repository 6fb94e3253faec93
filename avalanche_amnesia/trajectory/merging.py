"""Compaction of permanent tasks' undo logs, once they have been merged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from avalanche_amnesia.trajectory.undo_log import Log


def without_unneeded(logs: Mapping[int, Log], merged: frozenset[int]) -> dict[int, Log]:
    """Logs of which those of merged tasks hold only what taking others out needs.

    A merged task's entry is needed where an earlier task that may go wrote it too: the way back there leads over it.
    Of several merged writers with no such task's write between them the first one's value before is enough, unless the
    way back to it starts at what itself had written.
    """
    if not merged:
        return dict(logs)
    result = {task: log.with_entries(log) for task, log in logs.items()}
    for name in {name for task in merged & set(logs) for name in logs[task]}:
        wrote: Tensor | None = None
        for task, log in result.items():
            if name not in log:
                continue
            where = log[name].where.reshape(-1)
            if wrote is None:
                wrote, held = torch.zeros_like(where), torch.zeros_like(where)
            if task not in merged:
                wrote, held = wrote | where, held & ~where
                continue
            needed = where & wrote & ~held
            if not log[name].follows_value:
                held = held | needed
            if not bool(needed.any()):
                del log[name]
            elif not torch.equal(needed, where):
                log[name] = log[name].restricted(needed)
    return {task: log.unless_same(logs[task]) for task, log in result.items()}
