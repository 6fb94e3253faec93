"""Parts that tests of several rooms share: networks, streams, strategies, faults, and slow twins of what is tested."""

import os

FACTOR = int(os.environ.get("AMNESIA_THOROUGH", "1"))


def examples(usual: int) -> int:
    """Examples of a test that draws at random and takes long: AMNESIA_THOROUGH=5 asks for five times as many."""
    return FACTOR * usual
