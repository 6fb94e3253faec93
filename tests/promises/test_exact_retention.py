"""Earlier tasks' logits keep their bits under every optimizer, plugin and setting of later trainings."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EWCPlugin, LRSchedulerPlugin, LwFPlugin, ReplayPlugin
from support.small_networks import Net
from support.small_runs import OPTIMIZERS, StubbornSGD, assert_retained, logits_of, make, permuted, split
from support.strategies import Hears, learn
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import WSN, AdjustmentRule, AmnesiacHAT, ConstantRule, HardAttention


class WatchEveryStep(SupervisedPlugin):
    """Logits of the first task after every step of a later one, not only after its commit."""

    def __init__(self, benchmark) -> None:
        super().__init__()
        self.benchmark, self.expected, self.compared = benchmark, None, 0

    def before_training_exp(self, strategy, **kwargs):
        if self.expected is None and strategy.experience.task_label:
            self.expected = logits_of(strategy, self.benchmark, [0])[0]

    def after_training_iteration(self, strategy, **kwargs):
        if self.expected is not None:
            assert torch.equal(logits_of(strategy, self.benchmark, [0])[0], self.expected)
            self.compared += 1


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


def norm_net():
    layers = {"first": nn.Linear(64, 30), "norm": nn.LayerNorm(30), "second": nn.Linear(30, 20), "features": 20}
    return Net(lambda n, x: torch.relu(n.second(torch.relu(n.norm(n.first(x.flatten(1)))))), **layers)


@pytest.mark.parametrize(("optimizer", "kind"), [(Lookahead, AmnesiacHAT), (StubbornSGD, WSN)])
def test_optimizers_may_move_parameters_without_gradients(optimizer, kind):
    """Heads and norms of other tasks stay after every step, and the norms that later tasks begin with."""
    benchmark = permuted(3)
    watch = WatchEveryStep(benchmark)
    torch.manual_seed(0)
    model = SubnetModel(norm_net(), density=0.3) if kind is WSN else MaskedModel(norm_net())
    initial = {n: p.detach().clone() for n, p in model.backbone.named_parameters() if n.startswith("norm")}
    options = {} if kind is WSN else {"masks": HardAttention(embedding_optimizer=lambda p: torch.optim.SGD(p, lr=0.05))}
    strategy = make(kind, model=model, optimizer=optimizer, plugins=[watch], **options)
    learn(strategy, benchmark.train_stream)
    assert watch.compared == 40
    assert initial
    assert all(torch.equal(p, initial[n]) for n, p in model.backbone.named_parameters() if n in initial)


KEPT = [(name, False) for name in OPTIMIZERS if name != "fused sgd"]  # whose momentum torch can't keep
RESET = [("momentum", True), ("fused sgd", True)]


@pytest.mark.parametrize(("optimizer", "reset"), KEPT + RESET)
def test_logits_keep_their_bits_at_every_step(optimizer, reset):
    benchmark = permuted(2, n_train=96)
    watch = WatchEveryStep(benchmark)
    strategy = make(optimizer=optimizer, reset_optimizer=reset, plugins=[watch])
    assert_retained(strategy, benchmark, must_move=optimizer != "rmsprop")  # it fills every layer with one task
    assert watch.compared == 12


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.5},
        {"train_mb_size": 1000, "train_epochs": 3},  # one batch per epoch
        {"train_mb_size": 53, "train_epochs": 1},  # 160 samples: the last batch has one
        {"masks": HardAttention(annealing="cosine", sparsity="cross")},
        {"masks": HardAttention(embedding_init="ones", sparsity="quota")},
        {"masks": HardAttention(sparsity_weight=0.0, embedding_init="last")},
        {"masks": HardAttention(s_max=1.5, embedding_clamp=0.3)},
        {"adjustment": ConstantRule(alpha=0.0)},
        {"criterion": nn.MultiMarginLoss()},
        {"eval_every": 1},
        {"masks": HardAttention(embedding_optimizer=lambda p: torch.optim.SGD(p, lr=1.0))},
    ],
    ids=lambda options: next(iter(options)) + " " + str(next(iter(options.values())))[:8],
)
def test_earlier_tasks_keep_their_bits_under_every_setting(options):
    fills = getattr(options.get("masks"), "embedding_init", None) in ("ones", "last")  # no free unit may be left
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
def test_earlier_tasks_keep_their_bits_beside_other_plugins(plugin):
    made = {}

    def optimizer(parameters):
        made["optimizer"] = torch.optim.Adam(parameters, lr=3e-3, weight_decay=1e-3)
        return made["optimizer"]

    strategy = make(optimizer=optimizer, reset_optimizer=False)
    position = next(i for i, p in enumerate(strategy.plugins) if not type(p).__module__.startswith("avalanche_amnesia"))
    strategy.plugins.insert(position, plugin(made["optimizer"]))
    assert_retained(strategy, split(), 3)


def test_plain_gradient_masking_protects_only_under_sgd():
    assert_retained(make(optimizer="sgd", adjustment=AdjustmentRule(space="gradient")), permuted())
    with pytest.raises(AssertionError, match="drifted"):
        assert_retained(make(optimizer="adamw", adjustment=AdjustmentRule(space="gradient")), permuted())
