"""Every kind of value as it stands in the written run."""

import math
import warnings
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from avalanche.evaluation.metric_results import AlternativeValues, TensorImage
from matplotlib.figure import Figure
from PIL import Image
from support.wandb_files import Recorder

SCALARS = {
    "float": (0.1, 0.1),
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "float64": (np.float64(0.2), 0.2),
    "float32": (np.float32(0.5), 0.5),
    "float16": (np.float16(0.5), 0.5),
    "int64": (np.int64(-7), -7.0),
    "bool_": (np.bool_(False), 0.0),
    "0-dim array": (np.array(1.5), 1.5),
    "0-dim tensor": (torch.tensor(2.5, requires_grad=True), 2.5),
    "0-dim int tensor": (torch.tensor(4), 4.0),
    "0-dim bool tensor": (torch.tensor(True), 1.0),
    "bfloat16 tensor": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "loss of shape (1,)": (torch.tensor([0.75]), 0.75),
}


def test_scalars_of_every_kind_are_scalars(recorder: Recorder) -> None:
    for name, (value, _) in SCALARS.items():
        recorder.log(name, value)
    rows = recorder.read().rows
    assert {name: row[name] for name, row in zip(SCALARS, rows, strict=True)} == {
        name: expected for name, (_, expected) in SCALARS.items()
    }


def test_values_that_are_not_finite_survive(recorder: Recorder) -> None:
    for value in (math.nan, math.inf, -math.inf):
        recorder.log("x", value)
    read = [row["x"] for row in recorder.read().rows]
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf]


def figure_of_lines() -> Figure:
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2, 3])
    return figure


IMAGES = {
    "pil": (Image.new("RGB", (7, 5)), (7, 5)),
    "figure": (figure_of_lines(), None),
    "tensor image grey": (TensorImage(torch.zeros(5, 7, dtype=torch.uint8)), (7, 5)),
    "tensor image chw, one channel": (TensorImage(torch.rand(1, 5, 7)), (7, 5)),
    "tensor image chw, three wide": (TensorImage(torch.rand(3, 5, 3)), (3, 5)),
    "tensor image chw": (TensorImage(torch.rand(3, 5, 7)), (7, 5)),
    "first alternative": (AlternativeValues(object(), Image.new("L", (7, 5)), torch.zeros(9)), (7, 5)),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_files_of_the_run(recorder: Recorder, kind: str) -> None:
    value, size = IMAGES[kind]
    recorder.log("picture", value)
    (row,) = recorder.read().rows
    assert row["picture"]["_type"] == "image-file"
    with Image.open(recorder.run_folder / "files" / row["picture"]["path"]) as picture:
        assert size is None or picture.size == size


def test_pixels_of_a_float_image(recorder: Recorder) -> None:
    channels_first = torch.zeros(3, 4, 5)
    channels_first[0, 1, 2] = 1.0
    recorder.log("picture", TensorImage(channels_first))
    (row,) = recorder.read().rows
    with Image.open(recorder.run_folder / "files" / row["picture"]["path"]) as picture:
        assert picture.getpixel((2, 1)) == (255, 0, 0)
        assert picture.getpixel((1, 2)) == (0, 0, 0)


def test_a_figure_stays_the_users(recorder: Recorder) -> None:
    figure = plt.figure()
    try:
        recorder.log("figure", figure)
        assert plt.fignum_exists(figure.number)
    finally:
        plt.close(figure)


HISTOGRAMS: dict[str, tuple[Any, int]] = {
    "vector": (torch.arange(10), 10),
    "strided, with gradient": (torch.rand(4, 6, requires_grad=True).T[::2], 12),
    "bfloat16": (torch.rand(8).bfloat16(), 8),
    "bools": (torch.tensor([True, False, True]), 3),
    "array": (np.linspace(0, 1, 5), 5),
    "with holes": (np.array([1.0, np.nan, np.inf, 2.0]), 2),
    "weights, not pixels": (torch.rand(3, 4, 4), 48),
}


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_tensors_are_histograms(recorder: Recorder, kind: str) -> None:
    value, entries = HISTOGRAMS[kind]
    recorder.log("weights", value)
    (row,) = recorder.read().rows
    assert row["weights"]["_type"] == "histogram"
    assert sum(row["weights"]["values"]) == entries


def test_dicts_are_taken_apart(recorder: Recorder) -> None:
    recorder.log("capacity", {"layer0": 0.5, "layer1": {"free": 0.25, 2: 1}})
    run = recorder.read()
    (row,) = run.rows
    values = {name: value for name, value in row.items() if name.startswith("capacity")}
    assert values == {"capacity/layer0": 0.5, "capacity/layer1/free": 0.25, "capacity/layer1/2": 1.0}


def test_texts_go_to_the_summary(recorder: Recorder) -> None:
    recorder.log("Unlearning/claim", "exact")
    run = recorder.read()
    assert run.rows == []
    assert run.summary["Unlearning/claim"] == "exact"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"blob",
        [1.0, 2.0],
        object(),
        1j,
        np.array(["a"]),
        torch.full((3,), torch.nan),
        AlternativeValues(None),
    ],
)
def test_the_rest_is_named_once_and_left_out(recorder: Recorder, value: object) -> None:
    with pytest.warns(UserWarning, match=rf"'odd' is a .*{type(value).__name__}.*Supported: numbers"):
        recorder.log("odd", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.log("odd", value)
    assert recorder.read().rows == []
