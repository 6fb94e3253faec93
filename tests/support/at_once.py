"""An executor without processes."""

from concurrent.futures import Future

from loky.process_executor import TerminatedWorkerError


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
