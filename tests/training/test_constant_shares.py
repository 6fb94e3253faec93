"""Rates stored by rows and columns give the same bits as dense ones, in a fraction of their memory."""

import pytest
import torch
from support.residue_oracle import tensors_within

from avalanche_amnesia.training.adjuster import ConstantShares

SHAPES = {"large": (700, 513), "tall": (300_000, 1), "wide": (2, 200_000), "small": (40, 30), "filters": (64, 3, 5, 5)}


def drawn(name, values=(0.0, 1.0)):
    """Rates of one parameter: the minimum over its unit and its sources."""
    shape, generator = SHAPES[name], torch.Generator().manual_seed(len(name))
    chosen = torch.tensor(values)
    rows = chosen[torch.randint(len(values), (shape[0], *(1 for _ in shape[1:])), generator=generator)]
    columns = chosen[torch.randint(len(values), (1, shape[1], *(1 for _ in shape[2:])), generator=generator)]
    return torch.minimum(rows, columns).expand(shape)


@pytest.fixture(params=[(0.0, 0.25, 0.9, 1.0), (0.0,)], ids=["between", "free"])
def shares(request):
    everything = [drawn(name, request.param) for name in SHAPES]
    no_product = drawn("large", request.param).clone()
    no_product[3, 5], no_product[4, 5] = 0.5, 0.75
    by_unit = drawn("tall", request.param)[:700].expand(700, 513)
    return [*everything, no_product, by_unit]


def noise(shares, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(of.shape, generator=generator) for of in shares]


def test_dense_rates_can_be_recovered(shares):
    assert all(map(torch.equal, ConstantShares(shares).dense(), shares))


def test_gradients_are_scaled_as_by_dense_rates(shares):
    gradients = noise(shares, 1)
    gradients[2] = None
    expected = [None if g is None else g.addcmul(g, of, value=-1) for g, of in zip(gradients, shares, strict=True)]
    ConstantShares(shares).take_off(gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert gradient is wanted is None or torch.equal(gradient, wanted)


def test_parameters_are_restored_as_by_dense_rates(shares):
    after, before = noise(shares, 2), noise(shares, 3)
    expected = [torch.lerp(a, b, of) for a, b, of in zip(after, before, shares, strict=True)]
    constant = ConstantShares(shares)
    constant.put_back(after, before)
    assert all(map(torch.equal, after, expected))
    constant.put_back(after, before)  # a second time, from the cache
    assert all(map(torch.equal, after, map(torch.lerp, expected, before, shares)))


def test_a_large_matrix_takes_a_number_per_row_and_column():
    def held(shares):
        found = tensors_within(ConstantShares(shares))
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())

    block = 4 * 2**17
    assert held([drawn("large")]) == 4 * (700 + 513) + block
    assert held([drawn("large"), drawn("large").clone(), drawn("small")]) <= 8 * (700 + 513) + block + 4 * 40 * 30
    other = drawn("large").clone().index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(0.5))
    assert held([other]) >= 4 * 700 * 513
