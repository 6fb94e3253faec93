"""Arguments that a strategy can't use are refused with a clear message, before anything changes."""

import inspect
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from avalanche.training import Naive
from avalanche.training.plugins import GDumbPlugin
from support import tiny
from support.small_networks import Net
from support.small_runs import make, masked_mlp, permuted, split
from support.strategies import amnesiac, learn, quiet
from support.strategy_state import same_state, state, values
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, Muon, SparseAdam

from avalanche_amnesia import DisjointModel, Pools, task_benchmark, with_unlearning
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent, NetworkPerTask
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel, SubnetModel
from avalanche_amnesia.training import (
    HAT,
    WSN,
    AdaHAT,
    AdaHATRule,
    AdjustmentRule,
    AmnesiacHAT,
    AveragedWeights,
    ConstantRule,
    DisjointSubnets,
    HardAttention,
    RandomFeatures,
    RandomRule,
    ScoredWeights,
    TaskStrategy,
)
from avalanche_amnesia.training.host.lookup import remaining_experiences
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.update_rules import RULES

KINDS = {
    AmnesiacHAT: masked_mlp,
    WSN: lambda: SubnetModel(MLP(64, hidden=(40,), features=30)),
    DisjointSubnets: lambda: DisjointModel(MLP(64, hidden=(40,), features=30)),
    Independent: lambda: NetworkPerTask(MLP(64, hidden=(40,), features=30)),
}


class OldAdagrad(Adagrad):
    """Adagrad of torch 2.9: only its constructor makes its state."""

    def step(self, closure=None):
        assert all(self.state[parameter]["sum"] is not None for parameter in self.param_groups[0]["params"])


class WithOneMore(AmnesiacHAT):
    """A subclass as a user writes it."""

    def __init__(self, *, mine=0, **options):
        super().__init__(**options)
        self.mine = mine


def hat(optimizer=lambda model: SGD(model.parameters(), lr=0.1), **options):
    model = masked_mlp()
    before = state(model)
    try:
        return HAT(model=model, optimizer=optimizer(model), **{"train_mb_size": 32, **options})
    finally:
        assert same_state(before, state(model))


X, Y = tiny.samples()
NET = tiny.Net()


def benchmark(x=X, y=Y, **options):
    return task_benchmark((x, y), (X, Y), [[0, 1]], **options)


def transformed(function):
    tiny.strategy().train(benchmark(transforms=[function]).train_stream)


REFUSED = [
    (lambda: hat(lambda model: Adam), r"must be an object of Optimizer, got the class Adam: Adam\(model"),
    (lambda: hat(lambda model: LBFGS(model.parameters())), "LBFGS .* through a closure .* take a first-order"),
    (lambda: hat(lambda model: OldAdagrad(model.parameters())), "Adagrad of torch .* take a newer torch"),
    (lambda: hat(lambda model: SparseAdam(model.parameters())), "takes sparse gradients alone"),
    (lambda: hat(lambda model: SGD(MLP(64).parameters(), lr=0.1)), "has none of the model's parameters"),
    (lambda: hat(lambda model: Muon(matrices(model))), "Muon steps matrices alone"),
    (lambda: hat(train_mb_size=0), "train_mb_size must be an int of at least 1, got 0"),
    (lambda: hat(train_epochs=True), "train_epochs must be an int of at least 1, got True"),
    (lambda: hat(eval_mb_size=0), "eval_mb_size must be"),
    (lambda: hat(eval_every=-2), "eval_every must be an int of at least -1"),
    (lambda: hat(peval_mode="step"), "peval_mode must be one of 'experience', 'epoch'"),
    (lambda: hat(seed=None), "seed must be an int, got None"),
    (lambda: hat(evaluator="x"), "evaluator must be an object of EvaluationPlugin, got 'x'"),
    (lambda: hat(plugins=SeedingPlugin()), "plugins must be a list of plugins"),
    (lambda: hat(plugins=[SeedingPlugin]), "SeedingPlugin.*which is no plugin"),
    (lambda: hat(criterion=nn.CrossEntropyLoss), "criterion must be a loss .* got <class"),
    (lambda: hat(reset_optimizer="no"), "reset_optimizer must be one of True, False"),
    (lambda: make(DisjointSubnets, fit_head="layers"), "fit_head must be one of True, False, got 'layers'"),
    (lambda: HAT(model=MLP(64), optimizer=SGD(MLP(64).parameters(), lr=0.1)), "MaskedModel"),
    (lambda: make(WSN, model=masked_mlp()), r"model must be a SubnetModel, got MaskedModel: .* SubnetModel\(backbone"),
    (lambda: PermutedDigits(2, seed=None), "seed must be an int, got None"),
    (lambda: make(AmnesiacHAT, foo=1), "AmnesiacHAT has no option 'foo'; it has adjustment, .*, unlearning"),
    (lambda: make(AmnesiacHAT, s_max=1), r"AmnesiacHAT has no option 's_max': write masks=HardAttention\(s_max=…\)"),
    (lambda: make(WSN, deadline=1), r"write unlearning=UnlearningPlugin\(deadline=…\)$"),
    (lambda: make(AdaHAT, alpha=1), r"write adjustment=AdaHATRule\(alpha=…\)"),
    (lambda: make(HAT, train_epoch=1), "did you mean 'train_epochs'"),
    (lambda: make(WithOneMore, main=1), "WithOneMore has no option 'main'"),
    (lambda: make(HAT, adjustment="adahats"), "adjustment must be one of .*'adahat', or a rule"),
    (lambda: make(HAT, adjustment=AdjustmentRule), "adjustment"),
    (lambda: amnesiac(trajectory="logs"), "trajectory must be an object of TrajectoryPlugin, got"),
    (lambda: amnesiac(compensation="all"), "compensation must be 'counterfactual', 'none'"),
    (lambda: AdjustmentRule(locked=1), "locked must be a list of task labels"),
    (lambda: AdjustmentRule(locked=[True]), r"locked: \[True\] are no task labels"),
    (lambda: AdjustmentRule(space="weights"), "space"),
    (lambda: AdjustmentRule(between="mean"), "between must be one of 'min', 'max'"),
    (lambda: ConstantRule(alpha=1.2), "alpha"),
    (lambda: AdaHATRule(alpha=0.0), "alpha"),
    (lambda: AdaHATRule(epsilon=-1.0), "epsilon"),
    (lambda: AdaHATRule(importance=True), "importance must be one of 'sum', 'flat', 'number'"),
    (lambda: AdaHATRule(importance="number", between="max"), "between='max' has no meaning"),
    (lambda: HardAttention(sparsity="none"), "sparsity must be one of 'original'"),
    (lambda: HardAttention(annealing="step"), "annealing"),
    (lambda: HardAttention(embedding_init="zeros"), "embedding_init"),
    (lambda: HardAttention(sparsity_weight=math.nan), "sparsity_weight"),
    (lambda: HardAttention(s_max=1), "s_max"),
    (lambda: HardAttention(embedding_lr=0), "embedding_lr"),
    (lambda: HardAttention(embedding_clamp=0), "embedding_clamp"),
    (lambda: HardAttention(compensation_clamp=100), "compensation_clamp must be at most 88"),
    (lambda: HardAttention(min_units=1.5), "min_units"),
    (lambda: HardAttention(embedding_optimizer="adam"), "embedding_optimizer must make an optimizer .* got 'adam'"),
    (lambda: HardAttention(budget=1.5), "budget must"),
    (lambda: HardAttention(budget=0.5, warm_up=1.1), "warm_up must"),
    (lambda: HardAttention(budget=0.5, reuse=-1), "reuse must"),
    (lambda: HardAttention(reuse=0.3), "reuse=0.3 has no meaning without a budget"),
    (lambda: ScoredWeights(scores="drop"), "scores must be one of 'keep', 'redraw'"),
    (lambda: ScoredWeights(score_bits=9), "score_bits must be a whole number from 1 to 8, or None"),
    (lambda: ScoredWeights(score_bits=2, scores="redraw"), "score_bits=2 has no meaning for scores='redraw'"),
    (lambda: ScoredWeights(score_lr=0), "score_lr must be above 0"),
    (lambda: MaskedModel(NET, input_shape="8"), r"input_shape must be a tuple of sizes.*got '8'"),
    (lambda: MaskedModel(NET, input_shape=(-1,)), "a size in input_shape must be an int of at least"),
    (lambda: MaskedModel(NET, frozen="first"), r"frozen must be a list of names.*\['layer'\], got 'first'"),
    (lambda: MaskedModel(NET, example="tokens"), "example must be a batch.*got str"),
    (lambda: MaskedModel(NET, example=(X, None)), "tuple with a NoneType"),
    (lambda: MaskedModel(NET, example=(X, X[:1])), "the same number"),
    (lambda: MaskedModel(NET, example=(X[:0], X[:0])), "at least one, got"),
    (lambda: MaskedModel(NET, example=X, input_shape=(8,)), "not both"),
    (lambda: MaskedModel(NET, frozen=["7"]), "no module or parameter '7'; it has"),
    (lambda: MaskedModel(NET, task_owned=["first.weights"]), "no module or parameter 'first.weights'"),
    (lambda: MaskedModel(NET, classifier="fc"), "no module or parameter 'fc'"),
    (lambda: MaskedModel(NET, classifier=["first", "head"]), "has no module or parameter 'head'.*'first'"),
    (lambda: MaskedModel(NET, norm="shared"), "norm must be one of 'task', 'batch', got 'shared'"),
    (lambda: MaskedModel(tiny.Net().to("meta")), "on the device 'meta', without values"),
    (lambda: AdaHATRule(alpha="x"), "alpha must be above 0, got 'x'"),
    (lambda: tiny.strategy(device="gpu"), "device must be one of torch's, such as 'cpu'.* got 'gpu'"),
    (lambda: tiny.strategy(device="cuda:99"), "device='cuda:99': torch finds . CUDA devices here"),
    (lambda: WSN(SubnetModel(NET), None), r"WSN takes its options by name: WSN\(model=…, opt"),
    (lambda: benchmark(y=None), "train: None are no labels"),
    (lambda: benchmark(x=None), "train: x is no array of numbers"),
    (lambda: task_benchmark({"x": X}, {"x": X}, [[0, 1]]), "train: dict is no"),
    (lambda: benchmark(x=X.to_sparse()), "train: x is a tensor of layout torch.sparse_coo; give a dense"),
    (lambda: transformed(lambda x: None), "transform of whole batches made None of 24 samples"),
    (lambda: transformed(lambda x: x[:3]), r"made shape \(3, 8\) of 24 samples; one each is"),
    (lambda: with_unlearning(tiny.tasks(), 3), r"3 are no requests; give a mapping \{position: tasks\}"),
    (lambda: Pools.planned(None), "Pools.planned takes the benchmark.* got None"),
    (lambda: tiny.strategy().save(None), "path must be the path of a directory.*, got None"),
    (lambda: TrajectoryPlugin(dtype="int8"), r"dtype must be one of torch.float32.*torch.int8.*got 'int8'"),
    (lambda: AveragedWeights(0), r"last must lie in \(0, 1\], got 0"),
    (lambda: RandomFeatures(0), "width must be an int of at least 1, got 0"),
    (lambda: tiny.strategy(plugins=[GDumbPlugin()]), "use Avalanche's GDumb strategy"),
    (lambda: type("Other", (AdaHATRule,), {}, name="adahat"), "'adahat' is there already, AdaHATRule"),
    (lambda: MaskedModel(nn.Sequential(OrderedDict(all=nn.Linear(8, 6)))).utilisation(), "is called 'all'"),
    (lambda: MaskedModel(tiny.Net().requires_grad_(False)), r"where only heads learn, MultiHeadModel\(backbone\)"),
    (lambda: DisjointModel(Net(None, kept=(n for n in range(3))), 2), "Net can't be copied"),
    (lambda: MLP(0), "in_features must be an int of at least 1, got 0"),
    (lambda: MLP(64, hidden=None), "a width in hidden must be an int of at least 1, got None"),
    (lambda: MLP(64, hidden=(10, 5.0)), "a width in hidden must be an int of at least 1, got 5.0"),
    (lambda: MLP(64, features=True), "features must be an int of at least 1, got True"),
    (lambda: MLP(64, dropout=(1.0, 0.2)), "dropout must lie in"),
    (lambda: MLP(64, dropout=-0.1), "dropout must lie in"),
    (lambda: MLP(64, norm="group"), "norm must be one of 'none', 'batch', 'layer', got 'group'"),
    (lambda: MLP(64, activation="relu"), "activation must be a class of modules .* got 'relu'"),
    (lambda: MLP(64, activation=nn.ReLU()), r"activation must be .*nn.Tanh.* got ReLU\(\)"),
    (lambda: MLP(64, activation=lambda: torch.relu), "not a Module subclass"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_an_argument_without_a_meaning_is_refused(number):
    call, words = REFUSED[number]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


# Optimizers ---------------------------------------------------------------------------------------------------------


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def test_an_optimizer_of_matrices_is_for_models_of_matrices():
    bare = MaskedModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 20, bias=False), nn.ReLU()))
    with pytest.raises(ValueError, match=r"parameters that are none \(biases of layers or heads"):
        HAT(model=bare, optimizer=Muon(matrices(bare)))
    subnet = KINDS[WSN]()  # has no biases, heads included
    WSN(model=subnet, optimizer=Muon(matrices(subnet), lr=0.02), train_mb_size=32).train(split().train_stream[0])
    assert subnet.tasks == (0,)


class Stepless(SGD):
    """A class that can't be made again from its settings."""

    def __init__(self, parameters, needed) -> None:
        super().__init__(parameters, lr=0.05)


def test_an_optimizer_that_cant_be_made_twice_needs_one_for_the_embeddings():
    strategy, stream = hat(lambda model: Stepless(model.parameters(), 1)), split().train_stream
    before = state(strategy.model)
    with pytest.raises(ValueError, match=r"no Stepless can be made for a vector: embedding_optimizer=lambda"):
        strategy.train(stream[0])
    assert same_state(before, state(strategy.model))
    masks = HardAttention(embedding_optimizer=lambda p: Adam(p, lr=0.05))
    given = hat(lambda model: Stepless(model.parameters(), 1), masks=masks)
    given.train(stream[0])
    assert given.model.tasks == (0,)
    nothing = hat(masks=HardAttention(embedding_optimizer=lambda parameters: None))
    with pytest.raises(TypeError, match="what embedding_optimizer returns must be an object of Optimizer, got None"):
        nothing.train(stream[0])


@pytest.mark.parametrize("kind", [AmnesiacHAT, WSN, Independent])
def test_several_parameter_groups_train_the_same_model_as_one(kind):
    """Avalanche can't place a new head among several groups: the first one takes it."""
    stream = split().train_stream

    def trained(groups):
        torch.manual_seed(0)
        model = KINDS[kind]()
        parameters = list(model.parameters())
        held = [{"params": parameters[:1]}, {"params": parameters[1:]}] if groups else parameters
        unlearning = UnlearningPlugin(deadline=5)
        strategy = kind(model=model, optimizer=Adam(held, lr=1e-2), train_mb_size=32, unlearning=unlearning)
        learn(strategy, stream[:3])
        strategy.unlearn([1])
        strategy.train(stream[3])
        return strategy

    one, two = trained(False), trained(True)
    assert same_state(state(one.model), state(two.model))
    first, second = two.optimizer.param_groups
    assert len(first["params"]) + len(second["params"]) == len(one.optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("kind", [HAT, DisjointSubnets])
def test_parameter_groups_keep_their_own_settings(kind):
    model = KINDS[AmnesiacHAT if kind is HAT else kind]()
    weight, bias = model.backbone.layers[0].weight, model.backbone.layers[0].bias
    rest = [p for p in model.parameters() if p is not weight and p is not bias]
    groups = [{"params": rest, "lr": 0.05}, {"params": [bias], "lr": 0.0}, {"params": [weight], "lr": 0.1}]
    before, other = bias.detach().clone(), model.backbone.layers[1].bias.detach().clone()
    kind(model=model, optimizer=SGD(groups, lr=0.1), train_mb_size=32).train(split().train_stream[:2])
    trained = model.backbone if kind is HAT else model.network(1)
    assert torch.equal(trained.layers[0].bias, before)
    assert not torch.equal(trained.layers[1].bias, other)


# Options of a training ----------------------------------------------------------------------------------------------


def test_options_may_come_from_numpy():
    strategy = make(train_mb_size=np.int64(32), train_epochs=np.int32(1), eval_mb_size=None, seed=np.int64(3))
    plain = make(train_mb_size=32, train_epochs=1, eval_mb_size=None)
    for one in (strategy, plain):
        one.train(split().train_stream[0])
    assert same_state(state(strategy.model), state(plain.model))
    assert strategy.eval_mb_size == 32
    assert hat(train_mb_size=40, eval_mb_size=8).eval_mb_size == 8


@pytest.mark.parametrize("option", ["train_mb_size", "train_epochs"])
def test_a_stock_strategy_that_would_train_nothing_is_refused(option):
    model = MultiHeadModel(MLP(64, hidden=(40,), features=30))
    plugins = [SeedingPlugin(0), TrajectoryPlugin(), UnlearningPlugin()]
    optimizer = SGD(model.parameters(), lr=0.1)
    strategy = Naive(model=model, optimizer=optimizer, plugins=plugins, evaluator=quiet(), **{option: 0})
    before = state(model)
    with pytest.raises(ValueError, match=f"{option} must be an int of at least 1, got 0"):
        strategy.train(split().train_stream[0])
    assert same_state(before, state(model))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (split(), "got a benchmark: give one of its streams, train_stream, test_stream"),
        ([1], "and number 0 is 1: give an experience, or a stream or list of them"),
    ],
    ids=["a benchmark", "numbers"],
)
def test_only_experiences_are_trained_and_evaluated(given, message):
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
            call(given)
    assert same_state(before, state(strategy.model))
    assert modes == [m.training for m in strategy.model.modules()]


def test_experiences_may_come_from_a_generator():
    stream, runs = split().train_stream, []
    for experiences in (stream[:2], (e for e in stream[:2])):
        strategy = make(train_epochs=1)
        strategy.train(experiences)
        strategy.eval(iter(stream[:2]))
        runs.append(state(strategy.model))
    assert same_state(*runs)


def test_only_tasks_of_the_stream_can_be_locked():
    stream = split().train_stream
    strategy = make(adjustment=RandomRule(locked=[0, 77]))
    with pytest.raises(ValueError, match=r"locked=\[0, 77\]: the stream has no tasks \[77\], but \[0, 1, 2, 3, 4\]"):
        strategy.train(stream[0])
    assert strategy.model.tasks == ()
    make(adjustment=RandomRule(locked=[0, 4])).train(stream[0])  # task 4 is still to come


STRATEGIES = [HAT, AdaHAT, AmnesiacHAT, WSN, DisjointSubnets, PALL, CLPUDERpp, Independent]
OF_AVALANCHE = ["criterion", "train_mb_size", "train_epochs", "eval_mb_size", "device", "plugins", "evaluator"]
OF_AVALANCHE += ["eval_every", "peval_mode"]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_signature_names_each_of_at_most_twenty_arguments(kind):
    parameters = inspect.signature(kind).parameters
    assert len(parameters) <= 20
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert list(parameters)[:2] == ["model", "optimizer"]
    of_base = inspect.signature(TaskStrategy).parameters
    assert [(name, parameters[name].default) for name in OF_AVALANCHE] == [
        (name, of_base[name].default) for name in OF_AVALANCHE
    ]


def test_a_subclass_takes_what_its_base_takes():
    assert set(inspect.signature(WithOneMore).parameters) == {"mine", *inspect.signature(AmnesiacHAT).parameters}
    assert make(WithOneMore, mine=3).mine == 3


def test_a_rule_has_a_name_by_its_class():
    try:

        class Frozen(AdjustmentRule, name="frozen"):
            def protected_share(self, use, name, sparsity):
                return torch.ones_like(use.covered[name])

        strategy = make(HAT, adjustment="frozen", train_epochs=1)
        before = values(strategy.model.backbone)
        strategy.train(permuted().train_stream[0])
        after = dict(strategy.model.backbone.named_parameters())
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    finally:
        RULES.pop("frozen", None)
    with pytest.raises(ValueError, match=r"adjustment must be one of .*'adahat', or a rule; got 'frozen'"):
        make(HAT, adjustment="frozen")
