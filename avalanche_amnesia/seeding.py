"""Seeds derived from what a draw is for, never from a running global stream."""

import hashlib

from avalanche_amnesia import checks


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and on the draw's purpose alone.

    Args:
        seed: the user's seed.
        purpose: what is drawn, from the general to the particular, e.g. ``("order", task)``.

    Returns:
        An integer in ``[0, 2**63)``, the same on every machine and in every process.

    Raises:
        ValueError: for a seed that is no integer.
    """
    text = "/".join(str(part) for part in (checks.whole_number("seed", seed, None), *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
