"""Avalanche's early stopping restores the best weights of the training that it ends."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EarlyStoppingPlugin
from support.small_runs import logits_of, make, permuted, split
from support.strategies import quiet
from support.strategy_state import same_state, state
from torch.optim import Adam

from avalanche_amnesia import WSN, AmnesiacHAT, DisjointSubnets

KINDS = {
    "amnesiac": lambda **options: make(AmnesiacHAT, **options),
    "disjoint": lambda **options: make(DisjointSubnets, optimizer="adam", fit_head=False, **options),
    "wsn": lambda **options: make(WSN, optimizer=partial(Adam, lr=1e-2), seed=0, **options),
}


class Falls(EarlyStoppingPlugin):
    """Early stopping with a metric that was best in a given epoch; keeps the state that it restored."""

    def __init__(self, best, **options):
        super().__init__(patience=2, val_stream_name="test_stream", metric_name="Top1_Acc_Stream", **options)
        self.best, self.seen, self.ended = best, 0, None

    def before_training_exp(self, strategy, **kwargs):
        super().before_training_exp(strategy, **kwargs)
        self.seen = 0

    def _update_best(self, strategy):
        self.seen += 1
        values = strategy.evaluator.last_metric_results
        for name in [name for name in values if name.startswith(self.metric_key)]:
            values[name] = 1.0 if self.seen == self.best else 0.5
        return super()._update_best(strategy)

    def before_training_epoch(self, strategy, **kwargs):
        super().before_training_epoch(strategy, **kwargs)
        if strategy._stop_training:
            self.ended = deepcopy(self.best_state), state(strategy.model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_ends_with_its_best_weights(kind):
    benchmark, stopping = permuted(2), Falls(best=2)
    evaluator = quiet(accuracy_metrics(stream=True))
    strategy = KINDS[kind](train_epochs=8, plugins=[stopping], evaluator=evaluator, eval_every=1)
    logits = {}
    for task, experience in enumerate(benchmark.train_stream):
        strategy.train(experience, eval_streams=[benchmark.test_stream[task : task + 1]])
        assert same_state(*stopping.ended)
        assert not strategy.model.heads.unfinished
        assert list(strategy.model.tasks) == list(range(task + 1))
        seen = logits_of(strategy, benchmark, range(task + 1))
        assert all(torch.equal(seen[t], logits[t]) for t in logits)
        logits = seen
    assert strategy.clock.train_iterations < 2 * 8 * 10  # it did stop


@pytest.mark.parametrize("kind", ["amnesiac", "wsn"])
def test_a_state_from_the_middle_of_a_task_can_be_loaded_only_in_that_training(kind):
    benchmark, states = split(), []

    class Keeps(EarlyStoppingPlugin):
        def before_training_epoch(self, strategy, **kwargs):
            states.append(state(strategy.model))

    strategy = KINDS[kind](train_epochs=1, plugins=[Keeps(patience=1, val_stream_name="test_stream")])
    strategy.train(benchmark.train_stream[0])
    before = state(strategy.model)
    with pytest.raises(ValueError, match=r"saved in the middle of a task.*none is in training now: save between tasks"):
        strategy.model.load_state_dict(states[0])

    class Loads(Keeps):
        def before_training_epoch(self, strategy, **kwargs):
            strategy.model.load_state_dict(states[0])

    strategy.plugins.append(Loads(patience=1, val_stream_name="test_stream"))
    with pytest.raises(ValueError, match=r"saved in the middle of a task.*in training is task 1: save between tasks"):
        strategy.train(benchmark.train_stream[1])
    strategy.abort_training()
    assert same_state(before, strategy.model.state_dict())
