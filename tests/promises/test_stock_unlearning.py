"""Stock Avalanche strategies that unlearn: none of their state may bring an unlearned task back."""

from copy import deepcopy

import pytest
import torch
from avalanche.training import EWC, LwF, Naive, Replay
from avalanche.training.plugins import EWCPlugin, LwFPlugin, ReplayPlugin
from avalanche.training.storage_policy import ClassBalancedBuffer, ParametricBuffer, ReservoirSamplingBuffer
from support.stock_hosts import AvalancheNet
from support.strategies import DIGITS, Hears, learn, stock, trained
from support.strategy_state import bits, trajectory, unlearning_plugin, values
from torch import nn

from avalanche_amnesia.benchmarks import PermutedDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.models import MLP, MultiHeadModel
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.unit_graph import ModelError
from avalanche_amnesia.unlearning.purging import purgers

FULL = PermutedDigits(3, n_train=500)  # with ten classes an old head on a random backbone is near chance


MODELS = {"ours": lambda: MultiHeadModel(MLP(64, hidden=(32,), features=32)), "avalanche's": AvalancheNet}
METHODS = {
    "naive": (Naive, {}),
    "ewc": (EWC, {"ewc_lambda": 400.0}),
    "ewc online": (EWC, {"ewc_lambda": 400.0, "mode": "online", "decay_factor": 0.9}),
    "lwf": (LwF, {"alpha": 2.0, "temperature": 2.0}),
    "replay": (Replay, {"mem_size": 50}),
}


def accuracy_through(head, model) -> float:
    x, y = FULL.test_stream[0].tensors
    model.eval()
    with torch.no_grad():
        features = model.backbone(x.flatten(1) if isinstance(model, MultiHeadModel) else x)
        return float((head(features)[:, :10].argmax(1) == y).float().mean())


def forget(method, model, when, *, unlearning=None):
    make, options = METHODS[method]
    heads = []

    def keep(strategy):
        """Keep a copy of task 0's head from right before it goes, as an attacker would."""
        if not heads and 0 in unlearning_plugin(strategy).current.tasks:
            own = strategy.model.heads if model == "ours" else strategy.model.classifier.classifiers
            heads.append(deepcopy(own["0"]).eval())

    keeps = Hears(before_unlearning=keep)
    strategy = stock(make, model=MODELS[model](), plugins=[keeps], unlearning=unlearning, epochs=8, **options)
    request = UnlearningRequest((0,), 1) if when == "after" else UnlearningRequest((0,), 1, "iteration", 5)
    accuracies = []
    for experience in with_unlearning(FULL, [request]).train_stream:
        strategy.train(experience)
        accuracies += [accuracy_through(head, strategy.model) for head in heads]
    return strategy, accuracies


@pytest.mark.parametrize(
    ("method", "model", "when"),
    [
        *(("ewc", "ours", "after"), ("ewc online", "ours", "after"), ("ewc", "avalanche's", "iteration")),
        *(("lwf", "avalanche's", "after"), ("replay", "ours", "iteration")),
    ],
)
def test_an_unlearned_task_does_not_come_back(method, model, when):
    strategy, accuracies = forget(method, model, when)
    assert max(accuracies) < 0.35, accuracies  # chance is .1
    assert unlearning_plugin(strategy).ledger.remaining == (1, 2)
    own = [name for name in strategy.model.state_dict() if not name.startswith("backbone")]
    assert not [name for name in own if ".0." in name]
    assert not [name for log in trajectory(strategy).logs.values() for name in log if "heads.0." in name]


def test_without_the_purge_ewc_brings_the_task_back(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(purgers, "_PURGERS", {})
    _, accuracies = forget("ewc", "ours", "after", unlearning=UnlearningPlugin(allow_unknown=True))
    assert accuracies[-1] > 0.45, accuracies


@pytest.mark.parametrize(
    ("method", "model"), [*((method, "ours") for method in METHODS), ("ewc", "avalanche's"), ("lwf", "avalanche's")]
)
def test_a_request_for_the_task_just_trained_leaves_nothing_of_it(method, model):
    """EWC and LwF store their state after the user's plugins ran: the request must wait for them."""
    make, options = METHODS[method]
    strategy = stock(make, model=MODELS[model](), epochs=1, **options)
    stream = with_unlearning(DIGITS, {1: [1]}).train_stream
    strategy.train(stream[0])
    before = values(strategy.model)
    strategy.train(stream[1])
    after = dict(strategy.model.named_parameters())
    assert set(after) == set(before)
    assert all(torch.equal(after[n], before[n]) for n in before)
    ewc, lwf, replay = (find_plugin(strategy, kind) for kind in (EWCPlugin, LwFPlugin, ReplayPlugin))
    if ewc is not None:
        for store in (ewc.saved_params, ewc.importances):
            assert 1 not in store
            assert not [n for kept in store.values() for n in kept if "heads.1." in n or "classifiers.1." in n]
    if lwf is not None:
        assert 1 not in lwf.lwf.prev_classes_by_task
        assert all(torch.equal(p, before[n]) for n, p in lwf.lwf.prev_model.named_parameters())
        assert set(lwf.lwf.prev_model.state_dict()) == set(strategy.model.state_dict())
    if replay is not None:
        assert set(replay.storage_policy.buffer.targets_task_labels) == {0}
    learn(strategy, stream[2:4])
    assert unlearning_plugin(strategy).ledger.remaining == (0, 2, 3)


def test_ewc_anchors_lose_the_update_of_the_unlearned_task():
    strategy = stock(EWC, epochs=1, ewc_lambda=1.0)
    states = [values(strategy.model)]
    for experience in DIGITS.train_stream[:4]:
        strategy.train(experience)
        states.append(values(strategy.model))
    ewc = find_plugin(strategy, EWCPlugin)
    importances = {c: {n: v.data.clone() for n, v in of.items()} for c, of in ewc.importances.items()}
    unlearning_plugin(strategy).unlearn(strategy, [1])
    assert sorted(ewc.saved_params) == sorted(ewc.importances) == [0, 2, 3]
    for counter in (0, 2, 3):
        names = [n for n in states[counter + 1] if not n.startswith("heads.1.")]
        assert sorted(ewc.saved_params[counter]) == sorted(names)
        for name in names:
            update = 0.0
            if counter > 1 and name in states[1]:
                update = states[2][name].double() - states[1][name].double()
            expected = (states[counter + 1][name].double() - update).float()
            assert torch.equal(ewc.saved_params[counter][name].data, expected), (counter, name)
            assert torch.equal(ewc.importances[counter][name].data, importances[counter][name])
    # the last anchor was the model itself: it still is, up to a rounding
    for name, parameter in strategy.model.named_parameters():
        torch.testing.assert_close(ewc.saved_params[3][name].data, parameter.detach(), rtol=0, atol=1e-6)


POLICIES = {
    "experiences": lambda: None,
    "classes": lambda: ClassBalancedBuffer(60),
    "parametric by class": lambda: ParametricBuffer(60, groupby="class"),
    "parametric": lambda: ParametricBuffer(60),
    "reservoir": lambda: ReservoirSamplingBuffer(60),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_no_later_batch_holds_a_sample_of_an_unlearned_task(policy):
    batches = []
    listens = Hears(before_forward=lambda made: batches.append(sorted(set(made.mb_task_id.tolist()))))
    replay = ReplayPlugin(mem_size=60, storage_policy=POLICIES[policy]())
    strategy = stock(plugins=[listens, replay], epochs=2)
    storage = replay.storage_policy
    requests = [UnlearningRequest((0,), 2, "iteration", 1), UnlearningRequest((3,), 3)]
    stream = with_unlearning(DIGITS, requests).train_stream
    learn(strategy, stream[:2])
    old = {tuple(map(float, x.flatten())): (y, t) for x, y, t in storage.buffer}
    batches.clear()
    strategy.train(stream[2])
    assert 0 in batches[0]  # it was there before the request
    assert [tasks for tasks in batches[1:] if 0 in tasks] == []
    assert any(1 in tasks for tasks in batches[1:])
    batches.clear()
    for experience in stream[3:]:
        strategy.train(experience)
        assert not {0} & set(map(int, storage.buffer.targets_task_labels))
    assert [tasks for tasks in batches if 0 in tasks] == []
    assert set(map(int, storage.buffer.targets_task_labels)) == {1, 2, 4}
    for x, y, t in storage.buffer:  # samples and labels still belong together
        if int(t) == 1 and tuple(map(float, x.flatten())) in old:
            assert old[tuple(map(float, x.flatten()))] == (y, t)
    if policy == "reservoir":
        assert len(storage._buffer_weights) == len(storage.buffer)


def test_a_plugin_that_does_not_obey_only_updates_the_ledger():
    def outcome(obey):
        strategy = stock(EWC, epochs=2, ewc_lambda=1.0, unlearning=UnlearningPlugin(obey=obey))
        schedule = [UnlearningRequest((0,), 2, "iteration", 1), UnlearningRequest((1,), 2)]
        return learn(strategy, (with_unlearning(DIGITS, schedule) if obey is False else DIGITS).train_stream[:4])

    control, never_asked = outcome(False), outcome(True)
    assert bits(control.model) == bits(never_asked.model)
    assert unlearning_plugin(control).ledger.remaining == (2, 3)
    assert unlearning_plugin(control).ledger.unlearned == (0, 1)
    assert trajectory(control).tasks == (0, 1, 2, 3)
    assert [r.claim for r in unlearning_plugin(control).records] == ["approximate"] * 2
    assert all(r.changes == () and not r.plan.entries for r in unlearning_plugin(control).records)


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_shared_running_statistics_are_refused_before_training(make):
    model = MultiHeadModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), make(16), nn.ReLU()), 16)
    strategy = stock(model=model)
    before = bits(model)
    with pytest.raises(ModelError, match=r"backbone\.2.*running statistics.*track_running_stats=False"):
        strategy.train(DIGITS.train_stream[0])
    assert bits(model) == before
    model = MultiHeadModel(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.ReLU()), 16
    )
    stock(model=model, epochs=1).train(DIGITS.train_stream[0])


def test_lwf_distinguishes_a_task_s_new_head_from_its_unlearned_one():
    """Learn 0, 1; forget 0; learn 0 again, 2; forget 1: head 0 must be the new one with 1's update on nothing of it."""
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), "alpha": 1.0, "temperature": 2.0}
    strategy = learn(stock(LwF, epochs=1, **options), DIGITS.train_stream[:2])
    assert strategy.optimizer.state
    unlearning_plugin(strategy).unlearn(strategy, [0])
    assert not strategy.optimizer.state  # it mixed the tasks
    learn(strategy, [DIGITS.train_stream[task] for task in (0, 2)])
    head = {n: p.detach().clone() for n, p in strategy.model.named_parameters() if n.startswith("heads.0.")}
    unlearning_plugin(strategy).unlearn(strategy, [1])
    assert all(torch.equal(dict(strategy.model.named_parameters())[n], v) for n, v in head.items())


@pytest.mark.parametrize("order", [lambda u, r: [u, r], lambda u, r: [r, u]], ids=["in front", "behind"])
def test_the_order_of_plugins_does_not_matter(order):
    plugins = [SeedingPlugin(0), TrajectoryPlugin(), *order(UnlearningPlugin(), LwFPlugin())]
    options = {"kind": Naive, "optimizer": "sgd", "train_epochs": 1}
    strategy = trained(2, with_unlearning(DIGITS, {1: [1]}), plugins=plugins, **options)
    lwf = find_plugin(strategy, LwFPlugin).lwf
    assert bits(lwf.prev_model) == bits(strategy.model)
    assert set(lwf.prev_classes_by_task) == {0}
