"""The trajectory's store of undo logs: recording, saving, restoring and errors."""

import pytest
import torch
from support.trajectory_oracle import recorded, states

from avalanche_amnesia.trajectory import Trajectory
from avalanche_amnesia.trajectory.log_files import TrajectoryError


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


def test_a_tensor_that_is_new_in_a_task_is_not_recorded():
    store = Trajectory()
    store.record(0, {"w": torch.zeros(2)}, {"w": torch.ones(2), "heads.0.weight": torch.ones(2)})
    assert list(store.logs[0]) == ["w"]


def test_restored_logs_are_not_changed_by_later_records():
    s = states([0.0], [1.0], [2.0])
    store = Trajectory()
    store.record(0, s[0], s[1])
    logs = store.logs
    store.apply(store.remove([0], s[1]))
    store.record(1, s[0], s[1])
    store.restore(logs)
    assert store.tasks == (0,)
    store.record(1, s[1], s[2])
    assert list(logs) == [0]
