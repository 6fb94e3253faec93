"""A run gets no weights of a run that trained otherwise, though no setting says how they differ."""

import shutil
import types
import warnings

import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from support.strategies import DIGITS, amnesiac
from torch import nn
from torch.utils.data import Dataset, default_collate

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.lab.runs import RunStore


def make():
    return amnesiac(train_epochs=1)


def bits(strategy) -> dict[str, str]:
    return state_hashes(strategy.model.state_dict())


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
    "hook behind the optimizer's step": lambda s: s.optimizer.register_step_post_hook(shrinking),
    "hook of a parameter": lambda s: first_of(s).register_hook(halved),
    "hook behind a gradient": lambda s: first_of(s).register_post_accumulate_grad_hook(halve),
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
    run = RunStore(folder).run(make())
    for task in (0, 1):
        run.train(DIGITS.train_stream[task])
    return folder


@pytest.fixture
def store(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return RunStore(tmp_path)


def test_the_same_script_trains_nothing_and_is_not_warned(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = store.run(make())
        for task in (0, 1):
            run.train(DIGITS.train_stream[task])
            run.strategy.eval(DIGITS.test_stream[: task + 1])
    assert run.computed == 0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_before_the_run_is_in_its_key(change, store):
    strategy = make()
    change(strategy)
    assert store.run(strategy).key != store.run(make()).key


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_between_steps_leaves_the_store(change, store):
    run, plain, nodes = store.run(make()), make(), {node.key for node in store.nodes()}
    run.train(DIGITS.train_stream[0])
    plain.train(DIGITS.train_stream[0])
    change(run.strategy)
    change(plain)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for task in (1, 2):
            run.train(DIGITS.train_stream[task])
            plain.train(DIGITS.train_stream[task])
    assert bits(run.strategy) == bits(plain)
    assert sum("somebody changed" in str(warning.message) for warning in told) == 1
    assert {node.key for node in store.nodes()} == nodes


def test_the_warning_names_what_changed(store):
    run = store.run(make())
    other_rate(run.strategy)
    with pytest.warns(UserWarning, match=r"somebody changed optimizer\.param_groups\[0\]\.lr$"):
        run.train(DIGITS.train_stream[0])
    assert run.computed == 1


# Data --------------------------------------------------------------------------------------------------------------

X, Y = DIGITS.train_stream[0].tensors


class Items(Dataset):
    """Samples one by one."""

    targets = Y.tolist()

    def __init__(self, x=X, collate=None):
        self.x = x
        if collate is not None:
            self.collate_fn = collate

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at], self.targets[at]


def of(train_transform=None, x=X, collate=None):
    benchmark = nc_benchmark(
        Items(x), Items(), 1, True, seed=0, train_transform=train_transform, eval_transform=lambda x: x
    )
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
    """Noise from a generator of its own."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


DATA = {
    "transform": lambda: of(lambda x: x * 2),
    "random transform": lambda: of(noisy),
    "generator": lambda: of(Drawn(1)),
    "another generator": lambda: of(Drawn(2)),
    "content of the same length": lambda: of(x=X.flip(-1)),
    "collate function": lambda: of(collate=brighter),
}


def key_of(store, experience):
    return store.run(make()).keys_of([experience])[0]


def test_the_data_count_as_the_training_sees_them(store):
    keys = {name: key_of(store, data()) for name, data in DATA.items()} | {"plain": key_of(store, of())}
    assert len(set(keys.values())) == len(keys)
    assert {name: key_of(store, data()) for name, data in DATA.items()}.items() <= keys.items()


def test_looking_at_the_data_draws_nothing(store):
    experience, run = of(drawn := Drawn(1)), store.run(make())
    before, state = torch.get_rng_state(), drawn.generator.get_state()
    run.keys_of([experience])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn.generator.get_state(), state)


def test_another_order_is_another_key(store):
    assert store.run(amnesiac(train_epochs=1, seed=3)).key != store.run(make()).key
