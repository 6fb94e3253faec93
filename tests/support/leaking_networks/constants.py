"""Integers, booleans and constants met as values."""

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn

from support.leaking_networks.kit import WORDS, K, L, P, ac, accepts, between, either, net, part

POSITIONS = torch.arange(4)

CONSTANTS = {
    "positions beside units": lambda h: torch.cat([POSITIONS.expand_as(h).to(h), h], 1)[:, 2:6],
    "positions beside units, as they are": lambda h: torch.cat([torch.arange(4).expand(h.shape[0], 4), h], 1)[:, :4],
    "integer positions added": lambda h: h + torch.arange(4),
    "integer positions multiplied": lambda h: h * POSITIONS + POSITIONS,
    "integer positions expanded": lambda h: (POSITIONS.expand_as(h) + 1) * h + POSITIONS.expand_as(h),
    "filled like": lambda h: torch.full_like(h, 2) + torch.full_like(h, 3, dtype=torch.long),
    "zeros like, in integers": lambda h: torch.zeros_like(h, dtype=torch.long) + 1.0,
    "ones like the first units": lambda h: torch.cat([torch.ones_like(h[:, :2]), h[:, 2:]], 1),
    "new tensors": lambda h: torch.cat([h.new_ones(h.shape[0], 2), h.new_full((h.shape[0], 2), 3)], 1),
    "where with integers": lambda h: torch.where(h > 0, POSITIONS, 2).to(h),
    "where with booleans": lambda h: torch.where(POSITIONS > 1, h, POSITIONS),
    "one-hot rows": lambda h: h @ F.one_hot(torch.tensor([1, 0, 3, 3]), 4).to(h) + F.one_hot(POSITIONS, 4)[1],
    "boolean mask of units": lambda h: h * (POSITIONS % 2 == 0) + (POSITIONS % 2 == 1),
    "masked select by a constant": lambda h: h[:, POSITIONS != 1].repeat(1, 2)[:, :4] + 1,
    "scatter": lambda h: torch.zeros_like(h).scatter(1, torch.tensor([[3, 2, 1, 0]]).expand(h.shape[0], 4), h) + 1,
    "scatter of ones": lambda h: h.scatter(1, torch.zeros(h.shape[0], 1, dtype=torch.long), 1.0),
    "scatter added": lambda h: h.scatter_add(1, torch.tensor([[0, 0, 1, 1]]).expand(h.shape[0], 4), h),
    "gather": lambda h: h.gather(1, torch.tensor([[3, 3, 0, 1]]).expand(h.shape[0], 4)) + 1,
    "take along": lambda h: torch.take_along_dim(h, torch.tensor([[3, 3, 0, 1]]), 1) + 1,
    "index_add": lambda h: h.index_add(1, torch.tensor([0, 0, 3]), h[:, 1:]),
    "index_put": lambda h: h.index_put((torch.arange(h.shape[0])[:, None], torch.tensor([0, 2])), torch.tensor(7.0)),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([2, 3]), h[:, :2]),
    "index_fill": lambda h: h.index_fill(1, torch.tensor([1]), 5.0),
    "cumsum": lambda h: h.cumsum(1),
    "sort": lambda h: h.sort(1).values,
    "order as a value": lambda h: h.argsort(1).to(h),
    "largest": lambda h: h.topk(4, 1).values,
    "places of the largest": lambda h: h.topk(4, 1).indices.to(h),
    "arg max as a value": lambda h: h.argmax(1, keepdim=True) * torch.ones(4),
    "one-hot arg max": lambda h: F.one_hot(h.argmax(1), 4).to(h),
    "range by a product": lambda h: h + torch.outer(torch.ones(h.shape[0]), POSITIONS.to(h)),
    "triangular": lambda h: h @ torch.ones(4, 4).tril() + torch.eye(4)[0],
    "integer division": lambda h: (h * 4).long().to(h) + 1,
    "threshold": lambda h: F.threshold(h, 0.1, 5.0),
    "padded with threes": lambda h: F.pad(h[:, 1:3], (1, 1), value=3.0),
    "filled where it is zero": lambda h: h.masked_fill(h == 0, 3.0),
    "numbers of units looked up": lambda h: torch.tensor([0.0, 1.0, 2.0, 3.0])[POSITIONS.flip(0)] + h,
}
# torch.export takes the size of the batch for a constant in the one, the number of entries for an unknown in the other.
NOT_EXPORTED = {"take along", "masked select by a constant"}
for name, function in CONSTANTS.items():
    (either if name in NOT_EXPORTED else accepts)(name, between(function))

accepts("integer buffer added", ac(lambda s, x: s.c(s.a(x) + s.n), n=K([3, 2, 1, 0])))
accepts("integer buffer as an index", ac(lambda s, x: s.c(s.a(x)[:, s.n] + s.n), n=K([3, 2, 2, 0])))
accepts(
    "integer buffer multiplied",
    ac(lambda s, x: s.c(torch.cat([s.a(x), s.n.expand(x.shape[0], 2)], 1)[:, 2:]), n=K([0, 1])),
)
either(
    "embedding of an arg max",
    net(lambda s, x: s.c(s.e(s.a(x).argmax(1))), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)),
)
either(
    "embedding of rounded units",
    net(
        lambda s, x: s.c(s.e((s.a(x) * 3).long().clamp(0, 3)).sum(1)), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)
    ),
)
either(
    "embedding of a constant",
    net(lambda s, x: s.c(s.a(x) + s.e(torch.tensor([0, 2])).sum(0)), a=L(6, 4), e=part(nn.Embedding, 4, 4), c=L(4, 3)),
)
either("rows of a parameter by arg max", ac(lambda s, x: s.c(s.a(x) + s.g[s.a(x).argmax(1)]), g=P(4, 4)))
accepts(
    "words and places",
    net(
        lambda s, x: s.c(torch.tanh(s.e(x) + s.p(torch.arange(3)))).mean(1),
        e=part(nn.Embedding, 9, 4),
        p=part(nn.Embedding, 3, 4),
        c=L(4, 3),
    ),
    WORDS,
)
accepts(
    "padding mask from the words",
    net(
        lambda s, x: s.c((s.e(x) * (x != 0).unsqueeze(-1)).sum(1) / (x != 0).sum(1, keepdim=True).clamp(min=1)),
        e=part(nn.Embedding, 9, 4),
        c=L(4, 3),
    ),
    WORDS,
)
