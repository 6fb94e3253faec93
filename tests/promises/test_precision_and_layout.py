"""Autocast around a forward or a strategy, and weights whose channels lie last: all promises hold as in float32."""

from functools import partial

import pytest
import torch
from support import tiny
from support.small_runs import assert_retained
from support.strategies import DIGITS, BatchNormedConvNet, learn, make
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import (
    WSN,
    AmnesiacHAT,
    DisjointModel,
    DisjointSubnets,
    MaskedModel,
    References,
    SubnetModel,
)
from avalanche_amnesia.training.host.saving import load_state


def in_bfloat16(kind):
    class LowPrecision(kind):
        def forward(self):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward()

    return LowPrecision


def made(kind, how, **options):
    torch.manual_seed(0)
    model = {WSN: SubnetModel, DisjointSubnets: DisjointModel}.get(kind, MaskedModel)(BatchNormedConvNet())
    if how == "channels last":
        model = model.to(memory_format=torch.channels_last)
    return make(in_bfloat16(kind) if how == "bfloat16" else kind, model=model, **options)


HOWS = ["bfloat16", "channels last"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [AmnesiacHAT, WSN])
def test_earlier_tasks_keep_their_bits(kind, how):
    strategy = made(kind, how)
    assert_retained(strategy, DIGITS, 3)
    assert strategy.model.backbone.second.weight.is_contiguous() == (how != "channels last")


@pytest.mark.parametrize("how", HOWS)
def test_weight_pools_unlearn_to_the_bit(how):
    factory = partial(made, DisjointSubnets, how)
    strategy = learn(factory(), DIGITS, 4)
    # A subclass that casts is the script's own.
    assert strategy.unlearn([1]).claim == ("conditional" if how == "bfloat16" else "exact")
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([2, 3]).claim != "approximate"
    reference = References(factory, DIGITS).reference(unlearning_plugin(strategy).ledger.remaining)
    assert bits(strategy.model) == bits(reference)


@pytest.mark.parametrize("kind", [AmnesiacHAT, WSN])
def test_weights_in_channels_last_order_are_saved_and_unlearned(kind, tmp_path):
    strategy, loaded = made(kind, "channels last"), made(kind, "channels last")
    learn(strategy, DIGITS.train_stream[:3])
    strategy.save(tmp_path / "state")
    load_state(loaded, tmp_path / "state")
    for one in (strategy, loaded):
        one.train(DIGITS.train_stream[3])
        one.unlearn([1])
    assert bits(loaded.model) == bits(strategy.model)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_autocast_around_a_strategy_leaves_its_state_in_float32(kind):
    stream = tiny.tasks([[0, 1], [2, 3], [1, 0]]).train_stream
    strategy, plain = tiny.strategy(kind), tiny.strategy(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        strategy.train(stream)
        strategy.eval(stream)
        record = strategy.unlearn(task=1, samples=[0, 2]) if kind == "pools" else strategy.unlearn([0])
        assert torch.is_autocast_enabled("cpu")
    types = {value.dtype for value in strategy.model.state_dict().values() if value.is_floating_point()}
    assert types == {torch.float32}
    plain.train(stream)
    assert bits(plain.model) != bits(strategy.model)  # forwards were not whole
    assert record.claim == ("exact" if kind == "pools" else "approximate")
    if kind == "pools":  # trained again at other settings than before
        assert "other settings" in strategy.unlearn(task=2, samples=[0], reproduce=False).plan.reasons[0]
