"""Values that chance makes alike are no residue, however few; those that hold an update are found all the same."""

import pytest
import torch

from avalanche_amnesia.contrib.residue_search.recognition import ALIKE, CHANCE, HELD, _by_chance, _ranks, _regress


def found(x, update, after):
    held, alike, chance = _regress(x.double(), update.double(), (torch.ones(len(x)).double(), after.double()))
    return chance <= CHANCE and (held > HELD or abs(alike) > ALIKE)


def spiky(n, generator, where=None):
    """One entry is far larger than the others."""
    values = torch.randn(n, generator=generator)
    values[torch.randint(n, (), generator=generator) if where is None else where] = 60
    return values


def test_one_large_entry_that_both_have_is_chance():
    generator = torch.Generator().manual_seed(0)
    update, log, after = spiky(24, generator, 5), -spiky(24, generator, 5), torch.randn(24, generator=generator)
    _, alike, _ = _regress(log.double(), update.double(), (torch.ones(24).double(), after.double()))
    assert alike < -0.98
    assert not found(log, update, after)


DRAWS = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "heavy": lambda n, g: torch.empty(n).cauchy_(generator=g),
    "spiky": spiky,
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.2),
    "two values": lambda n, g: torch.randint(2, (n,), generator=g).float(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_unrelated_tensors_are_never_residue(kind):
    generator = torch.Generator().manual_seed(1)
    for n in (8, 9, 12, 16, 24, 48):
        for _ in range(300):
            x, update, after = (DRAWS[kind](n, generator) for _ in range(3))
            assert not found(x, update, after)


@pytest.mark.parametrize("n", [16, 24, 64, 512])
@pytest.mark.parametrize(
    "make",
    [lambda u, a, e: u, lambda u, a, e: -0.01 * u + 2, lambda u, a, e: a + 0.8 * u, lambda u, a, e: a + u + 0.03 * e],
    ids=["copy", "scaled", "most of it", "with noise"],
)
def test_what_holds_an_update_is_found(n, make):
    generator = torch.Generator().manual_seed(2)
    update, after, noise = (torch.randn(n, generator=generator) for _ in range(3))
    assert found(make(update, after, noise), update, after)


@pytest.mark.parametrize("n", [4, 8, 24])
def test_the_bound_holds_for_directions_drawn_at_random(n):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(20_000, n, generator=generator) for _ in range(2))
    correlations = torch.cosine_similarity(x, y).abs()
    for r in (0.3, 0.6, 0.9):
        assert (correlations >= r).double().mean() <= _by_chance(r, n - 1) + 0.01


def test_equal_entries_share_a_rank():
    assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
