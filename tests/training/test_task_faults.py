"""Warnings about masks, unlearned tasks and units left for later tasks."""

import warnings

import pytest
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EarlyStoppingPlugin
from support.small_runs import make
from support.strategies import DIGITS, amnesiac, learn, mlp, quiet, stock
from support.strategy_state import bits
from torch.optim import Adam

from avalanche_amnesia.benchmarks import SplitDigits
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel
from avalanche_amnesia.training import HAT, WSN, HardAttention
from avalanche_amnesia.training.task_faults import MaskWarning


def test_a_task_may_take_every_unit():
    stream = SplitDigits(n_tasks=2, n_train=600, seed=3).train_stream
    model = MaskedModel(MLP(64, hidden=(64, 40), features=24))
    options = {
        "masks": HardAttention(sparsity_weight=1e-6, embedding_init="ones"),
        "train_epochs": 4,
        "train_mb_size": 32,
    }
    strategy = HAT(model=model, optimizer=Adam(model.parameters(), lr=3e-3), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MaskWarning)
        strategy.train(stream[1])
        assert bool(model.cumulative_mask().all())


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
