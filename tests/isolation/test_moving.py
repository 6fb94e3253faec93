"""Pools that move: a task takes any free slot, and still the state is that of a model that never saw the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.isolated_pools import N_TASKS, NETS, equal, pools, references
from support.strategies import DIGITS, OPTIMIZERS
from support.strategy_state import bits, fingerprint, trajectory, unlearning_plugin
from support.thoroughness import examples
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.contrib.residue_search import audit
from avalanche_amnesia.isolation import CapacityError, Pools
from avalanche_amnesia.isolation.relocation import Relocation
from avalanche_amnesia.isolation.slots import SlotError, SlotTables
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import HAT
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import HATPlugin, TrajectoryPlugin
from avalanche_amnesia.trajectory import Trajectory


class ResidualNet(nn.Module):
    """A small ResNet with BatchNorm, global pooling and a shortcut that changes the width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.first_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12)
        self.shortcut, self.shortcut_norm = nn.Conv2d(8, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.first_norm(self.first(x)))
        x = torch.relu(self.shortcut_norm(self.shortcut(x)) + self.second_norm(self.second(x)))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


@pytest.fixture(autouse=True)
def nets(monkeypatch):
    monkeypatch.setitem(NETS, "resnet", ResidualNet)


def relocation(strategy) -> Relocation:
    found = find_plugin(strategy, HATPlugin).allocator.relocation
    assert found is not None
    return found


@torch.no_grad()
def logits(strategy) -> dict[int, Tensor]:
    strategy.model.eval()
    tasks = unlearning_plugin(strategy).ledger.remaining
    return {task: strategy.model(DIGITS.test_stream[task].tensors[0], task) for task in tasks}


def unlearn(strategy, tasks) -> None:
    """Unlearn; tasks that don't move keep the bits of their logits, those that do are off by rounding alone."""
    before = logits(strategy)
    record = strategy.unlearn(tasks)
    assert record.claim == "exact"
    for task, after in logits(strategy).items():
        if task in record.plan.moved:
            assert torch.allclose(after, before[task], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(after, before[task])


# Any sequence of tasks ---------------------------------------------------------------------------------------------

ANY_METHOD = st.fixed_dictionaries(
    {
        "net": st.sampled_from(["mlp", "dropout", "conv", "norms", "resnet"]),
        "optimizer": st.sampled_from(list(OPTIMIZERS)),
        "adjustment": st.sampled_from(["hat", "hat", "adahat", "random"]),
        "slots": st.integers(2, 4),
    },
    optional={"sparsity_weight": st.just(0.5), "embedding_init": st.sampled_from(["normal", "sparse"])},
)


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(ANY_METHOD, st.sets(st.integers(0, N_TASKS - 1), max_size=2), st.data())
def test_any_life_with_fewer_slots_than_tasks_leaves_the_reference(method, permanent, data):
    """Tasks in any order, learned again, and unlearned one or several at a time, between and in the middle of tasks."""
    benchmark = with_unlearning(DIGITS, {}, sorted(permanent))
    strategy, refs = pools(**method), references(benchmark, **method)
    ledger = unlearning_plugin(strategy).ledger
    for _ in range(data.draw(st.integers(3, 6), "events")):
        ledger = unlearning_plugin(strategy).ledger
        may, left = ledger.unlearnable, [task for task in range(N_TASKS) if task not in ledger.remaining]
        task = data.draw(st.sampled_from(left), "task") if left else None
        full = bool(ledger.remaining) and len(may) == len(relocation(strategy).places) and task not in permanent
        if task is None or full or (may and data.draw(st.integers(0, 2), "unlearn") == 0):
            unlearn(strategy, data.draw(st.lists(st.sampled_from(may), min_size=1, unique=True), "gone"))
            continue
        experience, gone = benchmark.train_stream[task], None
        if may and data.draw(st.integers(0, 2), "in the middle") == 0:
            gone = data.draw(st.lists(st.sampled_from(may), min_size=1, max_size=2, unique=True), "gone")
            iteration = data.draw(st.integers(0, 3), "iteration")
            experience.requests = (UnlearningRequest(tuple(gone), task, "iteration", iteration),)
        strategy.train(experience)
        experience.requests = ()
        if data.draw(st.integers(0, 3), "look") == 0:
            assert equal(strategy, refs)
    assert equal(strategy, refs)
    assert {record.claim for record in unlearning_plugin(strategy).records} <= {"exact"}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(1, 2), st.sampled_from(["mlp", "norms"]), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_tasks_past_their_deadline_move_with_their_readers(deadline, net, draws):
    benchmark = with_unlearning(DIGITS, {}, permanent=[3], deadline=deadline)
    options = {"net": net, "slots": 5, "adjustment": "adahat"}
    strategy, refs = pools(**options), references(benchmark, **options)
    for experience, number in zip(benchmark.train_stream, [0, *draws], strict=True):
        strategy.train(experience)
        may = unlearning_plugin(strategy).ledger.unlearnable
        if may and number % 2:
            unlearn(strategy, [may[number % len(may)]])
    assert equal(strategy, refs)


def test_a_task_fits_wherever_a_slot_is_free():
    strategy, refs = pools(slots=3), references(slots=3)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    plan = strategy.plan_unlearning([1])
    assert (plan.claim, plan.moved) == ("exact", (2,))
    unlearn(strategy, [1])
    assert equal(strategy, refs)
    strategy.train(DIGITS.train_stream[3])  # whose label names the slot of task 0
    assert equal(strategy, refs)
    with pytest.raises(CapacityError, match=r"task 4 finds none of 3 slots free: tasks \[0, 2, 3\] hold them"):
        strategy.train(DIGITS.train_stream[4])
    assert equal(strategy, refs)
    unlearn(strategy, [0, 2])
    strategy.train(DIGITS.train_stream[1])
    assert equal(strategy, refs)
    assert [held.tasks for held in relocation(strategy).held.values()] == [(3,), (1,)]


def test_a_run_without_records_is_the_same_reference():
    strategy = pools("norms", slots=3)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    unlearn(strategy, [0])
    torch.manual_seed(0)
    model = MaskedModel(NETS["norms"]())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    learned_alike = {"budget": "even", "s_max": 100.0, "embedding_lr": 0.02, "fit_head": True}
    moving = Pools(slots=3, moving=True)
    plain = HAT(model=model, optimizer=optimizer, train_mb_size=40, train_epochs=2, **learned_alike, isolation=moving)
    for task in (1, 2):
        plain.train(DIGITS.train_stream[task])
    assert bits(plain.model) == bits(strategy.model)


def test_while_a_task_trains_the_others_answer_as_before():
    """They lie elsewhere then, with everything that is theirs."""
    benchmark = with_unlearning(DIGITS, {}, permanent=[2])
    strategy, seen = pools("norms", slots=4), []

    for task in (0, 1, 2):
        strategy.train(benchmark.train_stream[task])
    before, state = logits(strategy), bits(strategy.model)
    trained = strategy.training_epoch

    def look(**kwargs) -> None:
        seen.append((logits(strategy), bits(strategy.model)))
        strategy.model.train()
        trained(**kwargs)

    with patch.object(strategy, "training_epoch", look):
        strategy.train(benchmark.train_stream[3])
    for task, values in before.items():
        assert torch.allclose(seen[-1][0][task], values, rtol=1e-4, atol=1e-5)
    assert any(seen[-1][1][name] != value for name, value in state.items())  # else nothing lay elsewhere
    after = logits(strategy)
    assert all(torch.equal(after[task], values) for task, values in before.items())


# As a whole or not at all ------------------------------------------------------------------------------------------


class InjectedError(BaseException):
    pass


@contextmanager
def failing(owner, name: str, behind: bool) -> Iterator[None]:
    original = getattr(owner, name)

    def fails(*args, **kwargs) -> None:
        if behind:
            original(*args, **kwargs)
        raise InjectedError(name)

    with patch.object(owner, name, fails), pytest.raises(InjectedError):
        yield


STEPS = [(Relocation, "_at_rest"), (Relocation, "_move"), (Trajectory, "rearrange"), (Relocation, "rearrange")]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("owner", "name"), STEPS)
def test_a_failure_in_the_middle_of_a_move_leaves_everything_as_it_was(owner, name, behind):
    strategy, refs = pools("norms", slots=3), references(net="norms", slots=3)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    before, held = fingerprint(strategy), dict(relocation(strategy).held)
    with failing(owner, name, behind):
        strategy.unlearn([1])
    assert fingerprint(strategy) == before
    assert relocation(strategy).held == held
    unlearn(strategy, [1])
    strategy.train(DIGITS.train_stream[3])
    assert equal(strategy, refs)


@pytest.mark.parametrize(("owner", "name"), [(Relocation, "_freed"), (Relocation, "_move"), (Trajectory, "rearrange")])
def test_a_training_interrupted_by_a_failing_request_is_given_up_whole(owner, name):
    benchmark = with_unlearning(DIGITS, [UnlearningRequest((0,), 3, "iteration", 2)])
    strategy, refs = pools("norms", slots=4), references(net="norms", slots=4)
    for experience in benchmark.train_stream[:3]:
        strategy.train(experience)
    state = bits(strategy.model)
    original = getattr(owner, name)
    inside = []

    def fails(self, *args, **kwargs):
        if unlearning_plugin(strategy).current is not None:
            inside.append(True)
            raise InjectedError(name)
        return original(self, *args, **kwargs)

    with patch.object(owner, name, fails), pytest.raises(InjectedError):
        strategy.train(benchmark.train_stream[3])
    assert inside
    strategy.abort_training()
    assert bits(strategy.model) == state
    strategy.train(benchmark.train_stream[3])
    assert unlearning_plugin(strategy).ledger.remaining == (1, 2, 3)
    assert equal(strategy, refs)


@pytest.mark.parametrize("event", ["before_training_epoch", "after_update"])
def test_a_training_that_is_given_up_leaves_every_bit(event):
    strategy, refs = pools("resnet", slots=3), references(net="resnet", slots=3)
    strategy.train(DIGITS.train_stream[0])
    strategy.train(DIGITS.train_stream[1])
    before = bits(strategy.model)
    with failing(find_plugin(strategy, HATPlugin), event, True):
        strategy.train(DIGITS.train_stream[2])
    strategy.abort_training()
    assert bits(strategy.model) == before
    unlearn(strategy, [0])
    strategy.train(DIGITS.train_stream[2])
    assert equal(strategy, refs)


def test_a_task_that_can_not_be_recorded_gives_its_slot_back():
    strategy, refs = pools(slots=3), references(slots=3)
    for task in (0, 1):
        strategy.train(DIGITS.train_stream[task])
    before = bits(strategy.model)
    with failing(Trajectory, "record", False):
        strategy.train(DIGITS.train_stream[2])
    assert bits(strategy.model) == before
    strategy.abort_training()
    assert bits(strategy.model) == before
    unlearn(strategy, [0])
    strategy.train(DIGITS.train_stream[3])
    assert equal(strategy, refs)


def test_logs_on_disk_move_too(tmp_path):
    strategy, refs = pools(slots=3, trajectory=TrajectoryPlugin(path=tmp_path)), references(slots=3)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    unlearn(strategy, [0])
    unlearn(strategy, [2])  # by a log that moved
    assert equal(strategy, refs)
    saved = Trajectory(path=tmp_path)
    assert saved.tasks == (1,)
    now = {name: p.detach() for name, p in strategy.model.named_parameters()}
    assert trajectory(strategy).remove([1], now).values.keys() == saved.remove([1], now).values.keys()


def test_an_audit_finds_nothing_of_a_task_whose_place_was_taken():
    strategy = pools(slots=3)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    record = strategy.unlearn([0], fingerprint=True)
    assert audit(strategy, record).clean
    strategy.train(DIGITS.train_stream[3])
    assert audit(strategy, record).clean


# Where slots follow from labels ------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads of attention over the rows of an image: a third of the units is no whole number of heads."""

    features = 16

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        return self.attend(x, x, x, need_weights=False)[0].mean(1)


class Straddling(nn.Module):
    """Two groups of channels, normalised together."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 12, 3), nn.GroupNorm(2, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))).mean((2, 3))


class Grouped(nn.Module):
    """A convolution in two groups."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped = nn.Conv2d(1, 12, 3), nn.Conv2d(12, 12, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.grouped(torch.relu(self.conv(x)))).mean((2, 3))


class Positions(nn.Module):
    """Every channel has a shift that no task trains."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.register_buffer("shift", torch.linspace(0, 1, 12).reshape(1, 12, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + self.shift).mean((2, 3))


class Neighbours(nn.Module):
    """Every channel is divided by what its neighbours are, on either side of a slot's border."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 12, 3), nn.LocalResponseNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.conv(x))).mean((2, 3))


FIXED = {"heads": Heads, "neighbours": Neighbours, "group norm": Straddling, "grouped": Grouped, "positions": Positions}


@pytest.mark.parametrize("net", FIXED)
def test_networks_whose_slots_can_not_change_places_keep_slots_by_label(net, monkeypatch):
    monkeypatch.setitem(NETS, net, FIXED[net])
    strategy, refs = pools(net, slots=3, moving=False), references(net=net, slots=3, moving=False)
    for task in (0, 1, 2):
        strategy.train(DIGITS.train_stream[task])
    assert strategy.unlearn([1]).claim == "exact"
    with pytest.raises(CapacityError, match=r"task 3 .*slot \[0\] of 3.* by tasks \[0\]"):
        strategy.train(DIGITS.train_stream[3])
    strategy.train(DIGITS.train_stream[4])
    assert equal(strategy, refs)
    with pytest.raises(ValueError, match=r"moving=True\) is not possible: \w+"):
        pools(net, slots=3).train(DIGITS.train_stream[0])


@pytest.mark.parametrize("net", ["mlp", "conv", "norms", "resnet", "heads"])
def test_slots_of_these_networks_change_places(net, monkeypatch):
    """Attention too, where each slot has heads of its own."""
    monkeypatch.setitem(NETS, "heads", Heads)
    model = pools(net).model
    assert {name for name, axes in SlotTables(model, 2).parameters.items() if not axes} <= {"frozen"}


def test_rounding_in_a_deep_network_is_no_other_function():
    model = MaskedModel(ResNet(BasicBlock, [2, 2, 2, 2]), classifier="fc", input_shape=(3, 32, 32))
    assert SlotTables(model, 4).output


class Tilted(nn.Module):
    """Every unit is scaled a little unlike the others, by no parameter that could move with it."""

    features = 8

    def __init__(self, by):
        super().__init__()
        self.first, self.last, self.by = nn.Linear(6, 8), nn.Linear(8, 8), by

    def forward(self, x):
        tilt = 1 + self.by * torch.arange(8, dtype=x.dtype)
        return torch.relu(self.last(torch.relu(self.first(x) * tilt)))


def test_what_is_more_than_rounding_is_another_function():
    torch.manual_seed(0)
    assert SlotTables(MaskedModel(Tilted(0.0), input_shape=(6,)), 2).output
    with pytest.raises(SlotError, match="computes something else once its slots have changed places"):
        SlotTables(MaskedModel(Tilted(1e-9), input_shape=(6,)), 2)
