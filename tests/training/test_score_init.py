"""Initial scores of WSN: their distributions, and that seed and task alone decide them."""

import math
from functools import partial

import pytest
import torch
from scipy import stats
from support.small_runs import OPTIMIZERS, assert_retained, logits_of, split
from support.strategies import learn, make

from avalanche_amnesia import WSN, ScoredWeights, SubnetModel
from avalanche_amnesia.training.plugins import SubnetPlugin

WIDTHS = {"layers.0.weight": 64, "layers.1.weight": 100}
DISTRIBUTIONS = {
    "fan_in": lambda n: stats.uniform(-1 / math.sqrt(n), 2 / math.sqrt(n)),
    "normal": lambda n: stats.norm(),
    "positive": lambda n: stats.uniform(),
}


class Drawn(SubnetPlugin):
    """Notes the scores with which every task begins."""

    def before_training_exp(self, strategy, *args, **kwargs):
        super().before_training_exp(strategy, *args, **kwargs)
        notes.setdefault(self.seed, {})[self.in_training.task] = self.in_training.scores.detach().clone()


notes: dict[int, dict[int, torch.Tensor]] = {}


def wsn(plugin=None, **options):
    wrap = partial(SubnetModel, density=0.3)
    options |= {"hidden": (100,), "features": 50, "optimizer": OPTIMIZERS["adam"]}
    strategy = make(WSN, wrap=wrap, train_mb_size=16, train_epochs=1, **options)
    if plugin is not None:
        strategy.plugins = [plugin if isinstance(p, SubnetPlugin) else p for p in strategy.plugins]
    return strategy


def drawn(tasks, *, seed=3, **options):
    """Task → scores with which it began, layer by layer."""
    notes.clear()
    strategy = learn(wsn(Drawn(seed=seed, **options), seed=seed), [split().train_stream[task] for task in tasks])
    return {task: strategy.model.by_layer(scores) for task, scores in notes[seed].items()}


@pytest.mark.parametrize("scores", ["keep", "redraw"])
@pytest.mark.parametrize("init", DISTRIBUTIONS)
def test_scores_have_the_distribution_that_was_asked_for(init, scores):
    for of_task in [
        drawn([0, 1], masks=ScoredWeights(score_init=init, scores=scores))[task]
        for task in ([0] if scores == "keep" else [0, 1])
    ]:
        assert set(of_task) == set(WIDTHS)
        for name, values in of_task.items():
            distance = stats.kstest(values.double().numpy(), DISTRIBUTIONS[init](WIDTHS[name]).cdf)
            assert distance.pvalue > 1e-3, (name, distance)
            for other in DISTRIBUTIONS.keys() - {init}:
                assert stats.kstest(values.double().numpy(), DISTRIBUTIONS[other](WIDTHS[name]).cdf).pvalue < 1e-9


@pytest.mark.parametrize("init", DISTRIBUTIONS)
def test_redrawn_scores_depend_on_seed_and_task_alone(init):
    """Whatever was trained before, and whatever was drawn meanwhile."""
    options = {"masks": ScoredWeights(score_init=init, scores="redraw")}
    alone = drawn([1], **options)[1]
    torch.rand(7)
    behind, other_seed = drawn([0, 1], **options), drawn([1], seed=4, **options)[1]
    for name, values in alone.items():
        assert torch.equal(values, behind[1][name])
        assert not torch.equal(values, behind[0][name])
        assert not torch.equal(values, other_seed[name])


@pytest.mark.parametrize("init", DISTRIBUTIONS)
def test_kept_scores_are_drawn_once(init):
    first, later = (
        drawn([0], masks=ScoredWeights(score_init=init))[0],
        drawn([1, 0], masks=ScoredWeights(score_init=init)),
    )
    for name, values in first.items():
        assert torch.equal(values, later[1][name])  # whichever task comes first
        assert float((later[0][name] - values).abs().mean()) < 0.1


@pytest.mark.parametrize(("init", "score_lr"), [("normal", 0.05), ("positive", 0.02)])
def test_tasks_are_kept_to_the_bit_and_learned(init, score_lr):
    strategy = wsn(masks=ScoredWeights(score_init=init, score_lr=score_lr, scores="redraw"))
    assert_retained(strategy, split(), 3)
    strategy = learn(
        wsn(masks=ScoredWeights(score_init=init, score_lr=score_lr, scores="redraw")), split(1000).train_stream[:3]
    )
    for task, out in logits_of(strategy, split(1000), range(3)).items():
        assert (out.argmax(1) == split(1000).test_stream[task].tensors[1]).float().mean() > 0.85


def test_an_initialisation_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="score_init must be one of 'fan_in', 'normal', 'positive', got 'uniform'"):
        wsn(masks=ScoredWeights(score_init="uniform"))
