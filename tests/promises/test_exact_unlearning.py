"""Weight pools: after any requests the state equals, bit for bit, that of a model that never saw the tasks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from support.fault_injection import FailsAtEvent, InjectedError
from support.isolated_pools import ITERATIONS, N_TASKS, NETS, equal, pools, references
from support.strategies import DIGITS, OPTIMIZERS, Hears, RunningScale, amnesiac, learn
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import UnlearningRequest, with_unlearning
from avalanche_amnesia.ledger import TaskLedger
from avalanche_amnesia.unlearning.purging import UnknownStateError

# Any sequence of tasks ---------------------------------------------------------------------------------------------

ANY_METHOD = st.fixed_dictionaries(
    {"net": st.sampled_from(list(NETS)), "optimizer": st.sampled_from(list(OPTIMIZERS))},
    optional={"seed": st.integers(1, 9)},
)


@st.composite
def schedules(draw):
    """Permanent tasks, a deadline, and requests before, after and in the middle of tasks, as the rules allow them."""
    permanent = draw(st.sets(st.integers(0, N_TASKS - 1), max_size=2))
    deadline = draw(st.sampled_from([None, None, 1, 2, 3]))
    ledger, requests = TaskLedger(deadline), []

    def ask(position: int, when: str) -> None:
        may = list(ledger.unlearnable)
        if may and draw(st.booleans()):
            tasks = draw(st.lists(st.sampled_from(may), min_size=1, max_size=2, unique=True))
            iteration = draw(st.integers(0, ITERATIONS - 1)) if when == "iteration" else None
            requests.append(UnlearningRequest(tuple(tasks), position, when, iteration))
            ledger.forget(tasks)

    for position in range(N_TASKS):
        ask(position, "before" if draw(st.booleans()) else "iteration")
        ledger.learn(position, permanent=position in permanent)
        ask(position, "after")
    return {"requests": requests, "permanent": sorted(permanent), "deadline": deadline}


@settings(max_examples=examples(6), deadline=None, derandomize=True)
@given(schedules(), ANY_METHOD, st.data())
def test_any_requests_in_any_stream_give_the_retrained_model(schedule, method, data):
    benchmark = with_unlearning(DIGITS, **schedule)
    strategy, refs = pools(**method), references(benchmark, **method)
    for experience in benchmark.train_stream:
        strategy.train(experience)
        if data.draw(st.integers(0, 3), "look") == 0:
            assert equal(strategy, refs)
    if may := unlearning_plugin(strategy).ledger.unlearnable:
        strategy.unlearn(data.draw(st.lists(st.sampled_from(may), min_size=1, unique=True), "at the end"))
    gone = sorted(set(unlearning_plugin(strategy).ledger.unlearned) - set(schedule["permanent"]))
    if gone:  # one is learned again, as a new task at the end
        strategy.train(with_unlearning(DIGITS, {}, schedule["permanent"], schedule["deadline"]).train_stream[gone[0]])
    assert equal(strategy, refs)
    assert {record.claim for record in unlearning_plugin(strategy).records} <= {"exact"}


@settings(max_examples=examples(6), deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 99), min_size=6, max_size=9), st.sampled_from([None, 1]))
def test_exact_claims_hold_in_any_order_of_training(draws, deadline):
    """Out of the stream's order a task may be read before its deadline: its unlearning is then no longer exact."""
    benchmark = with_unlearning(DIGITS, {}, deadline=deadline)
    strategy, refs = pools(train_epochs=1), references(benchmark, train_epochs=1)
    for number in draws:
        may = unlearning_plugin(strategy).ledger.unlearnable
        left = [task for task in range(N_TASKS) if task not in unlearning_plugin(strategy).ledger.remaining]
        if may and (number % 2 or not left):
            claim = strategy.unlearn([may[number % len(may)]]).claim
            assert claim == "exact" or deadline is not None
            assert claim == "approximate" or equal(strategy, refs)
        elif left:
            strategy.train(benchmark.train_stream[left[number % len(left)]])


# State that outlives a task ----------------------------------------------------------------------------------------


def test_a_criterion_with_learned_state_is_refused():
    strategy = learn(pools(criterion=RunningScale()), DIGITS.train_stream[:2])
    before = bits(strategy.model)
    with pytest.raises(UnknownStateError, match=r"RunningScale \(in its \.?mean\)"):
        strategy.unlearn([0])
    assert bits(strategy.model) == before
    record = strategy.unlearn([0], allow_unknown=True)
    assert (record.claim, record.plan.unpurged) == ("approximate", ("RunningScale",))


@torch.no_grad()
def add_to_finished_tasks(strategy):
    for task in strategy.model.masked_tasks:
        own = strategy.model.heads[task]
        for tensor in (*own.parameters(), *own.buffers()):
            tensor.add_(1)


def test_what_a_plugin_writes_into_finished_tasks_is_undone_when_a_task_ends_or_is_aborted():
    def in_the_second_step_of_the_fourth_task(made):
        return len(made.model.tasks) == 4 and made.clock.train_exp_iterations == 1

    fails = FailsAtEvent("after_update", when=in_the_second_step_of_the_fourth_task)
    writes = Hears(after_update=add_to_finished_tasks)
    strategy, without = (amnesiac(net=NETS["norms"], plugins=of) for of in ([writes, fails], []))
    for experience in DIGITS.train_stream[:3]:
        strategy.train(experience)
        without.train(experience)
        assert bits(strategy.model) == bits(without.model)
    with pytest.raises(InjectedError):
        strategy.train(DIGITS.train_stream[3])
    assert bits(strategy.model) != bits(without.model)
    strategy.abort_training()
    assert bits(strategy.model) == bits(without.model)


@pytest.mark.parametrize("option", ["lr", "train_epochs"])
def test_tasks_trained_at_other_settings_are_not_unlearned_exactly(option):
    """A retrained model would come to them at another setting."""
    strategy = learn(pools(train_epochs=1), DIGITS, 1)
    holder = strategy.optimizer.param_groups[0] if option == "lr" else vars(strategy)
    holder[option] *= 2
    learn(strategy, DIGITS, [1, 2])
    assert strategy.plan_unlearning([1]).claim == "approximate"
    # The remaining task was trained at the first settings, but the code that changed them may count tasks.
    assert strategy.plan_unlearning([1, 2]).claim == "conditional"
