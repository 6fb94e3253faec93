"""An interrupted training leaves the state before the task or after it, and the stream can continue."""

import copy
import random
from contextlib import suppress
from functools import partial

import pytest
import torch
from avalanche.training import DER, Naive
from avalanche.training.plugins import EWCPlugin, LwFPlugin, ReplayPlugin
from support import examples, interruptions
from support.strategies import NormedConvNet, learn, make, quiet, ranpac
from torch import nn

from avalanche_amnesia import DisjointSubnets
from avalanche_amnesia.benchmarks import SplitDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel
from avalanche_amnesia.training import WSN, AdaHAT, AmnesiacHAT
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.host.rollback import is_finishing
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

DIGITS = SplitDigits(n_train=150, n_test=50)
STREAM = with_unlearning(DIGITS, {2: [0]}).train_stream
IN_THE_MIDDLE = with_unlearning(DIGITS, [UnlearningRequest((0,), 2, "iteration", 1)]).train_stream
OPTIONS = {"train_mb_size": 10, "train_epochs": 1}


mlp = partial(MLP, 64, hidden=(12,), features=8)


def ours(kind, **options):
    return partial(make, kind, **{"net": mlp, **OPTIONS, **options})


def stock(kind, *, masks=list, plugins=list, **options):
    def given():
        return [SeedingPlugin(0), *masks(), TrajectoryPlugin(), UnlearningPlugin(), *plugins()]

    of_all = {"wrap": MultiHeadModel, "optimizer": "momentum", "criterion": nn.CrossEntropyLoss(), "evaluator": quiet}
    return ours(kind, plugins=given, **{**of_all, **options})


KINDS = {
    "no requests": ours(AdaHAT, net=NormedConvNet),
    "backup and repair": ours(AmnesiacHAT, compensation=BackupPlugin, repair=RepairPlugin),
    "int8": ours(
        AmnesiacHAT,
        trajectory=lambda: TrajectoryPlugin(dtype=torch.int8),
        unlearning=lambda: UnlearningPlugin(deadline=3),
    ),
    "weight pools": ours(DisjointSubnets, net=NormedConvNet),
    "wsn": ours(WSN, net=NormedConvNet),
    "pall": ours(PALL, repair_steps=3),
    "clpu": ours(CLPUDERpp, unlearning=lambda: UnlearningPlugin(deadline=1), merge_steps=3),
    "ranpac": lambda: ranpac(train_mb_size=10),
    "naive with masks": stock(Naive, wrap=MaskedModel, masks=lambda: [HATPlugin()]),
    "ewc, lwf and replay": stock(Naive, plugins=lambda: [EWCPlugin(1.0), LwFPlugin(1.0, 2.0), ReplayPlugin(20)]),
    "der": stock(DER, wrap=lambda net: nn.Sequential(net, nn.Linear(8, 2)), mem_size=20, batch_size_mem=5),
}


NOT_COPIED = {"der"}
"""The host's own loaders can't be copied in the middle of a training."""


def made(kind, stream):
    """A strategy that has trained two tasks, and the stream that it goes on with."""
    torch.manual_seed(0)
    random.seed(0)
    strategy = KINDS[kind]()
    # Without the plugin no request is obeyed; a deadline forbids it; DER renews logits with the half-trained model.
    if find_plugin(strategy, UnlearningPlugin) is None or kind in ("clpu", "der"):
        stream = DIGITS.train_stream
    learn(strategy, stream[:2])
    if kind == "ranpac":  # whose next training is of a further part of task 2
        learn(strategy, DIGITS.train_stream[2:3])
    return strategy, stream


def state_after(strategy, experience):
    """State of a strategy after one more task; the host draws from the global streams."""
    torch.manual_seed(1)
    random.seed(1)
    strategy.train(experience)
    return interruptions.comparable_state(strategy)


def sampled(things, kind, most):
    """Evenly spread sample, different for every kind of strategy because most lines are run by all kinds."""
    step = -(-len(things) // most)
    return things[list(KINDS).index(kind) % step :: step]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_COPIED])
def test_an_error_at_any_line_after_the_last_epoch_leaves_the_state_before_or_after_the_task(kind):
    strategy, stream = made(kind, STREAM)
    before = interruptions.comparable_state(copy.deepcopy(strategy))  # a copy's samples lie in a tensor of their own
    copied = interruptions.at_the_end_of(strategy, stream[2])
    copied()._after_training_exp()  # some lines run once in a process
    straight = copied()
    positions = interruptions.first_and_last(interruptions.lines_of(straight._after_training_exp))
    after = interruptions.comparable_state(straight)
    assert after != before
    later, undone = state_after(straight, stream[3]), 0
    for position in sampled(positions, kind, examples(10)):
        broken = copied()
        with pytest.raises(interruptions.Interrupted) as error, interruptions.interrupted_at(position):
            broken._after_training_exp()
        interruptions.give_up(broken)
        state = interruptions.comparable_state(broken)
        undone += state == before
        if state not in (before, after):  # finished, but its request still waits: it is obeyed before the next task
            assert state_after(broken, stream[3]) == later, error.value
    assert undone > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_interrupted_at_any_line_can_be_repeated(kind):
    """Task 0 is requested in the middle; after that, the repeated training is one without task 0."""

    first, stream = made(kind, IN_THE_MIDDLE)

    def fresh():
        return made(kind, IN_THE_MIDDLE)[0] if kind in NOT_COPIED else copy.deepcopy(first)

    state_after(fresh(), stream[2])  # some lines run once in a process
    straight = fresh()  # the last lines are those of the test above
    lines = len(interruptions.lines_of(lambda: state_after(straight, stream[2]))) * 19 // 20
    expected = {False: all_but_records(state_after(straight, stream[3]))}
    if 0 not in learned_tasks(straight):
        without = fresh()
        find_plugin(without, UnlearningPlugin).unlearn(without, [0])
        state_after(without, DIGITS.train_stream[2])
        expected[True] = all_but_records(state_after(without, DIGITS.train_stream[3]))
    draw = random.Random(kind)
    for _ in range(examples(1)):
        broken = fresh()
        position = draw.randrange(lines)
        with pytest.raises(interruptions.Interrupted) as error, interruptions.interrupted_at(position):
            state_after(broken, stream[2])
        if draw.random() < 0.5:
            with suppress(interruptions.Interrupted), interruptions.interrupted_at(draw.randrange(60)):
                interruptions.give_up(broken)
            interruptions.give_up(broken)
        repeated = 2 not in learned_tasks(broken)
        obeyed = repeated and 0 in getattr(find_plugin(broken, UnlearningPlugin), "ledger", TaskLedger()).unlearned
        if repeated:
            state_after(broken, stream[2])
        assert all_but_records(state_after(broken, stream[3])) == expected[obeyed], (error.value, position)


def all_but_records(state):
    # A repair's samples name the tasks that had a part in their logits, the one in training then among them.
    return {name: part for name, part in state.items() if name not in ("UnlearningPlugin", "RepairPlugin")}


def learned_tasks(strategy):
    plugin = find_plugin(strategy, UnlearningPlugin)
    if is_finishing(strategy):
        return ()
    tasks = strategy.model.masks if plugin is None else plugin.ledger.remaining
    part = getattr(strategy.model, "additive", False) and plugin.counters[2] == 2  # the third training
    return [task for task in tasks if not (task == 2 and part)]
