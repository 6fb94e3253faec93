"""Small backbones, one for each shape that the unit graph has a rule for."""

import torch
import torch.nn.functional as F
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel

Linear, Conv1d, Conv2d, Flatten = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Flatten


class Net(nn.Module):
    """Any parts under any forward function; parts that are plain tensors become buffers."""

    def __init__(self, function, **parts) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.given = (function,)

    def forward(self, *inputs, **named):
        return self.given[0](self, *inputs, **named)


class Choosing(nn.Module):
    """A layer with control flow on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Linear(4, 4)

    def forward(self, x):
        return self.l(x) if x.sum() > 0 else -self.l(x)


class LowRank(nn.Module):
    """A layer without gradients, and its low-rank update: without zeros, which would hide its inputs."""

    def __init__(self, base: nn.Linear, rank: int = 6, *, bias: bool = False):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=bias)

    def forward(self, x):
        return self.up(self.down(x)) + self.base(x)


class RankNet(nn.Sequential):
    """Low-rank updates, an adapter with biases, and a LayerNorm without gradients; 6 ranks each."""

    features = 12

    def __init__(self):
        norm = nn.LayerNorm(20).requires_grad_(False)
        super().__init__(
            *(nn.Flatten(), LowRank(nn.Linear(64, 20)), norm, nn.ReLU()),
            *(Adapter(20), LowRank(nn.Linear(20, self.features), bias=True)),
        )


class Adapter(nn.Module):
    """A bottleneck with biases, added to its input (Houlsby et al., ICML 2019)."""

    def __init__(self, width: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@torch.no_grad()
def lived_in(norm: nn.Module) -> nn.Module:
    """Give a norm weights, shifts and statistics that no initialisation makes."""
    for value in (*norm.parameters(), *norm.buffers()):
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape) + 0.5)
    return norm


def layers(*modules):
    """A case: modules in a row."""
    return lambda: nn.Sequential(*(make() for make in modules))


def linears(function, **makers):
    """A case: linear layers ``a``, ``b`` and ``c``, and further parts, under a function."""
    usual = {"a": lambda: Linear(6, 6), "b": lambda: Linear(6, 6), "c": lambda: Linear(6, 3)}
    return parts(function, **usual, **makers)


def parts(function, **makers):
    """A case: parts under a function."""
    return lambda: Net(function, **{name: make() for name, make in makers.items()})


def L(*sizes, **options):
    return lambda: Linear(*sizes, **options)


def C(*sizes, **options):
    return lambda: Conv2d(*sizes, **options)


def P(*shape):
    return lambda: parameter(*shape)


def residual(s, x):
    x = F.leaky_relu(s.first(x))
    x = F.leaky_relu(s.second(x) + s.shortcut(x))
    return s.last(x.flatten(1))


def three_branches(s, x):
    x = x.flatten(1)
    return s.c(torch.cat([torch.tanh(s.a(x)), x, torch.tanh(s.b(x))], dim=1))


def twice(s, x):
    x = torch.tanh(s.first(x.flatten(1)))
    for _ in range(2):
        x = torch.tanh(s.again(x))
    return s.last(x)


def shared(s, x):
    return s.last(s.shared(torch.tanh(s.a(x))) - s.shared(torch.tanh(s.b(x))))


def tokens(s, x):
    """A class token before a sequence, and a learned position for each token."""
    x = torch.cat([s.token.expand(x.shape[0], -1, -1), s.a(x)], 1)
    return torch.tanh(s.b(x + s.places)).flatten(1)


def last_state(s, x):
    return s.out(s.r(x)[0][:, -1])


def pyramid(s, x):
    """Pooled maps of two depths, concatenated."""
    first = torch.tanh(s.a(x))
    return s.drop(torch.cat([F.adaptive_avg_pool2d(y, 1) for y in (first, s.b(first))], 1)).flatten(1)


def under_two_names() -> nn.Module:
    layer = Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), Linear(6, 3))


def excited(s, x):
    h = torch.relu(s.k(x))
    return (h * torch.sigmoid(s.e(h.mean((2, 3), keepdim=True)))).mean((2, 3))


def moved_units(s, x):
    h = torch.roll(s.a(x).flip(1), 1, 1)
    h = torch.cat([torch.tanh(h.chunk(2, 1)[1]), h.chunk(2, 1)[0]], 1)
    return s.c(torch.tanh(s.b(torch.cat([h[:, 1::2], -h[:, ::2]], 1))))


def moved_maps(s, x):
    return s.c(F.max_pool2d(F.channel_shuffle(F.conv2d(torch.tanh(s.a(x)), s.w, s.v), 2), 2).flatten(1))


# name → (factory, shape of one input); options of MaskedModel are added below
NETWORKS = {
    "mlp": (lambda: MLP(6, hidden=(5, 4), features=3), (6,)),
    "lenet": (
        layers(C(1, 3, 3), nn.ReLU, lambda: nn.MaxPool2d(2), C(3, 4, 2), nn.LeakyReLU, Flatten, L(16, 5), nn.Tanh),
        (1, 8, 8),
    ),
    "residual 1x1": (
        parts(residual, first=C(2, 3, 3, padding=1), second=C(3, 3, 3, padding=1), shortcut=C(3, 3, 1), last=L(27, 4)),
        (2, 3, 3),
    ),
    "three branches": (parts(three_branches, a=L(6, 3), b=L(6, 2), c=L(11, 4)), (6,)),
    "concatenated maps": (
        parts(
            lambda s, x: s.c(torch.flatten(torch.cat((s.a(x), s.b(x)), 1), 1)),
            a=C(2, 2, 1),
            b=C(2, 3, 3, padding=1),
            c=L(45, 3),
        ),
        (2, 3, 3),
    ),
    "grouped": (layers(C(2, 4, 1), nn.Tanh, C(4, 6, 2, groups=2), Flatten, L(24, 3)), (2, 3, 3)),
    "depthwise": (layers(C(1, 3, 2), C(3, 3, 2, groups=3), Flatten, L(3, 2)), (1, 3, 3)),
    "twice": (parts(twice, first=L(6, 4), again=L(4, 4), last=L(4, 3)), (6,)),
    "shared by branches": (parts(shared, a=L(6, 4), b=L(6, 4), shared=L(4, 3), last=L(3, 3)), (6,)),
    "pooled": (
        layers(C(2, 4, 2), nn.Tanh, C(4, 3, 1, bias=False), lambda: nn.AdaptiveAvgPool2d(1), Flatten),
        (2, 3, 3),
    ),
    "dropout": (parts(lambda s, x: s.b(F.dropout(torch.tanh(s.a(x)), 0.5, s.training)), a=L(6, 5), b=L(5, 3)), (6,)),
    "sigmoid": (layers(L(6, 5), nn.Sigmoid, L(5, 4), nn.Sigmoid, L(4, 3)), (6,)),
    "plus one": (
        parts(lambda s, x: s.b((torch.sigmoid(s.a(x)) + 1).flatten(1) / 2), a=lambda: Conv1d(2, 3, 2), b=L(6, 3)),
        (2, 3),
    ),
    "added by keyword": (
        linears(lambda s, x: s.c(torch.add(input=(h := s.a(x)), other=s.b(torch.tanh(h)), alpha=2))),
        (6,),
    ),
    "added in place": (linears(lambda s, x: s.c((2 * s.a(x)).add_(s.b(x)).sigmoid_())), (6,)),
    "pyramid": (parts(pyramid, a=C(2, 3, 2), b=C(3, 2, 1), drop=lambda: nn.Dropout(0.3)), (2, 3, 3)),
    "conv3d": (layers(lambda: nn.Conv3d(1, 3, 2), nn.Tanh, Flatten, L(3, 3)), (1, 2, 2, 2)),
    "batch norm": (layers(C(1, 3, 2), lambda: lived_in(nn.BatchNorm2d(3)), Flatten, L(12, 3)), (1, 3, 3)),
    "layer norm": (layers(L(6, 4), lambda: lived_in(nn.LayerNorm(4)), nn.Tanh, L(4, 3)), (6,)),
    "group norm": (layers(C(1, 4, 2), lambda: lived_in(nn.GroupNorm(2, 4)), Flatten, L(16, 3)), (1, 3, 3)),
    "prelu": (layers(L(6, 4), lambda: nn.PReLU(4), L(4, 3)), (6,)),
    "transposed": (
        layers(C(2, 4, 1), nn.Tanh, lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), Flatten, L(54, 3)),
        (2, 2, 2),
    ),
    "embedding": (
        parts(lambda s, x: s.d(torch.tanh(s.e(x)).flatten(1)), e=lambda: nn.Embedding(5, 4), d=L(8, 3)),
        (2,),
    ),
    "raw parameter": (linears(lambda s, x: s.c(torch.tanh(s.b(s.a(x) * s.g + s.g))), g=P(6)), (6,)),
    "units that change places": (linears(moved_units), (6,)),
    "maps that change places": (parts(moved_maps, a=C(2, 4, 1), w=P(4, 4, 1, 1), v=P(4), c=L(4, 3)), (2, 3, 3)),
    "rows of one weight": (
        parts(lambda s, x: s.d(torch.tanh(F.linear(F.linear(x, s.w[:4]).tanh(), s.w[4:, :4]))), w=P(8, 6), d=L(4, 3)),
        (6,),
    ),
    "parameter from the right": (parts(lambda s, x: s.d(torch.tanh(x @ s.w)), w=P(6, 4), d=L(4, 3)), (6,)),
    "features summed": (linears(lambda s, x: s.c(s.b(torch.tanh(s.a(x)))).cumsum(1)), (6,)),
    "one module under two names": (under_two_names, (6,)),
    "class token and positions": (parts(tokens, a=L(6, 4), b=L(4, 3), token=P(1, 1, 4), places=P(1, 3, 4)), (2, 6)),
}
# Here the graph covers more entries than reach the features: a product is masked by one factor only, and values of
# functions without a rule count as always used.
COVER_MORE = {
    "product of branches": (linears(lambda s, x: s.c((h := s.a(x)) * torch.sigmoid(s.b(h)))), (6,)),
    "product of zeros": (linears(lambda s, x: s.c((h := s.a(x)) * torch.tanh(s.b(h)))), (6,)),
    "softmax": (layers(L(6, 4), lambda: nn.Softmax(1), L(4, 3)), (6,)),
    "sorted": (linears(lambda s, x: s.c(s.b(torch.tanh(s.a(x))).sort(1)[0])), (6,)),
    "pool over units": (layers(L(6, 4), lambda: nn.MaxPool1d(3, stride=1, padding=1), L(4, 4)), (6,)),
    "attention": (
        parts(
            lambda s, x: s.d(s.m(h := s.k(x), h, h)[0].mean(1)),
            k=L(6, 4),
            m=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            d=L(4, 3),
        ),
        (2, 6),
    ),
    "squeeze and excite": (parts(excited, k=C(2, 4, 2), e=C(4, 4, 1)), (2, 3, 3)),
}
NETWORKS, COVER_MORE = (
    {name: (make, shape, {"input_shape": shape}) for name, (make, shape) in table.items()}
    for table in (NETWORKS, COVER_MORE)
)
ALL = NETWORKS | COVER_MORE


def network(name: str) -> tuple[MaskedModel, torch.Tensor]:
    """Return the masked network in evaluation mode, and a batch for it."""
    torch.manual_seed(0)
    make, shape, options = ALL[name]
    model = MaskedModel(make(), **options).eval()
    return model, inputs(model, shape, 32)


def inputs(model: MaskedModel, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """Return a batch of numbers, or of tokens if the backbone reads tokens."""
    n_tokens = next((m.num_embeddings for m in model.backbone.modules() if isinstance(m, nn.Embedding)), None)
    return torch.randn(size, *shape) if n_tokens is None else torch.randint(0, n_tokens, (size, *shape))
