"""Rehearsals do not change what the methods of contrib learn."""

import pytest
from support.strategies import DIGITS, ConvNet, amnesiac, make
from support.strategy_state import bits, unlearning_plugin

from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.training.host.rehearsal import look_at_task, rehearse_task

METHODS = {
    "shadows": lambda: amnesiac(compensation=BackupPlugin(start="before")),
    "shadows of convolutions": lambda: amnesiac(net=ConvNet, compensation=BackupPlugin(start="fresh")),
    "repair": lambda: amnesiac(repair=RepairPlugin()),
    "PALL": lambda: make(PALL),
    "CLPU-DER++": lambda: make(CLPUDERpp),
    "separate networks": lambda: make(Independent),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_rehearsal_changes_no_bits(method):
    lives = []
    for steps in (3, 0):
        strategy = METHODS[method]()
        unlearning_plugin(strategy).trial = steps
        for experience in DIGITS.train_stream[:3]:
            if steps:  # also outside of a training
                assert rehearse_task(strategy, experience, steps).reason is None
                assert look_at_task(strategy, experience, steps).reason is None
            strategy.train(experience)
        learned = bits(strategy.model)
        strategy.unlearn([0])
        strategy.train(DIGITS.train_stream[3])
        lives.append([learned, bits(strategy.model)])
    assert lives[0] == lives[1]
