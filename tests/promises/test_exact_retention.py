"""Earlier tasks' logits keep their bits, whatever optimizer, plugin or setting trains the later ones."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EWCPlugin, LRSchedulerPlugin, LwFPlugin, ReplayPlugin
from support.small_networks import Net
from support.small_runs import OPTIMIZERS, assert_retained, logits_of, make, permuted, split
from support.strategies import Hears, learn
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.contrib.streams import SplitMNIST
from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, AdjustmentRule, AmnesiacHAT, ConstantRule, HardAttention


class WatchEveryStep(SupervisedPlugin):
    """Logits of the first task after every step of a later one, not only after its commit."""

    def __init__(self, benchmark) -> None:
        super().__init__()
        self.benchmark, self.expected, self.compared = benchmark, None, 0

    def after_training_exp(self, strategy, **kwargs):
        if self.expected is None:
            self.expected = logits_of(strategy, self.benchmark, [0])[0]

    def after_training_iteration(self, strategy, **kwargs):
        if self.expected is not None:
            assert torch.equal(logits_of(strategy, self.benchmark, [0])[0], self.expected)
            self.compared += 1


@pytest.mark.parametrize("reset_optimizer", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer, reset_optimizer):
    if optimizer == "fused sgd" and not reset_optimizer:
        pytest.skip("torch's own: fused SGD with momentum can't take up a new parameter")
    strategy = make(optimizer=optimizer, reset_optimizer=reset_optimizer)
    assert_retained(strategy, permuted(), must_move=optimizer != "rmsprop")  # it fills every layer with one task


class Lookahead(torch.optim.Optimizer):
    """Slow weights of all parameters, with or without a gradient (Zhang et al., NeurIPS 2019), and decay on them."""

    def __init__(self, params, lr=1e-2):
        self.fast = torch.optim.SGD(params, lr=lr)
        super().__init__(self.fast.param_groups, {"lr": lr})
        self.param_groups = self.fast.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.fast.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", 0.9 * parameter.detach())
                slow.add_(parameter - slow, alpha=0.5)
                parameter.data.copy_(slow)


class NoisySGD(torch.optim.SGD):
    """Langevin noise on every parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def with_noisy_hook(params):
    optimizer = torch.optim.Adam(params, lr=3e-3)

    def noise(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)

    optimizer.register_step_post_hook(noise)
    return optimizer


MOVE_EVERYTHING = {"lookahead": Lookahead, "noise": lambda p: NoisySGD(p, lr=0.05), "hook": with_noisy_hook}


def norm_net():
    layers = {"first": nn.Linear(64, 30), "norm": nn.LayerNorm(30), "second": nn.Linear(30, 20), "features": 20}
    return Net(lambda n, x: torch.relu(n.second(torch.relu(n.norm(n.first(x.flatten(1)))))), **layers)


@pytest.mark.parametrize("kind", [HAT, AmnesiacHAT, WSN])
@pytest.mark.parametrize("optimizer", MOVE_EVERYTHING)
def test_optimizers_that_move_what_has_no_gradient(optimizer, kind):
    """Heads and norms of other tasks stay after every step, and the norms that later tasks begin with."""
    benchmark = permuted(3)
    watch = WatchEveryStep(benchmark)
    torch.manual_seed(0)
    model = SubnetModel(norm_net(), density=0.3) if kind is WSN else MaskedModel(norm_net())
    initial = {n: p.detach().clone() for n, p in model.backbone.named_parameters() if n.startswith("norm")}
    options = {} if kind is WSN else {"masks": HardAttention(embedding_optimizer=lambda p: torch.optim.SGD(p, lr=0.05))}
    strategy = make(kind, model=model, optimizer=MOVE_EVERYTHING[optimizer], plugins=[watch], **options)
    learn(strategy, benchmark.train_stream)
    assert watch.compared == 40
    assert initial
    assert all(torch.equal(p, initial[n]) for n, p in model.backbone.named_parameters() if n in initial)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_drifts_in_the_middle_of_a_task(optimizer):
    benchmark = permuted(2)
    watch = WatchEveryStep(benchmark)
    learn(make(optimizer=optimizer, plugins=[watch]), benchmark.train_stream)
    assert watch.compared == 20


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.5},
        {"train_mb_size": 1000, "train_epochs": 3},  # one batch per epoch
        {"train_mb_size": 53, "train_epochs": 1},  # 160 samples: the last batch has one
        {"masks": HardAttention(annealing="cosine")},
        {"masks": HardAttention(embedding_init="ones", sparsity="quota")},
        {"masks": HardAttention(sparsity="cross")},
        {"masks": HardAttention(embedding_init="last")},
        {"masks": HardAttention(sparsity_weight=0.0, embedding_init="positive")},
        {"masks": HardAttention(s_max=1.5, embedding_clamp=0.3)},
        {"adjustment": ConstantRule(alpha=0.0)},
        {"criterion": nn.MultiMarginLoss()},
        {"eval_every": 1},
        {"masks": HardAttention(embedding_optimizer=lambda p: torch.optim.SGD(p, lr=1.0))},
    ],
    ids=lambda options: next(iter(options)) + " " + str(next(iter(options.values())))[:8],
)
def test_settings(options):
    fills = getattr(options.get("masks"), "embedding_init", None) in (
        "ones",
        "last",
        "positive",
    )  # no free unit may be left
    assert_retained(make(optimizer="adam decay", **options), permuted(), must_move=not fills)


@pytest.mark.parametrize(
    "plugin",
    [
        lambda _: ReplayPlugin(mem_size=60),
        lambda _: ReplayPlugin(mem_size=60, batch_size=5, batch_size_mem=7),
        lambda _: LwFPlugin(alpha=1.0, temperature=2.0),
        lambda _: EWCPlugin(ewc_lambda=1.0),
        lambda o: LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(o, 1, 0.5), reset_scheduler=False),
        lambda _: Hears(before_update=lambda made: clip_grad_norm_(made.model.parameters(), 0.1)),
        lambda _: Hears(after_backward=lambda made: clip_grad_value_(made.model.parameters(), 0.01)),
    ],
    ids=["replay", "replay batches", "lwf", "ewc", "scheduler", "clip", "clip early"],
)
@pytest.mark.parametrize("reset_optimizer", [True, False])
def test_beside_other_plugins(plugin, reset_optimizer):
    made = {}

    def optimizer(parameters):
        made["optimizer"] = torch.optim.Adam(parameters, lr=3e-3, weight_decay=1e-3)
        return made["optimizer"]

    strategy = make(optimizer=optimizer, reset_optimizer=reset_optimizer)
    position = next(i for i, p in enumerate(strategy.plugins) if not type(p).__module__.startswith("avalanche_amnesia"))
    strategy.plugins.insert(position, plugin(made["optimizer"]))
    assert_retained(strategy, split(), 4)


def test_amnesiac_hat_and_a_stream_of_unequal_tasks():
    x = torch.cat([experience.tensors[0] for experience in split().train_stream])
    y = torch.arange(len(x)) % 9
    benchmark = task_benchmark((x, y), (x, y), [[0, 1], [2, 3, 4, 5], [6, 7, 8]])
    strategy = make(AmnesiacHAT, optimizer="adamw", plugins=[ReplayPlugin(mem_size=40)])
    assert_retained(strategy, benchmark)


def conv_net() -> MaskedModel:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 8, 5, stride=2), nn.Conv2d(8, 8, 3, padding=1)
            self.shortcut, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8 * 36, 24)

        def forward(self, x):
            x = torch.relu(self.first(x))
            x = torch.nn.functional.max_pool2d(torch.relu(self.second(x) + self.shortcut(x)), 2)
            return torch.relu(self.last(x.flatten(1)))

    torch.manual_seed(0)
    return MaskedModel(Net())


@pytest.mark.parametrize("optimizer", ["adam decay", "momentum"])
def test_a_residual_convolution_on_images(data_root, optimizer):
    benchmark = SplitMNIST(n_train=500, n_test=100, root=data_root)
    assert_retained(make(model=conv_net(), optimizer=optimizer), benchmark, 3)


def test_plain_gradient_masking_holds_under_sgd_alone():
    assert_retained(make(optimizer="sgd", adjustment=AdjustmentRule(space="gradient")), permuted())
    for optimizer in ("adam decay", "decay", "adamw"):
        with pytest.raises(AssertionError, match="drifted"):
            assert_retained(make(optimizer=optimizer, adjustment=AdjustmentRule(space="gradient")), permuted())


def test_no_protection_does_drift():
    with pytest.raises(AssertionError, match="drifted"):
        assert_retained(make(adjustment=ConstantRule(alpha=1.0)), permuted())
    with pytest.raises(AssertionError, match="drifted"):
        assert_retained(make(adjustment="random"), permuted())


def test_training_several_experiences_in_one_call():
    benchmark = permuted()
    at_once, one_by_one = make(HAT, optimizer="adam"), make(HAT, optimizer="adam")
    at_once.train(benchmark.train_stream)
    learn(one_by_one, benchmark.train_stream)
    a, b = logits_of(at_once, benchmark, range(3)), logits_of(one_by_one, benchmark, range(3))
    assert all(torch.equal(a[task], b[task]) for task in a)
