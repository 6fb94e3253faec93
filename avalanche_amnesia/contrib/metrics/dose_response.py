"""Dose–response: what a measure of forgetting reads when a known share of the forgotten update is put back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin


def update_of(strategy: Strategy, task: int) -> dict[str, Tensor]:
    """Recorded update ``Δ^(τ)`` of a task; changes nothing, and has to be taken before the task is unlearned.

    Args:
        strategy: with a :class:`~avalanche_amnesia.training.plugins.TrajectoryPlugin`, as AmnesiacHAT has one.
        task: one that it has recorded.

    Returns:
        Name of a parameter → float64 tensor of its shape: value after the task minus value before it. Parameters that
        the task did not move are left out, and so are its own, its head say, which go with it.

    Raises:
        TypeError: for a strategy that records no trajectory.
        TrajectoryError: for a task that is not recorded, or merged.
    """
    plugin = find_plugin(strategy, TrajectoryPlugin)
    if plugin is None:
        raise TypeError(
            f"{type(strategy).__name__} records no updates, so that none can be put back: use AmnesiacHAT, or "
            "plugins=[TrajectoryPlugin(), …]"
        )
    removal = plugin.trajectory.remove([task], dict(strategy.model.named_parameters()))
    return dict(removal.updates[task])


@contextmanager
def put_back(model: nn.Module, update: Mapping[str, Tensor], share: float) -> Iterator[None]:
    """Leave a share ``δ`` of an update in a model for a while: ``θ + δ · Δ`` in float64; then the old bits again.

    0 changes no bit, 1 puts all of :func:`update_of` back. ``ValueError`` for a share that is not finite, or a
    parameter that the model does not have in this shape.
    """
    if not np.isfinite(share):
        raise ValueError(f"share must be a finite number, got {share!r}")
    parameters = dict(model.named_parameters())
    strange = [name for name, of in update.items() if name not in parameters or parameters[name].shape != of.shape]
    if strange:
        raise ValueError(f"the model has no parameters {strange} of the update's shapes: take the update of this model")
    before = {name: parameters[name].detach().clone() for name in update}
    try:
        with torch.no_grad():
            for name, old in before.items():
                if share:
                    parameters[name].copy_(old.double() + share * update[name].to(old.device))
        yield
    finally:
        with torch.no_grad():
            for name, old in before.items():
                parameters[name].copy_(old)


def dose_response(
    model: nn.Module,
    update: Mapping[str, Tensor],
    shares: Sequence[float],
    readings: Mapping[str, Callable[[nn.Module], float]],
) -> dict[str, dict[float, float]]:
    """Readings of a model with each of several shares of an update put back; the model is as it was afterwards.

    Args:
        model: from which the update was taken out.
        update: of :func:`update_of`.
        shares: as for :func:`put_back`, distinct.
        readings: name → function of the model.

    Returns:
        Name → share → reading.

    Raises:
        ValueError: as :func:`put_back`, and for shares that are named twice.
    """
    if len(set(shares)) < len(shares):
        raise ValueError(f"shares={list(shares)} must be distinct: one reading is kept of each")
    result: dict[str, dict[float, float]] = {name: {} for name in readings}
    for share in shares:
        with put_back(model, update, share):
            for name, read in readings.items():
                result[name][share] = read(model)
    return result


def detection_limit(readings: Mapping[float, Sequence[float]], *, level: float = 0.05) -> float | None:
    """Smallest share that a measure distinguishes from 0: there, and at every larger share, it reads more than at 0.

    More by an exact one-sided rank-sum test over independent runs (Mann and Whitney, 1947), not paired: an audit of one
    model has no reading of the same model without residue. So what counts is the spread of clean readings from run to
    run, and a reading that depends on its run (scale of the features, task) is to be given relative to its run's
    control: a JSD in units of its order floor, an accuracy minus that of the retrained model. The level holds for each
    share by itself.

    Args:
        readings: share, 0 among them → a reading per run, where more means more residue; as many at every share.
        level: of the test, in (0, 1).

    Returns:
        None where no share that was tried is distinguished from 0.

    Raises:
        ValueError: without share 0, without another share, for a number of runs that differs or is too small to reach
            the level at all (three can reach .05), readings that are not finite, or a level outside (0, 1).
    """
    checks.within("level", level, "(0, 1)")
    shares = sorted(share for share in readings if share != 0)
    if 0 not in readings or not shares or shares[0] < 0:
        raise ValueError(f"expected share 0 and at least one above it, got shares {sorted(readings)}")
    runs = len(readings[0.0])
    counts = {share: len(values) for share, values in readings.items()}
    if set(counts.values()) != {runs} or not all(np.isfinite(values).all() for values in readings.values()):
        raise ValueError(f"expected as many finite readings at every share, one per run, got these counts: {counts}")
    if comb(2 * runs, runs) * level < 1:
        raise ValueError(f"{runs} runs can't reach p ≤ {level}, however far their readings lie apart: give more")
    limit = None
    for share in reversed(shares):
        if rank_sum_p(readings[share], readings[0.0]) > level:
            break
        limit = share
    return limit


def rank_sum_p(larger: Sequence[float], smaller: Sequence[float]) -> float:
    """Chance that shuffled labels rank the first values as high or higher; ties share their mean rank."""
    n = len(larger)
    doubled = np.rint(2 * stats.rankdata([*larger, *smaller])).astype(int)  # mean ranks of ties are halves
    ways = np.zeros((n + 1, int(doubled.sum()) + 1))  # how many values are chosen → sum of their ranks → ways
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return float(ways[n, int(doubled[:n].sum()) :].sum() / ways[n].sum())
