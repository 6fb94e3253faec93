"""Claims beside an optimizer, a loss or a rule of adjustment of the user's: none is exact that is not."""

import pytest
import torch
from support.strategies import DIGITS, make, trained
from support.strategy_state import bits
from torch import nn

from avalanche_amnesia import DisjointSubnets, ModelError
from avalanche_amnesia.optimizers import traits_of
from avalanche_amnesia.training import AdaHATRule, AdjustmentRule


def clipped(parameters):
    """Adam, all of whose weights are scaled down together behind every step: its steps mix entries."""
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    @torch.no_grad()
    def scale(optimizer, *given):
        values = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        size = sum(float(value.square().sum()) for value in values) ** 0.5
        for value in values:
            value.mul_(min(1.0, 2.0 / size))

    optimizer.register_step_post_hook(scale)
    return optimizer


def penalised(model):
    """A loss with a penalty of the backbone's norms."""
    weights = list(model.backbone.parameters())
    return lambda logits, y: nn.functional.cross_entropy(logits, y) + 0.05 * sum(weight.norm() for weight in weights)


def in_pools(**options):
    return make(DisjointSubnets, train_epochs=1, seed=0, **options)


@pytest.mark.parametrize("options", [{}, {"optimizer": clipped}], ids=["adam", "a step that mixes entries"])
def test_a_step_mixes_only_the_entries_of_one_task(options):
    strategy = trained([0, 1, 2], maker=in_pools, **options)
    assert strategy.unlearn([1]).claim == ("conditional" if options else "exact")
    assert bits(strategy.model) == bits(trained([0, 2], maker=in_pools, **options).model)


def test_a_loss_over_the_weights_of_the_whole_backbone_is_refused():
    strategy = in_pools()
    strategy._criterion = penalised(strategy.model)
    with pytest.raises(ModelError, match="the training of task 0 changed"):
        strategy.train(DIGITS.train_stream[0])


def test_an_optimizer_without_torchs_hooks_is_one_of_which_nothing_is_known():
    class Wrapped(torch.optim.Adam):
        def __init__(self, parameters):
            inner = torch.optim.Adam(parameters)
            self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    assert not any(traits_of(Wrapped([nn.Parameter(torch.zeros(2))])))


def test_a_claim_rests_on_an_adjustment_rule_of_the_user():
    class Keeps(AdjustmentRule):
        def protected_share(self, use, name, sparsity):
            """HAT's."""
            self.kept = use.covered[name].clone()
            return self.kept

    strategy = trained([0, 1], adjustment=Keeps(), train_epochs=1)
    (part,) = strategy.unlearn([1]).rests_on
    assert part.endswith("Keeps in HATPlugin")


def test_a_name_of_a_rule_is_not_taken_twice():
    with pytest.raises(ValueError, match="'adahat' is there already, AdaHATRule"):

        class Other(AdaHATRule, name="adahat"):
            pass


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda like: None, TypeError, "must return a tensor of the shape of .*; got None"),
        (lambda like: torch.zeros(3, 1, 2), TypeError, r"got one of \(3, 1, 2\)"),
        (lambda like: torch.full_like(like, 3.0), ValueError, "from 0, free, to 1, frozen"),
        (lambda like: torch.full_like(like, torch.nan), ValueError, "from nan to nan"),
    ],
)
def test_what_a_rule_returns_is_checked(given, error, message):
    class Wrong(AdjustmentRule):
        def protected_share(self, use, name, sparsity):
            """As given."""
            return given(use.covered[name])

    with pytest.raises(error, match=message):
        trained([0], adjustment=Wrong(), train_epochs=1)
