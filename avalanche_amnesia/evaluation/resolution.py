"""Distances divided by their noise floor (distance of two retrained models), and as text, unless below detection."""

RESOLUTION = 1e-9
"""Smallest distance that counts (for the JSD in bits): smaller ones are rounding errors and have no ratio."""


def floor_ratio(distance: float, floor: float) -> float | None:
    """Return a distance divided by its noise floor, which is the distance between two retrained models.

    Args:
        distance: between the model and the retrained one, at least 0.
        floor: the same distance between two retrained models, at least 0.

    Returns:
        ``distance / floor``; None if either is below :data:`RESOLUTION` (two models with the same bits, or with
        sums in another order), because a rounding error is neither a unit nor a multiple of one.

    Raises:
        ValueError: for a negative distance or floor.

    >>> floor_ratio(0.036, 0.02), floor_ratio(0.0, 0.02), floor_ratio(0.01, 1e-17)
    (1.7999999999999998, None, None)
    """
    if distance < 0 or floor < 0:
        raise ValueError(f"a distance and its floor are at least 0, got {distance} and {floor}")
    return None if min(distance, floor) < RESOLUTION else distance / floor


def distance_in_words(distance: float) -> str:
    """Return a distance as text with two significant digits; ``below detection`` under :data:`RESOLUTION`.

    >>> distance_in_words(0.0108), distance_in_words(5e-5), distance_in_words(3e-17)
    ('0.011', '5.0e-5', 'below detection')
    """
    return "below detection" if distance < RESOLUTION else two_digits(distance)


def two_digits(value: float) -> str:
    """Return a number of at least 0 as text with two significant digits.

    >>> two_digits(0.5), two_digits(1.04), two_digits(149.448), two_digits(0)
    ('0.50', '1.0', '150', '0')
    """
    if value == 0:
        return "0"
    digits = f"{value:.1e}"
    if value < 1e-3:
        return digits.replace("e-0", "e-")
    return f"{float(digits):,.{max(0, 1 - int(digits[4:]))}f}"
