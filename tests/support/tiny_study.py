"""A small experiment on the embedded digits, and an executor without processes."""

from concurrent.futures import Future

from loky.process_executor import TerminatedWorkerError

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


class AtOnce:
    """Calls in this process, one after another, some of which lose their worker."""

    def __init__(self, losses=(), workers=None):
        self.calls, self.losses, self.workers = [], list(losses), workers

    def submit(self, function, /, *arguments):
        self.calls.append(arguments)
        future = Future()
        if self.losses and arguments[0] == self.losses[0]:
            self.losses.pop(0)
            future.set_exception(TerminatedWorkerError("lost"))
            return future
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def lost(self, error):
        return isinstance(error, TerminatedWorkerError)

    def close(self):
        pass
