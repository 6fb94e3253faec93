"""Refused trainings and typical mistakes change nothing, and errors name a remedy."""

import copy
import warnings
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training import Cumulative, JointTraining
from avalanche.training.plugins import EarlyStoppingPlugin
from support import tiny
from support.small_networks import L, layers, parts
from support.strategies import DIGITS, Hears, amnesiac, learn, make, mlp, quiet, stock, trained
from support.strategy_state import bits, frozen, unchanged, unlearning_plugin
from torch import nn
from torch.optim import SGD

from avalanche_amnesia import MLP, HardAttention, MaskedModel, SplitDigits, SubnetModel, task_benchmark
from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import MultiHeadModel, UnknownTaskError
from avalanche_amnesia.training import HAT
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.task_mask import DivergedError
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_faults import MaskWarning

# A task that can't be trained -----------------------------------------------------------------------------------------


def returning(made):
    net = parts(lambda s, x: made(s.layer(x)), layer=L(8, 6))
    return lambda: tiny.strategy("wsn", model=SubnetModel(net(), n_features=6))


def pictures():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6))
    return tiny.strategy(model=MaskedModel(net, input_shape=(1, 8, 8)))


def shaped(*shape):
    x, y = torch.randn(16, *shape), torch.arange(16) % 2
    return lambda: task_benchmark((x, y), (x, y), [[0, 1]])


def one_more(n):
    return lambda: tiny.tasks([[0], [1], [2]], tiny.samples(n, classes=3))


def rand(generator):
    return torch.randn(8, generator=generator)


def items(item):
    return lambda: tiny.tasks([[0, 1]], tiny.items(item))


NORMED = layers(L(8, 8), lambda: nn.BatchNorm1d(8), nn.ReLU, L(8, 6))
normed, pools = partial(tiny.strategy, net=NORMED, train_mb_size=20), partial(tiny.strategy, "pools")
weighing = partial(tiny.strategy, criterion=nn.CrossEntropyLoss(torch.ones(3)))
floating = Hears(before_forward=lambda s: s.mbatch.insert(1, s.mb_y.float()))
# name → (strategy, benchmark, words of the error)
REFUSED = {
    "one lonely": (normed, one_more(63), "one sample is alone .*BatchNorm1d '1'.*train_mb_size.*drop_last=True"),
    "lonely in pools": (partial(normed, "pools"), one_more(3), "one sample is alone .*BatchNorm1d '1'"),
    "weights of classes": (weighing, tiny.tasks, "weights for 3 classes, .* has 2"),
    "a list of features": (returning(lambda x: [x, x]), tiny.tasks, r"returns list.*a head reads \(8, 6\), samples"),
    "narrow features": (returning(lambda x: x[:, :4]), tiny.tasks, r"returns \(8, 4\) torch.float32.*reads \(8, 6\)"),
    "channels last": (pictures, shaped(8, 8, 1), r"channels come first, x.permute\(0, 3, 1"),
    "flat pictures": (pictures, shaped(64), r"x.reshape\(-1, \*\(1, 8, 8\)\)"),
    "other shape": (pictures, shaped(1, 10, 10), r"task 0: the model can't run on its .*\(1, 10, 10\), torch.float32"),
    "double": (pools, items(lambda g, y: (rand(g).double(), y)), r"float64.*x.to\(torch.float32\); .*backbone.to"),
    "labels as floats": (partial(tiny.strategy, plugins=[floating]), tiny.tasks, r"are torch.float32.* y.long\(\)"),
    "bytes": (pools, items(lambda g, y: ((rand(g) * 9).byte(), y)), r"torch.uint8.*return x.to\(torch.float32\) / 255"),
    "no label": (pools, items(lambda g, y: {"x": rand(g), "class": y}), r"got a mapping of \['x', 'class'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_first_task_that_can_t_be_trained_is_refused(name):
    make_strategy, benchmark, message = REFUSED[name]
    strategy, experience = make_strategy(), benchmark().train_stream[0]
    before, random = bits(strategy.model), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TaskError, match=message):
            strategy.train(experience)
    assert strategy.model.tasks == ()
    assert bits(strategy.model) == before
    if "lonely" in name:
        assert torch.equal(torch.get_rng_state(), random)
    if name == "one lonely":
        strategy.train(experience, drop_last=True)
        assert strategy.model.tasks == (0,)


def test_a_training_without_gradients_is_refused():
    for off in (torch.no_grad, torch.inference_mode):
        strategy = tiny.strategy()
        with off(), pytest.raises(TaskError, match=r"gradients are switched off by torch\.no_grad"):
            strategy.train(tiny.tasks().train_stream)
        assert strategy.model.tasks == ()


# A second task with unusable samples or labels ------------------------------------------------------------------------


def spoilt(value, where, *, lazy=False):
    """Return two tasks; some samples of the second one hold a value."""
    data = tiny.data(classes=4)
    x, y = data.tensors
    x[(y > 1).nonzero()[where, 0], 0] = value
    return tiny.tasks(given=data if lazy else (x, y)).train_stream


def relabelled(change):
    """Make two tasks; the second one has other labels than its experience says."""

    def made():
        stream = tiny.tasks().train_stream
        twin = copy.copy(stream[1])
        twin._samples = copy.copy(twin._samples)
        twin._samples.targets = change(torch.tensor(twin._samples.targets)).tolist()
        return [stream[0], twin]

    return made


NAN, EVERY = float("nan"), slice(None)
IN_MEMORY = r"task 1: 3 of 12 samples hold NaN or infinity, the first at index 4; take them out"
ON_DEMAND = r"task 1: in its first mini-batch 8 of 8 samples hold NaN or infinity.* Its training was undone"
LATER = r"task 1: (in its first mini-batch )?1 of \d+ samples holds NaN or infinity"
# (kind, options, stream, words of the error)
SECOND = {
    "NaN, units": ("amnesiac", {}, lambda: spoilt(NAN, [4, 7, 9]), IN_MEMORY),
    "infinity, weights": ("wsn", {}, lambda: spoilt(-float("inf"), [4, 7, 9]), IN_MEMORY),
    "on demand, units": ("amnesiac", {}, lambda: spoilt(NAN, EVERY, lazy=True), ON_DEMAND),
    "a later mini-batch": ("amnesiac", {"train_mb_size": 4}, lambda: spoilt(NAN, [9], lazy=True), LATER),
    "labels above": ("amnesiac", {}, relabelled(lambda y: y + 5), r"lie in 5..6, and its head has 2 .*, 0..1: c"),
    "labels below": ("wsn", {}, relabelled(lambda y: y - 1), r"lie in -1..0, and its head has 2 classes"),
    "some labels above": ("pools", {}, relabelled(lambda y: 3 * y), r"lie in 0..3, and its head has 2 classes"),
    "hidden labels": ("amnesiac", {}, relabelled(lambda y: y - 100), r"lie in -99..-99, and its head has 2"),
    "ignored labels": ("wsn", {}, relabelled(lambda y: 0 * y - 100), "all 8 labels are -100, which the loss ig"),
}


def what_it_is(strategy):
    return bits(strategy.model), strategy.model.tasks, unlearning_plugin(strategy).ledger.state_dict()


@pytest.mark.parametrize("name", SECOND)
def test_a_task_with_unusable_data_is_refused_and_can_be_trained_with_usable_ones(name):
    kind, options, make_stream, message = SECOND[name]
    stream = make_stream()
    strategy = learn(tiny.strategy(kind, **options), stream[:1])
    before, random = what_it_is(strategy), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(TaskError, match=message):
            strategy.train(stream[1])
        assert what_it_is(strategy) == before
        assert torch.equal(torch.get_rng_state(), random)
    good = spoilt(0.5, [9], lazy="later" in name or "demand" in name)
    strategy.train(good[1])
    assert what_it_is(strategy) == what_it_is(learn(tiny.strategy(kind, **options), [stream[0], good[1]]))


@pytest.mark.parametrize(("kind", "rate"), [("amnesiac", 1e36), ("wsn", 1e36)])
def test_a_diverged_task_is_undone_and_can_be_trained_again(kind, rate):
    stream = tiny.tasks().train_stream
    strategy = learn(tiny.strategy(kind), stream[:1])
    before = bits(strategy.model)
    strategy.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(DivergedError, match=r"task 1 diverged: .*; train it again with a smaller learning rate"):
        strategy.train(stream[1])
    assert bits(strategy.model) == before
    strategy.optimizer.param_groups[0]["lr"] = 0.1
    strategy.train(stream[1])
    assert bits(strategy.model) == bits(learn(tiny.strategy(kind), stream).model)


def test_weights_whose_features_overflow_are_refused():
    net, adam = partial(MLP, 64, hidden=(40,), features=30), partial(torch.optim.Adam, lr=1e-2)
    strategy = make(HAT, net=net, optimizer=adam, train_mb_size=20, seed=3, eval_every=1, eval_mb_size=50)
    strategy.optimizer.param_groups[0]["lr"] = 1e10
    with pytest.raises(DivergedError, match="its weights are finite, and its features are not, or overflow float32"):
        strategy.train(SplitDigits(n_train=300, n_test=100).train_stream[0])


@pytest.mark.parametrize("make_strategy", [amnesiac, stock])
def test_a_task_that_takes_no_step_is_undone(make_strategy):
    few = SplitDigits(n_train=30, n_test=60).train_stream  # 6 samples a task
    strategy = learn(make_strategy(), [DIGITS.train_stream[1]])
    before = bits(strategy.model)
    with pytest.raises(TaskError, match=r"task 0 took no step, and its training was undone.*drop_last=True"):
        strategy.train(few[0], drop_last=True)
    assert bits(strategy.model) == before
    strategy.train(few[0])
    assert bits(strategy.model) != before


# Warnings -------------------------------------------------------------------------------------------------------------


def test_a_task_of_one_class_and_a_test_stream_are_warned_of():
    stream = tiny.tasks([[0], [1], [2]]).test_stream
    with (
        pytest.warns(UserWarning, match="given the stream 'test', not benchmark.train_stream"),
        pytest.warns(MaskWarning, match="task 0 has one class, and nothing was learned"),
    ):
        tiny.strategy().train(stream[0])


def test_a_task_may_take_every_unit():
    stream = SplitDigits(n_tasks=2, n_train=600, seed=3).train_stream
    model = MaskedModel(MLP(64, hidden=(64, 40), features=24))
    masks = HardAttention(sparsity_weight=1e-6, embedding_init="ones")
    strategy = make(HAT, model=model, masks=masks, train_epochs=4, train_mb_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskWarning)
        strategy.train(stream[1])
        assert bool(model.cumulative_mask().all())


def test_a_task_whose_weights_were_reset_to_its_start_is_named():
    """The host's early stopping takes the value that the last task left for the first one of the next."""
    evaluator = quiet(accuracy_metrics(stream=True))
    stopping = EarlyStoppingPlugin(patience=1, val_stream_name="test_stream")
    strategy = amnesiac(train_epochs=4, evaluator=evaluator, eval_every=1, plugins=[stopping])
    told = []
    for task in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.train(DIGITS.train_stream[task], eval_streams=[DIGITS.test_stream[task : task + 1]])
        told += [task for w in caught if "ends with the weights with which it began" in str(w.message)]
    assert told == [1]


# Options and labels ---------------------------------------------------------------------------------------------------

OPTIONS = {
    "epochs": ({"epochs": 3}, r"no option 'epochs': it is one of the strategy, AmnesiacHAT\(…, train_epochs=…\)"),
    "workers": ({"num_workers": "a"}, "num_workers must be an int of at least 0, got 'a'"),
    "last": ({"drop_last": 3}, "drop_last must be True or False, got 3"),
    "streams": ({"eval_streams": 3}, r"eval_streams must be a list, \[benchmark.test_stream\].* got 3"),
    "mistyped": ({"droplast": True}, r"strategy\.train has no option 'droplast'; did you mean"),
    **{
        name: ({name: []}, f"no option '{name}'; did you mean 'eval_streams'")
        for name in ("eval", "eval_stream", "eval_stream_list", "test_stream")
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_of_a_training_is_refused(name):
    given, message = OPTIONS[name]
    strategy = tiny.strategy()
    with unchanged(lambda: bits(strategy.model)), pytest.raises((TypeError, ValueError), match=message):
        strategy.train(tiny.tasks().train_stream, **given)


@pytest.mark.parametrize("kind", ["amnesiac", "pools"])
def test_a_trained_model_is_asked_for_tasks_that_it_has(kind):
    model = learn(tiny.strategy(kind), tiny.tasks()).model.eval()
    x, _ = tiny.samples()
    for wrong in ("0", 0.5, torch.tensor([0, 1])):
        with pytest.raises(TypeError, match=r"task_labels must be an int, or a tensor of 24 labels of tasks, got"):
            model(x, wrong)
    if kind == "amnesiac":
        with pytest.raises(UnknownTaskError, match=r"task 9 has no mask; tasks with one: \[0, 1\]"):
            model.cumulative_mask([9])


# Plugins and ledgers --------------------------------------------------------------------------------------------------

STREAM = with_unlearning(DIGITS, [UnlearningRequest((0,), 1, "before")]).train_stream


def without_masks():
    return stock(model=MultiHeadModel(mlp()), epochs=1, optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9))


def masked():
    return amnesiac(compensation="none", train_epochs=1, optimizer="momentum")


def refusing(plugin):
    """A fault that consists in one plugin too many."""

    def spoil(strategy):
        added = plugin()
        place = strategy.plugins.index(unlearning_plugin(strategy))  # a second ledger comes after the first one
        strategy.plugins.insert(place + isinstance(added, UnlearningPlugin), added)
        return lambda: strategy.plugins.remove(added)

    return spoil


def swapped(strategy):
    right = list(strategy.plugins)
    strategy.plugins.sort(key=lambda plugin: not isinstance(plugin, TrajectoryPlugin))
    return lambda: setattr(strategy, "plugins", right)


FAULTS = {
    "heads without masks": (without_masks, refusing(CounterfactualPlugin), TypeError, "need a model with masks"),
    "shadows without masks": (
        without_masks,
        refusing(BackupPlugin),
        TypeError,
        "shadow copies are of masked units: give a MaskedModel",
    ),
    "two trajectories": (masked, refusing(TrajectoryPlugin), ValueError, "has 2 TrajectoryPlugins"),
    "two ledgers": (masked, refusing(UnlearningPlugin), ValueError, "has 2 UnlearningPlugins"),
    "recorded before committed": (masked, swapped, ValueError, "put HATPlugin before TrajectoryPlugin"),
}


def state(strategy):
    optimizer = strategy.optimizer
    sizes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    return bits(strategy.model), sizes, frozen(optimizer.state_dict()), unlearning_plugin(strategy).ledger.state_dict()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_training_changes_nothing_and_runs_once_the_fault_is_gone(fault):
    make, spoil, error, message = FAULTS[fault]
    strategy = make()
    first, second = STREAM[:2]
    strategy.train(first)
    before = state(strategy)
    repair = spoil(strategy)
    for _ in range(2):  # the second time as the first
        with pytest.raises(error, match=message):
            strategy.train(second)
        assert state(strategy) == before
    repair()
    strategy.train(second)
    assert unlearning_plugin(strategy).ledger.remaining == (1,)
    assert strategy.model.tasks == (1,)
    assert state(strategy)[0] != before[0]


def test_tasks_loaded_with_a_checkpoint_make_no_claim_exact():
    """The checkpoint may be that of a model which unlearned something approximately."""
    before = trained(2, train_epochs=1)
    before.unlearn([0])
    strategy = amnesiac(train_epochs=1)
    strategy.model.load_state_dict(before.model.state_dict())
    with pytest.raises(RequestError, match="task 1 can't be unlearned: the model came with it"):
        strategy.plan_unlearning([1])
    with pytest.raises(RequestError, match="task 3 can't be unlearned: it is not yet trained"):
        strategy.plan_unlearning([3])
    loaded = bits(strategy.model)
    strategy.train(DIGITS.train_stream[2])
    assert strategy.unlearn([2]).claim == "approximate"
    assert bits(strategy.model) == loaded


def test_an_unlearning_plugin_that_is_not_the_strategys_own_is_refused():
    strategy = learn(stock(epochs=1), DIGITS.train_stream[:1])
    with unchanged(lambda: bits(strategy.model)), pytest.raises(RequestError, match="Naive does not have this"):
        UnlearningPlugin().unlearn(strategy, [0])
    assert unlearning_plugin(strategy).unlearn(strategy, [0]).tasks == (0,)


@pytest.mark.parametrize("declined", [False, True])
def test_requests_without_an_unlearning_plugin_are_warned_of(declined):
    plugins = [TrajectoryPlugin(), UnlearningPlugin(obey=False)] if declined else []
    strategy = make(HAT, hidden=(12,), features=10, plugins=plugins, train_epochs=1)
    first, second, *_ = with_unlearning(DIGITS, {1: [0]}).train_stream
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy.train(first)
        assert not [w for w in said if "obeys no request" in str(w.message)]
        strategy.train(second)
    told = [str(w.message) for w in said if "obeys no request" in str(w.message)]
    assert len(told) == (0 if declined else 1)
    assert all("UnlearningPlugin()" in text and "at task 1" in text for text in told)


@pytest.mark.parametrize(("make", "error"), [(amnesiac, TaskError), (stock, RequestError)], ids=["masks", "stock"])
def test_a_task_that_remains_is_not_trained_again(make, error):
    strategy = learn(make(), DIGITS.train_stream[:2])
    with pytest.raises(error, match="task 1 is already trained and remains: unlearn it first"):
        strategy.train(DIGITS.train_stream[1])


def test_one_training_over_several_tasks_is_refused_as_such():
    strategy = stock(JointTraining, epochs=1)
    before = bits(strategy.model)
    with pytest.raises(TaskError, match=r"JointTraining trains tasks \[0, 1, 2\] in one training.*Train one after"):
        strategy.train(DIGITS.train_stream[:3])
    assert bits(strategy.model) == before
    assert unlearning_plugin(strategy).ledger.remaining == ()
    strategy.train(DIGITS.train_stream[:1])
    assert unlearning_plugin(strategy).ledger.remaining == (0,)
    memory = stock(Cumulative, epochs=1)
    for experience in DIGITS.train_stream[:3]:  # trains on earlier tasks again, which makes no new task
        memory.train(experience)
    assert unlearning_plugin(memory).ledger.remaining == (0, 1, 2)
