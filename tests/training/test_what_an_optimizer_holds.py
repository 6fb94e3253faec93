"""Parameters that the optimizer holds: those that learn, none of a finished task, as Avalanche's function has them."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.models.dynamic_optimizers import update_optimizer
from support.strategies import DIGITS, Hears, amnesiac, learn, make, mlp
from torch import nn
from torch.optim import SGD, Adam

from avalanche_amnesia import HAT, MLP, WSN, MaskedModel, UnlearningRequest, with_unlearning
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.optimizers import follow_model


def names(strategy):
    with register_all(strategy.model) as model:
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
    def look(made):
        gc.collect()
        alive.append(sum(reference() is not None for reference in first))

    first, alive = [], []
    strategy = amnesiac(plugins=[Hears(after_training_epoch=look)], reset_optimizer=reset)
    requests = [UnlearningRequest((0,), at=2, when="iteration", iteration=3)]
    stream = with_unlearning(DIGITS, requests).train_stream
    strategy.train(stream[0])
    first += [weakref.ref(p) for p in strategy.model.head(0).parameters()]
    strategy.train(stream[1:3])
    assert (alive[2:4], alive[-1]) == ([2, 2], 0)
    (held,) = names(strategy)
    assert all(name.startswith("backbone.") for name in held)


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def followed(optimizer, parameters, known, *, fresh):
    model = SimpleNamespace(named_parameters=parameters.items, begins_as=str)
    follow_model(SimpleNamespace(optimizer=optimizer, model=model, optimized_param_id=known), fresh=fresh)


def content(optimizer, names):
    held = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return held, {names[id(p)]: sorted(state) for p, state in optimizer.state.items()}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_pass_equals_the_update_of_avalanche(seed, fresh):
    draw = random.Random(seed)
    first = {f"backbone.{i}": nn.Parameter(torch.randn(2)) for i in range(3)}
    ours, theirs = (SGD(first.values(), lr=0.1, momentum=0.9) for _ in range(2))
    names = {id(p): name for name, p in first.items()}
    parameters, known, alive = first, first, list(first.values())
    for step in range(6):
        parameters = dict(parameters)
        for i in range(draw.randrange(3)):  # new heads
            parameters[f"heads.{step}.{i}"] = nn.Parameter(torch.randn(2))
        for name in draw.sample(sorted(parameters), 2):  # one grew, one was removed
            if draw.random() < 0.5:
                parameters[name] = nn.Parameter(torch.randn(3))
        if draw.random() < 0.5:
            del parameters[draw.choice(sorted(parameters))]
        alive += parameters.values()  # an id is unique only while its object lives
        names |= {id(p): f"{name} of step {step}" for name, p in parameters.items() if id(p) not in names}
        update_optimizer(theirs, parameters, known, reset_state=fresh, remove_params=True)
        followed(ours, parameters, known, fresh=fresh)
        known = parameters
        assert content(ours, names) == content(theirs, names)
        for optimizer in (ours, theirs):
            stepped(optimizer)


def test_other_parameters_stay_and_new_heads_join_the_first_group():
    weight, bias, first, second, foreign = (nn.Parameter(torch.randn(2)) for _ in range(5))
    optimizer = SGD([{"params": [weight]}, {"params": [foreign, bias]}], lr=0.1, momentum=0.9)
    known = {"weight": weight, "bias": bias}
    with_first = {**known, "heads.0": first}
    followed(optimizer, with_first, known, fresh=False)
    stepped(optimizer)
    followed(optimizer, {**known, "heads.1": second}, with_first, fresh=False)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert held == [[id(weight), id(second)], [id(foreign), id(bias)]]
    assert {id(p) for p, state in optimizer.state.items() if state} == {id(weight), id(foreign), id(bias)}
