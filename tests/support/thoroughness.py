"""Number of examples of the tests that draw at random and take long: AMNESIA_THOROUGH=5 looks at five times as many."""

import os

FACTOR = int(os.environ.get("AMNESIA_THOROUGH", "1"))


def examples(usual: int) -> int:
    """So many examples as asked for, by default the usual number."""
    return FACTOR * usual
