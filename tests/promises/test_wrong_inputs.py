"""Wrong inputs are refused with an error that says what to change, before anything changes."""

import warnings
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from support import tiny
from support.strategies import quiet
from support.strategy_state import bits, unchanged
from torch import nn
from torch.utils.data import Dataset

from avalanche_amnesia import (
    WSN,
    AdaHATRule,
    AmnesiacHAT,
    HardAttention,
    MaskedModel,
    Pools,
    References,
    SubnetModel,
    load_state,
    with_unlearning,
)
from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.evaluation import jsd_metrics, unlearned_accuracy_metrics
from avalanche_amnesia.models import UnknownTaskError
from avalanche_amnesia.training.plugins.task_mask import TaskError
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.task_faults import MaskWarning
from avalanche_amnesia.unit_graph.findings import ModelError

X, Y = tiny.samples()
NET = tiny.Net()


def benchmark(x=X, y=Y, **options):
    return task_benchmark((x, y), (X, Y), [[0, 1]], **options)


def transformed(function):
    tiny.strategy().train(benchmark(transforms=[function]).train_stream)


WRONG = {
    "a shape as a text": (lambda: MaskedModel(NET, input_shape="8"), r"input_shape must be a tuple of sizes.*got '8'"),
    "a shape as a number": (lambda: MaskedModel(NET, input_shape=8), "input_shape must be a tuple of sizes.*got 8"),
    "a negative size": (
        lambda: MaskedModel(NET, input_shape=(-1,)),
        "a size in input_shape must be an int of at least",
    ),
    "no list": (lambda: MaskedModel(NET, frozen="first"), r"frozen must be a list of names.*\['layer'\], got 'first'"),
    "no name": (lambda: MaskedModel(NET, classifier=3), "classifier must be a list of names of modules.*got 3"),
    "no values": (lambda: MaskedModel(tiny.Net().to("meta")), "on the device 'meta', without values"),
    "a density": (lambda: SubnetModel(NET, density="much"), r"density.* must lie in \(0, 1\], got 'much'"),
    "a share": (lambda: HardAttention(budget="even", reuse="x"), r"reuse must lie in \[0, 1\], got 'x'"),
    "an alpha": (lambda: AdaHATRule(alpha="x"), "alpha must be above 0, got 'x'"),
    "a device": (lambda: tiny.strategy(device="gpu"), "device must be one of torch's, such as 'cpu'.* got 'gpu'"),
    "no such device": (lambda: tiny.strategy(device="cuda:99"), "device='cuda:99': torch finds . CUDA devices here"),
    "without names": (
        lambda: WSN(SubnetModel(NET), None),
        r"WSN takes its options by name: WSN\(model=…, opt",
    ),
    "no labels": (lambda: benchmark(y=None), "train: None are no labels"),
    "no numbers": (lambda: benchmark(x=None), "train: x is no array of numbers"),
    "one number": (lambda: benchmark(x=torch.tensor(1.0)), "train: x is one number"),
    "a mapping": (lambda: task_benchmark({"x": X}, {"x": X}, [[0, 1]]), "train: dict is neither an"),
    "sparse": (lambda: benchmark(x=X.to_sparse()), "train: x is a tensor of layout torch.sparse_coo; give a dense"),
    "no transform": (lambda: benchmark(transforms=[1]), "1 is no transform; give a function of whole batches"),
    "nothing transformed": (
        lambda: transformed(lambda x: None),
        "transform of whole batches made None of 24 samples",
    ),
    "some transformed": (
        lambda: transformed(lambda x: x[:3]),
        r"made shape \(3, 8\) of 24 samples; one each is",
    ),
    "no requests": (lambda: with_unlearning(tiny.tasks(), 3), r"3 are no requests; give a mapping \{position: tasks\}"),
    "no benchmark": (lambda: Pools.planned(None), "Pools.planned takes the benchmark.* got None"),
    "no path": (
        lambda: tiny.strategy().save(None),
        r"path must be the path of a directory.*, got None",
    ),
    "no path to load": (lambda: load_state(tiny.strategy(), 3), "path must be the path of a directory.* got 3"),
    "no path for logs": (lambda: TrajectoryPlugin(path=3), "path must be the path of a directory.* got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_with_what_is_allowed(name):
    make, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


OPTIONS = {
    "epochs": ({"epochs": 3}, r"no option 'epochs': it is one of the strategy, AmnesiacHAT\(…, train_epochs=…\)"),
    "batch size": ({"batch_size": 3}, r"AmnesiacHAT\(…, train_mb_size=…\), and can be changed between trainings"),
    "seed": ({"seed": 3}, r"AmnesiacHAT\(…, seed=…\)"),
    "workers": ({"num_workers": "a"}, "num_workers must be an int of at least 0, got 'a'"),
    "last": ({"drop_last": 3}, "drop_last must be True or False, got 3"),
    "streams": ({"eval_streams": 3}, r"eval_streams .* streams, \[benchmark.test_stream\].* got 3"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_of_a_training_is_refused(name):
    given, message = OPTIONS[name]
    strategy = tiny.strategy()
    with unchanged(lambda: bits(strategy.model)), pytest.raises((TypeError, ValueError), match=message):
        strategy.train(tiny.tasks().train_stream, **given)
    strategy.train(tiny.tasks().train_stream, drop_last=True, num_workers=0, shuffle=False)
    assert strategy.model.tasks == (0, 1)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_trained_model_is_asked_for_tasks_that_it_has(kind):
    strategy = tiny.strategy(kind)
    strategy.train(tiny.tasks().train_stream)
    model = strategy.model.eval()
    for wrong in ("0", 0.5, torch.tensor([0, 1])):
        with pytest.raises(TypeError, match=r"task_labels must be the label of a task .* for each of 24 samples, got"):
            model(X, wrong)
    if kind != "pools":
        with pytest.raises(UnknownTaskError, match=r"task 9 has no mask; tasks with one: \[0, 1\]"):
            model.cumulative_mask([9])
    assert strategy.model.tasks == (0, 1)


class Returns(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.layer, self.made = nn.Linear(8, 6), made

    def forward(self, x):
        return self.made(self.layer(x))


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda x: None, "NoneType"),
        (lambda x: [x, x], "list"),
        (lambda x: x[:, :4], r"\(8, 4\) torch.float32"),
        (lambda x: x.view(-1, 2, 3), r"\(8, 2, 3\)"),
    ],
    ids=["none", "list", "narrow", "places"],
)
def test_a_backbone_without_features_is_refused_at_the_first_mini_batch(made, given):
    model = SubnetModel(Returns(made), n_features=6)
    strategy = WSN(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=8)
    before = bits(model)
    with pytest.raises(TaskError, match=rf"the backbone returns {given}.*a head reads \(8, 6\), samples and features"):
        strategy.train(tiny.tasks().train_stream)
    assert bits(model) == before


def test_a_task_of_one_class_and_a_test_stream_are_warned_of():
    stream = tiny.tasks([[0], [1], [2]]).test_stream
    with (
        pytest.warns(UserWarning, match="experiences of the stream 'test'.*benchmark.train_stream"),
        pytest.warns(MaskWarning, match="task 0 has one class, which any network predicts"),
    ):
        tiny.strategy("amnesiac").train(stream[0])


def test_features_are_read_only_where_a_model_may_be_trained():
    with pytest.raises(ModelError, match="does not run on an input of shape"):
        MaskedModel(NET, input_shape=(5,))
    assert MaskedModel(NET, input_shape=[8]).graph.inputs.shape == (8,)


def refused(strategy, stream, message, **options):
    """Check that a training is refused and changes nothing."""
    before = bits(strategy.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TaskError, match=message):
            strategy.train(stream, **options)
    assert strategy.model.tasks == ()
    assert bits(strategy.model) == before


# No mini-batches ------------------------------------------------------------------------------------------------------


def test_a_training_without_a_mini_batch_is_refused():
    strategy = tiny.strategy(train_mb_size=1000)
    refused(strategy, tiny.tasks().train_stream[0], r"took no step.*1000 of its 12 samples.*drop_last", drop_last=True)


# Losses ---------------------------------------------------------------------------------------------------------------


def test_class_weights_of_another_number_are_refused():
    strategy = tiny.strategy(criterion=nn.CrossEntropyLoss(weight=torch.ones(3)))
    refused(strategy, tiny.tasks().train_stream[0], "task 0: .*weights for 3 classes, and its head has 2")


def test_a_training_without_gradients_is_refused():
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            refused(tiny.strategy(), tiny.tasks().train_stream, "gradients are switched off around strategy.train")


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_autocast_around_a_strategy_leaves_its_state_in_float32(kind):
    stream = tiny.tasks([[0, 1], [2, 3], [1, 0]]).train_stream
    strategy, plain = tiny.strategy(kind), tiny.strategy(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        strategy.train(stream)
        strategy.eval(stream)
        record = strategy.unlearn(task=1, samples=[0, 2]) if kind == "pools" else strategy.unlearn([0])
        assert torch.is_autocast_enabled("cpu")
    types = {value.dtype for value in strategy.model.state_dict().values() if value.is_floating_point()}
    assert types == {torch.float32}
    plain.train(stream)
    assert bits(plain.model) != bits(strategy.model)  # forwards were not whole
    assert record.claim == ("exact" if kind == "pools" else "approximate")
    if kind == "pools":  # trained again at other settings than before
        assert "other settings" in strategy.unlearn(task=2, samples=[0], reproduce=False).plan.reasons[0]


class Items(Dataset):
    """Items of any kind, with labels 0 and 1."""

    def __init__(self, item, **attributes):
        self.item, self.targets = item, [i % 2 for i in range(16)]
        vars(self).update(attributes)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return self.item(torch.Generator().manual_seed(i), i % 2)


def drawn(generator, *shape):
    return torch.randn(*(shape or (8,)), generator=generator)


ITEMS = {
    "double": (
        lambda g, y: (drawn(g).double(), y),
        r"\(8,\), torch.float64.*x.to\(torch.float32\); .*backbone.to\(torch.fl",
    ),
    "bytes": (lambda g, y: ((drawn(g) * 9).byte(), y), r"\(8,\), torch.uint8.*return x.to\(torch.float32\) / 255"),
    "no label": (lambda g, y: drawn(g), r"must be pairs \(x, y\), or mappings.*got a Tensor"),
    "no known label": (lambda g, y: {"x": drawn(g), "class": y}, r"got a mapping of \['x', 'class'\]"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_make_no_mini_batch_are_refused(name):
    item, message = ITEMS[name]
    refused(tiny.strategy("pools"), tiny.tasks([[0, 1]], Items(item)).train_stream, message)


# Items of several names, and functions that put them together ---------------------------------------------------------


class Tokens(nn.Module):
    features = 6

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, 6), nn.Linear(6, 6)

    def forward(self, ids, mask):
        seen = mask.unsqueeze(-1)
        return torch.relu(self.layer((self.embedding(ids) * seen).sum(1) / seen.sum(1)))


def sentence(generator, y):
    ids = torch.randint(7, (5,), generator=generator)
    return {"ids": ids, "mask": torch.ones(5), "label": y}


def of_tokens(kind, **options):
    example = {"ids": torch.zeros(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5)}
    wrap = partial(MaskedModel, example=example) if kind == "amnesiac" else None
    return tiny.strategy(kind, net=Tokens, wrap=wrap, **options)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_mappings_reach_the_network_by_their_names(kind):
    data = Items(sentence)
    benchmark = with_unlearning(task_benchmark(data, data, [[0, 1], [1, 0]]), {1: [0]})
    references = References(lambda **options: of_tokens(kind, **options), benchmark)
    metrics = [
        *accuracy_metrics(stream=True),
        *jsd_metrics(references),
        *unlearned_accuracy_metrics(benchmark, references),
    ]
    strategy = of_tokens(kind, evaluator=quiet(*metrics))
    strategy.train(benchmark.train_stream)
    results = strategy.eval(benchmark.test_stream)
    assert strategy.model.tasks == (1,)
    assert any(name.startswith("JSD") for name in results)
    assert any("UnlearnedAccuracy" in name for name in results)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((8, 8, 1), r"channels come first, x.permute\(0, 3, 1"),
        ((64,), r"x.reshape\(-1, \*\(1, 8, 8\)\)"),
    ],
)
def test_samples_of_a_wrong_layout_are_refused_with_a_remedy(given, message):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6))
    model = MaskedModel(net, input_shape=(1, 8, 8))
    strategy = AmnesiacHAT(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_mb_size=8)
    x, y = torch.randn(16, *given), torch.arange(16) % 2
    refused(strategy, task_benchmark((x, y), (x, y), [[0, 1]]).train_stream, message)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_data_set_s_own_collate_fn_is_used(kind):
    def padded(items):
        return torch.stack([x.mean(0) for x, _ in items]), [y for _, y in items]

    data = Items(lambda g, y: (drawn(g, 3 + 2 * y, 8), y), collate_fn=padded)
    strategy = tiny.strategy(kind)
    benchmark = tiny.tasks([[0, 1], [1, 0]], data)
    strategy.train(benchmark.train_stream)
    strategy.eval(benchmark.test_stream)
    strategy.unlearn([0])
    assert strategy.model.tasks == (1,)
