"""Where costs are measured: a device and its clock, the precision of forwards, the layout of images."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

Mark = float | torch.cuda.Event
"""A moment: of the processor's time, or in the order of a GPU's work."""


class Span(NamedTuple):
    """Time between two moments. Of a GPU it is asked for when all is over: asking waits for its work."""

    began: Mark
    ended: Mark

    @property
    def seconds(self) -> float:
        if isinstance(self.began, float) or isinstance(self.ended, float):
            return float(self.ended) - float(self.began)  # type: ignore[arg-type]
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3


class Place(NamedTuple):
    """A device, and how networks run on it.

    Attributes:
        device: all data and networks lie on it.
        bfloat16: whether forwards run under autocast.
        channels_last: whether the channels of images and of their weights lie last in memory.
    """

    device: torch.device = torch.device("cpu")
    bfloat16: bool = False
    channels_last: bool = False

    def mark(self) -> Mark:
        """This moment; CPU time of the process, where there is no GPU."""
        if self.device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def put(self, model: nn.Module) -> nn.Module:
        """The model, on the device and in the layout."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def put_images(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``(n, …)``, likewise."""
        x = x.to(self.device)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def precision(self) -> AbstractContextManager[object]:
        """Context of a forward."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def lower(self, strategy: Any) -> None:
        """Let a strategy's forwards run in the precision."""
        place, kind = self, type(strategy)

        class Lowered(kind):  # type: ignore[misc, valid-type]
            def forward(self) -> Any:
                with place.precision():
                    return super().forward()

        if self.bfloat16:  # no attribute: requests look through all of them for what was learned
            strategy.__class__ = Lowered

    def __str__(self) -> str:
        parts = ("bfloat16" if self.bfloat16 else "", "channels last" if self.channels_last else "")
        where = "1 thread" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        return ", ".join((where, *filter(None, parts)))


CPU = Place()
