"""Code of others that an unlearning calls: what fails there is named, with the way to go on without it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.strategy import Strategy


class BrokenPluginError(RuntimeError):
    """A plugin, metric, logger or purger failed; nothing has changed when it is raised. Its cause is the error."""


# No RequestError: a request of the stream that met one is answered, and this one is to be obeyed once it can be.
@contextmanager
def naming_whose(strategy: Strategy, event: str, purged: object = None) -> Iterator[None]:
    """Say of an error whose it is: of what is being purged, or of the last one called that listens to an event."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # whatever the code of others raises
        evaluator = strategy.evaluator
        places = [("plugins", [plugin for plugin in strategy.plugins if plugin is not evaluator])]
        places += [("evaluator.metrics", evaluator.metrics), ("evaluator.loggers", evaluator.loggers)]
        place_of = {id(thing): place for place, things in places for thing in things}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_argcount]
        called = [frame.f_locals.get(frame.f_code.co_varnames[0]) for frame in frames]
        thing = purged or next((one for one in reversed(called) if id(one) in place_of), None)
        if thing is None or (purged is None and type(thing).__module__.startswith("avalanche_amnesia.")):
            raise  # what is wrong is said by this package's own
        kind, place = type(thing).__name__, place_of.get(id(thing))
        code, mend = f"{kind}.{event}", "Mend it"
        if purged is not None:
            code, mend = f"the purger of {kind}", f"Mend it and register it again (@register_purger({kind}))"
        raise BrokenPluginError(
            f"{code} failed ({type(error).__name__}: {error}). Nothing was changed, and the same can be asked again. "
            + (mend if place is None else f"{mend}, or go on without it: take it out of strategy.{place}")
        ) from error
