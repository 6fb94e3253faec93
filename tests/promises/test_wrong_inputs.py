"""Wrong inputs are refused with a list of allowed ones, before anything changes."""

import pytest
import torch
from support import tiny
from support.strategy_state import bits, unchanged
from torch import nn

from avalanche_amnesia import (
    WSN,
    AdaHATRule,
    HardAttention,
    MaskedModel,
    Pools,
    SubnetModel,
    load_state,
    with_unlearning,
)
from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.models import UnknownTaskError
from avalanche_amnesia.training import MaskWarning
from avalanche_amnesia.training.plugins import TaskError, TrajectoryPlugin
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
