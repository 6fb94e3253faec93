"""Arguments that a strategy can't use are refused where they are given, in words, and before anything changed."""

import numpy as np
import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training import Naive
from support.small_runs import OPTIMIZERS, logits_of, make, masked_mlp, split
from support.strategies import learn, quiet
from support.strategy_state import same_state, state
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, Muon, SparseAdam

from avalanche_amnesia import DisjointModel, DisjointSubnets
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask, SideNetworks
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AdjustmentRule, AmnesiacHAT, HardAttention, RandomRule, ScoredWeights
from avalanche_amnesia.training.host import remaining_experiences
from avalanche_amnesia.training.plugins import HATPlugin, SeedingPlugin, TrajectoryPlugin, UnlearningPlugin

KINDS = {
    HAT: masked_mlp,
    AmnesiacHAT: masked_mlp,
    WSN: lambda: SubnetModel(MLP(64, hidden=(40,), features=30)),
    PALL: lambda: SubnetModel(MLP(64, hidden=(40,), features=30)),
    DisjointSubnets: lambda: DisjointModel(MLP(64, hidden=(40,), features=30)),
    Independent: lambda: NetworkPerTask(MLP(64, hidden=(40,), features=30)),
    CLPUDERpp: lambda: SideNetworks(MLP(64, hidden=(40,), features=30)),
}


class OldAdagrad(Adagrad):
    """As of torch 2.9: it makes its state where it is built alone."""

    def step(self, closure=None):
        assert all(self.state[parameter]["sum"] is not None for parameter in self.param_groups[0]["params"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda model: Adam, TypeError, r"optimizer must be a torch optimizer, got the class Adam: Adam\(model"),
        (lambda model: None, TypeError, r"optimizer must be a torch optimizer, got None: Adam\(model"),
        (lambda model: model.parameters(), TypeError, "optimizer must be a torch optimizer, got <generator"),
        (lambda model: LBFGS(model.parameters()), ValueError, "LBFGS .* through a closure .* take a first-order"),
        (lambda model: OldAdagrad(model.parameters()), ValueError, r"Adagrad of torch \d.* take a newer torch"),
        (lambda model: SparseAdam(model.parameters()), ValueError, "SparseAdam takes sparse gradients alone.*Adam"),
        (lambda model: SGD(MLP(64).parameters(), lr=0.1), ValueError, "SGD holds none of the model's parameters: make"),
    ],
    ids=["class", "None", "parameters", "closure", "old Adagrad", "sparse", "another model's"],
)
def test_an_optimizer_that_trains_nothing_is_refused(kind, optimizer, error, message):
    model = KINDS[kind]()
    before = state(model)
    with pytest.raises(error, match=message):
        kind(model=model, optimizer=optimizer(model))
    assert same_state(before, state(model))


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def test_an_optimizer_of_matrices_is_for_models_of_matrices():
    model = masked_mlp()
    with pytest.raises(ValueError, match="Muon steps matrices alone, and the model has parameters that are none"):
        HAT(model=model, optimizer=Muon(matrices(model)))
    bare = MaskedModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 20, bias=False), nn.ReLU()))
    with pytest.raises(ValueError, match=r"parameters that are none \(biases of layers or heads"):
        HAT(model=bare, optimizer=Muon(matrices(bare)))
    subnet = KINDS[WSN]()  # has no biases, heads included
    strategy = WSN(model=subnet, optimizer=Muon(matrices(subnet), lr=0.02), train_mb_size=32)
    strategy.train(split().train_stream[0])
    assert subnet.tasks == (0,)


class Stepless(SGD):
    """A class that can't be made again from its settings."""

    def __init__(self, parameters, needed) -> None:
        super().__init__(parameters, lr=0.05)


@pytest.mark.parametrize("stock", [False, True])
def test_an_optimizer_without_a_sibling_asks_for_the_embeddings(stock):
    model, stream = masked_mlp(), split().train_stream
    optimizer = Stepless(model.parameters(), 1)
    strategy = (
        Naive(model=model, optimizer=optimizer, plugins=[HATPlugin()], evaluator=quiet())
        if stock
        else HAT(model=model, optimizer=optimizer, train_mb_size=32)
    )
    before = state(model)
    with pytest.raises(ValueError, match=r"no Stepless can be made for one vector.*give embedding_optimizer=lambda"):
        strategy.train(stream[0])
    assert same_state(before, state(model))
    assert model.tasks == ()
    model = masked_mlp()
    given = HAT(
        model=model,
        optimizer=Stepless(model.parameters(), 1),
        masks=HardAttention(embedding_optimizer=lambda p: Adam(p, lr=0.05)),
        train_mb_size=32,
    )
    given.train(stream[0])
    assert model.tasks == (0,)


@pytest.mark.parametrize("option", ["embedding_optimizer", "score_optimizer"])
def test_what_makes_an_optimizer_is_a_function_that_returns_one(option):
    kind, masks = (HAT, HardAttention) if option == "embedding_optimizer" else (WSN, ScoredWeights)
    model = KINDS[kind]()
    with pytest.raises(TypeError, match=f"{option} must make an optimizer .* got 'adam': lambda p"):
        masks(**{option: "adam"})
    settings = masks(**{option: lambda parameters: None})
    strategy = kind(model=model, optimizer=SGD(model.parameters(), lr=0.1), masks=settings)
    with pytest.raises(TypeError, match=rf"what {option} returns must be an object of Optimizer, got None"):
        strategy.train(split().train_stream[0])


class WatchGroups(SupervisedPlugin):
    """Notes, at a task's last step, its head's parameters and those of the optimizer's first group."""

    def after_update(self, strategy, **kwargs):
        head = strategy.model.head(strategy.experience.task_label)
        self.own = {id(parameter) for parameter in head.parameters()}
        self.first = {id(parameter) for parameter in strategy.optimizer.param_groups[0]["params"]}


@pytest.mark.parametrize("kind", KINDS)
def test_several_parameter_groups_train_what_one_does(kind):
    """The host can't place a new head among them: the first one takes it."""
    stream = split().train_stream

    def trained(groups, *plugins):
        torch.manual_seed(0)
        model = KINDS[kind]()
        parameters = list(model.parameters())
        held = [{"params": parameters[:1]}, {"params": parameters[1:]}] if groups else parameters
        options = {} if kind in (HAT, PALL) else {"unlearning": UnlearningPlugin(deadline=5)}
        strategy = kind(model=model, optimizer=Adam(held, lr=1e-2), train_mb_size=32, plugins=list(plugins), **options)
        learn(strategy, stream[:3])
        if kind is not HAT:
            strategy.unlearn([1])
        strategy.train(stream[3])
        return strategy

    watch = WatchGroups()
    one, two = trained(False), trained(True, watch)
    assert same_state(state(one.model), state(two.model))
    first, second = two.optimizer.param_groups
    assert watch.own <= watch.first
    assert len(first["params"]) + len(second["params"]) == len(one.optimizer.param_groups[0]["params"])


def test_groups_keep_their_own_settings():
    model = masked_mlp()
    first, *rest = model.parameters()
    groups = [{"params": rest, "lr": 0.05}, {"params": [first], "lr": 0.0}]
    before = first.detach().clone()
    strategy = HAT(model=model, optimizer=SGD(groups, lr=0.1), train_mb_size=32)
    strategy.train(split().train_stream[:2])
    assert torch.equal(first, before)
    assert not torch.equal(model.head(1).weight, torch.zeros_like(model.head(1).weight))


def test_copies_of_a_backbone_keep_its_groups():
    model = KINDS[DisjointSubnets]()
    weight, bias = model.backbone.layers[0].weight, model.backbone.layers[0].bias
    rest = [p for p in model.parameters() if p is not weight and p is not bias]
    groups = [{"params": rest, "lr": 0.05}, {"params": [bias], "lr": 0.0}, {"params": [weight], "lr": 0.1}]
    strategy = DisjointSubnets(model=model, optimizer=SGD(groups, lr=0.1), train_mb_size=32)
    strategy.train(split().train_stream[:2])
    assert torch.equal(model.network(1).layers[0].bias, bias)
    assert not torch.equal(model.network(1).layers[1].bias, model.backbone.layers[1].bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_mb_size": 0}, ValueError, "train_mb_size must be an int of at least 1, got 0"),
        ({"train_mb_size": -1}, ValueError, "train_mb_size must be an int of at least 1, got -1"),
        ({"train_mb_size": 2.5}, ValueError, "train_mb_size must be an int of at least 1, got 2.5"),
        ({"train_epochs": 0}, ValueError, "train_epochs must be an int of at least 1, got 0"),
        ({"train_epochs": True}, ValueError, "train_epochs must be an int of at least 1, got True"),
        ({"eval_mb_size": 0}, ValueError, "eval_mb_size must be an int of at least 1, got 0"),
        ({"eval_every": -2}, ValueError, "eval_every must be an int of at least -1, got -2"),
        (
            {"peval_mode": "step"},
            ValueError,
            "peval_mode must be one of 'experience', 'epoch', .* got 'step'",
        ),
        ({"seed": None}, ValueError, "seed must be an int, got None"),
        ({"seed": "zero"}, ValueError, "seed must be an int, got 'zero'"),
        (
            {"evaluator": "x"},
            TypeError,
            r"evaluator must be an object of EvaluationPlugin, got 'x': Eval",
        ),
        ({"evaluator": lambda: 1}, TypeError, "evaluator must be an object of EvaluationPlugin, got 1"),
        ({"plugins": "x"}, TypeError, "plugins must be a list of plugins, got 'x'"),
        ({"plugins": SeedingPlugin()}, TypeError, "plugins must be a list of plugins, got <"),
        ({"plugins": [SeedingPlugin]}, TypeError, "plugins holds <class .*SeedingPlugin.*which is no plugin"),
        (
            {"criterion": "ce"},
            TypeError,
            r"criterion must be a loss .* got 'ce': criterion=torch.nn.Cross",
        ),
        ({"criterion": nn.CrossEntropyLoss}, TypeError, "criterion must be a loss .* got <class"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
)
def test_options_of_the_host_are_checked(kind, options, error, message):
    model = KINDS[kind]()
    before = state(model)
    with pytest.raises(error, match=message):
        kind(model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)
    assert same_state(before, state(model))


def test_options_may_come_from_numpy():
    strategy = make(train_mb_size=np.int64(32), train_epochs=np.int32(1), eval_mb_size=None, seed=np.int64(3))
    plain = make(train_mb_size=32, train_epochs=1, eval_mb_size=None)
    for one in (strategy, plain):
        one.train(split().train_stream[0])
    assert same_state(state(strategy.model), state(plain.model))
    assert strategy.eval_mb_size == 32


@pytest.mark.parametrize("seed", [None, 0.5, True])
def test_plugins_check_their_seeds(seed):
    for plugin in (SeedingPlugin, HATPlugin):
        with pytest.raises(ValueError, match="seed must be an int, got"):
            plugin(seed=seed)
    with pytest.raises(ValueError, match="seed must be an int, got"):
        PermutedDigits(2, seed=seed)


def stock_of(model, **options):
    plugins = [SeedingPlugin(0), TrajectoryPlugin(), UnlearningPlugin()]
    optimizer = SGD(model.parameters(), lr=0.1)
    return Naive(model=model, optimizer=optimizer, plugins=plugins, evaluator=quiet(), **options)


@pytest.mark.parametrize("options", [{"train_mb_size": 0}, {"train_epochs": 0}])
def test_a_stock_strategy_that_trains_nothing_is_told_so(options):
    model = MultiHeadModel(MLP(64, hidden=(40,), features=30))
    before, strategy = state(model), stock_of(model, **options)
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be an int of at least 1, got 0"):
        strategy.train(split().train_stream[0])
    assert same_state(before, state(model))
    assert model.tasks == ()


NO_EXPERIENCES = {
    "a benchmark": (lambda: split(), "got a benchmark: give one of its streams, train_stream, test_stream"),
    "numbers": (lambda: [1], "and number 0 is 1: give an experience, or a stream or list of them"),
    "a tensor": (lambda: torch.zeros(3), "and number 0 is tensor"),
    "text": (lambda: "train", "got 'train': give an experience"),
    "nothing": (lambda: None, "got None: give an experience"),
    "one that is none": (lambda: [split().train_stream[1], split()], "and number 1 is <avalanche"),
}


@pytest.mark.parametrize("given", NO_EXPERIENCES)
def test_what_are_no_experiences_are_neither_trained_nor_evaluated(given):
    what, message = NO_EXPERIENCES[given]
    strategy, stream = make(train_epochs=1), split().train_stream
    strategy.train(stream[0])
    before, modes = state(strategy.model), [m.training for m in strategy.model.modules()]
    for call, name in (
        (strategy.train, "strategy.train takes experiences"),
        (strategy.eval, "strategy.eval takes experiences"),
        (lambda e: remaining_experiences(strategy, e), r"remaining_experiences\(strategy, …\) takes experiences"),
        (lambda e: strategy.train(stream[1], eval_streams=[e]), r"train\(eval_streams=…\) takes experiences"),
    ):
        with pytest.raises(TypeError, match=f"{name},? {message}"):
            call(what())
    assert same_state(before, state(strategy.model))
    assert modes == [m.training for m in strategy.model.modules()]
    assert strategy.model.tasks == (0,)


def test_experiences_may_come_one_after_the_other():
    stream = split().train_stream
    runs = []
    for experiences in (stream[:2], (e for e in stream[:2]), [stream[0], stream[1]]):
        strategy = make(train_epochs=1)
        strategy.train(experiences)
        strategy.eval(iter(stream[:2]))
        runs.append(strategy)
    assert all(same_state(state(runs[0].model), state(run.model)) for run in runs)


@pytest.mark.parametrize("rule", [AdjustmentRule, RandomRule])
def test_a_lock_on_a_task_that_the_stream_has_not_is_no_lock(rule):
    stream = split().train_stream
    strategy = make(adjustment=rule(locked=[0, 77]))
    before = state(strategy.model)
    with pytest.raises(ValueError, match=r"locked=\[0, 77\]: the stream has no tasks \[77\].*it has \[0, 1, 2, 3, 4\]"):
        strategy.train(stream[0])
    assert same_state(before, state(strategy.model))
    assert strategy.model.tasks == ()
    make(adjustment=rule(locked=[0, 4])).train(stream[0])  # still to come


def test_every_optimizer_of_the_other_tests_passes():
    for name, optimizer in OPTIMIZERS.items():
        strategy = learn(make(optimizer=optimizer, train_epochs=1), split().train_stream[:1])
        assert bool(logits_of(strategy, split(), [0])[0].isfinite().all()), name


@pytest.mark.parametrize(("given", "size"), [({}, 40), ({"eval_mb_size": 8}, 8), ({"eval_mb_size": None}, 40)])
def test_evaluation_takes_mini_batches_of_the_training_s_size_unless_told(given, size):
    model = MaskedModel(MLP(64, hidden=(8,), features=8))
    strategy = AmnesiacHAT(model=model, optimizer=SGD(model.parameters(), lr=0.1), train_mb_size=40, **given)
    assert strategy.eval_mb_size == size
