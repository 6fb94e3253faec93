"""Runs that train in different ways share no states, also if their settings are equal; a key changes no bit."""

import functools
import os
import random
import re
import signal
import warnings
from dataclasses import make_dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import product
from operator import itemgetter

import numpy as np
import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.core import SupervisedPlugin
from support.strategies import DIGITS, PRICED, ConvNet, amnesiac, brief, learn, make
from support.strategy_state import bits
from support.tiny import Items
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.data import default_collate
from torchvision.transforms import RandomErasing

from avalanche_amnesia import WSN, AmnesiacHAT
from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark, with_unlearning
from avalanche_amnesia.contrib.baselines import CLPUDERpp
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.runs.first_batches import first_batches


def key_of(strategy, *experiences) -> str:
    """Return the key of the state after training tasks, by default one."""
    return RunStore().run(strategy).keys_of(experiences or [DIGITS.train_stream[0]])[-1]


@functools.cache
def plain_key() -> str:
    return key_of(brief())


# Changes of a strategy after it was made -------------------------------------------------------------------------


def first_of(strategy):
    return next(p for p in strategy.model.parameters() if p.requires_grad)


CHANGES = {
    "forward hook": lambda s: s.model.register_forward_hook(lambda module, x, y: y * 1.5),
    "frozen parameter": lambda s: first_of(s).requires_grad_(False),
    "class weights": lambda s: setattr(s, "_criterion", nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]))),
    "parameter group": lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}),
    "weight": lambda s: first_of(s).data.add_(0.1),
    "learning rate": lambda s: s.optimizer.param_groups[0].update(lr=0.03),
    "epochs": lambda s: setattr(s, "train_epochs", 2),
    "mini-batches": lambda s: setattr(s, "train_mb_size", 20),
}


def test_every_change_before_the_run_changes_the_key():
    keys = {"none": plain_key()}
    for name, change in CHANGES.items():
        change(strategy := brief())
        keys[name] = key_of(strategy)
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [("forward hook", "other code changed "), ("learning rate", "other code changed optimizer.param_groups[0].lr")],
)
def test_a_run_that_is_changed_between_steps_leaves_the_store(change, words, tmp_path):
    store = RunStore(tmp_path)
    run, plain = learn(store.run(brief()), DIGITS, 1), learn(brief(), DIGITS, 1)
    CHANGES[change](run.strategy)
    CHANGES[change](plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        learn(run, DIGITS, [1, 2])
        learn(plain, DIGITS, [1, 2])
    assert bits(run.strategy.model) == bits(plain.model)
    assert sum(words in str(warning.message) for warning in told) == 1
    assert len(store.nodes()) == 1


# Scripts that differ ------------------------------------------------------------------------------------------


RATE = 1.0


class LaterLouder:
    """Doubles the results of a function after n calls."""

    def __init__(self, n, function=lambda x: x):
        self.n, self.function, self.calls = n, function, 0

    def __call__(self, *given):
        self.calls += 1
        return self.function(*given) * (2 if self.calls > self.n else 1)


def weighted(scale):
    return lambda x, y: scale * cross_entropy(x, y)


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


def louder_steps(gain):
    class Steps(AmnesiacHAT):
        def criterion(self):
            return super().criterion() * gain

    return Steps


def losses(one, other):
    return lambda: brief(criterion=one), lambda: brief(criterion=other)


class Shown(dict):
    """A dictionary with attributes."""

    def __call__(self, x, y):
        return cross_entropy(x, y) * self.gain


Slotted = make_dataclass("Slotted", ["gain"], namespace={"__call__": Shown.__call__}, slots=True)


def shown(gain):
    vars(found := Shown()).update(gain=gain)
    return found


def stepping(gain):
    (strategy := brief()).optimizer.step = shown(gain)
    return strategy


BARE = [(re.compile(text), itemgetter(text), Decimal(text), slice(text), np.dtype(f"f{text}")) for text in "48"]
SCRIPTS = {
    **{type(one).__name__: losses(weighted(one), weighted(other)) for one, other in zip(*BARE, strict=True)},
    "attribute of a dictionary": losses(shown(1.0), shown(2.0)),
    "attribute in a slot": losses(Slotted(1.0), Slotted(2.0)),
    "order of a dictionary": losses(partial(weighted, {"a": 1, "b": 2}), partial(weighted, {"b": 2, "a": 1})),
    "bound method of a list": losses(weighted([1.0].__getitem__), weighted([2.0].__getitem__)),
    "object as a method": (lambda: stepping(1.0), lambda: stepping(2.0)),
    "long list of arrays": losses(weighted([(1, np.ones(1))] * 2000), weighted([(1, np.zeros(1))] * 2000)),
    "mode of the loss": losses(nn.Sequential(), nn.Sequential().eval()),
    "later change of the loss": losses(LaterLouder(50, cross_entropy), LaterLouder(60, cross_entropy)),
    "state of a generator": losses(weighted(x for x in "a"), weighted(x for x in "b")),
    "tensor in a closure": losses(weighted(torch.ones(())), weighted(torch.zeros(()))),
    "array in a closure": losses(weighted(np.ones(1)), weighted(np.zeros(1))),
    "random numbers": losses(weighted(random.Random(0)), weighted(random.Random(1))),
    "number of a plugin": (lambda: brief(plugins=[ShrinksByEpoch(1.0)]), lambda: brief(plugins=[ShrinksByEpoch(0.9)])),
    "activation": (lambda: brief(net=Net), lambda: brief(net=lambda: Net(torch.tanh))),
    "network in evaluations": (lambda: brief(net=Net), lambda: brief(net=lambda: Net(evaluated=2))),
    "method of the strategy": (lambda: make(louder_steps(1.0)), lambda: make(louder_steps(1.5))),
    "betas": (brief, lambda: brief(optimizer=partial(Adam, lr=1e-2, betas=(0.8, 0.999)))),
    "price of a mask": (lambda: brief(masks=PRICED), lambda: brief(masks=replace(PRICED, sparsity_weight=0.1))),
    "compensation": (brief, lambda: brief(compensation="none")),
    "state of the optimizer": (brief, lambda: brief(reset_optimizer=False)),
    "seed": (brief, lambda: brief(seed=1)),
    "initial weights": (brief, lambda: brief(torch_seed=1)),
}


@pytest.mark.parametrize(("one", "other"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_that_train_in_different_ways_have_different_keys(one, other):
    key = plain_key() if one is brief else key_of(one())
    assert key == key_of(one()) != key_of(other())


def test_globals_of_the_script_and_patched_classes_are_part_of_the_key(monkeypatch):
    builds = (
        lambda: brief(criterion=lambda x, y: cross_entropy(x, y) * eval("RA" + "TE")),
        lambda: brief(plugins=[ShrinksByEpoch(1.0)]),
    )
    before, plain = [key_of(build()) for build in builds], plain_key()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "RATE", 0.5)
        assert not {key_of(build()) for build in builds} & set(before)
    for kind, method in ((Adam, "step"), (nn.CrossEntropyLoss, "forward"), (nn.init, "zeros_")):
        original = getattr(kind, method)

        def twice(self, *args, original=original):
            first = original(self, *args)
            return original(self, *args) if first is None else first * 2

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, twice)
            assert key_of(brief()) != plain


SPELLED = [lambda: os.environ["SCALE"], lambda: os.environ.get("SCALE", "1"), lambda: os.getenv("SCALE")]
COMPUTED = [lambda: os.getenv("A") or os.environ[KEY], lambda: os.getenv("A") or ALIAS["SCALE"]]
KEY, ALIAS = "SCALE", os.environ


@pytest.mark.parametrize("read", [*SPELLED, *COMPUTED])
def test_only_the_variables_of_the_environment_that_are_read_are_part_of_a_key(read, monkeypatch):
    keys = []
    for changed in ("SCALE", "OTHER", "SCALE"):
        monkeypatch.setenv(changed, str(len(keys)))
        keys.append(key_of(brief(criterion=weighted(read))))
    assert keys[2] not in keys[:2]
    assert (keys[0] == keys[1]) == (read in SPELLED)


class Evaluates(ShrinksByEpoch):
    evaluations = 0

    def after_eval(self, strategy, **kwargs):
        self.evaluations += 1


def test_changed_attributes_of_the_script_leave_the_store_and_evaluations_do_not(tmp_path):
    plugin = ShrinksByEpoch(1.0)
    run = RunStore(tmp_path).run(brief(plugins=[plugin, Evaluates(1.0)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(DIGITS.train_stream[0])
        run.strategy.eval(DIGITS.test_stream[:1])
        run.train(DIGITS.train_stream[1])
    plugin.by = 0.5
    with pytest.warns(UserWarning, match="other code changed"):
        run.train(DIGITS.train_stream[2])
    assert len(RunStore(tmp_path).nodes()) == 2


SCRIPT = """
class Shrinks(SupervisedPlugin):
    "{doc}"
    factor = {factor}{comment}

    def after_training_epoch(self, strategy, **kwargs):
        "{doc}"
        {comment}
        rates = [{rate} for _ in strategy.model.parameters()]
"""


def of_script(doc="One.", comment="", rate=0.9, factor=1):
    content = {"SupervisedPlugin": SupervisedPlugin, "__name__": "a_script"}
    exec(SCRIPT.format(doc=doc, comment=comment, rate=rate, factor=factor), content)
    return brief(plugins=[content["Shrinks"]()])


def test_comments_evaluations_and_threads_are_no_part_of_the_key():
    assert key_of(of_script()) == key_of(of_script(doc="Other words.", comment="  # a comment\n\n"))
    assert len({key_of(of_script(**changed)) for changed in ({}, {"rate": 0.8}, {"factor": 2})}) == 3
    assert plain_key() == key_of(brief(eval_mb_size=3))
    torch.set_num_threads(2)
    try:
        assert key_of(brief()) == plain_key()
    finally:
        torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        assert key_of(brief()) != plain_key()


# Data ---------------------------------------------------------------------------------------------------------


def test_any_change_of_the_stream_or_of_its_requests_changes_the_key():
    benchmarks = (
        *(DIGITS, SplitDigits(n_train=380, n_test=200), SplitDigits(n_train=400, n_test=200, seed=1)),
        *(with_unlearning(DIGITS, permanent=[0]), with_unlearning(DIGITS, deadline=2)),
        with_unlearning(DIGITS, {0: [0]}),
    )
    keys = [key_of(brief(), benchmark.train_stream[0]) for benchmark in benchmarks]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of(brief(), with_unlearning(DIGITS).train_stream[0])


X, Y = DIGITS.train_stream[0].tensors


def items(x=X):
    """A data set that returns single samples."""
    return Items(zip(x, Y.tolist(), strict=True), Y.tolist())


PAIRS = Items([{"a": x, "b": x, "label": y} for x, y in items()], Y.tolist())


def of(train_transform=None, x=X, collate=None):
    data, same = items(x), lambda x: x
    benchmark = nc_benchmark(data, items(), 1, True, seed=0, train_transform=train_transform, eval_transform=same)
    experience = benchmark.train_stream[0]
    if collate is not None:
        experience.dataset.collate_fn = collate
    return experience


def brighter(samples):
    x, *others = default_collate(samples)
    return [x * 3, *others]


def with_noise(seed):
    """Return a transform that adds noise from its own generator."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x: x + torch.rand(x.shape, generator=generator)


class Named:
    """A transform with settings that the first mini-batches do not show."""

    def __init__(self, mode, flip):
        self.mode, self.flip, self.names = mode, flip, {str(type(mode)), "c", "d"}

    def __call__(self, x):
        return x


DATA = {
    "transform": lambda: of(lambda x: x * 2),
    "random transform": lambda: of(lambda x: x + torch.rand(x.shape)),
    "rounded": lambda: of(lambda x: x.bfloat16().float()),
    "transform of one sample": lambda: of(lambda x: x * 2 if torch.equal(x, X[17]) else x),
    "transform that changes later": lambda: of(LaterLouder(10_000)),
    "transform that changes earlier": lambda: of(LaterLouder(5_000)),
    "order": lambda: of(x=X.flip(0)),
    "collate function": lambda: of(collate=brighter),
    "inputs of two names": lambda: task_benchmark(PAIRS, PAIRS, [[0, 1]]).train_stream[0],
    "plain": of,
}


def keys_of_data(*before) -> dict[str, str]:
    run = RunStore().run(brief())
    return {name: run.keys_of([*before, data()])[-1] for name, data in DATA.items()}


def test_the_data_as_seen_by_the_training_are_part_of_the_key():
    keys = keys_of_data(DIGITS.train_stream[1])
    assert len(set(keys.values())) == len(keys)
    assert keys_of_data(DIGITS.train_stream[1]) == keys


REMEMBERING = {
    "a count": (lambda: of(LaterLouder(70)), "the training is not repeatable: its data"),
    "a generator": (lambda: of(with_noise(1)), "the training is not repeatable: its data"),
    "a change later": (
        lambda: of(LaterLouder(10_000)),
        r"not repeatable: it changed test_keys\.LaterLouder\.calls in its data set",
    ),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_trainings_on_data_that_change_are_not_stored_and_have_the_bits_of_a_training_alone(name, tmp_path):
    data, words = REMEMBERING[name]
    before = [1] if name == "a generator" else []
    run = learn(RunStore(tmp_path).run(brief()), [DIGITS.train_stream[task] for task in before])
    with pytest.warns(UserWarning, match=words):
        run.train(data())
    assert run.computed == len(before) + 1
    assert len(RunStore(tmp_path).nodes()) == len(before)
    assert bits(run.strategy.model) == bits(
        learn(brief(), [*(DIGITS.train_stream[task] for task in before), data()]).model
    )


def test_settings_of_any_type_and_files_are_part_of_the_key(tmp_path):
    def keys(transforms):
        return [RunStore().run(brief()).keys_of([of(transform)])[-1] for transform in transforms]

    settings = [("a", True), ("b", True), ("a", False)]
    transforms = [*(RandomErasing(p=p) for p in (0.01, 0.012)), *(Named(*of) for of in settings)]
    first = keys(transforms)
    assert len(set(first)) == 5
    assert keys([RandomErasing(p=0.01), Named("a", True)]) == [first[0], first[2]]
    (file := tmp_path / "pixels.bin").write_bytes(b"1")
    many = [(str(file), 1)] * 2000
    before = keys([Named(str(file), True), Named(many, True)])
    file.write_bytes(b"22")
    assert not set(before) & set(keys([Named(str(file), True), Named(many, True)]))


def test_objects_of_one_class_are_told_apart_by_their_places():
    pairs = product([Named("a", True), Named("b", True)], repeat=2)
    keys = [key_of(brief(), of(Named(pair, True))) for pair in [*pairs] * 2]
    assert len(set(keys)) == 4
    assert keys[:4] == keys[4:]


def test_a_copy_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(signal, "alarm", lambda seconds, alarm=signal.alarm: alarm(1))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: signal.pause())
    with pytest.warns(UserWarning, match="ended, or needed more than 300 s"):
        key_of(brief(), of(lambda x: x))


METHODS = {
    "shadows of convolutions": lambda: amnesiac(net=ConvNet, compensation=BackupPlugin()),
    "random rule": lambda: amnesiac(adjustment="random", optimizer="momentum"),
    "WSN": lambda: make(WSN, optimizer="momentum"),
    "CLPU-DER++": lambda: make(CLPUDERpp),
}


@pytest.mark.parametrize("method", METHODS)
def test_reading_the_first_mini_batches_changes_no_bit(method):
    lives = []
    for read in (True, False):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
        strategy = METHODS[method]()
        for experience in DIGITS.train_stream[:2]:
            if read:
                assert first_batches(strategy, experience, 3)
            strategy.train(experience)
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
        learned = bits(strategy.model)
        strategy.unlearn([0])
        lives.append([learned, bits(strategy.model), drawn, vars(strategy.clock).copy()])
    assert lives[0] == lives[1]
