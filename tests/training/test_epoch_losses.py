"""Half of a layer held open as long as a task has not begun to learn."""

from functools import partial

import pytest
import torch
from support.strategies import make
from torch.optim import Adam

from avalanche_amnesia import HAT, HardAttention, SplitDigits
from avalanche_amnesia.training.plugins.hat import EpochLosses


@pytest.mark.parametrize(("losses", "stuck"), [([2.0, 1.9, 1.9], True), ([2.0, 1.5, 1.0], False), ([0.0, 0.0], False)])
def test_an_epoch_is_compared_with_the_first_mini_batch(losses, stuck):
    seen = EpochLosses()
    assert not seen.end_epoch()
    for loss in losses:
        seen.add(torch.tensor(loss))
    assert seen.end_epoch() == stuck
    seen.add(torch.tensor(losses[0] * 0.5))  # the next epoch is looked at by itself
    assert not seen.end_epoch()


def open_share(lr, **options):
    options = {"masks": HardAttention(sparsity_weight=20.0, embedding_lr=0.3), "train_epochs": 12, **options}
    adam, seeds = partial(Adam, lr=lr), {"torch_seed": 1, "seed": 1}
    strategy = make(HAT, hidden=(64, 40), features=24, optimizer=adam, train_mb_size=32, **seeds, **options)
    strategy.train(SplitDigits(n_tasks=5, n_train=600, seed=1).train_stream[0])
    return [float(units.float().mean()) for units in strategy.model.masks[0].values()]


def test_a_regulariser_closes_at_most_half_of_a_layer_before_the_task_is_learned():
    assert open_share(1e-7) == [0.5, 0.5, 0.5]
    assert min(open_share(3e-3)) < 0.2  # learned: what is left is the regulariser's and the task's affair


def test_without_a_regulariser_nothing_is_held():
    assert open_share(1e-7, masks=HardAttention(sparsity_weight=0.0, embedding_init="negative")) != [0.5, 0.5, 0.5]
