"""Reading the first mini-batches of a training, for its key in a store, changes no bit of that training."""

import random

import numpy as np
import pytest
import torch
from support.strategies import DIGITS, ConvNet, amnesiac, make
from support.strategy_state import bits

from avalanche_amnesia import WSN
from avalanche_amnesia.contrib.baselines import CLPUDERpp
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.lab.runs.first_batches import first_batches

METHODS = {
    "shadows of convolutions": lambda: amnesiac(net=ConvNet, compensation=BackupPlugin()),
    "random rule": lambda: amnesiac(adjustment="random", optimizer="momentum"),
    "WSN": lambda: make(WSN, optimizer="momentum"),
    "CLPU-DER++": lambda: make(CLPUDERpp),
}


@pytest.mark.parametrize("method", METHODS)
def test_reading_the_first_mini_batches_changes_no_bit(method):
    lives = []
    for read in (True, False):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)  # noqa: NPY002
        strategy = METHODS[method]()
        for experience in DIGITS.train_stream[:2]:
            if read:
                assert first_batches(strategy, experience, 3)
            strategy.train(experience)
        drawn = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
        learned = bits(strategy.model)
        strategy.unlearn([0])
        lives.append([learned, bits(strategy.model), drawn, vars(strategy.clock).copy()])
    assert lives[0] == lives[1]
