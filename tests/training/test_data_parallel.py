"""One training on several processes: the same mini-batches and bits for all, and one end for all."""

import os
import signal
from functools import partial

import pytest
import torch
from avalanche.benchmarks.utils.data_loader import TaskBalancedDataLoader
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training import Naive
from avalanche.training.plugins import ReplayPlugin
from support import FACTOR
from support.process_group import in_group, is_last
from support.stock_hosts import host
from support.strategies import BatchNormedConvNet, Hears, NormedConvNet, TwoNorms, learn, make, quiet, ranpac
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from avalanche_amnesia import HAT, WSN, AdaHAT, AmnesiacHAT, DisjointModel, DisjointSubnets, MaskedModel, RequestError
from avalanche_amnesia.benchmarks import SplitDigits, task_benchmark, with_unlearning
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.contrib.baselines import PALL, Independent, NetworkPerTask
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.processes import n_processes
from avalanche_amnesia.training import AveragedWeights, RandomFeatures, SeedingPlugin, data_parallel, load_state
from avalanche_amnesia.training.host.lookup import unlearning_of

STREAM = SplitDigits(n_train=200, n_test=100)
KINDS = {kind.__name__: kind for kind in (HAT, AdaHAT, AmnesiacHAT, WSN, DisjointSubnets, PALL, Independent)}
STOCK = ("ewc", "lwf", "replay", "gem", "agem")
SHADOWED, AVERAGED = "AmnesiacHAT with shadows", "DisjointSubnets with averages"


def hashes(strategy):
    return state_hashes(strategy.model.state_dict())


def add_noise(strategy):
    """Draw outside of the network: the same in all processes."""
    for gradient in (p.grad for p in strategy.model.parameters() if p.grad is not None):
        gradient.add_(0.01 * torch.randn_like(gradient))


def strategy_of(name, net=NormedConvNet, **options):
    """A strategy by name; its last mini-batch, of 3 samples, is smaller than a group of 4."""
    if name == "ranpac":
        return ranpac(**options)
    if name in STOCK:
        return host(name, plugins=(Hears(before_update=add_noise),), **options)
    if name == SHADOWED:
        name, options = "AmnesiacHAT", {"compensation": BackupPlugin, **options}
    if name == AVERAGED:
        name, net = "DisjointSubnets", BatchNormedConvNet
        options = {"plugins": [AveragedWeights(), RandomFeatures(30)], **options}
    return make(KINDS[name], net=net, optimizer="momentum", **{"train_mb_size": 37, **options})


def lives(names):
    """Bits, records and metrics of a short life of each strategy, with a request after the second task."""
    found = {}
    stream = with_unlearning(STREAM, requests={1: [0]})
    for name in names:
        asked = name not in ("HAT", "AdaHAT")
        evaluator = quiet(accuracy_metrics(epoch=True, experience=True), loss_metrics(epoch=True))
        strategy = learn(strategy_of(name, evaluator=evaluator), stream if asked else STREAM, 3)
        records = unlearning_of(strategy).records if asked else []
        found[name] = hashes(strategy), records, strategy.eval(STREAM.test_stream)
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_all_processes_hold_the_same_bits_records_and_metrics(n):
    first, *others = in_group(n, lives, [*KINDS, *STOCK, SHADOWED, AVERAGED, "ranpac"])
    for name, found in first.items():
        assert all(other[name] == found for other in others), name
    assert first["DisjointSubnets"][1][0].claim == "exact"
    (alone,) = in_group(1, lives, ["DisjointSubnets"])
    metrics = [{k: v for k, v in of["DisjointSubnets"][2].items() if isinstance(v, float)} for of in (alone, first)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-4)


# Mini-batches and gradients -------------------------------------------------------------------------------------------


class Generated:
    """A loader of a user, which draws its samples itself."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        for _ in range(4):
            places = torch.randint(len(self.x), (11,))
            yield [self.x[places], self.y[places], torch.zeros(11, dtype=torch.int64)]


def seen(loader):
    """Sums of the pixels of the samples in each mini-batch, of all processes, for a kind of loader."""
    x, y = STREAM.train_stream[0].tensors
    samples = TensorDataset(x, y, torch.zeros_like(y))
    stream = type("", (IterableDataset,), {"__iter__": lambda _: iter(samples)})()
    make_loader = {
        "torch": lambda _: DataLoader(samples, 37, shuffle=True),
        "iterable": lambda _: DataLoader(stream, 37),
        "avalanche": lambda s: TaskBalancedDataLoader(s.adapted_dataset, batch_size=37, shuffle=True),
        "generated": lambda _: Generated(x, y),
    }.get(loader, lambda s: s.dataloader)
    found = []
    replace = Hears(before_training_exp=lambda s: setattr(s, "dataloader", make_loader(s)))
    look = Hears(before_forward=lambda s: found.append(s.mb_x.sum((1, 2, 3)).tolist()))
    learn(strategy_of("DisjointSubnets", BatchNormedConvNet, plugins=[replace, look]), STREAM, 1)
    return found


@pytest.mark.parametrize("loader", ["tensors", "torch", "iterable", "avalanche", "generated"])
def test_a_mini_batch_is_the_same_for_any_number_of_processes(loader):
    (alone,) = in_group(1, seen, loader)
    found = in_group(2, seen, loader)
    assert [first + second for first, second in zip(*found, strict=True)] == alone
    assert all(abs(len(first) - len(second)) <= 1 for first, second in zip(*found, strict=True))


CLASS_WEIGHTS = nn.CrossEntropyLoss(torch.linspace(1, 10, 10).double())


class Patched(nn.Module):
    """With BatchNorm over four patches of each sample."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x.reshape(-1, 16)))).reshape(len(x), -1))


class Seldom(Patched):
    """With a layer that few mini-batches use, none of the first, a norm of torch's own, and a part computed twice."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.seldom = nn.Linear(64, 10)

    def forward(self, x):
        self.steps += 1
        bright = (x.mean((1, 2, 3)) > 0.31) & (self.steps > 2)
        of_bright = self.seldom(x.flatten(1)) * bright[:, None] if bright.any() else 0
        x = torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
        return checkpoint(super().forward, x, use_reentrant=False) + of_bright


def final(net, size, loss=None):
    """Weights of a network in double precision after a training with momentum."""
    torch.manual_seed(0)
    model = net().double()
    plugins = [SeedingPlugin(), Hears(before_forward=lambda s: s.mbatch.__setitem__(0, s.mb_x.double()))]
    options = {"optimizer": SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1), "criterion": loss or CLASS_WEIGHTS}
    learn(Naive(model=model, train_mb_size=size, plugins=plugins, evaluator=quiet(), **options), STREAM, 1)
    return model.state_dict()


@pytest.mark.parametrize(("net", "n", "size"), [(Patched, 2, 37), (Patched, 3, 2), (Seldom, 2, 4)])
def test_weights_and_statistics_are_those_of_one_process(net, n, size):
    """Of mini-batches of any size, and of fewer samples than processes."""
    (alone,), (together, *_) = (in_group(count, final, net, size) for count in (1, n))
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-9)


def statistics(named):
    """Statistics after a task whose last mini-batch is one sample; samples may be mappings."""
    x, y = data = tuple(part[:10] for part in STREAM.train_stream[0].tensors)
    if named:
        data = [{"x": one, "label": int(label)} for one, label in zip(x, y, strict=True)]
    wrap = (lambda net: MaskedModel(net, example={"x": x})) if named else None
    options = {"optimizer": "momentum", "train_mb_size": 3, "train_epochs": 1}
    strategy = learn(
        make(AmnesiacHAT, net=BatchNormedConvNet, wrap=wrap, **options), task_benchmark(data, data, [[0, 1]])
    )
    return {name: value for name, value in strategy.model.state_dict().items() if name.startswith("heads.0.own.norm")}


@pytest.mark.parametrize("named", [False, True])
def test_statistics_of_a_task_are_those_of_its_samples(named):
    (alone,), (together, *_) = (in_group(n, statistics, named) for n in (1, 3))
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)


def refused(what):
    if what == "tasks":
        strategy = strategy_of("AmnesiacHAT", BatchNormedConvNet, plugins=[ReplayPlugin(mem_size=30)])
    elif what == "norm":
        norm = partial(nn.InstanceNorm2d, track_running_stats=True)
        strategy = strategy_of("DisjointSubnets", partial(TwoNorms, norm))
    else:
        strategy = strategy_of("HAT", criterion=nn.CrossEntropyLoss(**what))
    try:
        learn(strategy, STREAM, 2)
    finally:
        assert len(strategy.model.tasks) == (what == "tasks"), "the refused task left a head"


MEAN = "on several processes it must be the mean over all samples"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        *(({"reduction": "sum"}, MEAN), ({"ignore_index": 1}, MEAN), ({"weight": torch.eye(2)[0]}, MEAN)),
        ("norm", "would be those of one process's samples"),
        ("tasks", "mini-batches of several tasks ([0, 1]) can't be normalised task by task"),
    ],
)
def test_what_processes_can_not_share_is_refused(what, words):
    assert all(words in found for found in in_group(2, refused, what, fails=True))


def sent(name):
    """Numbers that a step sends."""
    sizes = []
    sum_all = data_parallel.sum_all
    data_parallel.sum_all = lambda values: (sizes.append(len(values)), sum_all(values))[1]
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 400, bias=False), nn.ReLU(), nn.Linear(400, 16, bias=False))
    model = {"Independent": NetworkPerTask, "DisjointSubnets": DisjointModel}[name](wide, n_features=16)
    learn(strategy_of(name, model=model), STREAM, 1)
    return max(sizes)


def test_only_entries_of_the_tasks_share_are_sent():
    whole, share = (in_group(2, sent, name)[0] for name in ("Independent", "DisjointSubnets"))
    assert max(80 * 400, 4 * share) < whole  # five tasks


def test_draws_of_a_step_differ_between_processes():
    assert not set.intersection(*map(set, in_group(2, drawn)))


def drawn():
    values = []
    learn(strategy_of("HAT", plugins=[Hears(before_forward=lambda s: values.append(torch.rand(1).item()))]), STREAM, 1)
    return values


# Processes that differ ------------------------------------------------------------------------------------------------


AFTER = {"after its first step": "after_update", "after the training": "after_training_epoch"}
OTHER_OPTIONS = {"seed": {"seed": 5}, "tensor": {"torch_seed": 5}, "epochs": {"train_epochs": 3}}
OTHER_OPTIONS["loss"] = {"criterion": CLASS_WEIGHTS}


def differing(what):
    """Train in a group whose last process has something else than the others."""
    stream, last = STREAM, is_last()
    strategy = strategy_of("HAT", **(OTHER_OPTIONS.get(what, {}) if last else {}))
    if what in ("samples", "labels"):
        x, y = STREAM.train_stream[0].tensors
        x, y = (x + (last and what == "samples"), y.flip(0) if last and what == "labels" else y)
        stream = task_benchmark((x, y), (x, y), [[0, 1]])
    if what == "optimizer" and last:
        strategy.optimizer.param_groups[0]["lr"] = 0.2
    if what in AFTER:
        strategy.plugins.append(Hears(**{AFTER[what]: lambda s: s.model.heads[0].bias.data.add_(last)}))
    return learn(strategy, stream, [1] if what == "task" and last else [0])


WHAT = [*OTHER_OPTIONS, "optimizer", "samples", "labels", "task", *AFTER]


@pytest.mark.parametrize("what", WHAT)
def test_a_process_that_differs_is_named_by_all(what):
    for found in in_group(3, differing, what, fails=True):
        assert found.startswith("ProcessError: ")
        assert what in found
        assert "process 2" in found


# Faults ---------------------------------------------------------------------------------------------------------------


class Ends(SupervisedPlugin):
    """Ends the last process at a place of its training."""

    def __init__(self, place, how):
        self.passed, self._own_slice, self._how = 0, place, how  # no settings, which a load would compare

    def end(self, strategy, **kwargs):
        self.passed += 1
        if self.passed == self._own_slice and is_last():
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("here")

    before_forward = before_update = before_training_exp = after_training_exp = after_unlearning = end


def saved_life(folder, place=0, how=""):
    """Go on from the state in a folder, if there is one."""
    ends = Ends(place, how)
    strategy = strategy_of("AmnesiacHAT", plugins=[ends])
    if folder.exists():
        load_state(strategy, folder)
    stream = with_unlearning(STREAM, requests={1: [0]}).train_stream
    for experience in stream[len(unlearning_of(strategy).trained) : 3]:
        strategy.train(experience)
        strategy.save(folder)
    return ends.passed, hashes(strategy)


@pytest.mark.parametrize("how", ["error", "kill"])
def test_an_end_of_one_process_ends_all_and_the_saved_state_goes_on_with_the_same_bits(how, tmp_path):
    (n, expected), _ = in_group(2, saved_life, tmp_path / "whole")
    for trial, place in enumerate(n * (i + 1) // (2 + FACTOR) for i in range(FACTOR)):
        other, ended = in_group(2, saved_life, tmp_path / f"{trial}", place, how, fails=True)
        assert other.startswith("ProcessError: process 0 of 2: another process has ended with an error, or did not")
        assert ended is None if how == "kill" else "here" in ended
        again = in_group(2, saved_life, tmp_path / f"{trial}")
        assert all(found == expected for _, found in again)


def after_an_error(fails):
    """Train again after an error inside a step; a norm of the script's own, in one process, waits for no other."""

    def fail(strategy):
        if strategy.clock.train_exp_iterations == 2:
            raise ZeroDivisionError

    strategy = learn(strategy_of("AmnesiacHAT", BatchNormedConvNet), STREAM, 1)
    if fails:
        strategy.plugins.append(Hears(after_forward=fail))
        with pytest.raises(ZeroDivisionError):
            learn(strategy, STREAM, [1])
        strategy.plugins.pop()
        strategy.abort_training()
    if is_last():
        nn.BatchNorm1d(3)(torch.randn(4, 3))
    return hashes(learn(strategy, STREAM, [1]))


def test_a_caught_error_leaves_nothing_behind():
    (undisturbed, _), found = (in_group(2, after_an_error, fails) for fails in (False, True))
    assert found == [undisturbed] * 2


def proved():
    """Retrain without samples, unlearn a task, and prove."""
    strategy = learn(strategy_of("DisjointSubnets", BatchNormedConvNet), STREAM, 3)
    strategy.unlearn(task=1, samples=[0, 5])
    strategy.unlearn([0])
    record = strategy.prove(lambda **options: strategy_of("DisjointSubnets", BatchNormedConvNet, **options), STREAM)
    return hashes(strategy), record


def test_requests_for_samples_reproduce_and_are_proved_on_as_many_processes():
    first, second = in_group(2, proved)
    assert first == second
    assert first[1].proved


def goes_on(folder):
    strategy = strategy_of("DisjointSubnets")
    if n_processes() > 1:
        return learn(strategy, STREAM, 2).save(folder)
    load_state(strategy, folder)
    record = learn(strategy, STREAM, [2]).unlearn([0])
    with pytest.raises(RequestError) as refused:
        strategy.prove(lambda **options: strategy_of("DisjointSubnets", **options), STREAM)
    return record.claim, record.reasons, str(refused.value)


def test_a_task_trained_on_another_number_of_processes_is_approximate(tmp_path):
    in_group(2, goes_on, tmp_path)
    ((claim, reasons, refused),) = in_group(1, goes_on, tmp_path)
    assert claim == "approximate"
    assert "tasks [1, 2] trained with other" in reasons[0] or "task 2 trained with other" in reasons[0]
    assert "approximate" in refused or "2 processes" in refused
