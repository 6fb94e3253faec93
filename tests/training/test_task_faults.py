"""Warnings about masks, unlearned tasks and units left for later tasks."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EarlyStoppingPlugin
from support import strategies
from support.small_runs import make
from support.strategies import DIGITS, amnesiac, learn, mlp, quiet, stock
from support.strategy_state import bits
from torch.optim import Adam

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.models import MaskedModel, SubnetModel
from avalanche_amnesia.training import EVEN_BUDGET, HAT, WSN, AmnesiacHAT, HardAttention, MaskWarning, ScoredWeights

WIDTHS = {"layers.0": 64, "layers.1": 40, "layers.2": 24}


def run(kind=HAT, *, tasks=3, lr=3e-3, wrap=MaskedModel, **options):
    """Labels and texts of the warnings of a run, and its strategy."""
    stream = SplitDigits(n_tasks=5, n_train=600, seed=3).train_stream[:tasks]
    settings = {"optimizer": partial(Adam, lr=lr), "train_mb_size": 32, "train_epochs": 8, "seed": 3} | options
    strategy = strategies.make(kind, hidden=(64, 40), features=24, wrap=wrap, torch_seed=3, **settings)
    told = []
    for experience in stream:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.train(experience)
        told += [(experience.task_label, str(w.message)) for w in caught if w.category is MaskWarning]
    return told, strategy


def test_defaults_warn_of_nothing():
    assert run(AmnesiacHAT, tasks=3)[0] == []


@pytest.mark.parametrize(("kind", "wrap"), [(AmnesiacHAT, MaskedModel), (WSN, SubnetModel)])
def test_a_task_that_learned_nothing_is_reported_once(kind, wrap):
    options = {
        AmnesiacHAT: {"masks": replace(EVEN_BUDGET, fit_head=False)},
        WSN: {"masks": ScoredWeights(score_lr=1e-7, fit_head=False)},
    }[kind]
    told, _ = run(kind, wrap=wrap, lr=1e-7, train_epochs=2, **options)
    told = [(task, text) for task, text in told if "hardly learned" in text]
    assert [task for task, _ in told] == [0]
    assert told[0][1].startswith("task 0 ends with an accuracy of 0.")


def test_layers_at_their_minimum_of_units_are_named_with_a_remedy():
    told, strategy = run(
        masks=HardAttention(sparsity_weight=80.0, embedding_lr=0.5, min_units=2), tasks=1, train_epochs=20
    )
    least = {name: int(units.sum()) for name, units in strategy.model.masks[0].items()}
    closed = {name: n for name, n in least.items() if n <= 2}
    assert closed
    text = next(text for _, text in told if "has closed layers" in text)
    assert str(closed) in text
    assert "min_units=2" in text
    assert "budget='even'" in text


def test_a_task_without_free_units_that_learned_little_is_warned_of():
    told, strategy = run(masks=HardAttention(embedding_init="ones", annealing="cosine"), train_epochs=1, tasks=2)
    assert all(bool(units.all()) for units in strategy.model.masks[0].values())
    ((task, text),) = [each for each in told if "hardly any units free" in each[1]]
    assert task == 1
    assert all(f"0 of {width} in '{name}'" in text for name, width in WIDTHS.items())


def test_a_warning_raised_as_an_error_still_finishes_the_task():
    stream = SplitDigits(n_tasks=5, n_train=600, seed=3).train_stream
    options = {"optimizer": partial(Adam, lr=1e-7), "masks": replace(EVEN_BUDGET, fit_head=False)}
    strategy = strategies.make(hidden=(64, 40), features=24, train_mb_size=1, train_epochs=1, **options)
    model = strategy.model
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskWarning)
        with pytest.raises(MaskWarning, match="hardly learned"):
            strategy.train(stream[0])
        assert model.tasks == (0,)
        strategy.train(stream[1])  # once each
    assert model.tasks == (0, 1)
    strategy.unlearn([0])
    assert model.tasks == (1,)


MAKERS = {
    "amnesiac": lambda **options: amnesiac(**options),
    "wsn": lambda **options: make(WSN, model=SubnetModel(mlp()), **{"train_mb_size": 40, **options}),
    "stock": lambda **options: stock(**options),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_task_that_takes_no_step_is_undone(kind):
    few = SplitDigits(n_train=30, n_test=60).train_stream  # 6 samples a task
    strategy = learn(MAKERS[kind](), [DIGITS.train_stream[1]])
    before = bits(strategy.model)
    with pytest.raises(TaskError, match=r"task 0 took no step, and its training was undone.*drop_last=True"):
        strategy.train(few[0], drop_last=True)
    assert bits(strategy.model) == before
    strategy.train(few[0])
    assert bits(strategy.model) != before


@pytest.mark.parametrize("kind", ["amnesiac", "wsn"])
def test_a_task_whose_weights_were_reset_to_its_start_is_named(kind):
    """The host's early stopping takes the value that the last task left for the first one of the next."""
    evaluator = quiet(accuracy_metrics(stream=True))
    stopping = EarlyStoppingPlugin(patience=1, val_stream_name="test_stream")
    strategy = MAKERS[kind](train_epochs=4, evaluator=evaluator, eval_every=1, plugins=[stopping])
    told = []
    for task in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.train(DIGITS.train_stream[task], eval_streams=[DIGITS.test_stream[task : task + 1]])
        told += [task for w in caught if "ends with the weights with which it began" in str(w.message)]
    assert told == [1]
