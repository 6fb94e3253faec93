"""Claims of exactness: made only where the state is that of the retrained model, bit for bit."""

import functools
import random
from dataclasses import replace
from functools import partial

import pytest
from avalanche.training.plugins import ReplayPlugin
from support import examples
from support.isolated_pools import equal
from support.strategies import DIGITS, PRICED, ConvNet, NormedConvNet, brief, make, mlp, trained
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia import MLP, WSN, References, ScoredWeights, SubnetModel
from avalanche_amnesia.training import EVEN_BUDGET, AdaHATRule, AdjustmentRule, ConstantRule


@functools.cache
def references(**which) -> References:
    return References(lambda **options: brief(**which, **options), DIGITS)


def equals_reference(strategy, **which) -> bool:
    return equal(strategy, references(**which))


def test_claims_are_exact_again_once_all_tainted_tasks_are_unlearned():
    strategy = trained(4, maker=brief)
    assert strategy.unlearn([1]).claim == "approximate"
    assert not equals_reference(strategy)
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([4]).claim == "approximate"  # 2 and 3 stay tainted
    strategy.train(DIGITS.train_stream[4])
    assert strategy.unlearn([3]).claim == "approximate"  # 2 and 4 are tainted: 4 was trained after them
    assert strategy.unlearn([2]).claim == "approximate"
    assert strategy.unlearn([4]).claim == "exact"
    assert unlearning_plugin(strategy).ledger.remaining == (0,)
    assert equals_reference(strategy)


def wsn(net=mlp, **options):
    return partial(make, WSN, net=net, wrap=partial(SubnetModel, density=0.3), train_epochs=1, **options)


LIVES = {
    "as by default": brief,
    "no sum, one lock": partial(brief, adjustment=AdaHATRule(0.5, importance="number", sparsity=False, locked=[0])),
    "no lock": partial(
        brief, adjustment=AdjustmentRule(locked=[]), masks=replace(EVEN_BUDGET, embedding_init="sparse")
    ),
    "constant": partial(brief, adjustment=ConstantRule(0.5, between="max", locked=[1, 3])),
    "convolutions": partial(brief, net=ConvNet, optimizer="adamw", adjustment="adahat"),
    "random": partial(brief, optimizer="momentum", adjustment="random"),
    "weights, convolutions": wsn(NormedConvNet, masks=ScoredWeights(fit_head=False)),
    "weights, redrawn": wsn(masks=ScoredWeights(scores="redraw")),
    "weights, coded": wsn(masks=ScoredWeights(score_bits=3)),
}


@pytest.mark.parametrize("life", LIVES)
def test_random_lives_are_called_exact_only_if_they_equal_the_retrained_model(life):
    maker = LIVES[life]
    references = References(maker, DIGITS)
    claims = []
    for seed in range(examples(2)):
        draw, strategy = random.Random(seed), maker()
        for _ in range(12):
            remaining = list(unlearning_plugin(strategy).ledger.remaining)
            if remaining and (len(remaining) == 4 or draw.random() < 0.4):
                gone = draw.sample(remaining, draw.randint(1, min(2, len(remaining))))
                claims.append(strategy.unlearn(gone).claim)
                reference = references.reference(unlearning_plugin(strategy).ledger.remaining)
                assert claims[-1] == "approximate" or bits(strategy.model) == bits(reference), (seed, gone)
            else:
                strategy.train(DIGITS.train_stream[draw.choice([t for t in range(4) if t not in remaining])])
    assert claims.count("exact") > 1
    assert claims.count("approximate") > 0


@pytest.mark.parametrize(
    "options", [{"reset_optimizer": False}, {"plugins": [ReplayPlugin(mem_size=20)]}], ids=["optimizer kept", "replay"]
)
def test_a_training_that_is_not_repeatable_is_never_exact(options):
    strategy = trained(2, train_epochs=1, **options)
    assert strategy.plan_unlearning([1]).claim == "approximate"
    assert strategy.unlearn([1]).claim == "approximate"


def test_a_training_with_kept_optimizer_state_is_not_exact():
    strategy = trained(1, train_epochs=1)
    assert strategy.plan_unlearning([0]).claim == "exact"
    strategy.train(DIGITS.train_stream[1], reset_optimizer_state=False)
    assert strategy.unlearn([1]).claim == "approximate"


def test_a_task_trained_with_dropout_and_a_quota_is_unlearned_exactly():
    def of_quota(**kw):
        net = lambda: MLP(64, hidden=(24,), features=16, dropout=0.2)  # noqa: E731
        return brief(net=net, masks=replace(PRICED, sparsity="quota", embedding_init="last"), **kw)

    strategy = of_quota()
    for experience in DIGITS.train_stream[:3]:
        strategy.train(experience)
        strategy.eval(DIGITS.test_stream)
    assert strategy.unlearn([1, 2]).claim == "exact"
    strategy.train(DIGITS.train_stream[3])
    assert bits(strategy.model) == bits(References(of_quota, DIGITS).reference([0, 3]))
