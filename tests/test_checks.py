"""Checks of arguments: integers of Python, numpy and torch are integers; bools, floats and vectors are not."""

from typing import Literal

import numpy as np
import pytest
import torch

from avalanche_amnesia import checks

INTEGERS = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8)]
OTHERS = [True, np.bool_(True), torch.tensor(True), 3.0, np.float32(3), torch.tensor(3.0), torch.tensor([3]), "3", None]


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_an_integer_of_any_library_becomes_an_int(value):
    assert checks.integer(value) == 3
    assert type(checks.integer(value)) is type(checks.whole_number("n", value)) is int
    assert checks.integers("tasks", [value, 4], "tasks") == (3, 4)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_no_other_value_is_an_integer(value):
    assert checks.integer(value) is None
    with pytest.raises(ValueError, match="n must be an int of at least 1, got"):
        checks.whole_number("n", value)
    with pytest.raises(ValueError, match="are no tasks; give a list of ints"):
        checks.integers("tasks", [0, value], "tasks")


NOT_POSITIVE = "lr must be above 0, got"
REFUSED = [
    (lambda: checks.whole_number("n", -1, 0), "n must be an int of at least 0, got -1"),
    (lambda: checks.whole_number("n", "x", None), "n must be an int, got 'x'"),
    (lambda: checks.above("lr", 0, 0), NOT_POSITIVE),
    (lambda: checks.above("lr", -1, 0), NOT_POSITIVE),
    (lambda: checks.above("lr", float("nan"), 0), NOT_POSITIVE),
    (lambda: checks.above("lr", None, 0), NOT_POSITIVE),
    (lambda: checks.above("lr", "2", 0), NOT_POSITIVE),
    (lambda: checks.above("lr", True, 0), NOT_POSITIVE),
    (lambda: checks.above("s", -1, 0, inclusive=True), "s must be at least 0, got -1"),
    (lambda: checks.one_of("mode", "c", Literal["a", "b"]), "mode must be one of 'a', 'b', got 'c'"),
    (lambda: checks.integers("left", 1, "tasks"), r"left must be a list of tasks \(ints\), such as \[0, 2\], got 1"),
]


@pytest.mark.parametrize(("check", "message"), REFUSED)
def test_a_wrong_value_is_refused(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_a_value_within_its_bounds_is_accepted():
    assert checks.whole_number("n", 0, 0) == 0
    assert checks.whole_number("n", -7, None) == -7
    checks.above("s", 0, 0, inclusive=True)
    checks.above("s", np.float32(0.5), 0)
    checks.one_of("mode", "a", Literal["a", "b"])
