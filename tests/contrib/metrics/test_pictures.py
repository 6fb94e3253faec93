"""Masks as a figure shows them: a row per task, small whatever the network, and nothing that is no mask."""

import numpy as np
import pytest
import torch

from avalanche_amnesia.contrib.metrics.mask_use import MAX_LAYERS, layer_masks, masks_figure


def test_rows_are_the_masks_in_the_order_of_the_mapping() -> None:
    masks = {4: {"a": torch.tensor([0.0, 0.5, 1.0])}, 1: {"a": torch.tensor([1.0, 0.0, 0.25])}}
    (shown,) = layer_masks(masks)
    assert shown.layer == "a"
    assert np.array_equal(shown.rows, np.array([[0, 128, 255], [255, 0, 64]], dtype=np.uint8))
    assert (shown.units, shown.used) == (3, (0.5, pytest.approx(1.25 / 3)))
    assert shown.shared == pytest.approx(1 / 3)


def test_wide_layers_stay_narrow_and_show_the_mean() -> None:
    mask = torch.zeros(4096, requires_grad=True)
    with torch.no_grad():
        mask[::2] = 1
    (shown,) = layer_masks({0: {"a": mask}, 1: {"a": torch.ones(4096)}})
    assert shown.rows.shape == (2, 1024)
    assert (shown.rows[0] == 128).all()
    assert (shown.rows[1] == 255).all()
    assert shown.units == 4096


def test_of_deep_networks_layers_are_shown_that_are_evenly_spread() -> None:
    masks = {0: {f"layer{i}": torch.ones(2) for i in range(100)}}
    names = [shown.layer for shown in layer_masks(masks)]
    assert len(names) == MAX_LAYERS
    assert (names[0], names[-1]) == ("layer0", "layer99")
    steps = np.diff([int(name.removeprefix("layer")) for name in names])
    assert steps.max() - steps.min() <= 1


def test_a_figure_has_a_panel_per_layer_with_the_tasks_labels() -> None:
    figure = masks_figure({3: {"a": torch.ones(4), "b": torch.ones(2)}, 0: {"a": torch.zeros(4), "b": torch.ones(2)}})
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 2
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["task 3: 100%", "task 0: 0%"]
    assert masks_figure({}).axes == []


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({0: torch.ones(2), 3: torch.ones(3)}, r"task 3 has shape \(3,\)"),
        ({0: torch.ones(2, 2)}, r"task 0 has shape \(2, 2\)"),
        ({0: torch.ones(2), 1: torch.tensor([0.0, 6.0])}, r"task 1 has values outside \[0, 1\]"),
        ({0: torch.tensor([torch.nan])}, "outside"),
    ],
)
def test_wrong_masks_are_refused(masks: dict[int, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_masks({task: {"a": mask} for task, mask in masks.items()})
