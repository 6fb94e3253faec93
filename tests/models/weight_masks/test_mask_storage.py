"""Masks in few bits: exact, close to the entropy, and never decoded from something else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from avalanche_amnesia.models.weight_masks.mask_storage import (
    decode_masks,
    encode_masks,
    magnitude_classes,
    pack_bits,
    unpack_bits,
)


def drawn(seed, n, tasks, stay, share=0.5):
    """Masks of successive tasks: each entry keeps its bit with probability ``stay``, else it is drawn anew."""
    rng = np.random.default_rng(seed)
    rows = [rng.random(n) < share]
    for _ in range(tasks - 1):
        rows.append(np.where(rng.random(n) < stay, rows[-1], rng.random(n) < share))
    return {3 * task: torch.from_numpy(row) for task, row in enumerate(rows)}


def weights_of(masks, seed):
    """Weights that are small where no task uses them."""
    values = torch.randn(len(masks[0]), generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.stack(list(masks.values())).any(0), values, 0.1 * values)


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[task], b[task]) for task in a)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 8, 9, 100, 4095, 8192, 8193]),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.sampled_from([0.0, 0.03, 0.5, 1.0]),
)
def test_any_masks_come_back_exactly(seed, n, tasks, stay, share):
    masks = drawn(seed, n, tasks, stay, share)
    assert same(decode_masks(encode_masks(masks)), masks)
    classes = magnitude_classes(weights_of(masks, seed))
    assert same(decode_masks(encode_masks(masks, classes), classes), masks)
    for mask in masks.values():
        packed = pack_bits(mask)
        assert packed.nbytes == -(-n // 8)
        assert torch.equal(unpack_bits(packed, n), mask)


def entropy(p):
    return 0.0 if p in (0, 1) else float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


@pytest.mark.parametrize(("stay", "share"), [(0.0, 0.5), (0.5, 0.5), (0.9, 0.5), (0.0, 0.1), (0.95, 0.3)])
def test_the_code_takes_a_hundredth_of_a_bit_over_the_entropy_of_what_was_drawn(stay, share):
    n, tasks = 100_000, 5
    bits = 8 * len(encode_masks(drawn(0, n, tasks, stay, share))) / (n * tasks)
    after_one, after_zero = stay + (1 - stay) * share, (1 - stay) * share
    rate = (entropy(share) + (tasks - 1) * (share * entropy(after_one) + (1 - share) * entropy(after_zero))) / tasks
    assert rate * 0.99 < bits < rate + 0.011


def test_classes_are_of_one_size_by_magnitude_and_the_same_for_equal_values():
    values = torch.randn(1600, generator=torch.Generator().manual_seed(0))
    classes = magnitude_classes(values)
    assert classes.bincount().tolist() == [100] * 16
    assert classes[values.abs().argsort()].diff().min() == 0
    assert magnitude_classes(torch.ones(50)).unique().numel() == 1
    assert magnitude_classes(values.half()).tolist() == magnitude_classes(values.half().double()).tolist()


@pytest.mark.parametrize("tasks", [1, 5])
def test_knowing_which_weights_no_task_uses_saves_what_that_tells(tasks):
    masks = drawn(0, 100_000, tasks, 0.5)
    used = torch.stack(list(masks.values())).any(0)
    classes = 15 * used.long()
    saved = 8 * (len(encode_masks(masks)) - len(encode_masks(masks, classes))) / 100_000
    assert saved == pytest.approx(entropy(float(used.float().mean())), abs=0.01)


def test_other_classes_are_refused():
    masks = drawn(0, 5000, 3, 0.7)
    weights = weights_of(masks, 0)
    code = encode_masks(masks, magnitude_classes(weights))
    moved = weights.clone()
    moved[weights.abs().argmax()] = 0
    for wrong in (None, magnitude_classes(moved), magnitude_classes(weights[1:])):
        with pytest.raises(ValueError, match="not of these classes"):
            decode_masks(code, wrong)
    with pytest.raises(ValueError, match=r"classes must be int64 \(5000,\) in 0..15, got torch.float32"):
        encode_masks(masks, weights)
    with pytest.raises(ValueError, match=r"in 0..15"):
        encode_masks(masks, magnitude_classes(weights) + 1)


def test_nothing_at_all():
    assert decode_masks(encode_masks({})) == {}
    empty = {0: torch.zeros(0, dtype=torch.bool)}
    assert same(decode_masks(encode_masks(empty)), empty)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda code: b"", id="empty"),
        pytest.param(lambda code: code[:40], id="head alone"),
        pytest.param(lambda code: code[:-1], id="cut off"),
        pytest.param(lambda code: code + b"\0", id="too long"),
        pytest.param(lambda code: b"XXXX" + code[4:], id="another kind"),
    ],
)
def test_what_is_no_code_is_refused(broken):
    with pytest.raises(ValueError, match="these are no encoded masks"):
        decode_masks(broken(encode_masks(drawn(0, 5000, 3, 0.7))))


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"bool vectors of one length, got \['torch.bool \(3,\)', 'torch.bool \(4,\)'\]"
    ):
        encode_masks({0: torch.ones(3, dtype=torch.bool), 1: torch.ones(4, dtype=torch.bool)})
    with pytest.raises(ValueError, match="bool vectors"):
        encode_masks({0: torch.ones(3)})
