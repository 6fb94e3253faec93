"""Shadow copies as in the AmnesiacHAT paper, of experiments/published_copies.py."""

import copy
import operator
from functools import cache, partial

import pytest
import torch
from avalanche.core import SupervisedPlugin
from support.small_networks import Net
from support.strategies import DIGITS, amnesiac, trained
from support.strategy_state import (
    backups,
    trajectory,
    values,
)
from torch import nn
from torch.nn.functional import cross_entropy

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.shadows.shadow import Shadow, entries_in_use
from avalanche_amnesia.seeding import derive_seed
from experiments.published_copies import PublishedCopies

PERMUTED = PermutedDigits(4, n_train=400, n_test=200)
ADJUSTMENTS = ["hat", "adahat"]


learned = partial(trained, stream=PERMUTED, train_epochs=1, compensation=PublishedCopies)


@cache
def trained_once(adjustment):
    return learned(4, adjustment=adjustment)


def layers(values):
    return [(values[f"layers.{i}.weight"], values[f"layers.{i}.bias"]) for i in (0, 1)]


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
        now, model = backups(strategy)._now, strategy.model
        x, y, task = strategy.mb_x, strategy.mb_y, int(strategy.experience.task_label)
        with torch.no_grad():
            head, main = model.head(task), layers(values(strategy.model.backbone))
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
    now = {f"backbone.{name}": value for name, value in values(strategy.model.backbone).items()}
    expected = {**now, **trajectory(strategy).remove([gone], now).values}
    mine = entries_in_use(strategy.model, gone)
    of_earlier = [entries_in_use(strategy.model, task) for task in range(gone)]
    overwritten = 0
    for task in range(gone + 1, 4):
        use = entries_in_use(strategy.model, task)
        for name, part in backups(strategy).kept[task][gone].updates.items():
            overlap = mine[name] & use[name]
            assert torch.equal(part.where, overlap)
            now = expected[f"backbone.{name}"] = expected[f"backbone.{name}"].clone()
            now[overlap] = part.values
            overwritten += sum(int((overlap & of[name]).sum()) for of in of_earlier)
    strategy.unlearn([gone])
    for name, value in values(strategy.model.backbone).items():
        assert torch.equal(value, expected[f"backbone.{name}"]), name
    assert (overwritten > 0) == (gone > 0)


def gains():
    parts = {"first": nn.Linear(64, 8), "scale": nn.Parameter(torch.ones(8)), "features": 8}
    return Net(lambda net, x: torch.relu(net.first(x.flatten(1))) * net.scale, **parts)


def test_networks_without_initialisation_and_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="scope must be one of 'unit', 'own_unit', got 'layer'"):
        PublishedCopies("layer")
    with pytest.raises(ValueError, match="seed"):
        PublishedCopies(seed=0.5)
    strategy = amnesiac(net=gains, compensation=PublishedCopies)
    with pytest.raises(ValueError, match=r"\['scale'\] do not have"):
        strategy.train(DIGITS.train_stream[0])
    assert strategy.model.tasks == ()
