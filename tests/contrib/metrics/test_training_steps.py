"""Capacity in every step against a loop over the masks and the gate of that step."""

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import loss_metrics
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from support.measured_runs import make_ewc, make_wsn
from support.small_runs import make, permuted
from support.strategies import DIGITS, learn, quiet

from avalanche_amnesia.contrib.metrics import StepCapacity, step_capacity_metrics
from avalanche_amnesia.evaluation import capacity_metrics, network_capacity
from avalanche_amnesia.training import HAT, AdaHAT, AdaHATRule, AdjustmentRule, ConstantRule

NAME = "Capacity_MB/train_phase/train_stream/Task{:03d}"
ALPHA, EPSILON = 0.05, 0.1


class Naive(SupervisedPlugin):
    """Mean adjustment rate of every step, entry by entry from masks, gate and formula."""

    def __init__(self, rate, between=min):
        super().__init__()
        self.rate, self.between, self.values = rate, between, {}

    def before_update(self, strategy, **kwargs):
        model, task = strategy.model, int(strategy.experience.task_label)
        masks = [m for t, m in model.masks.items() if t != task]
        gate, layers, rates = model.by_layer(model.gate.value), list(model.graph.layers), []
        for index, layer in enumerate(layers):
            count = sum((m[layer].double() for m in masks), torch.zeros(len(gate[layer])).double())
            free = (count == 0).double()
            kappa = float((gate[layer].double() * free).sum() / free.sum().clamp_min(1))
            below = (
                None if index == 0 else sum((m[layers[index - 1]].double() for m in masks), 0 * gate[layers[index - 1]])
            )
            n_inputs = model.backbone.get_parameter(f"{layer}.weight").shape[1]
            for i in range(len(count)):
                rates.append(self.rate(float(count[i]), kappa, len(masks)))
                for j in range(n_inputs):
                    ends = [float(count[i])] if below is None else [float(count[i]), float(below[j])]
                    rates.append(self.rate(self.between(ends), kappa, len(masks)))
        self.values.setdefault(task, []).append(sum(rates) / len(rates))


def damping(importance, kappa):
    rate = ALPHA / (EPSILON + kappa)
    return rate / (importance + rate)


CASES = {
    "hat": (HAT, {}, Naive(lambda m, k, n: float(m == 0))),
    "hat by max": (HAT, {"adjustment": AdjustmentRule(between="max")}, Naive(lambda m, k, n: float(m == 0), max)),
    "constant": (HAT, {"adjustment": ConstantRule(alpha=0.3)}, Naive(lambda m, k, n: 0.3 if m else 1.0)),
    "adahat": (AdaHAT, {"adjustment": AdaHATRule(ALPHA)}, Naive(lambda m, k, n: damping(m, k))),
    "adahat by max": (HAT, {"adjustment": AdaHATRule(ALPHA, between="max")}, Naive(lambda m, k, n: damping(m, k), max)),
    "no_reg": (AdaHAT, {"adjustment": AdaHATRule(alpha=ALPHA, sparsity=False)}, Naive(lambda m, k, n: damping(m, 0))),
    "no_sum": (
        AdaHAT,
        {"adjustment": AdaHATRule(alpha=ALPHA, importance="number")},
        Naive(lambda m, k, n: damping(n + 1, k)),
    ),
    "flat_sum": (
        AdaHAT,
        {"adjustment": AdaHATRule(alpha=ALPHA, importance="flat")},
        Naive(lambda m, k, n: damping(n if m else 0, k)),
    ),
}


def measured(kind, **options):
    evaluator = EvaluationPlugin(
        *capacity_metrics(), *step_capacity_metrics(), loggers=[BaseLogger()], collect_all=True
    )
    return make(kind, train_epochs=1, evaluator=evaluator, **options)


def history(strategy, task):
    return strategy.evaluator.get_all_metrics()[NAME.format(task)]


@pytest.mark.parametrize("case", CASES)
def test_every_step_against_a_loop(case):
    kind, options, naive = CASES[case]
    strategy = learn(measured(kind, plugins=[naive], **options), permuted(3).train_stream)
    for task in range(3):
        steps, values = history(strategy, task)
        assert len(values) == 10
        assert steps == sorted(steps)
        assert values == pytest.approx(naive.values[task], abs=1e-5)
    first = history(strategy, 0)[1]
    assert (first == [1.0] * 10) == (case != "no_sum")
    varies = len(set(history(strategy, 2)[1])) > 1
    assert varies == (case in {"adahat", "adahat by max", "no_sum", "flat_sum"})


def test_random_rates_are_those_that_were_drawn():
    strategy = learn(measured(HAT, adjustment="random"), permuted(2).train_stream)
    free = network_capacity(learn(make(HAT, train_epochs=1), permuted(2).train_stream[:1]))
    values = history(strategy, 1)[1]
    assert len(set(values)) == 10
    assert values == pytest.approx([(1 + free) / 2] * 10, abs=0.02)


def test_a_step_of_the_next_task_is_what_capacity_foretold_without_sparsity():
    strategy = measured(AdaHAT, adjustment=AdaHATRule(sparsity=False))
    for experience in permuted(3).train_stream:
        foretold = network_capacity(strategy)
        strategy.train(experience)
        assert history(strategy, experience.task_label)[1] == pytest.approx([foretold] * 10, abs=1e-6)


def test_weights_masked_by_themselves_have_it_and_strategies_without_masks_do_not():
    for maker, there in ((make_wsn, True), (make_ewc, False)):
        evaluator = quiet(StepCapacity(), loss_metrics(minibatch=True))
        strategy = learn(maker(evaluator=evaluator), DIGITS.train_stream[:2])
        named = strategy.evaluator.get_all_metrics()
        assert (NAME.format(1) in named) == there
        if there:
            assert set(named[NAME.format(0)][1]) == {1.0}
            used = strategy.model.binary_mask(0).float().mean()
            assert named[NAME.format(1)][1] == pytest.approx(
                [1 - float(used)] * len(named[NAME.format(1)][1]), abs=1e-6
            )
