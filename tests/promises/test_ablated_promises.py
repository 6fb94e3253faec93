"""Promises hold under the options of ablations: exact unlearning to the bit, protection, nothing stray."""

import pytest
from support.strategies import DIGITS, amnesiac, trained
from support.strategy_state import assert_nothing_stray, bits

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
def test_what_is_called_exact_equals_the_retrained_model(rule):
    strategy, plain = trained(3, adjustment=RULES[rule], train_epochs=1), trained(3, train_epochs=1)
    assert bits(strategy.model) != bits(plain.model)
    record = strategy.unlearn([2])
    assert record.claim == "exact", record.reasons
    assert bits(strategy.model) == bits(trained(2, adjustment=RULES[rule], train_epochs=1).model)


@pytest.mark.parametrize("rule", RULES)
def test_a_task_in_the_middle_leaves_nothing_that_nobody_owns(rule):
    strategy = amnesiac(adjustment=RULES[rule], train_epochs=1)
    assert_nothing_stray(strategy, DIGITS.train_stream, [[1], [0, 3], [2]])
