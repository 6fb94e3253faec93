"""Weight pools: partitions of weights, no access to other tasks' weights, exact unlearning."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fault_injection import FailsAtEvent
from support.small_networks import L, Net, RankNet, parts
from support.small_runs import StubbornSGD, make, split
from support.strategies import Hears, learn, mlp
from support.strategy_state import same_state, state, unlearning_plugin
from torch import Tensor, nn

from avalanche_amnesia import DisjointModel, DisjointSubnets
from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.isolation.pools import CapacityError, CapacityWarning
from avalanche_amnesia.models import MLP
from avalanche_amnesia.models.disjoint import Allocation
from avalanche_amnesia.training import load_state
from avalanche_amnesia.training.task_faults import MaskWarning
from avalanche_amnesia.unit_graph.findings import ModelError

STREAM = split(200)
REQUESTS = with_unlearning(STREAM, {1: [0], 3: [1]}, permanent=[2])


class Recurrent(nn.Module):
    """Can't be traced: an LSTM over a number of rows that depends on values, an embedding, and tied weights."""

    features = 12

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.embed = nn.LSTM(8, 12, batch_first=True), nn.Embedding(9, 12)
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        rows = 8 if float(x.mean()) > 0 else 7
        out, _ = self.rows(x.reshape(-1, 8, 8)[:, :rows])
        ink = self.embed((x.flatten(1).mean(1) / 2).long().clamp(0, 8))
        return torch.relu(self.two(torch.relu(self.one(out[:, -1] + ink))))


NETS = {"adapters": RankNet, "mlp": mlp, "recurrent": Recurrent}


def disjoint(net="mlp", optimizer="adam", isolation=None, **options) -> DisjointSubnets:
    isolation = Pools.planned(REQUESTS) if isolation is None else isolation
    net = NETS.get(net, net)
    return make(DisjointSubnets, net=net, wrap=DisjointModel, optimizer=optimizer, isolation=isolation, **options)


# Partitions -----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 90), st.integers(1, 12), st.integers(0, 2**62))
def test_slots_divide_every_row_into_nearly_equal_shares(rows, n_in, slots, seed):
    shape = torch.Size([rows, n_in])
    shares = [Allocation(seed, slots, slot) for slot in range(slots)]
    if n_in < slots:
        assert not shares[0].can_partition(shape)
        return
    dealt = torch.stack([share.own_entries("weight", shape) for share in shares])
    assert torch.equal(dealt.sum(0), torch.ones(shape, dtype=torch.int64))
    assert set(dealt.sum(2).unique().tolist()) <= {n_in // slots, math.ceil(n_in / slots)}


def test_a_partition_depends_only_on_seed_and_name():
    shape = torch.Size([64, 50])
    own = Allocation(1, 4, 2).own_entries("a", shape)
    assert torch.equal(own, Allocation(1, 4, 2).own_entries("a", shape))
    assert not torch.equal(own, Allocation(2, 4, 2).own_entries("a", shape))
    assert not torch.equal(own, Allocation(1, 4, 2).own_entries("b", shape))
    # Saved states depend on these positions: they must never change.
    assert Allocation(7, 3, 1).own_entries("layers.0.weight", torch.Size([3, 6])).nonzero().tolist() == FIRST


FIRST = [[0, 2], [0, 4], [1, 3], [1, 5], [2, 0], [2, 4]]


def test_a_share_starts_as_scaled_values_of_the_backbone():
    strategy = disjoint(train_epochs=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    with pytest.warns(MaskWarning, match="weights with which it began"):
        strategy.train(STREAM.train_stream[0])
    model, given = strategy.model, strategy.model.backbone.layers[0].weight
    mine = model.share(0).own_entries("layers.0.weight", given.shape)
    now = model.network(0).layers[0].weight
    assert torch.equal(now[~mine], torch.zeros_like(now[~mine]))
    torch.testing.assert_close(now[mine], given[mine] * (mine.numel() / int(mine.sum())) ** 0.5)


# Exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "optimizer"),
    [
        *(("mlp", optimizer) for optimizer in ("fused adamw", "adafactor")),
        *(("recurrent", "adamw"), ("adapters", "adamw")),
    ],
)
def test_unlearning_is_exact_after_further_tasks(net, optimizer):
    strategy = learn(disjoint(net, optimizer), REQUESTS.train_stream)
    alone = learn(disjoint(net, optimizer), with_unlearning(STREAM, permanent=[2]).train_stream[2:5])
    assert [record.plan.claim for record in unlearning_plugin(strategy).records] == ["exact"] * 2
    assert same_state(state(strategy.model), state(alone.model))
    record = strategy.unlearn([4])
    assert record.plan.reasons == ()
    assert {change.name.split(".")[1] for change in record.changes} == {"4"}
    assert strategy.model.tasks == (2, 3)


def test_later_tasks_read_a_permanent_task_and_never_change_it():
    for optimizer in ("adam decay", "adafactor"):
        strategy = learn(disjoint(optimizer=optimizer), REQUESTS.train_stream[:3])
        model, before = strategy.model, state(strategy.model)
        strategy.train(REQUESTS.train_stream[3])
        assert model.share(3).reads == (2,)
        network, weight = model.network(3), model.backbone.layers[1].weight
        theirs = model.share(2).own_entries("layers.1.weight", weight.shape)
        assert torch.equal(network.layers[1].weight[theirs], model.task_parts(2).tensors["layers.1.weight"])
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if ".2." in name)


def test_weights_outside_the_share_are_plus_zero_in_every_step():
    def look(strategy):
        model, task = strategy.model, strategy.experience.task_label
        weight = model.network(task).layers[0].weight.detach()
        others = weight[~model.share(task).own_entries("layers.0.weight", weight.shape)]
        assert not others.any()
        assert not others.signbit().any()
        seen.append(task)

    seen = []
    learn(disjoint(optimizer="adafactor", plugins=[Hears(after_update=look)]), STREAM, 2)
    assert len(seen) > 10


def test_an_interrupted_training_leaves_no_share():
    fails = FailsAtEvent("before_training_exp", KeyboardInterrupt, when=lambda s: s.experience.task_label == 2)
    stream = with_unlearning(STREAM, permanent=[2]).train_stream
    strategy = disjoint(plugins=[fails], train_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(stream[2])
    strategy.train(stream[3])  # which would read the permanent task 2
    assert (strategy.model.tasks, strategy.model.share(3).reads) == ((3,), ())


def test_an_optimizer_that_changes_parameters_without_gradients_changes_only_the_task_s_own(tmp_path):
    strategy, again = (disjoint(optimizer=StubbornSGD, train_epochs=1) for _ in range(2))
    before = state(strategy.model.backbone)
    learn(strategy, STREAM.train_stream[:1])
    assert same_state(before, state(strategy.model.backbone))
    assert strategy.unlearn([0]).claim == "exact"
    strategy.save(tmp_path / "state")
    load_state(again, tmp_path / "state")
    again.save(tmp_path / "again")  # the settings are equal
    load_state(disjoint(optimizer=StubbornSGD, train_epochs=1), tmp_path / "again")


# Slots -------------------------------------------------------------------------------------------------------------


def test_a_task_whose_share_is_taken_is_refused_and_changes_nothing():
    strategy = disjoint(isolation=Pools(2))
    with pytest.warns(CapacityWarning):
        learn(strategy, STREAM.train_stream[:2])
    before = state(strategy.model)
    with pytest.raises(CapacityError, match=r"task 2: slot 0 of 2 is taken by tasks \[0\]"):
        strategy.train(STREAM.train_stream[2])
    assert same_state(state(strategy.model), before)
    assert strategy.model.tasks == (0, 1)
    assert strategy.model.free_share() == 0
    strategy.unlearn([0])
    assert network_capacity(strategy) == strategy.model.free_share() == pytest.approx(0.5, abs=0.01)
    strategy.train(STREAM.train_stream[2])
    with pytest.raises(TaskError, match="already trained"):
        strategy.train(STREAM.train_stream[2])


# The model ---------------------------------------------------------------------------------------------------------


def test_a_whole_model_is_saved_loaded_copied_and_pickled(tmp_path):
    strategy = learn(disjoint("recurrent"), REQUESTS.train_stream[:3])
    x = STREAM.test_stream[2].tensors[0]

    def logits(model, task):
        with torch.no_grad():
            return model.eval()(x, task)

    wanted = {task: logits(strategy.model, task) for task in (1, 2)}
    strategy.save(tmp_path / "state")
    fresh, empty = disjoint("recurrent"), DisjointModel(Recurrent())
    settings = {"isolation": Pools.planned(REQUESTS), "train_mb_size": 16, "train_epochs": 2, "seed": 3}
    loaded = DisjointSubnets.load(tmp_path / "state", model=fresh.model, optimizer=fresh.optimizer, **settings)
    empty.load_state_dict(strategy.model.state_dict())
    models = [loaded.model, empty, copy.deepcopy(strategy.model), pickle.loads(pickle.dumps(strategy.model))]
    for model in models:
        assert all(torch.equal(logits(model, task), wanted[task]) for task in (2, 1, 2))
    learn(strategy, REQUESTS.train_stream[3:4])
    learn(loaded, REQUESTS.train_stream[3:4])
    assert same_state(state(strategy.model), state(loaded.model))
    assert strategy.model.double()(x.double(), 2).dtype == torch.float64


def test_a_state_of_another_backbone_or_from_an_unfinished_training_is_refused():
    strategy = learn(disjoint(), REQUESTS.train_stream[:1])
    state = strategy.model.state_dict()
    with pytest.raises(ValueError, match="is no share of this backbone"):
        DisjointModel(MLP(64, hidden=(20,), features=16)).load_state_dict(state)
    cut = {name: value for name, value in state.items() if not name.endswith("dealt")}
    with pytest.raises(ValueError, match="a task of this state has no share"):
        DisjointModel(mlp()).load_state_dict(cut)
    whole = state | {"heads.0.own.entries.layers.0.weight": strategy.model.backbone.layers[0].weight.detach()}
    with pytest.raises(ValueError, match="in the middle of a training"):
        DisjointModel(mlp()).load_state_dict(whole)


def test_a_state_with_impossible_shares_is_refused_and_changes_nothing():
    strategy = learn(disjoint(isolation=Pools(), train_epochs=1), STREAM.train_stream[:2])
    model, empty, good = strategy.model, DisjointModel(mlp()), state(strategy.model)
    for wrong in ([3, 5, 0], [3, 2**62, 1], [3, 5, 2], [9, 5, 1], [3, 5, 1, 1], [3, 5, 1, 7], [3, 0, 0]):
        for into in (model, empty):
            tasks = into.tasks
            with pytest.raises(ValueError, match="is no share"):
                into.load_state_dict(good | {"heads.1.own.dealt": torch.tensor(wrong)})
            assert into.tasks == tasks
    assert same_state(state(model), good)


def test_a_finished_task_is_loaded_over_its_interrupted_training():
    fails = FailsAtEvent("after_training_iteration", KeyboardInterrupt)
    strategy, done = disjoint(plugins=[fails]), state(learn(disjoint(), STREAM.train_stream[:1]).model)
    with pytest.raises(KeyboardInterrupt):
        strategy.train(STREAM.train_stream[0])
    assert strategy.model.heads.unfinished == (0,)
    strategy.model.load_state_dict(done)
    assert same_state(state(strategy.model), done)
    assert strategy.model.heads.unfinished == ()


def test_an_unlearned_task_leaves_the_memory():
    strategy = learn(disjoint(isolation=Pools(), train_epochs=1), STREAM.train_stream[:1])
    network = weakref.ref(strategy.model.network(0))
    assert network() is not None
    strategy.unlearn([0])
    gc.collect()
    assert network() is None


def keeps_activations(s, x):
    s.kept = [s.layer(x.flatten(1)).detach().mean(0)]
    return s.layer(x.flatten(1))


def using_the_original():
    """A network whose copies multiply by the scale of the original."""
    net = Net(lambda s, x: s.scaled(s.layer(x.flatten(1))), layer=nn.Linear(64, 16), scale=nn.Parameter(torch.ones(16)))
    net.scaled = lambda x: x * net.scale
    return net


FORWARDS = {
    r"changes .*kept": parts(keeps_activations, layer=L(64, 16), kept=list),
    r"changed \['scale'\] of the backbone": using_the_original,
}


@pytest.mark.parametrize("message", FORWARDS)
def test_a_forward_that_no_task_can_own_is_refused_and_undone(message):
    strategy = disjoint(FORWARDS[message])
    before = state(strategy.model)
    with pytest.raises(ModelError, match=message):
        strategy.train(STREAM.train_stream[0])
    assert strategy.model.tasks == ()
    assert same_state(state(strategy.model), before)


def test_a_description_lists_the_rule_of_every_parameter():
    strategy = learn(disjoint("adapters", isolation=Pools(3)), STREAM.train_stream[:1])
    described = strategy.model.describe(3).splitlines()
    rule = {words[1]: line for line in described if len(words := line.split()) > 5}
    assert "dealt to 3 slots" in rule["1.down.weight"]
    assert "each task's own" in rule["5.up.bias"]
    assert "without gradients" in rule["1.base.weight"]
    kept = sum(t.numel() for t in strategy.model.task_parts(0).tensors.values())
    said = int(described[-1].partition(" ")[0].replace(",", ""))
    assert said == pytest.approx(kept, rel=0.05)  # rows have one entry more or less
