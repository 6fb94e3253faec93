"""Unlearning requests in a stream: their order, refused schedules, and the rules written a second time."""

from collections import Counter
from copy import copy

import pytest
from avalanche.benchmarks import CLScenario, EagerCLStream
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.ledger_oracle import LedgerOracle
from support.strategy_state import same

from avalanche_amnesia import RequestError, SplitDigits, TaskError, UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.requests import without_requests


def stream_of(labels: list[int]) -> CLScenario:
    """A benchmark whose train stream trains these task labels; a label may come twice."""
    source = tiny.blank(max(labels) + 1)
    experiences = []
    for label in labels:
        experience = copy(source.train_stream[label])
        experience.__dict__["_current_experience"] = copy(experience.__dict__["_current_experience"])
        experiences.append(experience)
    return CLScenario([EagerCLStream("train", experiences), source.test_stream])


def test_requests_are_sorted_by_the_time_of_execution():
    requests = [
        UnlearningRequest([3], 4),
        UnlearningRequest([0], 3, "iteration", 7),
        UnlearningRequest([2], 3, "iteration", 0),
        UnlearningRequest([1], 3, "before"),
        UnlearningRequest([4], 4),
    ]
    carried = [e.requests for e in with_unlearning(tiny.blank(), requests).train_stream]
    assert carried == [(), (), (), (requests[3], requests[2], requests[1]), (requests[0], requests[4])]


@pytest.mark.parametrize("make", [SplitDigits, tiny.of_avalanche])
def test_requests_are_carried_by_a_copy_with_the_same_data(make):  # traps 7 and 11
    benchmark = make()
    benchmark.note = "kept"
    result = with_unlearning(benchmark, {1: [0], 4: [2, 4]}, permanent=[1])
    assert [tuple(r.tasks for r in e.requests) for e in result.train_stream] == [(), ((0,),), (), (), ((2, 4),)]
    for name in ("note", "n_classes", "n_classes_per_exp"):
        assert getattr(result, name, None) == getattr(benchmark, name, None)
    assert list(result.streams) == ["train", "test"]
    for name, stream in benchmark.streams.items():
        twins = result.streams[name]
        assert stream.benchmark is stream[1:3].benchmark is benchmark
        assert twins.benchmark is twins[1:3].benchmark is result
        for position, (experience, twin) in enumerate(zip(stream, twins, strict=True)):
            assert experience is not twin
            assert not hasattr(experience, "requests")
            assert experience.origin_stream is stream
            assert twin.origin_stream is twins
            assert (experience.benchmark, twin.benchmark) == (benchmark, result)
            assert twin.task_labels == experience.task_labels == [position]
            assert twin.dataset is experience.dataset
            assert same(getattr(twin, "tensors", None), getattr(experience, "tensors", None))
            twin.current_experience = 99
            assert experience.current_experience == position
            twin.current_experience = position
    assert not hasattr(result.test_stream[0], "requests")


def carried(benchmark):
    return [(e.requests, e.permanent, e.deadline) for e in benchmark.train_stream]


def test_a_second_schedule_is_added_to_the_first():
    first = with_unlearning(tiny.blank(), {3: [1]}, permanent=[2], deadline=4)
    both = with_unlearning(first, {1: [0], 3: [3]}, permanent=[4])
    at_once = with_unlearning(tiny.blank(), {1: [0], 3: [1, 3]}, permanent=[2, 4], deadline=4)
    assert [tuple(t for r in e.requests for t in r.tasks) for e in both.train_stream] == [(), (0,), (), (1, 3), ()]
    assert [entry[1:] for entry in carried(both)] == [entry[1:] for entry in carried(at_once)]
    assert carried(with_unlearning(both)) == carried(both)
    assert carried(with_unlearning(first, deadline=4)) == carried(first)
    assert [e.requests for e in first.train_stream[:2]] == [(), ()]


def test_a_benchmark_without_its_requests_keeps_permanent_tasks():
    plain = without_requests(with_unlearning(tiny.blank(), {2: [1]}, permanent=[0], deadline=4))
    assert carried(plain) == [((), position == 0, 4) for position in range(5)]
    assert carried(without_requests(tiny.blank())) == [((), False, None)] * 5


def test_streams_without_task_labels_are_refused():
    benchmark = SplitDigits()
    benchmark.train_stream[2].task_labels = [2, 3]
    with pytest.raises(ValueError, match=r"train experience 2 has the task labels \[2, 3\]"):
        with_unlearning(benchmark, {})
    with pytest.raises(ValueError, match="no train stream"):
        with_unlearning(CLScenario([benchmark.test_stream]), {})


R = UnlearningRequest


def scheduled(requests, benchmark=None, **options):
    """Return a call that adds these requests to a benchmark."""
    return lambda: with_unlearning(benchmark or tiny.blank(), requests, **options)


def scheduled_again(requests, **options):
    """Return a call that adds a second schedule."""
    return scheduled(requests, with_unlearning(tiny.blank(), {2: [1]}, permanent=[0], deadline=4), **options)


REFUSED = [
    (scheduled({3: [7]}), r"after task 3: task 7 .* it is unknown \(known are 0, 1, 2, 3, 4\)"),
    (scheduled({1: [2]}), "after task 1: task 2 .* it is not yet trained"),
    (scheduled([R([2], 2, "before")]), "before task 2: task 2 .* it is not yet trained"),
    (scheduled([R([3], 2, "iteration", 4)]), "iteration 4 of task 2: task 3 .* it is not yet trained"),
    (scheduled([R([2], 2, "iteration", 40)]), "iteration 40 of task 2: task 2 is in training"),
    (scheduled({1: [1]}, permanent=[1]), "after task 1: task 1 .* it was declared permanent"),
    (scheduled({2: [0]}, deadline=2), r"after task 2: task 0 .* deadline has expired \(2 further"),
    (scheduled({2: [0], 3: [1, 0]}), "after task 3: task 0 .* it is already unlearned"),
    (scheduled([R([], 2)]), "after task 2: the request is empty"),
    (scheduled({2: [0, 0]}), "after task 2: task 0 is named more than once"),
    (scheduled({2: [True]}), r"after task 2: .*\[True\] are no tasks"),
    (scheduled({2: ["0"]}), r"after task 2: .*\['0'\] are no tasks"),
    (scheduled({5: [0]}), r"at=5 is no position .* allowed are 0 to 4"),
    (scheduled({True: [0]}), "at must be an int of at least 0, got True"),
    (scheduled([[0]]), r"\[0\] is no UnlearningRequest"),
    (scheduled({2: [R(task=0, samples=[1])]}), r"requests listed at position 2: give {2: …} or \[Unl.*at=2\)\]"),
    (scheduled({}, permanent=[0, 5]), r"permanent=\[0, 5\]: task 5 is unknown"),
    (scheduled({}, deadline=0), "deadline=0 is not allowed"),
    (scheduled({}, deadline=True), "deadline=True is not allowed"),
    (scheduled([R(task=0, at=1, classes=[7])], SplitDigits()), r"task 0 has no samples of classes \[7\]"),
    (scheduled([R(task=0, at=1, samples=[10**6])], SplitDigits()), r"and none at \[1000000\]"),
    (scheduled_again({3: [1]}), r"already unlearned.*carries requests already, \[1\] at position 2, and these"),
    (scheduled_again({}, permanent=[1]), "task 1 .* declared permanent.*the benchmark without requests"),
    (scheduled_again({}, deadline=2), "deadline=2: the benchmark carries deadline=4 already"),
    (lambda: R([0], -1), "at must be an int of at least 0, got -1"),
    (lambda: R([0], 1, "during"), "when must be one of 'after', 'before', 'iteration', got 'during'"),
    (lambda: R([0], 1, "after", 3), "iteration=3 don't go together: when='iteration' needs iteration"),
    (lambda: R([0], 1, "iteration"), "iteration=None don't go together"),
    (lambda: R([0], 1, "iteration", True), "iteration must be an int of at least 0, got True"),
    (lambda: R(0, 1), "0 are no tasks"),
    (lambda: R(task=1), "needs samples"),
    (lambda: R(task=1, samples=[-1]), "counted from 0"),
    (lambda: R(task=1, samples=["a"]), "give a list of ints"),
    (lambda: R(tasks=(0, 1), samples=[1]), "name one task"),
    (lambda: R(task=1, samples=[1], when="before"), "when='after'"),
    (scheduled([R((0,), 1), R(task=0, samples=[1], at=2)], SplitDigits()), "already unlearned"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_wrong_request_or_schedule_is_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make()


def test_a_task_may_be_learned_again_once_it_was_unlearned():
    result = with_unlearning(stream_of([0, 1, 0, 2]), {1: [0], 3: [0]})
    assert [e.task_label for e in result.train_stream] == [0, 1, 0, 2]
    parts = with_unlearning(stream_of([0, 1, 0, 2]), {3: [0]}).train_stream  # for a strategy that adds parts
    with pytest.raises(TaskError, match=r"task 0: 2 experiences of this stream .*as one: put AvalancheDataset\(\["):
        tiny.strategy().train(parts[0])
    with pytest.raises(RequestError, match=r"iteration 1 of task 0: task 0 is in training"):
        with_unlearning(stream_of([0, 1, 0]), [R([0], 1), R([0], 2, "iteration", 1)])


def allowed(labels, requests, permanent, deadline) -> bool:
    """Apply the rules event by event, without a ledger."""
    oracle = LedgerOracle(deadline)
    oracle.declared = set(permanent)
    for position, label in enumerate(labels):
        mine = [r for r in requests if r.at == position]
        iterations = sorted((r for r in mine if r.when == "iteration"), key=lambda r: r.iteration)
        for request in [r for r in mine if r.when == "before"] + iterations:
            if not oracle.allows(request.tasks):
                return False
            oracle.forget(request.tasks)
        if label not in oracle.order:  # else a part
            oracle.learn(label)
        for request in [r for r in mine if r.when == "after"]:
            if not oracle.allows(request.tasks):
                return False
            oracle.forget(request.tasks)
    return True


@st.composite
def schedules(draw):
    """Random schedules; allowed ones are drawn more often, because they are rare."""
    n_tasks = draw(st.integers(2, 5))
    labels = list(range(n_tasks))
    requests = []
    if draw(st.booleans()):
        labels.append(draw(st.sampled_from(labels)))
        if draw(st.booleans()):
            requests.append(UnlearningRequest([labels[-1]], n_tasks - 1))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(labels) - 1))
        tasks = draw(st.lists(st.integers(0, at), min_size=1, max_size=2, unique=draw(st.booleans())))
        when = draw(st.sampled_from(["after", "after", "before", "iteration"]))
        iteration = draw(st.integers(0, 3)) if when == "iteration" else None
        requests.append(UnlearningRequest(tasks, at, when, iteration))
    permanent = draw(st.just([]) | st.lists(st.sampled_from(labels), max_size=1))
    return labels, requests, permanent, draw(st.none() | st.integers(1, 4))


VERDICTS: Counter[tuple[bool, bool]] = Counter()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(schedules())
def check_against_the_slow_rules(schedule):
    labels, requests, permanent, deadline = schedule
    expected = allowed(*schedule)
    VERDICTS[expected, len(set(labels)) < len(labels)] += 1
    try:
        with_unlearning(stream_of(labels), requests, permanent, deadline)
    except RequestError:
        assert not expected
    else:
        assert expected


def test_a_schedule_is_accepted_exactly_if_the_slow_rules_allow_it():
    check_against_the_slow_rules()
    assert len(VERDICTS) == 4
    assert min(VERDICTS.values()) > 15, VERDICTS


def test_an_empty_request_in_a_mapping_is_no_request():
    benchmark = with_unlearning(SplitDigits(), {1: [], 2: [0]})
    assert [len(experience.requests) for experience in benchmark.train_stream] == [0, 0, 1, 0, 0]
