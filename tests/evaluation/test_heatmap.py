import matplotlib
import numpy as np
import pytest
import torch

from avalanche_amnesia.evaluation.heatmap import mask_heatmap


def colour(value: float) -> list[int]:
    return list(matplotlib.colormaps["viridis"](value, bytes=True)[:3])


def test_each_cell_has_the_colour_of_its_value() -> None:
    masks = {4: torch.tensor([0.0, 0.5, 1.0]), 1: torch.tensor([1.0, 0.0, 0.25])}
    picture = mask_heatmap(masks)
    pixels = np.asarray(picture)
    assert picture.mode == "RGB"
    assert pixels.shape == (2 * 16, 3 * 16, 3)
    for row, mask in enumerate(masks.values()):  # in the order of the mapping, not of the labels
        for column, value in enumerate(mask.tolist()):
            cell = pixels[row * 16 : (row + 1) * 16, column * 16 : (column + 1) * 16]
            assert (cell == colour(value)).all()


def test_wide_layers_stay_narrow_and_show_the_mean() -> None:
    mask = torch.zeros(4096, requires_grad=True)
    with torch.no_grad():
        mask[::2] = 1
    picture = mask_heatmap({0: mask, 1: torch.ones(4096)})
    assert picture.size == (1024, 32)
    pixels = np.asarray(picture)
    assert (pixels[0] == colour(0.5)).all()
    assert (pixels[-1] == colour(1.0)).all()


def test_many_tasks_keep_visible_rows() -> None:
    assert mask_heatmap({task: torch.ones(10).bool() for task in range(300)}).size == (160, 1200)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({}, "empty"),
        ({0: torch.ones(2), 3: torch.ones(3)}, r"task 3 has shape \(3,\)"),
        ({0: torch.ones(2, 2)}, r"task 0 has shape \(2, 2\)"),
        ({0: torch.ones(2), 1: torch.tensor([0.0, 6.0])}, r"task 1 has values outside \[0, 1\]"),
        ({0: torch.tensor([torch.nan])}, "outside"),
    ],
)
def test_wrong_masks_are_refused(masks: dict[int, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask_heatmap(masks)
