"""Seeds derived from what a draw is for, never from a running global stream."""

import hashlib


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A 63-bit seed that depends on ``seed`` and on the draw's purpose alone.

    Args:
        seed: the user's seed.
        purpose: what is drawn, from the general to the particular, e.g. ``("order", task)``.

    Returns:
        An integer in ``[0, 2**63)``, the same on every machine and in every process.
    """
    text = "/".join(str(part) for part in (int(seed), *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
