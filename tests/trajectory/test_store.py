"""The trajectory's store of undo logs: sparse entries, recording, lower precision, restoring and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trajectory_oracle import assert_same, recorded, states

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.sparse import SparseValues, compress_bytes, decompress_bytes, encode_update, pack
from avalanche_amnesia.trajectory.store import TrajectoryError


def test_a_change_from_zero_to_negative_zero_is_recorded_and_removed():
    store, s = recorded([0.0, 0.0], [-0.0, 0.0])
    assert store.moved(0)["w"].tolist() == [True, False]
    assert not torch.signbit(store.remove([0], s[1]).values["w"]).any()


def test_non_contiguous_tensors_are_recorded_in_logical_order():
    before, after = {"w": torch.arange(12.0).reshape(3, 4).T}, {"w": torch.arange(12.0).reshape(3, 4).T.clone()}
    after["w"][1, 2] = 99.0
    store = Trajectory()
    store.record(0, before, after)
    assert torch.equal(store.remove([0], after).values["w"], before["w"])
    assert int(store.moved(0)["w"].sum()) == 1


def test_a_log_costs_at_most_one_bit_per_entry_and_the_moved_values():
    before = {"w": torch.zeros(80), "still": torch.zeros(8)}
    after = {"w": torch.zeros(80), "still": torch.zeros(8)}
    after["w"][:5] = 1.0
    store = Trajectory()
    store.record(0, before, after)
    store.record(1, after, before)
    assert store.nbytes(0) == 80 // 8 + 5 * 4
    assert store.nbytes() == 2 * store.nbytes(0)
    assert store.nbytes(0) == sum(e.nbytes for e in store.logs[0].values())


def test_a_log_does_not_share_memory_with_the_model():
    weight = torch.zeros(3)
    before = {"w": weight}
    after = {"w": torch.ones(3)}
    store = Trajectory()
    store.record(0, before, after)
    weight.fill_(7.0)
    assert torch.equal(store.remove([0], after).values["w"], torch.zeros(3))


def test_an_error_names_the_task_the_tensor_and_the_remedy():
    store = Trajectory()
    store.record(3, {"w": torch.zeros(2)}, {"w": torch.ones(2)})
    with pytest.raises(TrajectoryError, match=r"task 3 is recorded already; recorded tasks: \[3\]"):
        store.record(3, {"w": torch.zeros(2)}, {"w": torch.ones(2)})
    with pytest.raises(TrajectoryError, match=r"w grew from \(2,\) to \(3,\) during task 4.*MultiHeadModel"):
        store.record(4, {"w": torch.zeros(2)}, {"w": torch.ones(3)})
    assert store.tasks == (3,)
    for call in (lambda: store.remove([3, 9], {"w": torch.ones(2)}), lambda: store.moved(9)):
        with pytest.raises(TrajectoryError, match=r"task 9 is not recorded; recorded tasks: \[3\]"):
            call()
    assert store.tasks == (3,)


def test_restored_logs_are_not_changed_by_later_records():
    s = states([0.0], [1.0], [2.0])
    store = Trajectory()
    store.record(0, s[0], s[1])
    logs = store.logs
    store.apply(store.remove([0], s[1]))
    store.record(1, s[0], s[1])
    store.logs = logs
    assert store.tasks == (0,)
    store.record(1, s[1], s[2])
    assert list(logs) == [0]


CODES = (torch.float16, torch.bfloat16, torch.int8)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_updates_that_no_code_can_represent_are_restored(dtype):
    before = {"w": torch.tensor([[1.0, 1.0, 0.0], [1e30, 0.1, 5.0]])}
    after = {"w": torch.tensor([[math.inf, math.nan, -0.0], [-1e30, 0.2, 5.0 + 1e-6]])}
    store = Trajectory(dtype=dtype)
    committed = {**after, **store.record(0, before, after)}
    assert same_bits(committed["w"][0, :2], after["w"][0, :2]).all()
    assert_same({"w": store.remove([0], committed).values["w"]}, before)


def test_a_dtype_that_saves_no_bytes_is_lossless():
    before, after = {"w": torch.randn(50).half()}, {"w": torch.randn(50).half()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        store = Trajectory(dtype=dtype)
        assert store.record(0, before, after) == {}
        assert torch.equal(store.remove([0], after).values["w"], before["w"])


def test_lower_precision_takes_fewer_bytes():
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.empty(100, 100).uniform_(-0.1, 0.1, generator=generator)}
    after = {"w": before["w"] + 0.03 * torch.randn(100, 100, generator=generator)}
    sizes = []
    for dtype in (None, torch.float16, torch.int8):
        store = Trajectory(dtype=dtype)
        store.record(0, before, after)
        sizes.append(store.report()[0]["bytes_per_parameter"])
        assert sizes[-1] == store.nbytes() / 10_000
    assert 3.51 > sizes[0] > sizes[1] + 0.5 > sizes[2] + 1.4


# Entries --------------------------------------------------------------------------------------------------------


SHAPE = (4, 5)
CHOICES = st.lists(st.booleans(), min_size=20, max_size=20).map(lambda flat: torch.tensor(flat).reshape(SHAPE))
INDICES = st.lists(st.integers(0, 19), max_size=6, unique=True).map(torch.tensor).map(torch.Tensor.long)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45])
"""Values that a comparison, or arithmetic, would not restore."""


def drawn(dtype=torch.float32, seed=0):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    values[0] = ODD
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(where=CHOICES)
def test_positions_and_bits_are_restored(dtype, where):
    tensor = drawn(dtype)
    entries = SparseValues.select(tensor, where)
    assert (entries.shape, entries.dtype) == (SHAPE, dtype)
    assert torch.equal(entries.where, where)
    assert same_bits(entries.values, tensor[where]).all()
    assert same_bits(entries.old_values(torch.zeros(int(where.sum()), dtype=dtype)), tensor[where]).all()
    assert entries.nbytes == sum(part.nbytes for part in (entries.chosen, entries.high, entries.low))


@given(where=CHOICES, index=INDICES)
def test_entries_are_added_or_replaced(where, index):
    tensor, other = drawn(), drawn(seed=1).reshape(-1)
    extended = SparseValues.select(tensor, where).extend(index, other[index])
    expected = where.reshape(-1).clone()
    expected[index] = True
    assert torch.equal(extended.where.reshape(-1), expected)
    values = tensor.reshape(-1).clone()
    values[index] = other[index]
    assert same_bits(extended.values, values[expected]).all()


@given(where=CHOICES, keep=CHOICES)
def test_entries_are_restricted_joined_and_given_other_values(where, keep):
    tensor, other = drawn(), drawn(seed=1)
    entries = SparseValues.select(tensor, where)
    kept = entries.restrict(keep.reshape(-1))
    assert torch.equal(kept.where, where & keep)
    assert same_bits(kept.values, tensor[where & keep]).all()
    rebased = entries.rebase(other[where], tensor[where])
    assert torch.equal(rebased.where, where)
    assert same_bits(rebased.values, other[where]).all()
    assert (entries.bits | SparseValues.select(other, keep).bits == SparseValues.select(other, where | keep).bits).all()


@pytest.mark.parametrize("dtype", CODES, ids=str)
@given(keep=CHOICES, index=INDICES)
def test_coded_updates_are_restricted_and_added_or_replaced(dtype, keep, index):
    before, other = drawn(), drawn(seed=1)
    committed, updates = encode_update(before, drawn(seed=2).flip(0), dtype)
    kept = updates.restrict(keep.reshape(-1))
    assert torch.equal(kept.where, updates.where & keep)
    assert same_bits(kept.old_values(committed[kept.where]), before[kept.where]).all()
    extended, expected = updates.extend(index, other.view(-1)[index]), before.clone()
    expected.view(-1)[index] = other.view(-1)[index]
    assert same_bits(extended.old_values(committed[extended.where]), expected[extended.where]).all()


def test_an_outer_product_takes_few_bytes():
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(n, generator=generator) < 0.3 for n in (200, 100))
    assert pack(rows[:, None] & columns).nbytes < 0.1 * 200 * 100 / 8


@given(data=st.binary(max_size=400))
def test_bytes_with_few_values_take_half_and_none_takes_more(data):
    for some in (np.frombuffer(data, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8) % 20):
        short = compress_bytes(some)
        assert short.nbytes <= len(data)
        assert decompress_bytes(short, len(data)).tobytes() == some.tobytes()
    assert compress_bytes(np.arange(3000, dtype=np.uint16).astype(np.uint8) % 15).nbytes == 16 + 1500
