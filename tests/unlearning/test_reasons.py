"""Reasons of an approximate claim, and claims beside parts of the user's: none is exact that is not."""

from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import LRSchedulerPlugin
from support.fault_injection import FailsAtEvent
from support.strategies import DIGITS, ConvNet, Hears, amnesiac, brief, learn, make, quiet, trained
from support.strategy_state import bits, initial_values, trajectory, unlearning_plugin
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from avalanche_amnesia import DisjointSubnets, ModelError, UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.optimizers import traits_of
from avalanche_amnesia.training import AdjustmentRule
from avalanche_amnesia.unlearning.claims import TamperedError

pools = partial(make, DisjointSubnets, train_epochs=1)


learned = partial(trained, maker=pools)


def test_a_later_training_is_a_reason():
    strategy = trained(2, train_epochs=1)
    plan = strategy.plan_unlearning([0])
    assert plan.reasons == ("task 1 may have learned from task 0",)
    record = strategy.unlearn([0])
    assert record.claim == "approximate"
    assert record.reasons == plan.reasons
    strategy.train(DIGITS.train_stream[2])
    assert strategy.plan_unlearning([2]).reasons == ("task 1 may have learned from task 0, unlearned before",)


# Tampering ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def change_one_weight(strategy):
    weight = next(strategy.model.backbone.parameters())
    weight[0, 0] += 1e-3


def step_by_hand(strategy):
    x, y = DIGITS.train_stream[0].tensors
    parameters = list(strategy.model.parameters())
    nn.functional.cross_entropy(strategy.model(x[:8], 0), y[:8]).backward()
    SGD(parameters, lr=0.1).step()


@torch.no_grad()
def change_a_mask(strategy):
    mask = strategy.model._masks[2]
    mask[0] = ~mask[0]


TAMPERINGS = [
    *((brief, tamper, False) for tamper in (step_by_hand, change_a_mask)),
    (brief, lambda s: s.model.load_state_dict(trained(3, maker=brief, seed=1).model.state_dict()), False),
    (brief, lambda s: s.model.backbone.register_buffer("seen", torch.ones(3)), False),
    *((maker, change_one_weight, True) for maker in (brief, pools)),
]


@pytest.mark.parametrize(("maker", "tamper", "later"), TAMPERINGS)
def test_a_model_changed_by_other_code_is_never_exact(maker, tamper, later):
    """Without the writing, AmnesiacHAT unlearns the last task exactly, and DisjointSubnets any."""
    strategy = trained(3, maker=maker)
    tamper(strategy)
    if later:  # a training in between does not make it good
        strategy.train(DIGITS.train_stream[3])
    task = 1 if maker is pools else strategy.model.tasks[-1]
    before = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    with pytest.raises(TamperedError, match=r"changed by something else.*restore them"):
        strategy.unlearn([task], strict=True)
    assert all(torch.equal(value, before[name]) for name, value in strategy.model.state_dict().items())
    record = strategy.unlearn([task])
    assert record.claim == "approximate"
    assert any("changed by something else" in reason for reason in record.reasons)


def test_a_model_whose_state_was_restored_is_exact_again():
    strategy = learned(3)
    held = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    change_one_weight(strategy)
    assert strategy.plan_unlearning([1]).claim == "approximate"
    strategy.model.load_state_dict(held)
    assert strategy.unlearn([1], strict=True).claim == "exact"


@pytest.mark.parametrize("kind", ["SeedingPlugin", "CounterfactualPlugin"])
def test_a_removed_plugin_is_a_reason(kind):
    strategy = trained(3, maker=brief)
    strategy.plugins = [plugin for plugin in strategy.plugins if type(plugin).__name__ != kind]
    reasons = strategy.unlearn([2]).reasons
    assert "the strategy now has other plugins than at the first training" in reasons


def test_a_plugin_of_only_one_task_is_a_reason():
    strategy = learned(1)
    strategy.plugins.append(other := Hears())
    strategy.train(DIGITS.train_stream[1])
    strategy.plugins.remove(other)
    reasons = strategy.plan_unlearning([0]).reasons
    assert any("with other settings or plugins" in reason for reason in reasons)


def test_an_unlearning_in_an_aborted_training_stays_exact():
    """Changes by a request in the middle of a task stay, and are no tampering."""

    def in_the_second_step_of_task_2(made):
        return made.experience.task_label == 2 and made.clock.train_exp_iterations == 1

    fails = FailsAtEvent("after_update", KeyboardInterrupt, when=in_the_second_step_of_task_2)
    strategy = make(DisjointSubnets, train_epochs=1, plugins=[fails])
    benchmark = with_unlearning(DIGITS, [UnlearningRequest((0,), 2, "iteration", 1)])
    learn(strategy, benchmark.train_stream[:2])
    with pytest.raises(KeyboardInterrupt):
        strategy.train(benchmark.train_stream[2])
    strategy.abort_training()
    assert unlearning_plugin(strategy).ledger.remaining == (1,)
    strategy.train(DIGITS.train_stream[3])
    assert strategy.plan_unlearning([1]).reasons == ()
    assert strategy.unlearn([1], strict=True).claim == "conditional"


# Code with state ---------------------------------------------------------------------------------------------------


def test_a_plugin_of_avalanche_without_a_purger_is_named():
    strategy = pools()
    strategy.plugins.append(LRSchedulerPlugin(StepLR(strategy.optimizer, 1)))
    learn(strategy, DIGITS.train_stream[:2])
    record = strategy.unlearn([0], allow_unknown=True)
    assert (record.claim, record.rests_on) == ("conditional", ("Avalanche's LRSchedulerPlugin",))


def test_affected_tasks_are_those_that_own_a_changed_entry():
    strategy = trained(5, net=ConvNet, train_epochs=1)
    masks = {task: strategy.model.by_layer(strategy.model.binary_mask(task)) for task in range(5)}
    before = initial_values(strategy.model)
    size = trajectory(strategy).nbytes()
    record = strategy.unlearn([1])
    assert record.plan.trajectory_bytes == size - trajectory(strategy).nbytes() > 0
    moved = {name: p.detach() != before[name] for name, p in strategy.model.backbone.named_parameters()}
    uses = {task: strategy.model.graph.parameter_use(masks[task]) for task in (0, 2, 3, 4)}
    affected = [task for task, use in uses.items() if any((moved[n] & (use[n] > 0)).any() for n in moved)]
    assert list(record.affected) == affected
    assert affected  # the test would say nothing otherwise


def test_results_after_an_unlearning_leave_out_the_unlearned_task():
    benchmark = with_unlearning(DIGITS, {1: [0]})
    strategy = amnesiac(evaluator=quiet(accuracy_metrics(experience=True)), train_epochs=1)
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp000"
    strategy.train(benchmark.train_stream[0])
    assert name in strategy.eval(benchmark.test_stream)
    strategy.train(benchmark.train_stream[1])
    results = strategy.eval(benchmark.test_stream)
    assert name not in results
    assert "Top1_Acc_Exp/eval_phase/test_stream/Task001/Exp001" in results
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def clipped(parameters):
    """Adam, all of whose weights are scaled down together behind every step: its steps mix entries."""
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    @torch.no_grad()
    def scale(optimizer, *given):
        values = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        size = sum(float(value.square().sum()) for value in values) ** 0.5
        for value in values:
            value.mul_(min(1.0, 2.0 / size))

    optimizer.register_step_post_hook(scale)
    return optimizer


def penalised(model):
    """A loss with a penalty of the backbone's norms."""
    weights = list(model.backbone.parameters())
    return lambda logits, y: nn.functional.cross_entropy(logits, y) + 0.05 * sum(weight.norm() for weight in weights)


@pytest.mark.parametrize("options", [{}, {"optimizer": clipped}], ids=["adam", "a step that mixes entries"])
def test_a_step_mixes_only_the_entries_of_one_task(options):
    strategy = trained([0, 1, 2], maker=pools, **options)
    assert strategy.unlearn([1]).claim == ("conditional" if options else "exact")
    assert bits(strategy.model) == bits(trained([0, 2], maker=pools, **options).model)


def test_a_loss_over_the_weights_of_the_whole_backbone_is_refused():
    strategy = pools()
    strategy._criterion = penalised(strategy.model)
    with pytest.raises(ModelError, match="the training of task 0 changed"):
        strategy.train(DIGITS.train_stream[0])


def test_an_optimizer_without_torchs_hooks_is_one_of_which_nothing_is_known():
    class Wrapped(torch.optim.Adam):
        def __init__(self, parameters):
            inner = torch.optim.Adam(parameters)
            self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    assert not any(traits_of(Wrapped([nn.Parameter(torch.zeros(2))])))


def test_a_claim_rests_on_an_adjustment_rule_of_the_user():
    class Keeps(AdjustmentRule):
        def protected_share(self, use, name, sparsity):
            """HAT's."""
            self.kept = use.covered[name].clone()
            return self.kept

    strategy = trained([0, 1], adjustment=Keeps(), train_epochs=1)
    (part,) = strategy.unlearn([1]).rests_on
    assert part.endswith("Keeps in HATPlugin")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda like: None, TypeError, "must return a tensor of the shape of .*; got None"),
        (lambda like: torch.zeros(3, 1, 2), TypeError, r"got one of \(3, 1, 2\)"),
        (lambda like: torch.full_like(like, 3.0), ValueError, "from 0, free, to 1, frozen"),
        (lambda like: torch.full_like(like, torch.nan), ValueError, "from nan to nan"),
    ],
)
def test_what_a_rule_returns_is_checked(given, error, message):
    class Wrong(AdjustmentRule):
        def protected_share(self, use, name, sparsity):
            """As given."""
            return given(use.covered[name])

    with pytest.raises(error, match=message):
        trained([0], adjustment=Wrong(), train_epochs=1)


@pytest.mark.parametrize("plugins", [[], [Hears(before_unlearning=change_one_weight)]])
def test_a_record_holds_the_hashes_of_the_model_also_if_a_plugin_writes(plugins):
    strategy = learn(pools(plugins=plugins), DIGITS, 3)
    record = strategy.unlearn([1])
    found = {change.name: change.after for change in record.changes if change.after} | record.unchanged
    assert found == state_hashes(strategy.model.state_dict())
