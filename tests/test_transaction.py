"""Transactions: either all changes stay, or none."""

import pytest
import torch
from torch import nn

from avalanche_amnesia.transaction import Transaction


class Holder:
    def __init__(self):
        self.kept, self.gone = [1, 2], "here"


def change_everything(change, holder, layer, entries):
    change.set(holder, kept=[3], made=True)
    change.keep(holder, "gone")
    holder.gone = None
    change.write(layer.weight, torch.zeros(2, 2))
    change.call(entries.append, "taken back")
    entries.clear()


def test_an_error_undoes_all_changes_in_reverse_order():
    holder, layer, entries = Holder(), nn.Linear(2, 2), ["first"]
    kept, before = holder.kept, layer.weight.detach().clone()

    def fail():
        with Transaction() as change:
            change_everything(change, holder, layer, entries)
            change.set(holder, kept=[4])
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert holder.kept is kept
    assert holder.gone == "here"
    assert not hasattr(holder, "made")
    assert torch.equal(layer.weight, before)
    assert entries == ["taken back"]


def test_committed_changes_stay():
    holder, layer, entries = Holder(), nn.Linear(2, 2), ["first"]
    with Transaction() as change:
        change_everything(change, holder, layer, entries)
        change.commit()
    assert (holder.kept, holder.gone, holder.made) == ([3], None, True)
    assert not layer.weight.any()
    assert entries == []


def test_attributes_of_modules_are_restored():
    layer = nn.BatchNorm1d(2)
    mean = layer.running_mean
    with Transaction() as change:
        change.keep(layer, "running_mean")
        layer.running_mean = torch.ones(2)
    assert layer.running_mean is mean
    assert "running_mean" in dict(layer.named_buffers())
