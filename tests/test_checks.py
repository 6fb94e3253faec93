"""Checks of arguments: every integer of Python, numpy and torch is one; bools, floats and vectors are none."""

from typing import Literal

import numpy as np
import pytest
import torch

from avalanche_amnesia import checks

INTEGERS = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8)]
OTHERS = [True, np.bool_(True), torch.tensor(True), 3.0, np.float32(3), torch.tensor(3.0), torch.tensor([3]), "3", None]


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_integers_become_pythons_own(value):
    assert checks.integer(value) == 3
    assert type(checks.integer(value)) is int
    assert type(checks.whole_number("n", value)) is int
    assert checks.integers("tasks", [value, 4], "tasks") == (3, 4)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_nothing_else_is_an_integer(value):
    assert checks.integer(value) is None
    with pytest.raises(ValueError, match="n must be an int of at least 1, got"):
        checks.whole_number("n", value)
    with pytest.raises(ValueError, match="are no tasks; give a list of ints"):
        checks.integers("tasks", [0, value], "tasks")


def test_a_whole_number_has_a_least_one_unless_it_has_none():
    assert checks.whole_number("n", 0, 0) == 0
    assert checks.whole_number("n", -7, None) == -7
    with pytest.raises(ValueError, match="n must be an int of at least 0, got -1"):
        checks.whole_number("n", -1, 0)
    with pytest.raises(ValueError, match="n must be an int, got 'x'"):
        checks.whole_number("n", "x", None)


@pytest.mark.parametrize("value", [0, -1, float("nan"), None, "2", True], ids=repr)
def test_a_bound_is_for_numbers_alone(value):
    with pytest.raises(ValueError, match="lr must be above 0, got"):
        checks.above("lr", value, 0)


def test_bounds_may_be_part_of_the_range():
    checks.above("s", 0, 0, inclusive=True)
    checks.above("s", np.float32(0.5), 0)
    with pytest.raises(ValueError, match="s must be at least 0, got -1"):
        checks.above("s", -1, 0, inclusive=True)


def test_a_choice_names_all_others():
    checks.one_of("mode", "a", Literal["a", "b"])
    with pytest.raises(ValueError, match="mode must be one of 'a', 'b', got 'c'"):
        checks.one_of("mode", "c", Literal["a", "b"])


def test_a_list_is_asked_for_by_name():
    with pytest.raises(ValueError, match=r"remaining_tasks must be a list of tasks \(ints\), such as \[0, 2\], got 1"):
        checks.integers("remaining_tasks", 1, "tasks")
