"""Parameters that the optimizer holds: those that learn, and none of a finished task."""

import gc
import weakref

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, amnesiac, learn, make, mlp
from torch.optim import Adam

from avalanche_amnesia import HAT, MLP, WSN, MaskedModel, UnlearningRequest, with_unlearning
from avalanche_amnesia.models.task_store import whole


def names(strategy):
    with whole(strategy.model) as model:
        known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in strategy.optimizer.param_groups]


class Watch(SupervisedPlugin):
    """Notes the optimizer's parameters in a step, and may do something in the first one."""

    def __init__(self, act=lambda strategy: None):
        super().__init__()
        self.act = act

    def after_training_iteration(self, strategy, **kwargs):
        if strategy.clock.train_exp_iterations == 0:
            self.act(strategy)
        self.seen = names(strategy)


def hat(plugin):
    return make(HAT, net=lambda: MLP(64, hidden=(24,), features=16, norm="layer"), train_epochs=1, plugins=[plugin])


def wsn(plugin):
    return make(WSN, optimizer="sgd", train_epochs=1, plugins=[plugin])


def with_groups(plugin):
    """The optimizer begins with biases in a group of their own."""
    torch.manual_seed(0)
    model = MaskedModel(mlp())
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    optimizer = Adam([{"params": others}, {"params": biases, "lr": 1e-3}], lr=1e-2)
    return HAT(model=model, optimizer=optimizer, train_mb_size=40, plugins=[plugin])


@pytest.mark.parametrize("make", [hat, wsn, with_groups, lambda plugin: amnesiac(plugins=[plugin])])
def test_an_optimizer_holds_the_backbone_and_the_parameters_of_the_task_in_training(make):
    watch = Watch()
    strategy = make(watch)
    backbone = names(strategy)
    for task, experience in enumerate(DIGITS.train_stream[:3]):
        strategy.train(experience)
        assert names(strategy) == backbone
        own = []
        for held, group in zip(backbone, watch.seen, strict=True):
            assert group[: len(held)] == held  # in their old places; new parameters follow
            own += group[len(held) :]
        assert own
        assert all(f".{task}." in name for name in own)


def test_an_interrupted_task_leaves_the_groups_as_they_were():
    def fail(strategy):
        raise InterruptedError

    watch = Watch()
    strategy = learn(with_groups(watch), DIGITS.train_stream[:2])
    before = names(strategy)
    watch.act = fail
    with pytest.raises(InterruptedError):
        strategy.train(DIGITS.train_stream[2])
    assert names(strategy) != before
    strategy.abort_training()
    watch.act = lambda strategy: None
    strategy.train(DIGITS.train_stream[2])
    assert names(strategy) == before


@pytest.mark.parametrize("reset", [True, False])
def test_parameters_unlearned_in_the_middle_of_a_task_are_freed(reset):
    class Living(SupervisedPlugin):
        def after_training_exp(self, strategy, **kwargs):
            if strategy.experience.task_label == 0:
                self.first = [weakref.ref(p) for p in strategy.model.head(0).parameters()]

        def after_training_epoch(self, strategy, **kwargs):
            gc.collect()
            self.alive = sum(reference() is not None for reference in getattr(self, "first", ()))

    living = Living()
    strategy = amnesiac(plugins=[living], reset_optimizer=reset)
    requests = [UnlearningRequest((0,), at=2, when="iteration", iteration=3)]
    stream = with_unlearning(DIGITS, requests).train_stream
    strategy.train(stream[:2])
    assert living.alive == 2
    strategy.train(stream[2])
    assert not living.alive
    (held,) = names(strategy)
    assert all(name.startswith("backbone.") for name in held)
