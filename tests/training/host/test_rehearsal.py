"""A rehearsal finds whatever remembers beside seed and task, and nothing else notices that there was one."""

import random

import numpy as np
import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.core import SupervisedPlugin
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from support.isolated_pools import NETS, pools
from support.strategies import DIGITS, NoMetric, amnesiac, learn, make
from support.strategy_state import bits, unchanged, unlearning_plugin
from torch import nn
from torch.utils.data import Dataset

from avalanche_amnesia import (
    WSN,
    AmnesiacHAT,
    DisjointSubnets,
    TaskError,
    UnlearningPlugin,
    task_benchmark,
    with_unlearning,
)
from avalanche_amnesia.training.host.rehearsal import look_at_task, rehearse_task

X, Y = DIGITS.train_stream[0].tensors
CLASSES = [[0, 1], [0, 1]]


class Items(Dataset):
    """Samples one by one, each through a function of its own making."""

    def __init__(self, change=lambda x: x):
        self.change, self.targets = change, Y.tolist()

    def __len__(self):
        return len(Y)

    def __getitem__(self, at):
        return self.change(X[at]), self.targets[at]


class Drawn:
    """Noise from a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        if isinstance(self.generator, torch.Generator):
            return x + torch.rand(x.shape, generator=self.generator)
        drawn = self.generator.random if hasattr(self.generator, "random") else self.generator.random_sample
        return x + drawn()


class Counted:
    """Adds the number of calls so far."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls


def counted_in_a_closure():
    calls = 0

    def change(x):
        nonlocal calls
        calls += 1
        return x * calls

    return change


STREAM = random.Random(3)
GLOBAL = [0]


def of_items(change):
    return task_benchmark(Items(change), Items(), CLASSES)


def of_tensors(change):
    return task_benchmark((X, Y), (X, Y), CLASSES, transforms=[change, change])


DATA = {
    "torch generator": lambda: of_items(Drawn(torch.Generator().manual_seed(1))),
    "numpy generator": lambda: of_items(Drawn(np.random.default_rng(1))),
    "numpy stream": lambda: of_items(Drawn(np.random.RandomState(1))),
    "python's generator": lambda: of_items(Drawn(random.Random(1))),
    "counter": lambda: of_items(Counted()),
    "closure": lambda: of_items(counted_in_a_closure()),
    "transform of tensors": lambda: of_tensors(Counted()),
    "generator of a transform of tensors": lambda: of_tensors(Drawn(torch.Generator().manual_seed(1))),
    "avalanche's data set": lambda: nc_benchmark(
        Items(Counted()), Items(), 2, True, seed=0, class_ids_from_zero_in_each_exp=True
    ),
}


def step_hook(strategy):
    change = counted_in_a_closure()

    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(change(1e-4))

    strategy.optimizer.register_step_post_hook(hook)


def gradient_hook(strategy):
    change = counted_in_a_closure()
    next(strategy.model.backbone.parameters()).register_hook(change)


def hook_behind_a_gradient(strategy):
    change = counted_in_a_closure()

    def hook(parameter):
        parameter.grad.add_(1e-3 * change(1))

    next(strategy.model.backbone.parameters()).register_post_accumulate_grad_hook(hook)


def forward_hook(strategy):
    change = counted_in_a_closure()
    strategy.model.register_forward_hook(lambda module, x, y: change(y))


def patched_step(strategy):
    step, change = strategy.optimizer.step, counted_in_a_closure()

    def other(*args):
        strategy.optimizer.param_groups[0]["lr"] = 1e-3 * change(1)
        return step(*args)

    strategy.optimizer.step = other


def loss_over_a_counter(strategy):
    change = counted_in_a_closure()
    strategy._criterion = lambda logits, y: change(nn.functional.cross_entropy(logits, y))


def loss_over_a_global_counter(strategy):
    def loss(logits, y):
        GLOBAL[0] += 1
        return nn.functional.cross_entropy(logits, y) * GLOBAL[0]

    strategy._criterion = loss


def loss_over_a_stream(strategy):
    strategy._criterion = lambda logits, y: nn.functional.cross_entropy(logits, y) * STREAM.random()


def counting_module(strategy):
    class Counts(type(strategy.model.backbone)):
        calls = 0

        def forward(self, *args):
            Counts.calls += 1
            return super().forward(*args) * Counts.calls

    strategy.model.backbone.__class__ = Counts


HOOKS = [
    *(step_hook, gradient_hook, hook_behind_a_gradient, forward_hook, patched_step, counting_module),
    *(loss_over_a_counter, loss_over_a_global_counter, loss_over_a_stream),
]


@pytest.mark.parametrize("method", [AmnesiacHAT, DisjointSubnets])
@pytest.mark.parametrize("data", DATA)
def test_data_with_a_memory_of_its_own_is_told(data, method):
    strategy = learn(make(method), DATA[data]().train_stream)
    (reason,) = strategy.plan_unlearning([1]).reasons
    assert reason.startswith("the training is not repeatable: its data")


@pytest.mark.parametrize("hook", HOOKS)
def test_whatever_remembers_in_a_step_is_told(hook):
    strategy = amnesiac()
    hook(strategy)
    learn(strategy, DIGITS.train_stream[:2])
    reasons = strategy.plan_unlearning([1]).reasons
    assert [reason for reason in reasons if reason.startswith("the training is not repeatable: ")], reasons
    assert [reason for reason in reasons if " differed after step 1" in reason], reasons


class CountsItsLosses(DisjointSubnets):
    """A user's strategy whose loss depends on how often it was asked for."""

    calls = 0

    def criterion(self):
        self.calls += 1
        return super().criterion() * self.calls


def test_what_a_strategy_of_the_user_s_remembers_is_told_and_sees_one_training():
    found = []
    for trial in (True, False):
        strategy = pools(unlearning=UnlearningPlugin(trial=trial))
        strategy.__class__ = CountsItsLosses
        learn(strategy, DIGITS.train_stream[:2])
        found.append((bits(strategy.model), strategy.calls))
        (reason,) = strategy.plan_unlearning([1]).reasons
        assert reason.startswith("the training is not repeatable: the loss" if trial else "trial=False")
    assert found[0] == found[1]


class Clips(SupervisedPlugin):
    repeatable = True

    def after_backward(self, strategy, **kwargs):
        nn.utils.clip_grad_norm_(strategy.model.parameters(), 0.1)


CLEAN = {
    "tensors": lambda: DIGITS,
    "items": lambda: of_items(lambda x: x),
    "global noise": lambda: of_items(lambda x: x + torch.rand(x.shape) + random.random() + np.random.rand()),  # noqa: NPY002
    "avalanche's data set": lambda: nc_benchmark(
        Items(), Items(), 2, True, seed=0, class_ids_from_zero_in_each_exp=True
    ),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("data", CLEAN)
def test_of_a_clean_training_nothing_is_told(net, data):
    strategy = pools(net, plugins=[Clips()], train_epochs=1)
    learn(strategy, CLEAN[data]().train_stream[:2])
    assert strategy.unlearn([0]).claim == "exact"


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["an epoch", "a task"])
def test_workers_draw_as_they_would_without_a_rehearsal(options):
    found = []
    for trial in (True, False):
        strategy = pools(unlearning=UnlearningPlugin(trial=trial))
        strategy.train(CLEAN["global noise"]().train_stream[0], num_workers=1, **options)
        found.append(bits(strategy.model))
        strategy.train(CLEAN["global noise"]().train_stream[1], num_workers=1, **options)
        assert (strategy.plan_unlearning([0]).claim == "exact") == trial
    assert found[0] == found[1]


class Sees(SupervisedPlugin):
    """A user's plugin that counts every event of a training, prints and writes."""

    repeatable = True

    def __init__(self):
        super().__init__()
        self.events, self.losses = [], []

    def before_training_epoch(self, strategy, **kwargs):
        self.events.append("epoch")

    def after_training_iteration(self, strategy, **kwargs):
        self.events.append(strategy.clock.train_iterations)
        self.losses.append(float(strategy.loss))
        print("a step")  # noqa: T201


class SeesSteps(NoMetric):
    steps = 0

    def before_training_iteration(self, strategy):
        self.steps += 1


class SeesLogs(BaseLogger):
    steps = 0

    def after_training_iteration(self, strategy, metric_values, **kwargs):
        self.steps += 1


def lived(trial, optimizer="adam", data=lambda: DIGITS, method=AmnesiacHAT, **options):
    """What two tasks leave, and all that a user saw of them."""
    sees, metric, logger = Sees(), SeesSteps(), SeesLogs()
    evaluator = EvaluationPlugin(metric, loggers=[logger])
    options |= {"plugins": [sees], "evaluator": evaluator, "unlearning": UnlearningPlugin(trial=trial)}
    torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
    strategy = make(method, optimizer=optimizer, **options)
    benchmark = data()
    for experience in benchmark.train_stream[:2]:
        if trial:  # outside of a training too
            rehearse_task(strategy, experience, 3)
            look_at_task(strategy, experience, 3)
        strategy.train(experience)
    seen = [sees.events, sees.losses, metric.steps, logger.steps, vars(strategy.clock).copy()]
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
    samples = benchmark.train_stream[0].dataset._datasets[0] if data is not CLEAN["tensors"] else None
    return bits(strategy.model), seen, drawn, strategy, samples


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"method": DisjointSubnets}, {"adjustment": "random"}, {"net": NETS["norms"]}, {"method": WSN}],
    ids=["shared", "pools", "random rule", "norms", "WSN"],
)
def test_a_rehearsed_training_is_the_same_to_the_bit_and_seen_once(optimizer, options, capsys):
    rehearsed = lived(True, optimizer, **options)
    printed = capsys.readouterr().out
    plain = lived(False, optimizer, **options)
    assert rehearsed[:3] == plain[:3]
    assert printed == capsys.readouterr().out


@pytest.mark.parametrize("data", DATA)
def test_a_user_s_counters_and_generators_see_one_training(data):
    assert lived(True, data=DATA[data])[:3] == lived(False, data=DATA[data])[:3]


@pytest.mark.parametrize(
    "hook",
    [step_hook, gradient_hook, hook_behind_a_gradient, forward_hook, patched_step, loss_over_a_counter],
)
def test_what_remembers_in_a_step_sees_one_training(hook):
    found = []
    for trial in (True, False):
        strategy = amnesiac(unlearning=UnlearningPlugin(trial=trial))
        hook(strategy)
        strategy.train(DIGITS.train_stream[0])
        found.append(bits(strategy.model))
    assert found[0] == found[1]


def test_without_a_rehearsal_nothing_is_called_exact():
    strategy = learn(pools(unlearning=UnlearningPlugin(trial=False)), DIGITS, 2)
    (reason,) = strategy.plan_unlearning([0]).reasons
    assert "trial=False" in reason
    assert strategy.unlearn([0]).claim == "approximate"


@pytest.mark.parametrize(("given", "steps"), [(True, 3), (False, 0), (5, 5), (0, 0)])
def test_the_number_of_steps(given, steps):
    assert UnlearningPlugin(trial=given).trial == steps


@pytest.mark.parametrize("given", [-1, 1.5, "yes", None])
def test_another_number_of_steps_is_refused(given):
    with pytest.raises(ValueError, match="trial must be an int"):
        UnlearningPlugin(trial=given)


@pytest.mark.parametrize("trial", [2, 4])
def test_as_many_steps_are_rehearsed_as_are_asked_for_and_none_where_nothing_could_be_claimed(trial):
    taken = {}
    for declared in (True, False):
        GLOBAL[0] = 0
        plugin = type("Plugin", (SupervisedPlugin,), {"repeatable": declared})()
        strategy = amnesiac(plugins=[plugin], train_mb_size=10, unlearning=UnlearningPlugin(trial=trial))
        strategy.optimizer.register_step_post_hook(lambda *_: GLOBAL.__setitem__(0, GLOBAL[0] + 1))
        strategy.train(DIGITS.train_stream[0])
        taken[declared] = GLOBAL[0]
    assert taken[True] - taken[False] == 2 * trial


def test_a_fault_that_shows_in_the_rehearsal_is_the_fault_of_the_task():
    benchmark = with_unlearning(task_benchmark(Items(lambda x: x * float("nan")), Items(), CLASSES), {})
    strategy = amnesiac()
    with unchanged(lambda: bits(strategy.model)), pytest.raises(TaskError):
        strategy.train(benchmark.train_stream[0])
    strategy.train(DIGITS.train_stream[0])
    assert unlearning_plugin(strategy).ledger.remaining == (0,)


def test_a_training_that_needs_a_user_s_plugin_is_not_claimed_and_trains():
    class Weighs(SupervisedPlugin):
        repeatable, weight = True, None

        def before_forward(self, strategy, **kwargs):
            self.weight = 2.0

        def after_update(self, strategy, **kwargs):
            self.weight = None

    weighs = Weighs()
    strategy = pools(plugins=[weighs], train_epochs=1)
    strategy._criterion = lambda logits, y: weighs.weight * nn.functional.cross_entropy(logits, y)
    learn(strategy, DIGITS.train_stream[:2])
    (reason,) = strategy.plan_unlearning([1]).reasons
    assert reason.startswith("the training could not be rehearsed without plugins of others: TypeError")
