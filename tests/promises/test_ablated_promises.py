"""Promises hold under the options of ablations: exact unlearning to the bit, protection, nothing stray."""

import pytest
from support.strategies import DIGITS, amnesiac, trained
from support.strategy_state import assert_nothing_stray, bits

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.training import AdaHATRule, AdjustmentRule, ConstantRule, RandomRule

RULES = {
    "hat by max": AdjustmentRule(between="max"),
    "constant by max": ConstantRule(0.5, between="max"),
    "random by max": RandomRule(between="max"),
    "adahat by max": AdaHATRule(between="max"),
    "flat sum by max": AdaHATRule(importance="flat", between="max"),
    "no sum": AdaHATRule(0.5, importance="number"),
    "no sum, no reg": AdaHATRule(0.5, importance="number", sparsity=False),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("isolation", "task"), [("none", 2), ("pools", 1)])
def test_what_is_called_exact_equals_the_retrained_model(rule, isolation, task):
    options = {"train_epochs": 1, "isolation": isolation}
    strategy, plain = trained(3, adjustment=RULES[rule], **options), trained(3, **options)
    if isolation == "none":
        assert bits(strategy.model) != bits(plain.model)
    record = strategy.unlearn([task])
    assert record.claim == "exact", record.reasons
    retrained = trained([t for t in range(3) if t != task], adjustment=RULES[rule], **options)
    assert bits(strategy.model) == bits(retrained.model)


@pytest.mark.parametrize("rule", RULES)
def test_pools_beside_a_permanent_task_are_exact_and_it_is_damped_by_the_rule(rule):
    """Permanent tasks are read by all: what ``max`` adds to their use is held back and opens nothing."""

    stream = with_unlearning(DIGITS, {}, permanent=[0, 3])
    options = {"adjustment": RULES[rule], "train_epochs": 1, "isolation": "pools"}
    strategy = trained(4, stream, **options)
    assert strategy.unlearn([1]).claim == "exact"
    assert bits(strategy.model) == bits(trained([0, 2, 3], stream, **options).model)


@pytest.mark.parametrize("rule", RULES)
def test_a_task_in_the_middle_leaves_nothing_that_nobody_owns(rule):
    strategy = amnesiac(adjustment=RULES[rule], train_epochs=1)
    assert_nothing_stray(strategy, DIGITS.train_stream, [[1], [0, 3], [2]])
