"""Units that forwards compute: all but those whose gate is 0, and stays so while a mask is learned."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from avalanche_amnesia.unit_graph.open_entries import OpenEntries

FAR = 85.0
"""A unit with ``s·e`` below minus this is left out.

Its gate of e^-85 is read as 0. The loss's gradient with respect to its embedding would be σ'(s·e)·s_max·(cosh c + 1) /
(cosh e + 1) times that with respect to its gate: with c = 50 and s_max = 400 less than 1e-12 times, which moves no
number of single precision.
"""
EVERY = 16
"""Steps between two looks whether more units can be left out."""
MASKS = 32
"""Masks whose entries are remembered: as many as the tasks that share a mini-batch, mostly."""

EntriesOf = Callable[[Tensor], Mapping[str, OpenEntries]]
"""From units, bool ``(n_units,)``, to the entries of weights that these read, where it is much less than all."""


class EntriesOfMasks:
    """Entries that fixed masks read, remembered for those that were asked for last."""

    def __init__(self, entries_of: EntriesOf) -> None:
        self._entries_of = entries_of
        self._known: OrderedDict[tuple[torch.device, bytes], Mapping[str, OpenEntries]] = OrderedDict()

    def __call__(self, units: Tensor) -> Mapping[str, OpenEntries]:
        """Entries that units, bool ``(n_units,)``, read."""
        mask = units.device, units.cpu().numpy().tobytes()
        if mask not in self._known:
            self._known[mask] = self._entries_of(units)
            if len(self._known) > MASKS:
                self._known.popitem(last=False)
        self._known.move_to_end(mask)
        return self._known[mask]


class ComputedUnits:
    """Chooses the units that are computed, while a gate closes and opens.

    Units that were left out are looked at in every step, and come back before their gates are read as anything but 0.
    A mask that no longer changes leaves out exactly what it closes.
    """

    def __init__(self, allowed: Tensor | None, entries_of: EntriesOf) -> None:
        self.entries: Mapping[str, OpenEntries] = {}
        self._entries_of = entries_of
        self._left_out: Tensor | None = None
        self._looks = 0
        if allowed is not None:
            self._leave_out(~allowed)

    def _leave_out(self, units: Tensor) -> None:
        if self._left_out is None or not torch.equal(units, self._left_out):
            self._left_out, self._bounds = units, torch.where(units, -FAR, math.inf)
            self.entries = self._entries_of(~units)

    def keep_to(self, is_open: Tensor) -> None:
        """Compute some units, bool ``(n_units,)``, from here on."""
        self._leave_out(~is_open)

    def look(self, exponent: Tensor) -> None:
        """Follow a gate that learns.

        On an accelerator all that is allowed is computed: it would have to be waited for in every step.
        """
        if exponent.device.type != "cpu":
            return
        turn, self._looks = self._looks % EVERY == 0, self._looks + 1
        if turn or (self.entries and bool((exponent > self._bounds).any())):  # one of them came back
            self._leave_out(exponent < -FAR)
