"""Network state other than parameters belongs to each task, is refused, or is named in the plan."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from avalanche.training import Naive
from support import strategies
from support.strategies import learn, logits, make, stock
from support.strategy_state import same_state, unlearning_plugin
from torch import Tensor, nn
from torch.optim import SGD, Adam

from avalanche_amnesia import WSN, MaskedModel, ModelError, MultiHeadModel, References, SubnetModel
from avalanche_amnesia.benchmarks import PermutedDigits

STREAM = PermutedDigits(3, n_train=200, n_test=100)


class Net(nn.Module):
    """Two layers, and a function of the first one's outputs, which may have buffers."""

    features = 24
    buffers_of_zeros = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 24)
        for name in self.buffers_of_zeros:
            self.register_buffer(name, torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.between(self.first(x.flatten(1))))))


class MovingAverage(Net):
    buffers_of_zeros = ("average",)

    def between(self, h):
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.average


class Rebound(Net):
    """The same as a plain attribute, replaced in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(32)

    def between(self, h):
        if self.training:
            self.average = 0.9 * self.average + 0.1 * h.mean(0)
        return h - self.average.detach()


class FunctionalNorm(Net):
    buffers_of_zeros = ("mean", "var")

    def between(self, h):
        return F.batch_norm(h, self.mean, self.var, training=self.training)


class KeepsActivations(Net):
    def between(self, h):
        self.last = torch.relu(h)
        return self.last


class Grows(Net):
    buffers_of_zeros = ("rows",)

    def between(self, h):
        if self.training:
            self.rows = torch.cat([self.rows, h.detach()[0]])
        return h + self.rows.reshape(-1, 32).mean(0)


OWNED = [MovingAverage, Rebound, FunctionalNorm]


ADAM, SUBNET = partial(Adam, lr=1e-2, weight_decay=1e-3), partial(SubnetModel, density=0.4)
wsn = partial(strategies.make, WSN, wrap=SUBNET, optimizer=ADAM, train_mb_size=20, seed=0)
masked = partial(make, wrap=partial(MaskedModel, input_shape=(64,)), train_mb_size=20)


@pytest.mark.parametrize(
    ("maker", "net"), [*((wsn, net) for net in OWNED), (masked, FunctionalNorm), (masked, KeepsActivations)]
)
def test_every_task_has_its_own_state_and_is_unlearned_exactly(maker, net):
    strategy = learn(maker(net=net), STREAM.train_stream[:1])
    before = logits(strategy, STREAM.test_stream[0])
    strategy.train(STREAM.train_stream[1])
    assert torch.equal(logits(strategy, STREAM.test_stream[0]), before)
    strategy.eval(STREAM.test_stream)
    assert torch.equal(logits(strategy, STREAM.test_stream[0]), before)
    assert strategy.unlearn([1]).claim == "exact"
    reference = References(partial(maker, net=net), STREAM).reference([0]).state_dict()
    assert same_state(strategy.model.state_dict(), reference)
    assert any(name.startswith("heads.0.own.") for name in reference) == (net is not KeepsActivations)


@pytest.mark.parametrize(("net", "name"), [(KeepsActivations, "last"), (Grows, "rows")])
def test_state_that_no_task_can_own_is_refused(net, name):
    strategy = wsn(net=net)
    initial = {key: value.clone() for key, value in strategy.model.backbone.state_dict().items()}
    with pytest.raises(ModelError, match=rf"forward changes \['{name}"):
        strategy.train(STREAM.train_stream[0])
    assert strategy.model.tasks == ()
    assert all(torch.equal(value, initial[key]) for key, value in strategy.model.backbone.state_dict().items())


def test_a_stock_strategy_names_the_state_that_its_tasks_share():
    strategy = stock(Naive, model=MultiHeadModel(MovingAverage()), epochs=1, optimizer=lambda p: SGD(p, lr=0.1))
    learn(strategy, STREAM.train_stream[:2])
    plan = unlearning_plugin(strategy).plan(strategy, [1])
    assert plan.shared_state == ("backbone.average",)
    assert unlearning_plugin(strategy).unlearn(strategy, [1]).plan.shared_state == plan.shared_state
