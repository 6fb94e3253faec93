"""Unlearning requests of a stream: when they are obeyed, which are refused, and requests in the middle of a task."""

import pytest
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from support.strategies import DIGITS, Hears, amnesiac, learn, make, stock, trained
from support.strategy_state import bits, fingerprint, initial_values, stray, trajectory, unlearning_plugin

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

PER_EPOCH = 2  # batches of the 79 to 80 samples of tasks 0, 1, 3 and 4; task 2 has a third
BEFORE_TASK_3 = 2 * (2 + 2 + 3)


class Diary(SupervisedPlugin):
    """Notes what happens, in order; can break a training off."""

    def __init__(self, breaks_at=None):
        super().__init__()
        self.lines, self.iterations, self.breaks_at = [], 0, breaks_at

    def before_training_exp(self, strategy, **kwargs):
        self.iterations = 0
        self.lines.append(("train", strategy.experience.task_label))

    def after_training_iteration(self, strategy, **kwargs):
        self.iterations += 1
        if self.breaks_at == (strategy.experience.task_label, self.iterations):
            raise KeyboardInterrupt

    def after_training_exp(self, strategy, **kwargs):
        self.lines.append(("trained", strategy.experience.task_label))

    def after_unlearning(self, strategy, **kwargs):
        plan = unlearning_plugin(strategy).current
        self.lines.append((plan.event, plan.tasks, self.iterations))


def run(requests, *, benchmark=DIGITS, n=5, diary=None, make=amnesiac, **options):
    diary = Diary() if diary is None else diary
    options = {"plugins": [diary], **({"train_epochs": 2} if make is amnesiac else {"epochs": 2}), **options}
    strategy = make(**options)
    schedule = options.pop("schedule", {})
    stream = with_unlearning(benchmark, requests, **schedule).train_stream
    learn(strategy, stream[:n])
    return strategy, diary


@pytest.mark.parametrize(("make", "iteration"), [(amnesiac, 0), (stock, PER_EPOCH - 1), (amnesiac, 2 * PER_EPOCH - 1)])
def test_requests_are_obeyed_before_a_task_at_an_iteration_and_after_it(make, iteration):
    requests = [
        UnlearningRequest((3, 1), 3),
        UnlearningRequest((2,), 3, "iteration", iteration),
        UnlearningRequest((0,), 3, "before"),
    ]
    strategy, diary = run(requests, make=make)
    at = 6
    assert diary.lines[at][:2] == ("before task 3", (0,))
    assert diary.lines[at + 1] == ("train", 3)
    assert diary.lines[at + 2] == (f"iteration {iteration} of task 3", (2,), iteration)
    assert diary.lines[at + 3] == ("trained", 3)
    assert diary.lines[at + 4] == ("after task 3", (3, 1), 2 * PER_EPOCH)
    assert unlearning_plugin(strategy).ledger.remaining == (4,) == trajectory(strategy).tasks
    records = unlearning_plugin(strategy).records
    assert [r.n_trained for r in records] == [3, 3, 4]
    assert [r.iteration for r in records] == [BEFORE_TASK_3, BEFORE_TASK_3 + iteration, BEFORE_TASK_3 + 2 * PER_EPOCH]


@pytest.mark.parametrize("make", [amnesiac, stock])
def test_an_iteration_that_never_comes_is_refused_before_any_training(make):
    last = 2 * PER_EPOCH
    stream = with_unlearning(DIGITS, [UnlearningRequest((1,), 3, "iteration", last + 1)]).train_stream
    strategy = make(**({"train_epochs": 2} if make is amnesiac else {"epochs": 2}))
    before = bits(strategy.model)
    for given in (stream[0], stream):
        with pytest.raises(RequestError, match=rf"iteration {last + 1} of task 3 never comes.*0 to \d+"):
            strategy.train(given)
    assert bits(strategy.model) == before
    assert strategy.clock.train_iterations == 0
    assert unlearning_plugin(strategy).current_task is None


def test_permanent_and_deadline_come_from_the_stream():
    stream = with_unlearning(DIGITS, {}, permanent=[1], deadline=2).train_stream
    strategy = learn(amnesiac(train_epochs=1), stream[:4])
    for task, why in (
        (1, "declared permanent"),
        (0, r"deadline has expired \(2 further tasks"),
        (4, "not yet trained"),
    ):
        before = fingerprint(strategy)
        for ask in (strategy.unlearn, strategy.plan_unlearning):
            with pytest.raises(RequestError, match=rf"after 4 trainings: task {task} .* {why}"):
                ask([3, task])
        assert fingerprint(strategy) == before
    strategy.mark_permanent([3])
    with pytest.raises(RequestError, match="declared permanent"):
        strategy.unlearn([3])
    assert strategy.unlearn([2]).remaining == (0, 1, 3)


def test_the_plugin_s_deadline_overrides_the_stream_s():
    strategy = amnesiac(train_epochs=1, unlearning=UnlearningPlugin(deadline=1))
    learn(strategy, with_unlearning(DIGITS, {}, deadline=4).train_stream[:2])
    assert unlearning_plugin(strategy).ledger.permanent == {0}


def test_without_a_trajectory_nothing_is_trained():
    strategy = make(Naive, optimizer="sgd", plugins=[UnlearningPlugin()])
    with pytest.raises(RequestError, match="records no trajectory"):
        strategy.train(DIGITS.train_stream[0])
    assert strategy.clock.train_iterations == 0


# In the middle of a task ----------------------------------------------------------------------------------------


def test_entries_of_an_unlearned_task_are_free_for_the_task_in_training():
    strategy = amnesiac(train_epochs=2)
    initial = initial_values(strategy.model)
    stream = with_unlearning(DIGITS, [UnlearningRequest((0, 1), 2, "iteration", 0)]).train_stream
    learn(strategy, stream[:3])
    assert stray(strategy.model, initial) == []
    assert tuple(strategy.model.masks) == (2,)
    assert unlearning_plugin(strategy).records[0].claim == "approximate"
    assert strategy.plan_unlearning([2]).claim == "exact"
    strategy.train(stream[3])
    # task 2 began in a state that no retrained model has
    assert strategy.unlearn([3]).claim == "approximate"
    assert strategy.unlearn([2]).claim == "exact"


def test_the_mini_batch_survives_an_evaluation_inside_the_request():
    evaluates = Hears(after_unlearning=lambda strategy: strategy.eval(DIGITS.test_stream))
    requests = [UnlearningRequest((0,), 1, "iteration", 2)]
    with_eval, _ = run(requests, n=2, plugins=[evaluates])
    without, _ = run(requests, n=2, plugins=[])
    assert bits(with_eval.model) == bits(without.model)


@pytest.mark.parametrize("event", ["before_training_exp", "after_update", "after_training_exp"])
def test_a_plugin_that_unlearns_during_a_training_is_refused_with_a_remedy(event):
    def ask(strategy):
        if strategy.experience.task_label == 1:
            with pytest.raises(RequestError, match=r"task 1 is in training(.|\n)*when='iteration'"):
                strategy.unlearn([0])
            asked.append(event)

    asked = []
    strategy = trained(2, plugins=[Hears(**{event: ask})], train_epochs=1)
    assert asked
    assert unlearning_plugin(strategy).ledger.remaining == (0, 1)
    assert unlearning_plugin(strategy).records == []


# Interrupted trainings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["abort", "train on"])
def test_after_an_interruption_an_unlearning_needs_the_training_given_up(finish):
    strategy = trained(1, plugins=[Diary(breaks_at=(1, 2))], train_epochs=1)
    before = bits(strategy.model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(DIGITS.train_stream[1])
    with pytest.raises(RequestError, match=r"task 1 is in training, or was interrupted.*abort_training"):
        strategy.unlearn([0])
    if finish == "abort":
        strategy.abort_training()
        assert bits(strategy.model) == before
        strategy.eval(DIGITS.test_stream)  # task 1 has no head
        strategy.abort_training()
    else:
        strategy.train(DIGITS.train_stream[2])
        other = learn(amnesiac(plugins=[Diary()], train_epochs=1), [DIGITS.train_stream[task] for task in (0, 2)])
        assert bits(strategy.model) == bits(other.model)
        strategy.unlearn([2])
    strategy.unlearn([0])
    assert unlearning_plugin(strategy).ledger.remaining == ()
    assert trajectory(strategy).tasks == ()


def test_a_refused_request_before_a_task_leaves_the_strategy_usable():
    strategy = amnesiac(train_epochs=1)
    stream = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "before")]).train_stream
    strategy.train(stream[0])
    strategy.mark_permanent([0])
    before = fingerprint(strategy)
    with pytest.raises(RequestError, match="before task 1: task 0 can't be unlearned: it was declared permanent"):
        strategy.train(stream[1])
    assert fingerprint(strategy) == before
    strategy.eval(DIGITS.test_stream)  # task 1 has no head
    strategy.train(DIGITS.train_stream[1])
