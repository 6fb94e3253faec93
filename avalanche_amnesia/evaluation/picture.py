"""Figures as values of metrics, drawn only when a logger needs the pixels."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from avalanche.evaluation.metric_results import TensorImage
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from avalanche_amnesia.evaluation.figures import Table, house_style

_DPI = 100


class Picture(TensorImage):
    """Figure as a metric's value: drawn when a logger reads ``image``, skipped by loggers of text."""

    def __init__(self, draw: Callable[..., Figure], *arguments: Any, table: Table | None = None) -> None:
        self._draw, self._arguments, self.table = draw, arguments, table

    @cached_property
    @house_style
    def image(self) -> Tensor:
        """Draw the figure and return its pixels, uint8 of shape ``(3, height, width)``."""
        figure = self._draw(*self._arguments)
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(_DPI)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, -1, 0)))

    def __repr__(self) -> str:
        return f"Picture({getattr(self._draw, '__name__', self._draw)})"
