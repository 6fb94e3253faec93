"""Claims of exactness: made only where the state is that of the retrained model, bit for bit."""

import random
from dataclasses import replace

import pytest
from avalanche.training.plugins import ReplayPlugin
from support.strategies import DIGITS, PRICED, ConvNet, amnesiac, mlp, trained
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import MLP, References

REFERENCES: dict[str, References] = {}


def references(optimizer="adam", adjustment="hat", net=mlp) -> References:
    key = f"{optimizer}{adjustment}{net.__name__}"
    if key not in REFERENCES:
        REFERENCES[key] = References(
            lambda **kw: amnesiac(optimizer=optimizer, adjustment=adjustment, net=net, **kw), DIGITS
        )
    return REFERENCES[key]


def equals_reference(strategy, **which) -> bool:
    reference = references(**which).reference(unlearning_plugin(strategy).ledger.remaining)
    return list(bits(strategy.model).items()) == list(bits(reference).items())


@pytest.mark.parametrize(
    "which",
    [
        {},
        {"optimizer": "momentum", "adjustment": "adahat"},
        {"optimizer": "adamw"},
        {"net": ConvNet, "adjustment": "adahat"},
        {"adjustment": "random"},
    ],
    ids=str,
)
def test_what_is_called_exact_equals_the_retrained_model_bit_for_bit(which):
    strategy = trained(4, **which)
    assert strategy.unlearn([3]).claim == "exact"  # the last one
    assert equals_reference(strategy, **which)
    strategy.train(DIGITS.train_stream[4])  # and on
    assert equals_reference(strategy, **which)
    assert strategy.unlearn([2, 4]).claim == "exact"  # a suffix
    assert equals_reference(strategy, **which)
    strategy.train(DIGITS.train_stream[2])  # learned again
    assert equals_reference(strategy, **which)
    assert strategy.unlearn([2, 0, 1]).claim == "exact"  # all
    assert equals_reference(strategy, **which)
    strategy.train(DIGITS.train_stream[3])
    assert equals_reference(strategy, **which)


def test_a_middle_task_is_approximate_and_exactness_comes_back_with_the_tainted_ones_gone():
    strategy = trained(4)
    assert strategy.unlearn([1]).claim == "approximate"
    assert not equals_reference(strategy)
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([4]).claim == "approximate"  # 2 and 3 stay tainted
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([3]).claim == "approximate"  # 2 and 4 are: 4 learned beside them
    assert strategy.unlearn([2]).claim == "approximate"
    assert strategy.unlearn([4]).claim == "exact"
    assert unlearning_plugin(strategy).ledger.remaining == (0,)
    assert equals_reference(strategy)


def test_random_sequences_are_called_exact_only_where_they_are():
    exact = approximate = 0
    for seed in range(6):
        draw = random.Random(seed)
        strategy = amnesiac(train_epochs=1)
        refs = References(lambda **kw: amnesiac(train_epochs=1, **kw), DIGITS)
        for _ in range(9):
            remaining = list(unlearning_plugin(strategy).ledger.remaining)
            if remaining and (len(remaining) == 4 or draw.random() < 0.35):
                gone = draw.sample(remaining, draw.randint(1, min(2, len(remaining))))
                claim = strategy.unlearn(gone).claim
                same = bits(strategy.model) == bits(refs.reference(unlearning_plugin(strategy).ledger.remaining))
                assert same or claim == "approximate", (seed, gone)
                exact, approximate = exact + (claim == "exact"), approximate + (claim == "approximate")
            else:
                strategy.train(DIGITS.train_stream[draw.choice([t for t in range(5) if t not in remaining])])
    assert exact > 3
    assert approximate > 3


@pytest.mark.parametrize(
    "options",
    [
        {"reset_optimizer": False},
        {"plugins": [ReplayPlugin(mem_size=20)]},
    ],
    ids=["optimizer kept", "replay"],
)
def test_a_host_that_is_not_repeatable_is_never_exact(options):
    strategy = trained(2, train_epochs=1, **options)
    assert strategy.plan_unlearning([1]).claim == "approximate"
    assert strategy.unlearn([1]).claim == "approximate"


def test_one_training_without_new_optimizer_state_is_enough_not_to_be_exact():
    strategy = trained(1, train_epochs=1)
    assert strategy.plan_unlearning([0]).claim == "exact"
    strategy.train(DIGITS.train_stream[1], reset_optimizer_state=False)
    assert strategy.unlearn([1]).claim == "approximate"


def test_dropout_and_quota_do_not_spoil_exactness():
    def make(**kw):
        net = lambda: MLP(64, hidden=(24,), features=16, dropout=0.2)  # noqa: E731
        return amnesiac(net=net, masks=replace(PRICED, sparsity="quota", embedding_init="last"), train_epochs=1, **kw)

    strategy = make()
    for experience in DIGITS.train_stream[:3]:
        strategy.train(experience)
        strategy.eval(DIGITS.test_stream)
    assert strategy.unlearn([1, 2]).claim == "exact"
    strategy.train(DIGITS.train_stream[3])
    assert bits(strategy.model) == bits(References(make, DIGITS).reference([0, 3]))
