"""RanPAC: sums of whole numbers over a frozen network, from which any sample can be subtracted exactly."""

import gc
import random
import time
import weakref
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from avalanche.benchmarks import (
    CLScenario,
    EagerCLStream,
    benchmark_from_datasets,
    nc_benchmark,
    split_online_stream,
    with_task_labels,
)
from avalanche.training.plugins import ReplayPlugin
from sklearn.linear_model import Ridge
from support import examples
from support.small_networks import L, Net, lived_in, parts
from support.strategies import Hears, batch_normed, learn, quiet
from support.strategy_state import same_state, state, unlearning_plugin
from support.tiny import with_targets
from torch import nn
from torchvision.datasets import FakeData
from torchvision.transforms import Compose, RandomErasing, ToTensor

from avalanche_amnesia import AnalyticModel, ModelError, RanPAC, RequestError, SplitDigits, TaskError, UnlearningRequest
from avalanche_amnesia.benchmarks import PermutedDigits, task_benchmark, with_unlearning, without_samples
from avalanche_amnesia.benchmarks.data import targets_of, task_data
from avalanche_amnesia.benchmarks.requests import join, without_positions
from avalanche_amnesia.benchmarks.stream_labels import relabel
from avalanche_amnesia.contrib.baselines import analytic
from avalanche_amnesia.evaluation import References, accuracy_difference_metrics
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.training import RandomFeatures
from avalanche_amnesia.training.host.saving import load_state
from avalanche_amnesia.unit_graph.backbones import NamedTensors

STREAM = SplitDigits(5)


def network(seed=0):
    torch.manual_seed(seed)
    made = batch_normed(pooled=2)
    for norm in made[1], made[5]:
        lived_in(norm)
    return made


def attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 16)), layer, nn.Flatten())


def ranpac(backbone=network, n_features=48, size=64, model=None, **options):
    strategy = {n: options.pop(n) for n in ("plugins", "evaluator", "unlearning", "criterion") if n in options}
    model = AnalyticModel(backbone and backbone(), n_features, **{"ridge": 1.0, **options}) if model is None else model
    return RanPAC(model=model, train_mb_size=size, **{"evaluator": quiet(), **strategy})


def with_duplicates():
    """Digits as five tasks, some of whose samples come twice."""
    x, y = (torch.cat(parts) for parts in zip(*(task_data(e) for e in STREAM.train_stream), strict=True))
    y = torch.cat([torch.tensor(e.original_classes)[torch.tensor(e.targets)] for e in STREAM.train_stream])
    rows = torch.cat([torch.arange(0, len(x), 4), torch.arange(0, len(x), 20)])
    return task_benchmark((x[rows], y[rows]), (x, y), [[0, 1, 2], [2, 3], [4, 5, 6], [7, 8], [9, 0]])


@pytest.mark.parametrize("seed", range(examples(4)))
@pytest.mark.filterwarnings("ignore:.*copies of the requested samples")
def test_a_random_life_equals_a_fresh_fit_in_another_order_with_other_mini_batches(seed, tmp_path):
    draw, benchmark = random.Random(seed), with_duplicates()
    of_model = {"projection": draw.choice([0, 30]), "batch": draw.choice([1, 4]), "keep_features": draw.random() < 0.5}
    make = partial(ranpac, attention if seed % 2 else network, 64 if seed % 2 else 48, **of_model)
    size = draw.choice([7, 64])
    online = list(split_online_stream(benchmark.train_stream, draw.choice([20, 40, 1000]), seed=seed))
    arriving = relabel(draw.sample(online, len(online)), parts=True)
    strategy, parts, left_out = make(size=size), {}, {}
    x = task_data(benchmark.test_stream[0])[0]
    for part in arriving:
        if draw.random() < 0.2:  # a training fails in the middle of a sum
            before = state(strategy.model)
            with pytest.raises(ZeroDivisionError), patch.object(analytic, "_lower", lambda *given: 1 / 0):
                strategy.train(part)
            if draw.random() < 0.5:
                strategy.abort_training()
                assert same_state(state(strategy.model), before)
                assert not strategy.model.heads.unfinished
        strategy.train(part)
        strategy.model(x)  # keeps the total of all sums
        parts.setdefault(part.task_label, []).append(part)
        left_out.setdefault(part.task_label, set())
        one = draw.choice(list(left_out))
        targets = torch.cat([targets_of(each) for each in parts[one]]).tolist()
        there = sorted(set(range(len(targets))) - left_out[one])
        match draw.choice(["task", "class", "samples", "samples", "save", "nothing"]):
            case "task" if len(left_out) > 1:
                record = strategy.unlearn([one])
                del left_out[one], parts[one]
            case "class" if len({targets[at] for at in there}) > 1:
                label = targets[draw.choice(there)]
                record = strategy.unlearn(task=one, classes=[label], data=parts[one])
                left_out[one] |= {at for at, own in enumerate(targets) if own == label}
            case "samples" if len(there) > 9:
                some = draw.sample(there, 5)
                record = strategy.unlearn(task=one, samples=some, data=parts[one])
                left_out[one] |= set(some)
            case "save":
                strategy.save(tmp_path / "state")
                strategy = make(size=size)
                load_state(strategy, tmp_path / "state")
                continue
            case _:
                continue
        assert record.claim == "exact"
    fresh = make(size=23)
    for task in sorted(left_out, reverse=True):
        fresh.train(without_positions(join(parts[task]), left_out[task]))
    assert same_state(state(strategy.model), state(fresh.model))
    assert torch.equal(strategy.model(x), fresh.model(x))
    assert all(map(torch.equal, strategy.predict(x), fresh.predict(x)))  # some classes are in two tasks
    data = EagerCLStream("train", [part for task in strategy.model.tasks for part in parts[task]])
    if unlearning_plugin(strategy).records:
        assert strategy.prove(partial(make, size=size), CLScenario([data])).proved


def test_with_features_kept_a_loaded_strategy_unlearns_samples_and_classes_without_data(tmp_path):
    make = partial(ranpac, keep_features=True)
    learn(make(), STREAM, 2).save(tmp_path)
    with pytest.raises(StateError, match=r"heads.0.kept is \(287, 50\), here \(287, 0\)"):
        load_state(ranpac(), tmp_path)
    with pytest.raises(StateError, match=r"weight is torch\.float32 there, and torch\.float64 here"):
        load_state(make(lambda: network().double()), tmp_path)
    strategy, other = make(), [at for at, label in enumerate(STREAM.train_stream[0].targets) if label == 1]
    load_state(strategy, tmp_path)
    assert not strategy.model.heads.unfinished
    for request in ({"task": 1, "samples": [9, 3, 9]}, {"task": 0, "classes": [1]}, {"task": 1, "samples": [4]}):
        assert strategy.unlearn(**request).claim == "exact"
    fresh = learn(make(size=5), without_samples(STREAM, {0: other, 1: [3, 4, 9]}), 2)
    assert same_state(state(strategy.model), state(fresh.model))
    refused(strategy, "all of these samples of task 1 are forgotten already", None, task=1, samples=[4])
    strategy.model.heads[1].kept[3, 0] += 1  # of the sample at position 5
    refused(strategy, r"samples \[5\] of task 1 have other features", None, task=1, samples=[5])
    strategy.model.heads[1].kept[3, 0] -= 1
    assert strategy.prove(make, STREAM).proved


def test_a_proof_with_another_network_is_refused_and_changes_nothing():
    strategy = learn(ranpac(), STREAM, 2)
    strategy.unlearn([0])
    for other in ({"backbone": partial(network, 9)}, {"bits": 9}, {"keep_features": True}):
        with pytest.raises(ValueError, match=r"builds other frozen weights \((backbone.0.weight|settings)\)"):
            strategy.prove(partial(ranpac, **other), STREAM)
    assert strategy.prove(ranpac, STREAM).proved


@pytest.mark.parametrize("alone", [True, False])
def test_an_online_stream_equals_its_tasks_and_needs_no_data_while_it_is_in_memory(alone):
    online = split_online_stream(STREAM.train_stream, 50, shuffle=False)
    strategy, whole = ranpac(), learn(ranpac(), STREAM)
    if alone:
        learn(strategy, online)
    else:
        strategy.train(online)
    gc.collect()
    assert same_state(state(strategy.model), state(whole.model))
    for one in (strategy, whole):
        assert one.unlearn(task=2, samples=[3, 140]).claim == "exact"
        assert one.unlearn(task=3, classes=[0]).claim == "exact"
    assert same_state(state(strategy.model), state(whole.model))
    parts = [part for part in online if 2 in part.dataset.targets_task_labels.uniques]
    for data in (parts[::-1], parts[:2], STREAM.train_stream[2]):
        with pytest.raises(RequestError, match=r"not the data of task 2.*or all of its parts"):
            strategy.unlearn(task=2, samples=[7], data=data)
    assert strategy.unlearn(task=2, samples=[7], data=parts).claim == "exact"
    assert strategy.prove(ranpac, CLScenario([EagerCLStream("train", list(online))])).proved


def in_parts(*labels):
    """A benchmark of Avalanche whose train stream has a third of a task for each label, in the order of the labels."""
    data = [experience.dataset for experience in STREAM.train_stream]
    parts = [data[label].subset(range(labels[:at].count(label), 270, 3)) for at, label in enumerate(labels)]
    tests = [experience.dataset for experience in STREAM.test_stream]
    return with_task_labels(benchmark_from_datasets(train=parts, test=tests))


def test_requests_of_a_stream_concern_all_parts_by_then():
    requests = [
        UnlearningRequest(task=0, samples=[2, 95], at=2),
        UnlearningRequest([1], 3, "before"),  # whose second part then begins it anew
        UnlearningRequest([2], 5, "iteration", 1),
        UnlearningRequest(task=0, classes=[1], at=6),
    ]
    benchmark = with_unlearning(in_parts(0, 1, 0, 1, 2, 1, 0), requests)
    strategy = learn(ranpac(size=20), [benchmark.train_stream])
    assert strategy.model.tasks == (0, 1)
    labels = [STREAM.train_stream[0].targets[at] for first in range(3) for at in range(first, 270, 3)]
    left = [at for at, label in enumerate(labels) if label == 0 and at not in (2, 95)]
    assert [len(strategy.model.heads[task].hashes) for task in (0, 1)] == [len(left), 180]
    assert strategy.prove(partial(ranpac, size=20), benchmark).proof.tasks == (0, 1)
    with pytest.raises(RequestError, match=r"task 0 has 90 samples, at positions 0 to 89, and none at \[90\]"):
        with_unlearning(in_parts(0, 1, 0), {1: UnlearningRequest(task=0, samples=[90])})


def test_references_of_metrics_have_the_parts_trained_by_then():
    benchmark = with_unlearning(in_parts(0, 1, 0, 2), {3: [0]})
    metrics = accuracy_difference_metrics(References(ranpac, benchmark), controls=("reference",))
    strategy = ranpac(evaluator=quiet(metrics))
    for experience in benchmark.train_stream:
        strategy.train(experience)
        found = strategy.eval(benchmark.test_stream)
        assert {value for name, value in found.items() if "Difference" in name} == {0.0}


def test_parts_at_other_settings_or_of_other_classes_are_told():
    stream = in_parts(0, 0, 1, 0).train_stream
    strategy = ranpac(plugins=[Hears(after_training_epoch=lambda s: s.forward())])  # adds nothing
    for size, of_size in ((20, [0]), (30, [1]), (20, [2, 3])):
        strategy.train_mb_size = size
        learn(strategy, stream, of_size)
    record = strategy.unlearn([1])
    assert (record.claim, len(record.plan.reasons)) == ("approximate", 1)
    assert "task 0 trained with other settings or plugins than the first task" in record.plan.reasons[0]
    before = state(strategy.model)
    other = deepcopy(STREAM.train_stream[1])
    other.task_label, other.task_labels = 0, [0]
    with pytest.raises(TaskError, match=r"task 0: its labels .* \[0, 1\] in earlier parts, and \[2, 3\] here"):
        strategy.train(other)
    assert same_state(state(strategy.model), before)


def test_the_experiences_of_a_class_incremental_stream_are_parts_of_one_task():
    x, y = (torch.cat(parts) for parts in zip(*(task_data(e) for e in STREAM.train_stream), strict=True))
    y += torch.arange(5).repeat_interleave(torch.tensor([len(e.targets) for e in STREAM.train_stream])) * 2
    data = with_targets(x, y)
    stream = nc_benchmark(data, data, 5, task_labels=False, seed=0).train_stream
    strategy = learn(ranpac(), stream)
    assert float((strategy.model(x).argmax(1) == y).double().mean()) > 0.5
    strategy.unlearn(task=0, classes=[7], data=stream)
    assert not (strategy.model(x).argmax(1) == 7).any()


def test_a_class_without_samples_leaves_the_head():
    strategy = learn(ranpac(), STREAM, 2)
    x = task_data(STREAM.test_stream[0])[0]
    assert set(strategy.model(x).argmax(1).tolist()) <= {0, 1, 2, 3}
    strategy.model(x, 0)
    heads = [weakref.ref(analytic._SOLVED[sums][1]) for sums in (strategy.model, strategy.model.heads[0])]
    strategy.unlearn(task=0, classes=[1])
    gc.collect()
    assert (strategy.model.heads[0].classes.tolist(), [head() for head in heads]) == ([0], [None, None])
    assert bool((strategy.model(x)[:, 1] == -1000).all())
    assert not strategy.predict(x, 0).classes.any()
    strategy.eval(STREAM.test_stream)  # samples of the class among them
    strategy.unlearn([0, 1])
    with pytest.raises(ValueError, match="the model has no task"):
        strategy.model(x)


def test_both_heads_equal_a_ridge_regression_of_scikit_learn():
    strategy = learn(ranpac(projection=60, ridge=3.0, criterion=nn.CrossEntropyLoss(torch.ones(2))), STREAM, 3)
    model, unit = strategy.model, 2**-5
    data = [task_data(experience) for experience in STREAM.train_stream[:3]]
    named = [torch.tensor(e.original_classes)[y] for e, (_, y) in zip(STREAM.train_stream, data, strict=False)]
    test = task_data(STREAM.test_stream[1])[0]
    whole = torch.cat([x for x, _ in data]), torch.cat(named)
    for x, y, logits in ((*data[1], model(test, 1)), (*whole, model(test))):
        peer = Ridge(alpha=3.0, fit_intercept=False)
        peer.fit((model.features(x) * unit).numpy(), nn.functional.one_hot(y).numpy())
        expected = torch.from_numpy(peer.predict((model.features(test) * unit).numpy()))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    found = strategy.predict(test)
    originals = torch.stack([torch.tensor(e.original_classes) for e in STREAM.train_stream[:3]])
    assert torch.equal(originals[found.tasks, found.classes], model(test).argmax(1))
    assert torch.equal(strategy.predict(test, 1).classes, model(test, 1).argmax(1))
    assert torch.equal(model(test, torch.arange(len(test)) % 3)[1::3, :2], model(test[1::3], 1))


def test_the_ridge_is_the_one_with_the_least_generalised_cross_validation():
    torch.manual_seed(0)
    phi, y = torch.randn((40, 12), dtype=torch.float64), nn.functional.one_hot(torch.arange(40) % 3).double()
    errors = {}
    for ridge in (0.1, 3.0, 100.0):
        hat = phi @ torch.linalg.solve(phi.T @ phi + ridge * torch.eye(12, dtype=torch.float64), phi.T)
        errors[ridge] = float((y - hat @ y).square().sum() / (40 - hat.trace()) ** 2)
    assert analytic._best_ridge(phi.T @ phi, y.T @ phi, 40, 1.0, [*errors]) == min(errors, key=errors.get)


def test_random_features_of_pixels_read_a_stream_of_permutations():
    stream = PermutedDigits(3, n_train=600, n_test=200)
    strategy = learn(ranpac(None, 64, projection=500, ridge=None), stream)
    for experience in stream.test_stream:
        x, y = task_data(experience)
        assert float((strategy.model(x, experience.task_label).argmax(1) == y).double().mean()) > 0.9


@pytest.mark.parametrize(("backbone", "width"), [(network, 48), (attention, 64), (None, 64)])
def test_neighbours_and_place_change_no_bit_of_a_sample(backbone, width):
    model = AnalyticModel(backbone and backbone(), width, projection=40, batch=8)
    x = task_data(STREAM.train_stream[0])[0][:64]
    whole = model.features(x)
    for some in ([3], [60, 3], range(5, 27), torch.randperm(64)):
        assert torch.equal(model.features(x[list(some)]), whole[list(some)])
    assert torch.equal(model.features(x.to(memory_format=torch.channels_last)), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.features(x), whole)


UNFIT = {
    "mini-batch of 8": lambda: nn.Sequential(network(), nn.BatchNorm1d(48, track_running_stats=False)),
    "depend on its place": lambda: Net(lambda s, x: x.flatten(1)[:, :48] + torch.arange(len(x))[:, None] * 1e-7),
    "changes its buffers in a forward": lambda: Net(
        lambda s, x: x.flatten(1)[:, :48] + 0 * s.n.add_(1), n=torch.zeros(())
    ),
    r"returns \(8, 64\), and must return \(8, 48\)": nn.Flatten,
    "are random": lambda: nn.Sequential(network(), Net(lambda s, x: x + torch.rand_like(x))),
}


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("message", UNFIT)
@pytest.mark.filterwarnings("ignore:.*track_running_stats=False")
def test_networks_whose_features_are_not_a_function_of_the_sample_are_refused(message, size):
    strategy = ranpac(UNFIT[message], size=size)
    with pytest.raises(TaskError, match=message):
        strategy.train(STREAM.train_stream[0])
    assert strategy.model.tasks == ()


@pytest.mark.filterwarnings("ignore:.*track_running_stats=False")
def test_inputs_of_several_names_are_checked_and_read():
    x = {name: torch.randn(16, 8) for name in ("left", "right")}
    added = parts(lambda s, left, right: s.norm(s.layer(left + right)), layer=L(8, 6), norm=lambda: nn.LayerNorm(6))
    model = AnalyticModel(added(), 6)
    assert model.fault_of_network(NamedTensors(x)) is None
    assert model.features(x).shape == (16, 7)
    model.backbone.norm = nn.BatchNorm1d(6, track_running_stats=False)
    assert "depend on its place" in model.fault_of_network(NamedTensors(x))


def test_the_network_is_frozen_and_stays_in_evaluation_mode():
    strategy = ranpac()
    before = state(strategy.model.backbone)
    learn(strategy, STREAM, 2)
    assert not any(module.training for module in strategy.model.backbone.modules())
    x = task_data(STREAM.test_stream[0])[0]
    found = strategy.model(x)
    strategy.model.backbone.train()  # by its owner
    assert torch.equal(strategy.model(x), found)
    assert strategy.unlearn(task=1, samples=[3]).claim == "exact"
    assert same_state(before, state(strategy.model.backbone))
    with torch.inference_mode():
        strategy.unlearn(task=1, samples=[5])


def test_a_request_counts_no_time_of_listeners_and_the_next_finds_their_change_in_other_sums(monkeypatch):
    def write(strategy, clock=time.perf_counter):
        strategy.model.heads[1].gram.data[0] += 1
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1e6)

    strategy = learn(ranpac(plugins=[Hears(before_unlearning=write)]), STREAM, 3)
    first, second = strategy.unlearn([0]), strategy.unlearn(task=2, samples=[3])
    assert first.seconds < 1e5
    assert "heads.1.gram" in first.unchanged
    assert "tensors ['heads.1.gram'] were changed by something else" in second.reasons[0]


def refused(strategy, match, data=STREAM, **request):
    before = state(strategy.model)
    with pytest.raises(RequestError, match=match):
        strategy.unlearn(**request, data=data and data.train_stream[request["task"]])
    assert same_state(state(strategy.model), before)
    assert strategy.model.tasks == (0, 1)


def test_samples_that_were_repeated_left_out_or_transformed_at_random_are_refused():
    same = Hears(before_training_iteration=lambda s: vars(s).update(mbatch=[p[[0] * len(p)] for p in s.mbatch]))
    strategy = learn(ranpac(plugins=[same]), STREAM, 2)
    refused(strategy, "of task 1 .* a loader or plugin repeated samples", task=1, samples=[0])
    n = len(STREAM.train_stream[1].targets)
    shortened = Hears(before_training_epoch=lambda s: vars(s).update(dataloader=[*s.dataloader][:-1]))
    strategy = learn(ranpac(plugins=[shortened]), STREAM, 2)
    with pytest.raises(RequestError, match=rf"task 1 learned {n - n % 64} samples, and its data has {n} by now"):
        strategy.unlearn(task=1, samples=[0])
    whole, last = (state(learn(ranpac(), STREAM, 1, drop_last=drop).model) for drop in (False, True))
    assert same_state(whole, last)
    images = FakeData(60, (1, 8, 8), 2, transform=Compose([ToTensor(), RandomErasing(0.1)]))
    images.targets = [int(label) for _, label in images]
    strategy = learn(ranpac(), benchmark := task_benchmark(images, images, [[0, 1]] * 2))
    refused(strategy, "the data of task 1 draw random numbers", benchmark, task=1, samples=[0])
    assert strategy.unlearn([0]).claim == "exact"


def test_samples_of_other_data_or_in_another_order_or_type_are_refused():
    strategy = learn(ranpac(), STREAM, 2)
    x, y = task_data(STREAM.train_stream[1])
    twin = next(at for at in range(1, len(y)) if y[at] == y[0])
    order = torch.arange(len(y))
    order[[0, twin]] = order[[twin, 0]]
    for samples, labels, words in (
        (x + 1e-1, y, r"samples \[0\] of task 1 have other features"),
        (x[order], y[order], r"samples \[0\] of task 1 have other features"),
        (torch.cat([x, x], 1), y, r"the samples can't be read \(RuntimeError"),
    ):
        other = task_benchmark((samples, labels), (samples, labels), [[0, 1]] * 2)
        refused(strategy, words, other, task=1, samples=[0])
    before = state(strategy.model.heads[0])
    strategy.model.half()
    assert same_state(state(strategy.model.heads[0]), before)
    refused(strategy, "the samples can't be read", task=1, samples=[0])


def test_features_that_are_not_finite_undo_the_task():
    strategy = learn(ranpac(), STREAM, 2)
    before = state(strategy.model)
    x, y = task_data(deepcopy(STREAM.train_stream[2]))
    x[5] *= 1e30  # squares of the features are beyond float32
    task = task_benchmark((x, y), (x, y), [[0, 1]], first_task=2).train_stream[0]
    strategy.train(task)
    assert len(strategy.model.features(x[5:6]).unique()) > 9
    assert strategy.unlearn([2]).claim == "exact"
    strategy.model.backbone.register_forward_hook(lambda module, given, z: z * 1e30)
    with pytest.raises(TaskError, match=r"features of samples \[5\] of the batch are NaN or infinite"):
        strategy.train(task)
    assert same_state(state(strategy.model), before)


def test_labels_that_a_plugin_changes_are_refused():
    later = Hears(after_forward=lambda s: s.clock.train_exp_iterations and s.mbatch.insert(1, 0 * s.mb_y - 100))
    strategy = ranpac(plugins=[later])  # a label that cross-entropy ignores
    with pytest.raises(TaskError, match="labels must be 0 to 1, one per sample, got -100 to -100"):
        strategy.train(STREAM.train_stream[0])
    for label, named, message in (2**31, [], "below .*15, .* not 2147483648, 0"), (1, [0, 2**20], "not 1, 1048576"):
        of = SimpleNamespace(task_labels=[0], classes_in_this_experience=[label], original_classes=named)
        with pytest.raises(TaskError, match=message):
            strategy.model.adaptation(of)


def test_sums_of_the_largest_numbers_are_exact(monkeypatch):
    monkeypatch.setattr(analytic, "_AT_ONCE", 7)
    models = [AnalyticModel(None, 1), AnalyticModel(None, 1)]
    rows, [sums, small] = torch.full((1000, 3), -(2**15), dtype=torch.int16), [model.new_head(2) for model in models]
    rows[:, 2] = 1
    sums.change(rows)
    sums.change(rows[1:], torch.arange(999))
    assert (sums.gram.dtype, sums.gram.tolist()) == (torch.int32, [2**30] * 3)
    sums.change(rows + torch.tensor([1, 0, 0], dtype=torch.int16))
    exact = [2**30 + 1000 * (2**15 - 1) ** 2, 2**30 + 1000 * (2**30 - 2**15), 1001 * 2**30]
    small.change(rows[:1].sign().expand(1001, 3))
    for model, head in zip(models, (sums, small), strict=True):
        model.store_task(0, head)
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].heads[0].gram.tolist() == exact


MODEL = {
    "step must be a power of 2 from": {"step": 1 - 2**-40},
    "got 2$": {"step": 2},
    r"ridge must lie in \(0,inf\)": {"ridge": float("inf")},
    r"bits must lie in \[1,15\]": {"bits": 16},
    "batch must be an int of at least 1": {"batch": 0},
    "projection must be an int of at least 0": {"projection": -1},
}
STRATEGY = {
    "RanPAC has no option 'optimizer'": {"optimizer": None},
    "leave ReplayPlugin out of plugins": {"plugins": [ReplayPlugin(10)]},
    "leave RandomFeatures out of plugins": {"plugins": [RandomFeatures(10)]},
    "AnalyticModel": {"model": nn.Flatten()},
}


def test_wrong_options_and_parts_of_tasks_are_refused():
    model = AnalyticModel(network(), 48)
    for make, options in ((partial(AnalyticModel, network(), 48), MODEL), (partial(RanPAC, model=model), STRATEGY)):
        for message, given in options.items():
            with pytest.raises((TypeError, ValueError), match=message):
                make(**given)
    with pytest.raises(ValueError, match="train_epochs must be 1, got 2"):
        RanPAC(model=model, train_epochs=2).train(STREAM.train_stream[0])
    (strategy := RanPAC(model=model)).plugins.append(RandomFeatures(10))  # a request would not subtract from it
    with pytest.raises(TypeError, match="RanPAC is such a regression: leave RandomFeatures out of plugins"):
        strategy.train(STREAM.train_stream[0])
    with pytest.raises(ModelError, match="n_features"):
        AnalyticModel(None)
