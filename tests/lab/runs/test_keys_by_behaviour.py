"""Runs that train in different ways share no states, also if their settings are equal."""

import copy
import functools
import shutil
import types
import warnings

import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, brief, learn, stock
from support.strategy_state import bits
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate
from torchvision.transforms import RandomErasing

from avalanche_amnesia import AmnesiacHAT, MultiHeadModel, References
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.runs.behaviour import TEXTS
from avalanche_amnesia.training.plugins.in_memory_loader import InMemoryLoaderPlugin


def key_of(strategy, *experiences) -> str:
    """Return the key of the state after training tasks, by default one."""
    return RunStore().run(strategy).keys_of(experiences or [DIGITS.train_stream[0]])[-1]


@functools.cache
def trained_alone():
    return learn(brief(), DIGITS.train_stream[:1])


@functools.cache
def plain_key() -> str:
    return key_of(brief())


def halved(gradient):
    return gradient / 2


def halve(parameter):
    parameter.grad *= 0.5


def louder(module, inputs, output):
    return output * 1.5


def quieter(module, inputs):
    return (inputs[0] * 0.5, *inputs[1:])


def shrinking(optimizer, args, kwargs):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


def first_of(strategy):
    return next(p for p in strategy.model.parameters() if p.requires_grad)


def patched(strategy):
    step = type(strategy.optimizer).step

    def two_steps(self, closure=None):
        step(self)
        return step(self)

    strategy.optimizer.step = types.MethodType(two_steps, strategy.optimizer)


def weighted(strategy):
    strategy._criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]))


def another_group(strategy):
    strategy.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})


def by_hand(strategy):
    with torch.no_grad():
        first_of(strategy).add_(0.1)


def other_rate(strategy):
    strategy.optimizer.param_groups[0]["lr"] *= 3


CHANGES = {
    "hook before the optimizer's step": lambda s: s.optimizer.register_step_pre_hook(shrinking),
    "hook after the optimizer's step": lambda s: s.optimizer.register_step_post_hook(shrinking),
    "hook of a parameter": lambda s: first_of(s).register_hook(halved),
    "hook after a gradient": lambda s: first_of(s).register_post_accumulate_grad_hook(halve),
    "forward hook": lambda s: s.model.register_forward_hook(louder),
    "forward pre-hook": lambda s: s.model.register_forward_pre_hook(quieter),
    "patched step": patched,
    "frozen parameter": lambda s: first_of(s).requires_grad_(False),
    "class weights": weighted,
    "parameter group": another_group,
    "weight": by_hand,
    "learning rate": other_rate,
    "epochs": lambda s: setattr(s, "train_epochs", 2),
    "mini-batches": lambda s: setattr(s, "train_mb_size", 20),
    "smoothing of labels": lambda s: setattr(s, "_criterion", nn.CrossEntropyLoss(label_smoothing=0.2)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    learn(RunStore(folder).run(brief()), DIGITS.train_stream[:2])
    return folder


@pytest.fixture
def store(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return RunStore(tmp_path)


def test_the_same_script_trains_nothing_and_makes_no_warning(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = store.run(brief())
        for task in (0, 1):
            run.train(DIGITS.train_stream[task])
            run.strategy.eval(DIGITS.test_stream[: task + 1])
    assert run.computed == 0


def test_every_change_before_the_run_changes_the_key():
    keys = {"none": plain_key()}
    for name, change in CHANGES.items():
        change(strategy := brief())
        keys[name] = key_of(strategy)
    assert len(set(keys.values())) == len(keys)


BETWEEN = ("hook after a gradient", "forward hook", "patched step", "frozen parameter", "class weights")


@pytest.mark.parametrize("change", [*BETWEEN, "parameter group", "weight", "learning rate", "mini-batches"])
def test_a_run_that_is_changed_between_steps_leaves_the_store(change, store):
    run, plain, nodes = store.run(brief()), copy.deepcopy(trained_alone()), {node.key for node in store.nodes()}
    run.train(DIGITS.train_stream[0])
    CHANGES[change](run.strategy)
    CHANGES[change](plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for task in (1, 2):
            run.train(DIGITS.train_stream[task])
            plain.train(DIGITS.train_stream[task])
    assert bits(run.strategy.model) == bits(plain.model)
    assert sum("somebody changed" in str(warning.message) for warning in told) == 1
    assert {node.key for node in store.nodes()} == nodes


def test_the_warning_names_what_changed(store):
    run = store.run(brief())
    other_rate(run.strategy)
    with pytest.warns(UserWarning, match=r"somebody changed optimizer\.param_groups\[0\]\.lr$"):
        run.train(DIGITS.train_stream[0])
    assert run.computed == 1


RATE = 1.0


def over_a_global(logits, y):
    return nn.functional.cross_entropy(logits, y) * RATE


def later_louder(n):
    """Return a loss that doubles after n calls."""
    calls = 0

    def loss(logits, y):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(logits, y) * (2 if calls > n else 1)

    return loss


class ShrinksByEpoch(SupervisedPlugin):
    def __init__(self, factor):
        super().__init__()
        self.by = factor

    def after_training_epoch(self, strategy, **kwargs):
        with torch.no_grad():
            [parameter.mul_(self.by * RATE) for parameter in strategy.model.backbone.parameters()]


class Net(nn.Module):
    features = 16

    def __init__(self, activation=torch.relu, evaluated=1):
        super().__init__()
        self.layer, self.activation, self.evaluated = nn.Linear(64, 16), activation, evaluated

    def forward(self, x):
        x = self.activation(self.layer(x.flatten(1)))
        return x if self.training else torch.relu(x - self.evaluated)


def sampling(weight):
    """Return a class of strategies that draws samples with weights; its name is always the same."""

    class Sampling(AmnesiacHAT):
        def make_train_dataloader(self, **kwargs):
            data = self.adapted_dataset
            sampler = WeightedRandomSampler([weight if at % 2 else 1.0 for at in range(len(data))], len(data))
            self.dataloader = DataLoader(data, self.train_mb_size, sampler=sampler, collate_fn=data.collate_fn)

    return Sampling


def of_class(kind):
    strategy = brief()
    strategy.__class__ = kind
    strategy.plugins = [plugin for plugin in strategy.plugins if not isinstance(plugin, InMemoryLoaderPlugin)]
    return strategy


def louder_steps(gain):
    class Steps(AmnesiacHAT):
        def criterion(self):
            return super().criterion() * gain

    return Steps


def in_half_precision(strategy):
    strategy.model.backbone.register_forward_hook(lambda module, x, y: y.bfloat16().float())
    return strategy


def accumulating(strategy):
    zero_grad, calls = strategy.optimizer.zero_grad, iter(range(1000))
    strategy.optimizer.zero_grad = lambda: next(calls) % 2 or zero_grad()
    return strategy


def from_other_weights():
    strategy = brief()
    with torch.no_grad():
        for parameter in strategy.model.backbone.parameters():
            parameter.neg_()
    return strategy


SCRIPTS = {
    "later change of the loss": (lambda: brief(criterion=later_louder(50)), lambda: brief(criterion=later_louder(60))),
    "number of a plugin": (lambda: brief(plugins=[ShrinksByEpoch(1.0)]), lambda: brief(plugins=[ShrinksByEpoch(0.9)])),
    "sampler": (lambda: of_class(sampling(1.0)), lambda: of_class(sampling(5.0))),
    "activation": (lambda: brief(net=Net), lambda: brief(net=lambda: Net(torch.tanh))),
    "network in evaluations": (lambda: brief(net=Net), lambda: brief(net=lambda: Net(evaluated=2))),
    "method of the strategy": (lambda: of_class(louder_steps(1.0)), lambda: of_class(louder_steps(1.5))),
    "precision": (brief, lambda: in_half_precision(brief())),
    "gradients of several steps": (brief, lambda: accumulating(brief())),
    "initial weights": (brief, from_other_weights),
}


@pytest.mark.parametrize(("one", "other"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_that_train_in_different_ways_have_different_keys(one, other):
    key = plain_key() if one is brief else key_of(one())
    assert key == key_of(one()) != key_of(other())


def test_globals_of_the_script_and_patched_classes_are_part_of_the_key(monkeypatch):
    builds = (lambda: brief(criterion=over_a_global), lambda: brief(plugins=[ShrinksByEpoch(1.0)]))
    before, plain = [key_of(build()) for build in builds], plain_key()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "RATE", 0.5)
        assert not {key_of(build()) for build in builds} & set(before)
    for kind, method in ((Adam, "step"), (nn.CrossEntropyLoss, "forward")):
        original = getattr(kind, method)

        def twice(self, *args, original=original):
            first = original(self, *args)
            return original(self, *args) if first is None else first * 2

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, twice)
            assert key_of(brief()) != plain


class Evaluates(ShrinksByEpoch):
    evaluations = 0

    def after_eval(self, strategy, **kwargs):
        self.evaluations += 1


def slower_shrinking(strategy):
    next(plugin for plugin in strategy.plugins if type(plugin) is ShrinksByEpoch).by = 0.5


def other_activation(strategy):
    strategy.model.backbone.activation = torch.tanh


CHANGES_OF_ITS_OWN = {
    "number of a plugin": (lambda: brief(plugins=[ShrinksByEpoch(1.0), Evaluates(1.0)]), slower_shrinking),
    "activation": (lambda: stock(model=MultiHeadModel(Net()), epochs=1), other_activation),
}


@pytest.mark.parametrize(("build", "change"), CHANGES_OF_ITS_OWN.values(), ids=CHANGES_OF_ITS_OWN)
def test_changed_attributes_of_the_script_leave_the_store(build, change, tmp_path):
    run = RunStore(tmp_path).run(build())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(DIGITS.train_stream[0])
        run.strategy.eval(DIGITS.test_stream[:1])
        run.train(DIGITS.train_stream[1])
    change(run.strategy)
    with pytest.warns(UserWarning, match="somebody changed"):
        run.train(DIGITS.train_stream[2])
    assert len(RunStore(tmp_path).nodes()) == 2


SCRIPT = """
class Shrinks(SupervisedPlugin):
    "{doc}"
    factor = 1{comment}

    def after_training_epoch(self, strategy, **kwargs):
        "{doc}"
        {comment}
        rates = [{rate} for _ in strategy.model.parameters()]
"""


def of_script(doc="One.", comment="", rate=0.9):
    content = {"SupervisedPlugin": SupervisedPlugin, "__name__": "a_script"}
    exec(SCRIPT.format(doc=doc, comment=comment, rate=rate), content)
    return brief(plugins=[content["Shrinks"]()])


def test_comments_and_docstrings_of_a_script_are_no_part_of_the_key():
    assert key_of(of_script()) == key_of(of_script(doc="Other words.", comment="  # a comment\n\n"))
    assert key_of(of_script()) != key_of(of_script(rate=0.8))
    assert key_of(brief(seed=3)) != plain_key()


def test_the_number_of_threads_is_no_part_of_the_key_if_it_changes_no_bits():
    expected = plain_key()  # with one thread
    torch.set_num_threads(2)
    try:
        assert key_of(brief()) == expected
    finally:
        torch.set_num_threads(1)


X, Y = DIGITS.train_stream[0].tensors


class Items(Dataset):
    """A data set that returns single samples."""

    targets = Y.tolist()

    def __init__(self, x=X, collate=None):
        self.x = x
        if collate is not None:
            self.collate_fn = collate

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at], self.targets[at]


def of(train_transform=None, x=X, collate=None, data=None):
    data, same = data or Items(x), lambda x: x
    benchmark = nc_benchmark(data, Items(), 1, True, seed=0, train_transform=train_transform, eval_transform=same)
    experience = benchmark.train_stream[0]
    if collate is not None:
        experience.dataset.collate_fn = collate
    return experience


def brighter(samples):
    x, *others = default_collate(samples)
    return [x * 3, *others]


def noisy(x):
    return x + torch.rand(x.shape)


class Drawn:
    """Noise from its own generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


class LaterLouder:
    """A transform that changes after n samples."""

    def __init__(self, n):
        self.n, self.calls = n, 0

    def __call__(self, x):
        self.calls += 1
        return x * 2 if self.calls > self.n else x


class Named:
    """A transform with a string and a bool as settings, which no first mini-batch shows."""

    def __init__(self, mode, flip):
        self.mode, self.flip = mode, flip

    def __call__(self, x):
        return x


def changes_one(x):
    return x * 2 if torch.equal(x, X[17]) else x


DATA = {
    "transform": lambda: of(lambda x: x * 2),
    "random transform": lambda: of(noisy),
    "rounded": lambda: of(lambda x: x.bfloat16().float()),
    "transform of one sample": lambda: of(changes_one),
    "transform that changes later": lambda: of(LaterLouder(10_000)),
    "transform that changes earlier": lambda: of(LaterLouder(5_000)),
    "content of the same length": lambda: of(x=X.flip(-1)),
    "order": lambda: of(x=X.flip(0)),
    "collate function": lambda: of(collate=brighter),
}


def keys_of_data(before) -> dict[str, str]:
    run = RunStore().run(brief())
    return {name: run.keys_of([*before, data()])[-1] for name, data in {**DATA, "plain": of}.items()}


@pytest.mark.parametrize("before", [[], [DIGITS.train_stream[1]]], ids=["first task", "a later one"])
def test_the_data_as_seen_by_the_training_are_part_of_the_key(before):
    keys = keys_of_data(before)
    assert len(set(keys.values())) == len(keys)
    assert keys_of_data(before) == keys


class Counts(Items):
    """Samples that count how often they are read."""

    asked = 0

    def __getitem__(self, at):
        self.asked += 1
        x, y = super().__getitem__(at)
        return x + self.asked * 1e-3, y


REMEMBERING = {"generator": lambda: of(Drawn(1)), "counter": lambda: of(data=Counts())}


@pytest.mark.parametrize("data", REMEMBERING.values(), ids=REMEMBERING)
@pytest.mark.parametrize("before", [(), (1,)], ids=["first task", "a later one"])
def test_trainings_on_data_that_change_are_not_stored(data, before, tmp_path):
    run = learn(RunStore(tmp_path).run(brief()), [DIGITS.train_stream[task] for task in before])
    with pytest.warns(UserWarning, match="not stored: the training is not repeatable: its data"):
        run.train(data())
    assert run.computed == len(before) + 1
    assert len(RunStore(tmp_path).nodes()) == len(before)


def test_trainings_on_data_that_will_change_later_are_not_stored(tmp_path):
    run = RunStore(tmp_path).run(brief())
    with pytest.warns(UserWarning, match=r"not repeatable: it changed LaterLouder\.calls in its data set"):
        run.train(of(LaterLouder(10_000)))
    assert not RunStore(tmp_path).nodes()


def test_reading_the_data_for_a_key_draws_no_random_numbers():
    experience, run = of(drawn := Drawn(1)), RunStore().run(brief())
    before, state = torch.get_rng_state(), drawn.generator.get_state()
    with pytest.warns(UserWarning, match="not repeatable"):
        run.keys_of([experience])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn.generator.get_state(), state)


def test_settings_of_any_type_texts_and_files_are_part_of_the_key(tmp_path, monkeypatch):
    def transformed(transform):
        return lambda: of(transform)

    erasing = [transformed(RandomErasing(p=p)) for p in (0.01, 0.012)]
    named = [transformed(Named(mode, flip)) for mode, flip in (("a", True), ("b", True), ("a", False))]
    keys = [key_of(brief(), data()) for data in (*erasing, *named, *named)]
    assert len(set(keys)) == 5
    assert keys[-3:] == keys[2:5]
    (file := tmp_path / "pixels.bin").write_bytes(b"1")
    before = key_of(brief(), of(Named(str(file), True)))
    file.write_bytes(b"2" * 2)
    assert key_of(brief(), of(Named(str(file), True))) != before
    before = key_of(brief(criterion=over_a_global))
    text, imported = TEXTS["support.strategies"]  # imported by this module, whose function the loss is
    monkeypatch.setitem(TEXTS, "support.strategies", (f"{text}, with a comment", imported))
    assert key_of(brief(criterion=over_a_global)) != before


def test_a_key_of_the_user_stands_for_code(tmp_path):
    first, second = (
        References(functools.partial(brief, criterion=loss), DIGITS, store=RunStore(tmp_path), key="one")
        for loss in (later_louder(10**6), later_louder(10**7))
    )
    assert bits(first.reference([0, 1])) == bits(second.reference([0, 1]))
    assert (first.trainings, second.trainings) == (2, 0)
    assert References(brief, DIGITS, store=RunStore(tmp_path), key="two").seconds([0]) > 0
    assert len(RunStore(tmp_path).nodes()) == 3
