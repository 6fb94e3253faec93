"""Shadow copies as in the AmnesiacHAT paper; updates scaled by ``rate`` or ``draft``, or pruned; their removal."""

import copy
import operator
from functools import cache, partial

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support import strategy_state as states
from support.strategies import amnesiac, trained
from torch import nn
from torch.nn.functional import cross_entropy

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.contrib.shadows.shadow import Shadow, entries_first_used, entries_in_use
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training import PAPER_ALPHA, AdaHATRule
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.hat import HATPlugin
from avalanche_amnesia.training.update_rules import TaskUse
from experiments.pruned_updates import PrunedTrajectoryPlugin, StepActivity
from experiments.published_copies import PublishedCopies
from experiments.scaled_updates import ScaledUpdatesPlugin

PERMUTED = PermutedDigits(4, n_train=400, n_test=200)
ADJUSTMENTS = ["hat", "adahat"]


learned = partial(trained, stream=PERMUTED, train_epochs=1, compensation=PublishedCopies)


@cache
def trained_once(adjustment):
    return learned(4, adjustment=adjustment)


def layers(of):
    return [(of[f"layers.{i}.weight"], of[f"layers.{i}.bias"]) for i in (0, 1)]


def block(x, shadow, main, cumulative, gate):
    """``x ← a ⊙ B_l(x) + (1 − a) ⊙ W_l(x)``, then the mask of the task in training, then ReLU; layer by layer."""
    x = x.flatten(1)
    for (b_weight, b_bias), (w_weight, w_bias), a, mask in zip(shadow, main, cumulative, gate, strict=True):
        of_b, of_w = x @ b_weight.T + b_bias, x @ w_weight.T + w_bias
        x = torch.relu(mask * (a * of_b + (1 - a) * of_w))
    return x


class Watch(SupervisedPlugin):
    """Compares the shadows' logits and the joint loss with the paper's formula in every step."""

    seen = 0

    def __init__(self, gates):
        super().__init__()
        self.gates = gates

    def before_backward(self, strategy, **kwargs):
        now, model = states.backups(strategy)._now, strategy.model
        x, y, task = strategy.mb_x, strategy.mb_y, int(strategy.experience.task_label)
        with torch.no_grad():
            head, main = model.head(task), layers(states.values(strategy.model.backbone))
            gate = list(model.by_layer(model.gate.value).values())
            masks = {t: [m.float() for m in of.values()] for t, of in model.masks.items()}
            losses = []
            for other, shadow in now.shadows.items():
                gating = [masks[t] for t in masks if self.gates(t, other)]
                cumulative = [torch.stack(of_layer).amax(0) for of_layer in zip(*gating, strict=True)]
                logits = head(block(x, layers(shadow._values), main, cumulative, gate))
                assert torch.allclose(shadow.logits(x), logits, atol=1e-5)
                losses.append(cross_entropy(logits, y))
            alone = cross_entropy(model(x, task), y)
            assert torch.allclose(strategy.loss, alone + sum(losses) / max(1, len(losses)), atol=1e-5)
        Watch.seen += len(losses)


GATES = {"unit": operator.le, "own_unit": operator.eq}


@pytest.mark.parametrize(("adjustment", "scope"), [("hat", "unit"), ("adahat", "unit"), ("adahat", "own_unit")])
def test_forward_pass_and_joint_loss_equal_the_published_formulas(adjustment, scope):
    """HAT's regulariser is part of the mask's gradient, not of Avalanche's loss."""
    Watch.seen = 0
    learned(3, compensation=PublishedCopies(scope), adjustment=adjustment, plugins=[Watch(GATES[scope])])
    assert Watch.seen == 10 + 2 * 10


def test_a_fresh_shadow_is_drawn_from_seed_task_and_earlier_task(monkeypatch):
    drawn = {}
    made = Shadow.__init__

    def watched(self, model, task, region, start, *rest, **kwargs):
        drawn.setdefault(seed, []).append((task, {name: value.clone() for name, value in start.items()}))
        made(self, model, task, region, start, *rest, **kwargs)

    monkeypatch.setattr(Shadow, "__init__", watched)
    for seed in (5, 6, 5):
        learned(3, compensation=PublishedCopies(seed=seed))
    again, other = drawn[5][3:], drawn[6]
    assert [task for task, _ in again] == [1, 2, 2]
    for (task, of_task), (_, twice), (_, elsewhere), earlier in zip(drawn[5], again, other, (0, 0, 1), strict=False):
        torch.manual_seed(derive_seed(5, "shadow", task, earlier))
        naive = [nn.Linear(64, 24), nn.Linear(24, 16)]
        for index, layer in enumerate(naive):
            for kind in ("weight", "bias"):
                name = f"layers.{index}.{kind}"
                assert torch.equal(of_task[name], getattr(layer, kind))
                assert torch.equal(of_task[name], twice[name])
                assert not torch.equal(of_task[name], elsewhere[name])


@pytest.mark.parametrize("adjustment", ADJUSTMENTS)
@pytest.mark.parametrize("gone", [0, 1])
def test_an_unlearning_writes_the_shadows_values_where_both_masks_overlap(adjustment, gone):
    """Compare with a deletion, followed by the values of each shadow task by task."""
    strategy = copy.deepcopy(trained_once(adjustment))
    now = {f"backbone.{name}": value for name, value in states.values(strategy.model.backbone).items()}
    expected = {**now, **states.trajectory(strategy).remove([gone], now).values}
    mine = entries_in_use(strategy.model, gone)
    of_earlier = [entries_in_use(strategy.model, task) for task in range(gone)]
    overwritten = 0
    for task in range(gone + 1, 4):
        use = entries_in_use(strategy.model, task)
        for name, part in states.backups(strategy).kept[task][gone].updates.items():
            overlap = mine[name] & use[name]
            assert torch.equal(part.where, overlap)
            now = expected[f"backbone.{name}"] = expected[f"backbone.{name}"].clone()
            now[overlap] = part.values
            overwritten += sum(int((overlap & of[name]).sum()) for of in of_earlier)
    strategy.unlearn([gone])
    for name, value in states.values(strategy.model.backbone).items():
        assert torch.equal(value, expected[f"backbone.{name}"]), name
    assert (overwritten > 0) == (gone > 0)


def test_unlearned_tasks_leave_no_trace_in_a_joint_training_with_a_deadline():
    """A deadline counts unlearned tasks, but the shadows of a retrained model must be equal."""
    benchmark = with_unlearning(PERMUTED, {1: [1], 3: [3]}, deadline=1)
    models = []
    for tasks in (range(4), (0, 2)):
        strategy = learned(tasks, stream=benchmark)
        models.append(strategy.model)
        assert strategy.model.tasks == (0, 2)
    assert states.bits(models[0]) == states.bits(models[1])


NAMES = ["rate", "draft"]


def scaled(n_tasks=3, by="rate", adjustment="adahat", **options):
    """Return a strategy with scaled updates; None: only deletion."""
    compensation = "none" if by is None else ScaledUpdatesPlugin(by)
    options = {"compensation": compensation, "adjustment": adjustment, **options}
    return trained(n_tasks, PERMUTED, train_epochs=1, **options)


@pytest.mark.parametrize(("by", "atol"), [("rate", 2e-4), ("draft", 1e-6)])  # rates are kept in float16
def test_the_next_tasks_update_is_divided_by_the_rate_that_damped_it_or_multiplied_by_alpha(by, atol):
    strategy, plain = scaled(2, compensation=ScaledUpdatesPlugin(by, alpha=0.5)), scaled(2, None)
    use = TaskUse(scaled(1).model)  # before task 1
    rule = find_plugin(strategy, HATPlugin).rule
    before = states.trajectory(plain).values_before(1, dict(plain.model.named_parameters()))
    trained = states.values(plain.model.backbone)
    region, moved = entries_first_used(strategy.model, 0, []), states.trajectory(strategy).moved(1)
    plain.unlearn([0])
    assert strategy.unlearn([0]).plan.compensated == (1,)
    kept = find_plugin(strategy, ScaledUpdatesPlugin).rates
    assert kept.keys() == {1}
    assert not any((rates.where & ~moved[f"backbone.{name}"]).any() for name, rates in kept[1].items())
    unscaled = states.values(plain.model.backbone)
    n_scaled = 0
    for name, value in states.values(strategy.model.backbone).items():
        where = region[name] & moved[f"backbone.{name}"]
        update = trained[name].double() - before[f"backbone.{name}"].double()
        rate = (1 - rule.protected_share(use, name, 0.0)).double()
        wanted = unscaled[name].double() - update + (update / rate if by == "rate" else update * 0.5)
        assert torch.allclose(value[where].double(), wanted[where], rtol=0, atol=atol)
        assert same_bits(value, unscaled[name])[~where].all()
        n_scaled += int(((rate < 0.2) & where & (update.abs() > 1e-6)).sum())
    assert n_scaled > 50


@pytest.mark.parametrize("compensation", NAMES)
def test_the_coefficient_of_an_unlearned_update_is_zero(compensation):
    plain, marked = (scaled(4, compensation) for _ in range(2))
    for task in (0, 1):
        states.mark(marked, task, size=1.0)
    states.assert_marks_go(plain, marked, [[1], [0]], atol=2e-4)


def test_the_alpha_of_the_paper_is_finite_and_two_compensations_are_refused():
    strategy = scaled(2, adjustment=AdaHATRule(alpha=PAPER_ALPHA))
    strategy.unlearn([0])
    assert all(bool(value.isfinite().all()) for value in states.values(strategy.model.backbone).values())
    both = scaled(2, plugins=[ScaledUpdatesPlugin("draft")])
    before = states.fingerprint(both)
    with pytest.raises(ValueError, match="two compensations revise what task 1 wrote"):
        both.unlearn([0])
    assert states.fingerprint(both) == before


def test_a_pruned_log_is_removed_without_trace_and_keeps_the_claim():
    kept = PrunedTrajectoryPlugin(threshold=0.01, min_active_steps=0.3)
    of_all = {"adjustment": "adahat", "optimizer": "sgd"}
    strategy, lossless = trained(3, trajectory=kept, **of_all), trained(3, **of_all)
    states.assert_economical(strategy, lossless, states.initial_values(amnesiac().model))


@torch.no_grad()
def test_entries_with_small_or_rare_changes_are_reset():
    """Five steps: entry 0 changes little, entry 1 rarely."""
    layer = nn.Linear(1, 3, bias=False)
    plugin = PrunedTrajectoryPlugin(threshold=0.5, min_active_steps=0.6, dtype=torch.bfloat16)
    assert plugin.trajectory.dtype is torch.bfloat16
    plugin._activity, before = StepActivity(layer), states.values(layer)
    for step in range(5):
        plugin.before_update(None)
        layer.weight[:, 0] += torch.tensor([0.05, float(step < 2), float(step < 3)])
        plugin.after_update(None)
    plugin.prune(before, dict(layer.named_parameters()))
    moved = layer.weight.detach() - before["weight"]
    assert moved[:, 0].tolist() == pytest.approx([0, 0, 3], abs=1e-6)
    assert torch.equal(layer.weight.detach()[:2], before["weight"][:2])
