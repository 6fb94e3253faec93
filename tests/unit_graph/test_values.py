"""Connected components of what parameters' entries are mixed into, against scipy's."""

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from avalanche_amnesia.unit_graph.values import _components


def by_scipy(n, first, second):
    links = coo_matrix((torch.ones(len(first)), (first, second)), shape=(n, n))
    return torch.from_numpy(connected_components(links, directed=False)[1]).long()


def test_components_are_scipys():
    generator = torch.Generator().manual_seed(0)
    for n, edges in ((10, 5), (50, 40), (1000, 700), (1000, 1500)):
        for _ in range(10):
            first, second = torch.randint(n, (2, edges), generator=generator)
            assert torch.equal(_components(n, first, second), by_scipy(n, first, second))


def test_a_long_chain_is_one_component():
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert not _components(5000, order[:-1], order[1:]).any()
