"""Values of every type in the written run."""

import math
import warnings
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from avalanche.evaluation.metric_results import AlternativeValues, TensorImage
from PIL import Image
from support.wandb_files import Recorder


def test_scalars_of_every_type_are_written_as_numbers(recorder: Recorder) -> None:
    scalars = [
        *((0.1, 0.1), (3, 3.0), (True, 1.0), (math.inf, math.inf), (-math.inf, -math.inf)),
        *((np.float64(0.2), 0.2), (np.float16(0.5), 0.5), (np.int64(-7), -7.0), (np.bool_(False), 0.0)),
        *((np.array(1.5), 1.5), (torch.tensor(2.5, requires_grad=True), 2.5), (torch.tensor(True), 1.0)),
        *((torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (torch.tensor([0.75]), 0.75)),
    ]
    for value, _ in [*scalars, (math.nan, None)]:
        recorder.log("x", value)
    *rows, last = recorder.read().rows
    assert [row["x"] for row in rows] == [expected for _, expected in scalars]
    assert math.isnan(last["x"])


def test_images_are_written_as_files_with_their_pixels(recorder: Recorder) -> None:
    red = torch.zeros(3, 5, 7)
    red[0, 1, 2] = 1.0
    figure = plt.figure(figsize=(2, 1), dpi=50)
    images = [
        (Image.new("RGB", (7, 5)), (7, 5)),
        (figure, None),
        (TensorImage(torch.zeros(5, 7, dtype=torch.uint8)), (7, 5)),
        (TensorImage(torch.rand(1, 5, 7)), (7, 5)),
        (TensorImage(torch.rand(3, 5, 3)), (3, 5)),
        (AlternativeValues(object(), Image.new("L", (7, 5)), torch.zeros(9)), (7, 5)),
        (TensorImage(red), (7, 5)),
    ]
    try:
        for value, _ in images:
            recorder.log("picture", value)
        assert plt.fignum_exists(figure.number)  # the user's figure stays open
    finally:
        plt.close(figure)
    for row, (_, size) in zip(recorder.read().rows, images, strict=True):
        assert row["picture"]["_type"] == "image-file"
        with Image.open(recorder.run_folder / "files" / row["picture"]["path"]) as picture:
            assert size is None or picture.size == size
            last = picture.copy()
    assert (last.getpixel((2, 1)), last.getpixel((1, 2))) == ((255, 0, 0), (0, 0, 0))


def test_tensors_are_written_as_histograms(recorder: Recorder) -> None:
    histograms: list[tuple[Any, int]] = [
        (torch.arange(10), 10),
        (torch.rand(4, 6, requires_grad=True).T[::2], 12),
        (torch.rand(8).bfloat16(), 8),
        (torch.tensor([True, False, True]), 3),
        (np.linspace(0, 1, 5), 5),
        (np.array([1.0, np.nan, np.inf, 2.0]), 2),
        (torch.rand(3, 4, 4), 48),
    ]
    for value, _ in histograms:
        recorder.log("weights", value)
    rows = [row["weights"] for row in recorder.read().rows]
    assert [(row["_type"], sum(row["values"])) for row in rows] == [("histogram", entries) for _, entries in histograms]


def test_dicts_are_split_into_values_and_texts_go_to_the_summary(recorder: Recorder) -> None:
    recorder.log("capacity", {"layer0": 0.5, "layer1": {"free": 0.25, 2: 1}})
    recorder.log("Unlearning/claim", "exact")
    run = recorder.read()
    (row,) = run.rows
    values = {name: value for name, value in row.items() if name.startswith("capacity")}
    assert values == {"capacity/layer0": 0.5, "capacity/layer1/free": 0.25, "capacity/layer1/2": 1.0}
    assert run.summary["Unlearning/claim"] == "exact"


def test_values_of_other_types_are_left_out_with_one_warning(recorder: Recorder) -> None:
    others = [None, b"blob", [1.0, 2.0], object(), 1j, np.array(["a"]), torch.full((3,), torch.nan)]
    for number, value in enumerate([*others, AlternativeValues(None)]):
        words = rf"'odd{number}' is a .*{type(value).__name__}.*Supported: numbers"
        with pytest.warns(UserWarning, match=words):
            recorder.log(f"odd{number}", value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder.log(f"odd{number}", value)
    assert recorder.read().rows == []
