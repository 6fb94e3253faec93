"""Training with learned masks makes no subnormal numbers, because processors are slow with them."""

from functools import partial

import torch
from avalanche.core import SupervisedPlugin
from support.small_runs import logits_of
from support.strategies import Hears, learn, make
from torch import nn

from avalanche_amnesia import HAT, MLP, HardAttention, MaskedModel, optimizers
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.models import gate
from avalanche_amnesia.optimizers import FLUSH_BELOW, FLUSH_EVERY, BareStep, flush_denormals
from avalanche_amnesia.training.hat_formulas import embedding_gradient, rescale_embedding_gradient_
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from benchmarks.subnormals import SubnormalWatch

TINY = torch.finfo(torch.float32).tiny
PERMUTED = PermutedDigits(2)
# It forgets within 180 steps, an epoch here, as much as usual momentum does within a thousand.
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.5)


def watched():
    """Two tasks learned, every seventh step of the second one watched after its first epoch."""
    watch = SubnormalWatch(7, lambda made: made.clock.train_exp_counter == 1 and made.clock.train_exp_epochs == 1)
    masks = HardAttention(embedding_lr=0.05, s_max=400.0)
    options = {"hidden": (48,), "features": 40, "optimizer": MOMENTUM, "train_mb_size": 8, "seed": 1}
    learn(make(HAT, masks=masks, plugins=[watch], **options), PERMUTED.train_stream)
    assert watch.steps == 26
    return watch.found


def test_no_step_of_an_epoch_makes_a_subnormal_number():
    assert watched().total() == 0


def test_without_a_threshold_and_clearing_there_are_subnormal_numbers(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(gate, "SHUT", 0.0)
    monkeypatch.setattr(optimizers, "FLUSH_EVERY", 10**9)
    found = watched()
    assert found["gradients"] > 300
    assert found["moments of SGD"] > 1000


def test_only_gates_below_the_threshold_are_read_as_zero():
    model = MaskedModel(MLP(64, hidden=(40,), features=30))
    model.add_head(0, 10)
    embedding = torch.linspace(-1, 1, model.n_units)[torch.randperm(model.n_units)]
    model.start_task(0, embedding)
    exact = model.gate.update(60.0)
    assert torch.equal(exact, torch.sigmoid(60.0 * embedding))
    read = torch.cat(list(model.gate.leaves.values()))
    shut = exact <= gate.SHUT
    assert 5 < int(shut.sum()) < 60
    assert bool((read[shut] == 0).all())
    assert torch.equal(read[~shut], exact[~shut])


def test_the_embedding_of_a_shut_unit_gets_the_gradient_of_the_exact_gate():
    """Else a unit could never open again: the compensation makes up for a gate of 1e-20."""

    class See(SupervisedPlugin):
        def __init__(self):
            super().__init__()
            self.shut = 0

        def before_update(self, strategy, **kwargs):
            model, plugin = strategy.model, find_plugin(strategy, HATPlugin)
            exact = torch.sigmoid(plugin.in_training.scale * model.embedding.detach())
            of_gate = model.gate.gradient() + plugin.in_training.regulariser.gradient(exact)
            expected = embedding_gradient(of_gate, exact, plugin.in_training.scale)
            rescale_embedding_gradient_(expected, model.embedding.detach(), plugin.in_training.scale, 400.0, 50.0)
            assert torch.equal(model.embedding.grad, expected)
            self.shut += int(((exact < gate.SHUT) & (expected.abs() > 1e-12)).sum())

    torch.manual_seed(0)
    model, see = MaskedModel(MLP(64, hidden=(48,), features=40)), See()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = HAT(model=model, optimizer=optimizer, train_mb_size=32, train_epochs=1, plugins=[see])
    strategy.train(PERMUTED.train_stream[0])
    assert see.shut > 100


# Faint numbers -----------------------------------------------------------------------------------------------------


def with_moments(values, grad=1.0):
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = None if grad is None else torch.full_like(parameter, grad)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.tensor(values)
    optimizer.state[parameter]["step"] = torch.tensor(1e-35)
    return optimizer, parameter


def test_only_subnormal_numbers_are_cleared():
    small = [TINY / 8, -TINY, TINY * FLUSH_BELOW * 0.99]
    rest = [TINY * FLUSH_BELOW * 1.01, -0.5, float("inf"), float("nan"), 0.0]
    values, kept = [*small, *rest], [0.0, 0.0, 0.0, *rest]
    optimizer, parameter = with_moments(values)
    flush_denormals(optimizer, FLUSH_EVERY - 1)
    assert torch.equal(parameter.nan_to_num(), torch.tensor(values).nan_to_num())
    flush_denormals(optimizer, FLUSH_EVERY)
    for found in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
        assert torch.equal(found.nan_to_num(), torch.tensor(kept).nan_to_num())
        assert bool(found[6].isnan())
    assert float(optimizer.state[parameter]["step"]) > 0  # it is no entry's


def test_a_parameter_that_is_not_trained_keeps_its_bits():
    optimizer, parameter = with_moments([TINY / 8], grad=None)
    flush_denormals(optimizer, 0)
    assert float(parameter.detach()) > 0


@torch.no_grad()
def test_a_bare_step_clears_by_itself():
    parameter = nn.Parameter(torch.ones(3))
    step = BareStep(torch.optim.SGD([parameter], lr=0.0, momentum=0.5))
    parameter.grad = torch.ones(3)
    for _ in range(300):
        step()
        parameter.grad.zero_()
        found = step.optimizer.state[parameter]["momentum_buffer"]
        assert bool(((found == 0) | (found >= TINY)).all())
    assert not bool(found.any())


def test_subnormal_weights_of_an_earlier_task_keep_their_bits_at_every_step():
    """Frozen values of a task are restored after the clearing."""
    model, check = MaskedModel(MLP(64, hidden=(48,), features=40)), [lambda: None]
    every_step = Hears(after_training_iteration=lambda made: check[0]())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    strategy = HAT(model=model, optimizer=optimizer, train_mb_size=16, train_epochs=1, seed=1, plugins=[every_step])
    strategy.train(PERMUTED.train_stream[0])
    owned = model.graph.parameter_use(model.masks[0])["layers.0.weight"].expand(48, 64) > 0
    weight = model.backbone.get_parameter("layers.0.weight").data
    weight[owned] = torch.where(torch.rand(int(owned.sum())) < 0.5, TINY / 4, weight[owned])
    before, expected = weight[owned], logits_of(strategy, PERMUTED, [0])

    def unchanged():
        assert bool(same_bits(weight[owned], before).all())

    check[0] = unchanged
    strategy.train(PERMUTED.train_stream[1])
    assert torch.equal(logits_of(strategy, PERMUTED, [0])[0], expected[0])
