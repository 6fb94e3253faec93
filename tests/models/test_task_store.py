"""Modules and tensors of finished tasks: torch does not list them, but they are saved, loaded, moved and copied."""

import copy
import io
from contextlib import suppress
from functools import partial

import pytest
import torch
from avalanche.training.supervised import Naive
from support.interruptions import Interrupted, interrupted_at, lines_of
from support.strategies import DIGITS, trained
from support.strategy_state import bits, same_state
from torch import nn
from torch.optim import SGD

from avalanche_amnesia import HAT, MLP, WSN, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.models.task_store import TaskModules, TaskTensors, register_all

X = DIGITS.test_stream[0].tensors[0][:8]


NORMS = partial(MLP, 64, hidden=(16,), features=12, norm="batch")
STRATEGIES = {"masked": {"kind": HAT, "net": NORMS}, "subnet": {"kind": WSN, "net": NORMS}}


def strategy_of_kind(name, tasks=3):
    options = {"optimizer": partial(SGD, lr=0.05, momentum=0.9), "train_mb_size": 50, "train_epochs": 1}
    return trained(tasks, **STRATEGIES[name], **options)


def in_sight(self, task):
    """Torch's own way: the modules of a finished task stay submodules."""
    if task in self:
        self[task].eval()


def assert_equal(first, second):
    assert list(first) == list(second)
    assert same_state(first, second)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_state_equals_that_of_a_model_of_submodules(name, monkeypatch):
    ours = strategy_of_kind(name).model
    monkeypatch.setattr(TaskModules, "finish", in_sight)
    plain = strategy_of_kind(name).model
    assert len(list(plain.modules())) > len(list(ours.modules()))
    assert_equal(ours.state_dict(), plain.state_dict())
    assert_equal(ours.eval()(X), plain.eval()(X))
    with register_all(ours):
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_torch_lists_no_parameter_of_a_finished_task(name):
    model = strategy_of_kind(name).model
    seen = [*model.named_parameters(), *model.named_buffers(), *model.named_modules()]
    assert not [n for n, _ in seen if any(f".{task}" in n for task in model.tasks) and not n.startswith("backbone.")]
    assert model.unfinished == ()
    model.train()
    with register_all(model):
        own = [part for task in model.tasks for part in model.heads[task].modules()]
    assert own
    parameters = [p for part in own for p in part.parameters(recurse=False)]
    assert not any(part.training for part in own)
    assert not any(p.requires_grad or p.grad is not None for p in parameters)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_whole_model_is_loaded_copied_pickled_and_moved(name):
    model = strategy_of_kind(name).model.eval()
    expected = model(X)
    fresh, empty = strategy_of_kind(name, 0).model, strategy_of_kind(name, 0).model.state_dict()
    drawn = torch.get_rng_state()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(torch.get_rng_state(), drawn)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (fresh.eval(), copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert_equal(other.state_dict(), model.state_dict())
        assert_equal(other(X), expected)
        assert other.unfinished == ()
        with torch.no_grad(), register_all(other):
            for parameter in other.parameters():
                parameter.zero_()
    assert_equal(model(X), expected)
    double = copy.deepcopy(model).double()
    kinds = {value.dtype for value in double.state_dict().values()} - {torch.bool, torch.uint8, torch.int64}
    assert kinds == {torch.float64}
    for task, logits in double(X.double()).items():
        assert torch.allclose(logits, expected[task].double(), atol=1e-5)
    assert all(value.is_meta for value in copy.deepcopy(model).to("meta").state_dict().values())
    fresh.load_state_dict(empty)
    assert (fresh.tasks, dict(fresh.masks)) == ((), {})


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_task_without_a_mask_in_the_state_can_be_trained(name):
    strategy = strategy_of_kind(name, 2)
    model = strategy.model
    unmasked = strategy_of_kind(name, 0).model
    optimizer = SGD(unmasked.parameters(), lr=0.05)
    naive = Naive(model=unmasked, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), train_mb_size=50)
    naive.train(DIGITS.train_stream[0])
    model.train().load_state_dict(unmasked.state_dict())
    assert model.tasks == model.unfinished == (0,)
    assert model.masked_tasks == ()
    own = list(model.heads[0].parameters())
    assert all(any(p is parameter for parameter in model.parameters()) for p in own)
    assert all(p.requires_grad for p in own)
    assert all(part.training for part in model.heads[0].modules())


@pytest.mark.parametrize("model_class", [MaskedModel, SubnetModel, MultiHeadModel])
def test_a_model_moves_unless_every_tensor_is_on_the_device(model_class, monkeypatch):
    def made():
        return model_class(MLP(3, hidden=(2,), features=2))

    model = made()
    model.add_head(0, 2)
    moves = []
    monkeypatch.setattr(model, "_apply", lambda *given, **options: moves.append(given))
    assert model.to("cpu") is model
    assert not moves
    monkeypatch.undo()
    model.heads["0"].to("meta")
    model.to(torch.device("meta"))
    assert all(value.is_meta for value in model.state_dict().values())
    assert next(made().to("cpu", torch.float64).parameters()).dtype == torch.float64


def test_finished_tasks_are_listed_only_inside_a_whole_block():
    modules, tensors = TaskModules(), TaskTensors()
    model = nn.ModuleDict({"modules_of": modules, "tensors_of": tensors})
    modules[0], modules[1], tensors[0] = nn.Linear(2, 2), nn.BatchNorm1d(2), torch.ones(3)
    modules[0](torch.ones(1, 2)).sum().backward()
    modules.finish(0)
    assert modules["0"].weight.grad is None
    hidden = [name for name, _ in model.named_parameters()]
    assert hidden == ["modules_of.1.weight", "modules_of.1.bias"]
    with register_all(model), suppress(InterruptedError), register_all(model):
        assert next(name for name, _ in model.named_parameters()) == "modules_of.0.weight"
        assert [name for name, _ in model.named_buffers()][-1] == "tensors_of.0"
        raise InterruptedError
    assert [name for name, _ in model.named_parameters()] == hidden
    assert not list(tensors.buffers())
    assert list(model.state_dict())[:2] == ["modules_of.0.weight", "modules_of.0.bias"]
    modules.resume(0)
    assert modules.unfinished == (1, 0)
    assert modules.tasks == (0, 1)


def test_a_store_is_restored_to_an_earlier_state():
    store = TaskModules()
    store[0], store[1] = nn.Linear(2, 2), nn.Linear(2, 3)
    store.finish(0)
    state, first = store.state(), store[0]
    store.drop(0)
    store.finish(1)
    store[2] = nn.Linear(2, 2)
    assert (store.tasks, store.unfinished, 0 in store) == ((1, 2), (2,), False)
    store.restore(state)
    assert (store.tasks, store.unfinished, store.get(0)) == ((0, 1), (1,), first)
    assert list(store.held.items()) == [("0", first), ("1", store[1])]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_interrupted_state_dict_loses_nothing_and_the_next_task_hides_finished_ones(name):
    model = strategy_of_kind(name, 2).model
    before = bits(model)
    for position in range(len(lines_of(model.state_dict))):
        with pytest.raises(Interrupted), interrupted_at(position):
            model.state_dict()
        model.add_head(2, 2)
        own = ("heads.0.", "heads.1.")
        assert not [path for path, _ in model.named_parameters() if path.startswith(own)]
        model.remove_task(2)
        assert bits(model) == before
