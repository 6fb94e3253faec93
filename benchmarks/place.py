"""Device of a cost measurement, with its clock, the precision of forward passes, and the memory layout of images."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

Mark = float | torch.cuda.Event
"""A point in time: CPU time of the process in seconds, or an event in a GPU's stream."""


class Span(NamedTuple):
    """Time between two marks; on a GPU, read ``seconds`` only at the end, because it waits for the GPU's work."""

    began: Mark
    ended: Mark

    @property
    def seconds(self) -> float:
        if isinstance(self.began, float) or isinstance(self.ended, float):
            return float(self.ended) - float(self.began)  # type: ignore[arg-type]
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3


class Place(NamedTuple):
    """Device and settings with which networks run in a measurement.

    Attributes:
        device: device of all data and networks.
        bfloat16: True to run forward passes under autocast.
        channels_last: True for PyTorch's memory format ``channels_last`` for images and convolution weights.
    """

    device: torch.device = torch.device("cpu")
    bfloat16: bool = False
    channels_last: bool = False

    def mark(self) -> Mark:
        """Return the current point in time: on a GPU a new event, else the process's CPU time."""
        if self.device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def put(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and its memory format, and return it."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def put_images(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs ``(n, …)`` on the device and, if they are images, in its memory format."""
        x = x.to(self.device)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def precision(self) -> AbstractContextManager[object]:
        """Return a context in which forward passes run in the chosen precision."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def lower(self, strategy: Any) -> None:
        """Make a strategy's forward passes run in the chosen precision."""
        place, kind = self, type(strategy)

        class Lowered(kind):  # type: ignore[misc, valid-type]
            def forward(self) -> Any:
                with place.precision():
                    return super().forward()

        if self.bfloat16:  # a new class, because unlearning searches all attributes for learned values
            strategy.__class__ = Lowered

    def __str__(self) -> str:
        parts = ("bfloat16" if self.bfloat16 else "", "channels last" if self.channels_last else "")
        where = "1 thread" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        return ", ".join((where, *filter(None, parts)))


CPU = Place()
