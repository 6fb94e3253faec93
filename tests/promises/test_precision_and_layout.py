"""Autocast around the forward, and weights whose channels lie last: every promise holds as in plain float32."""

import pytest
import torch
from support.isolated_pools import NETS
from support.strategies import DIGITS, OPTIMIZERS
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia.evaluation import References
from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AmnesiacHAT


def in_bfloat16(kind):
    class LowPrecision(kind):
        def forward(self):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward()

    return LowPrecision


def made(kind, how, *, net="norms", **options):
    torch.manual_seed(0)
    backbone = NETS[net]()
    model = SubnetModel(backbone, n_features=12) if kind is WSN else MaskedModel(backbone)
    if how == "channels last":
        model = model.to(memory_format=torch.channels_last)
    kind = in_bfloat16(kind) if how == "bfloat16" else kind
    options = {"train_mb_size": 40, "train_epochs": 2, **options}
    return kind(model=model, optimizer=OPTIMIZERS["adam"](model.parameters()), **options)


HOWS = ["bfloat16", "channels last"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [HAT, AmnesiacHAT, WSN])
def test_earlier_tasks_keep_their_bits(kind, how):
    strategy, images, logits = made(kind, how), DIGITS.test_stream[0].tensors[0], []
    for experience in DIGITS.train_stream[:3]:
        strategy.train(experience)
        strategy.model.eval()
        with torch.no_grad():
            logits.append(strategy.model(images, 0))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert strategy.model.backbone.second.weight.is_contiguous() == (how != "channels last")


@pytest.mark.parametrize("how", ["float32", *HOWS])
def test_pools_unlearn_to_the_bit(how):
    def factory(**options):
        return made(AmnesiacHAT, how, isolation="pools", **options)

    strategy = factory()
    for experience in DIGITS.train_stream[:4]:
        strategy.train(experience)
    assert strategy.unlearn([1]).claim == "exact"
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([2, 3]).claim == "exact"
    reference = References(factory, DIGITS).reference(unlearning_plugin(strategy).ledger.remaining)
    assert bits(strategy.model) == bits(reference)


@pytest.mark.parametrize("how", ["float32", *HOWS])
def test_unlearning_the_last_task_of_wsn_takes_all_of_it(how):
    strategy = made(WSN, how)
    strategy.train(DIGITS.train_stream[0])
    before = bits(strategy.model)
    strategy.train(DIGITS.train_stream[1])
    assert bits(strategy.model) != before
    assert strategy.unlearn([1]).claim == "exact"
    assert bits(strategy.model) == before


def test_autocast_takes_part():
    """The control: other bits come out of the same seed."""
    results = []
    for how in ("float32", "bfloat16"):
        strategy = made(HAT, how)
        strategy.train(DIGITS.train_stream[0])
        results.append(strategy.model.backbone.get_parameter("third.weight").detach().clone())
    assert not torch.equal(*results)
