"""A small experiment on the embedded digits."""

from avalanche_amnesia.lab.study.settings import (
    Experiment,
    MethodSettings,
    NetworkSettings,
    ScenarioSettings,
    StreamSettings,
    TrainingSettings,
)

TINY = Experiment(
    name="tiny",
    methods={"AmnesiacHAT": MethodSettings("AmnesiacHAT"), "HAT": MethodSettings("HAT")},
    scenarios={"published": ScenarioSettings("published"), "newest": ScenarioSettings("newest_first")},
    seeds=[1, 2],
    stream=StreamSettings("SplitDigits", 5, n_train=100, n_test=50),
    network=NetworkSettings("MLP", [16, 12]),
    training=TrainingSettings(epochs=1, batch_size=20),
    floors=[],
)
