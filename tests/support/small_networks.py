"""Small backbones of every shape the unit graph has a rule for."""

import torch
import torch.nn.functional as F
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel
from support.network_modules import (
    ConcatenatedMaps,
    Function,
    FunctionalDropout,
    FunctionalLeNet,
    MeanOverPositions,
    PlusOne,
    Pyramid,
    RawResidual,
    Residual,
    Shared,
    ThreeBranches,
    Tokens,
    Twice,
    lenet,
    lifted,
    lived_in,
    parameter,
    under_two_names,
)

# name → (factory, shape of one input, keyword arguments of MaskedModel)
NETWORKS = {
    "mlp": (lambda: MLP(6, hidden=(5, 4), features=3), (6,), {}),
    "lenet": (lenet, (1, 8, 8), {}),
    "lenet view": (lambda: FunctionalLeNet("view"), (1, 8, 8), {}),
    "lenet reshape": (lambda: FunctionalLeNet("reshape"), (1, 8, 8), {}),
    "lenet flatten": (lambda: FunctionalLeNet("flatten"), (1, 8, 8), {}),
    "residual": (lambda: Residual(False), (2, 3, 3), {}),
    "residual 1x1": (lambda: Residual(True), (2, 3, 3), {}),
    "residual raw": (RawResidual, (6,), {}),
    "three branches": (ThreeBranches, (6,), {}),
    "concatenated maps": (ConcatenatedMaps, (2, 3, 3), {}),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 3)
        ),
        (2, 3, 3),
        {},
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 3, 2, groups=3), nn.Flatten(), nn.Linear(3, 2)),
        (1, 3, 3),
        {},
    ),
    "twice": (Twice, (6,), {}),
    "shared by branches": (Shared, (6,), {}),
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        (2, 3, 3),
        {},
    ),
    "flattened maps": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1), nn.Flatten()),
        (2, 3, 3),
        {"input_shape": (2, 3, 3)},
    ),
    "mean": (MeanOverPositions, (2, 3, 3), {}),
    "dropout": (FunctionalDropout, (6,), {}),
    "sigmoid": (lambda: lifted(nn.Sigmoid()), (6,), {}),
    "softplus": (lambda: lifted(nn.Softplus()), (6,), {}),
    "plus one": (PlusOne, (2, 3), {}),
    "raw input, never flattened": (
        lambda: Function(lambda net, x: net.c(torch.tanh(net.b(x + torch.tanh(net.a(x)))))),
        (6,),
        {},
    ),
    "added by keyword": (
        lambda: Function(lambda net, x: net.c(torch.add(input=(h := net.a(x)), other=net.b(torch.tanh(h)), alpha=2))),
        (6,),
        {},
    ),
    "added in place": (
        lambda: Function(lambda net, x: net.c((2 * net.a(x)).add_(net.b(x)).sigmoid_())),
        (6,),
        {},
    ),
    "scaled": (lambda: Function(lambda net, x: net.c(3 * torch.tanh(net.b(net.a(x) / 2)) * 0.5)), (6,), {}),
    "pyramid": (Pyramid, (2, 3, 3), {}),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ELU(), nn.Flatten(), nn.Linear(6, 3)), (2, 3), {}),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)),
        (1, 2, 2, 2),
        {},
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), lived_in(nn.BatchNorm2d(3)), nn.Flatten(), nn.Linear(12, 3)),
        (1, 3, 3),
        {"input_shape": (1, 3, 3)},
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 4), lived_in(nn.LayerNorm(4)), nn.Tanh(), nn.Linear(4, 3)),
        (6,),
        {},
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), lived_in(nn.GroupNorm(2, 4)), nn.Flatten(), nn.Linear(16, 3)),
        (1, 3, 3),
        {"input_shape": (1, 3, 3)},
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(4), nn.Linear(4, 3)), (6,), {}),
    "transposed": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(54, 3))
        ),
        (2, 2, 2),
        {},
    ),
    "embedding": (
        lambda: Function(
            lambda net, x: net.d(torch.tanh(net.e(x)).flatten(1)), e=nn.Embedding(5, 4), d=nn.Linear(8, 3)
        ),
        (2,),
        {"input_shape": (2,)},
    ),
    "raw parameter": (
        lambda: Function(lambda net, x: net.c(torch.tanh(net.b(net.a(x) * net.g + net.g))), g=parameter(6)),
        (6,),
        {},
    ),
    "functional linear": (
        lambda: Function(
            lambda net, x: net.d(torch.tanh(F.linear(x, net.w, net.g))),
            w=parameter(4, 6),
            g=parameter(4),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "functional convolution": (
        lambda: Function(
            lambda net, x: net.d(torch.tanh(F.conv2d(net.k(x), net.w)).flatten(1)),
            k=nn.Conv2d(1, 3, 1),
            w=parameter(4, 3, 2, 2),
            d=nn.Linear(4, 3),
        ),
        (1, 2, 2),
        {"input_shape": (1, 2, 2)},
    ),
    "rows of one weight": (
        lambda: Function(
            lambda net, x: net.d(torch.tanh(F.linear(torch.tanh(F.linear(x, net.w[:4])), net.w[4:, :4]))),
            w=parameter(8, 6),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "parameter from the right": (
        lambda: Function(lambda net, x: net.d(torch.tanh(x @ net.w)), w=parameter(6, 4), d=nn.Linear(4, 3)),
        (6,),
        {},
    ),
    "every other unit": (
        lambda: Function(
            lambda net, x: net.d((h := torch.sigmoid(net.a(x)))[:, ::2] - 2 * h[:, 1::2]),
            a=nn.Linear(6, 8),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "halves": (
        lambda: Function(
            lambda net, x: net.d(torch.cat(net.a(x).chunk(2, 1)[::-1], 1)), a=nn.Linear(6, 8), d=nn.Linear(8, 3)
        ),
        (6,),
        {},
    ),
    "shuffled channels": (
        lambda: Function(
            lambda net, x: net.d(F.channel_shuffle(torch.tanh(net.k(x)), 2).flatten(1)),
            k=nn.Conv2d(1, 4, 2),
            d=nn.Linear(4, 3),
        ),
        (1, 2, 2),
        {"input_shape": (1, 2, 2)},
    ),
    "rolled and padded": (
        lambda: Function(
            lambda net, x: net.d(F.pad(torch.roll(torch.sigmoid(net.a(x)), 1, 1), (1, 0))),
            a=nn.Linear(6, 4),
            d=nn.Linear(5, 3),
        ),
        (6,),
        {},
    ),
    "features summed": (lambda: Function(lambda net, x: net.c(net.b(torch.tanh(net.a(x)))).cumsum(1)), (6,), {}),
    "one module under two names": (under_two_names, (6,), {}),
    "class token and positions": (
        Tokens,
        (2, 6),
        {"input_shape": (2, 6)},
    ),
}

# Here the graph covers more than reaches the features, as documented: a product goes by one of its factors, and what
# torch makes of values without a rule of its own counts as always in use.
COVER_MORE = {
    "product of branches": (
        lambda: Function(lambda net, x: net.c((h := net.a(x)) * torch.sigmoid(net.b(h)))),
        (6,),
        {},
    ),
    "product of zeros": (lambda: Function(lambda net, x: net.c((h := net.a(x)) * torch.tanh(net.b(h)))), (6,), {}),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Linear(4, 3)), (6,), {}),
    "sorted": (lambda: Function(lambda net, x: net.c(net.b(torch.tanh(net.a(x))).sort(1)[0])), (6,), {}),
    "pool over units": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.MaxPool1d(3, stride=1, padding=1), nn.Linear(4, 4)),
        (6,),
        {},
    ),
    "attention": (
        lambda: Function(
            lambda net, x: net.d(net.m(h := net.k(x), h, h)[0].mean(1)),
            k=nn.Linear(6, 4),
            m=nn.MultiheadAttention(4, 2, batch_first=True),
            d=nn.Linear(4, 3),
        ),
        (2, 6),
        {"input_shape": (2, 6)},
    ),
    "squeeze and excite": (
        lambda: Function(
            lambda net, x: ((h := torch.relu(net.k(x))) * torch.sigmoid(net.e(h.mean((2, 3), keepdim=True)))).mean(
                (2, 3)
            ),
            k=nn.Conv2d(2, 4, 2),
            e=nn.Conv2d(4, 4, 1),
        ),
        (2, 3, 3),
        {},
    ),
}
ALL = NETWORKS | COVER_MORE


def network(name: str, seed: int = 0) -> tuple[MaskedModel, torch.Tensor]:
    """The masked network in evaluation mode, and a batch for it."""
    torch.manual_seed(seed)
    make, shape, options = ALL[name]
    model = MaskedModel(make(), **options).eval()
    return model, inputs(model, shape, 32)


def inputs(model: MaskedModel, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """Numbers, or tokens where the backbone reads those."""
    tokens = next((m.num_embeddings for m in model.backbone.modules() if isinstance(m, nn.Embedding)), None)
    return torch.randn(size, *shape) if tokens is None else torch.randint(0, tokens, (size, *shape))
