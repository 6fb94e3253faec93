"""Every network family learns and unlearns tasks exactly, and every layer learns its mask."""

import copy
import pickle

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import ReplayPlugin
from support.network_families import FAMILIES, stream
from support.small_networks import Net
from support.strategies import feed_in
from support.strategy_state import initial_values, state
from torchvision import models as zoo

from avalanche_amnesia import HAT, AdaHATRule, AmnesiacHAT, MaskedModel

ADAM = {"kind": torch.optim.Adam, "lr": 1e-3, "weight_decay": 5e-4}
MOMENTUM = {"kind": torch.optim.SGD, "lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4}


class GateGradients(SupervisedPlugin):
    """Largest gradient that the loss sends to the gate of each layer, over a training."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = {}

    def after_backward(self, strategy, **kwargs):
        for name, part in strategy.model.by_layer(strategy.model.gate.gradient().abs()).items():
            self.largest[name] = max(self.largest.get(name, 0.0), float(part.max()))


def build(name, seed=0, dtype=torch.float32):
    make, _, options = FAMILIES[name]
    torch.manual_seed(seed)
    return MaskedModel(make().to(dtype), **options)


def strategy_of(model, strategy=AmnesiacHAT, optimizer=ADAM, **options):
    settings = dict(optimizer)
    made = settings.pop("kind")(model.parameters(), **settings)
    return strategy(model=model, optimizer=made, **{"train_mb_size": 16, "train_epochs": 2, "seed": 1, **options})


@torch.no_grad()
def logits(model, benchmark):
    training = model.training
    model.eval()
    result = {}
    for task in model.masks:
        data = benchmark.test_stream[task].dataset
        x = torch.stack([torch.as_tensor(data[i][0]) for i in range(12)])
        dtype = next(model.parameters()).dtype
        result[task] = model(x.to(dtype) if x.is_floating_point() else x, task)
    model.train(training)
    return result


def assert_same(now, expected, tasks):
    for task in tasks:
        assert now[task].isfinite().all()
        assert torch.equal(now[task], expected[task]), f"the logits of task {task} drifted"


def learned(model, strategy, benchmark):
    """Train task after task: each moves something, and no earlier task's logits. Yields each, and the logits then."""
    kept = {}
    for task, experience in enumerate(benchmark.train_stream):
        before = initial_values(model)
        strategy.train(experience)
        assert_same(logits(model, benchmark), kept, range(task))
        kept = logits(model, benchmark)
        assert any(not torch.equal(p, before[n]) for n, p in initial_values(model).items()), (
            f"task {task} moved nothing"
        )
        yield task, kept


@pytest.mark.parametrize("name", FAMILIES)
def test_tasks_are_learned_kept_and_unlearned(name, data_root):
    model, benchmark = build(name), stream(data_root, FAMILIES[name][1])
    shares = model.describe().shares
    assert sum(shares.values()) == pytest.approx(1)
    assert {n for n, _ in model.backbone.named_parameters()} == set(model.graph.factors) | model.graph.owned
    initial, gates = initial_values(model), GateGradients()
    strategy = strategy_of(model, plugins=[gates])
    for task, kept in learned(model, strategy, benchmark):
        assert list(kept) == list(range(task + 1))
        if task == 0:
            assert [layer for layer, size in gates.largest.items() if size == 0] == []
            assert gates.largest.keys() == model.graph.layers.keys()
    fresh = build(name, seed=5)
    fresh.load_state_dict(model.state_dict())
    for twin in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(logits(twin, benchmark), kept, range(3))
    strategy.unlearn([2])
    assert model.tasks == (0, 1)
    assert_same(logits(model, benchmark), kept, range(2))
    strategy.unlearn([0, 1])
    assert model.tasks == ()
    assert dict(model.masks) == {}
    for parameter, value in initial_values(model).items():
        assert torch.equal(value, initial[parameter]), parameter
    assert [n for n in model.state_dict() if not n.startswith("backbone.")] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "classifier"), [("mobilenet_v3_large", "classifier"), ("resnet50", "fc")])
def test_every_parameter_of_a_network_of_published_size_is_in_the_graph(name, classifier):
    # Its layers are tried in small; and reading it for images of any size, as above, takes twice as long.
    model = MaskedModel(getattr(zoo, name)(), classifier=classifier, input_shape=(3, 64, 64), trial=False)
    names = {n for n, _ in model.backbone.named_parameters()}
    assert names == set(model.graph.factors) | model.graph.owned
    description = model.describe()
    assert sum(description.shares.values()) == pytest.approx(1)
    text = str(description)
    assert all(layer in text for layer in model.graph.layers)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("resnet cifar", torch.bfloat16), ("instance norm", torch.bfloat16), ("text transformer", torch.float64)],
)
def test_backbones_of_other_precision_are_unlearned_exactly(name, dtype, data_root):
    model = build(name, dtype=dtype)
    benchmark = stream(data_root, FAMILIES[name][1])
    initial, strategy = initial_values(model), strategy_of(model, train_epochs=1, plugins=[feed_in()])
    for task, kept in learned(model, strategy, benchmark):
        assert kept[task].dtype == dtype
    strategy.unlearn([0, 1, 2])
    for parameter, value in initial_values(model).items():
        assert value.dtype == dtype
        assert torch.equal(value, initial[parameter]), parameter


@pytest.mark.parametrize(("name", "kind"), [("vgg bn", HAT), ("vit", AmnesiacHAT)])
def test_momentum_decay_and_replay_change_no_earlier_task(name, kind, data_root):
    """One optimizer for all tasks, whose momentum outlives them, and old tasks' samples in every batch."""
    model, benchmark = build(name), stream(data_root, FAMILIES[name][1])
    strategy = strategy_of(model, kind, MOMENTUM, reset_optimizer=False, plugins=[ReplayPlugin(mem_size=30)])
    assert [task for task, _ in learned(model, strategy, benchmark)] == [0, 1, 2]


@pytest.mark.parametrize(("name", "optimizer"), [("vgg bn", MOMENTUM), ("text transformer", ADAM)])
def test_adahat_moves_no_norm_of_another_task(name, optimizer, data_root):
    model, benchmark = build(name), stream(data_root, FAMILIES[name][1])
    initial = initial_values(model)
    strategy = strategy_of(model, AmnesiacHAT, optimizer, adjustment=AdaHATRule(alpha=0.1))
    own = {}
    for task, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        for earlier in range(task):
            assert own[earlier].keys() == model.task_parts(earlier).state_dict().keys()
            for key, value in model.task_parts(earlier).state_dict().items():
                assert torch.equal(value, own[earlier][key])
        own[task] = state(model.task_parts(task))
    strategy.unlearn([0, 1, 2])
    for parameter, value in initial_values(model).items():
        assert torch.equal(value, initial[parameter]), parameter


def test_a_layer_multiplied_by_zero_gets_no_gradient(data_root):
    """The control of the check of gate gradients above."""

    def cut(net, x):
        return torch.cat([torch.relu(net.a(x)) * 0.0, torch.relu(net.b(x))], 1)

    torch.manual_seed(0)
    model, gates = MaskedModel(Net(cut, a=torch.nn.Linear(64, 12), b=torch.nn.Linear(64, 8))), GateGradients()
    strategy_of(model, plugins=[gates]).train(stream(data_root, (64,)).train_stream[0])
    assert gates.largest["a"] == 0 < gates.largest["b"]
