"""Small backbones of every shape the unit graph has a rule for, and parts of them: forwards as people write them."""

import torch
import torch.nn.functional as F
from torch import nn

from avalanche_amnesia.models import MLP, MaskedModel


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.LeakyReLU()),
        *(nn.Flatten(), nn.Linear(16, 5), nn.Tanh()),
    )


class FunctionalLeNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 2), nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.leaky_relu(self.b(x))
        if self.how == "view":
            x = x.view(x.size(0), -1)
        elif self.how == "reshape":
            x = x.reshape(-1, 16)
        else:
            x = torch.flatten(x, 1)
        return torch.tanh(self.c(x))


class Residual(nn.Module):
    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.shortcut = nn.Conv2d(3, 3, 1) if shortcut else nn.Identity()
        self.last = nn.Linear(3 * 9, 4)

    def forward(self, x):
        x = F.leaky_relu(self.first(x))
        x = F.leaky_relu(self.second(x) + self.shortcut(x))
        return self.last(x.flatten(1))


class RawResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.flatten(x, 1)
        return self.b(x + torch.tanh(self.a(x)))


class ThreeBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 3), nn.Linear(6, 2), nn.Linear(11, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.c(torch.cat([torch.tanh(self.a(x)), x, torch.tanh(self.b(x))], dim=1))


class ConcatenatedMaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 3, padding=1), nn.Linear(5 * 9, 3)

    def forward(self, x):
        return self.c(torch.flatten(torch.cat((self.a(x), self.b(x)), 1), 1))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        for _ in range(2):
            x = torch.tanh(self.again(x))
        return self.last(x)


class Shared(nn.Module):
    """One layer on two different branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shared, self.last = (nn.Linear(n, m) for n, m in ((6, 4), (6, 4), (4, 3), (3, 3)))

    def forward(self, x):
        x = x.flatten(1)
        return self.last(self.shared(torch.tanh(self.a(x))) - self.shared(torch.tanh(self.b(x))))


class MeanOverPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).mean((2, 3))


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = F.dropout(torch.tanh(self.a(x.flatten(1))), 0.5, self.training)
        return self.b(x)


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

    def forward(self, x):
        return self.given[0](self, x)


class Choosing(nn.Module):
    """A layer with control flow on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x) if x.sum() > 0 else -self.l(x)


def three(function, **parts) -> nn.Module:
    """Three linear layers, and the parts given, under a function."""
    return Net(function, **parts, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))


class Tokens(nn.Module):
    """A token of its own in front of a sequence, and a place for everyone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)
        self.token, self.places = parameter(1, 1, 4), parameter(1, 3, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.a(x)], 1)
        return torch.tanh(self.b(x + self.places)).flatten(1)


def under_two_names() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 3))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return net


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@torch.no_grad()
def lived_in(norm: nn.Module) -> nn.Module:
    """Weights, shifts and statistics that no initialisation makes."""
    for value in (*norm.parameters(), *norm.buffers()):
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape) + 0.5)
    return norm


class Pyramid(nn.Module):
    """Pooled maps of two depths side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1), nn.Dropout(0.3)

    def forward(self, x):
        first = torch.tanh(self.a(x))
        pooled = [F.adaptive_avg_pool2d(y, 1) for y in (first, self.b(first))]
        return self.drop(torch.cat(pooled, 1)).flatten(1)


def lifted(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), activation, nn.Linear(5, 4), activation, nn.Linear(4, 3))


class PlusOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 3, 2), nn.Linear(6, 3)

    def forward(self, x):
        return self.b((torch.sigmoid(self.a(x)) + 1).flatten(1) / 2)


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
        lambda: three(lambda net, x: net.c(torch.tanh(net.b(x + torch.tanh(net.a(x)))))),
        (6,),
        {},
    ),
    "added by keyword": (
        lambda: three(lambda net, x: net.c(torch.add(input=(h := net.a(x)), other=net.b(torch.tanh(h)), alpha=2))),
        (6,),
        {},
    ),
    "added in place": (lambda: three(lambda net, x: net.c((2 * net.a(x)).add_(net.b(x)).sigmoid_())), (6,), {}),
    "scaled": (lambda: three(lambda net, x: net.c(3 * torch.tanh(net.b(net.a(x) / 2)) * 0.5)), (6,), {}),
    "pyramid": (Pyramid, (2, 3, 3), {}),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.ELU(), nn.Flatten(), nn.Linear(6, 3)), (2, 3), {}),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)), (1, 2, 2, 2), {}),
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
        lambda: Net(lambda net, x: net.d(torch.tanh(net.e(x)).flatten(1)), e=nn.Embedding(5, 4), d=nn.Linear(8, 3)),
        (2,),
        {"input_shape": (2,)},
    ),
    "raw parameter": (
        lambda: three(lambda net, x: net.c(torch.tanh(net.b(net.a(x) * net.g + net.g))), g=parameter(6)),
        (6,),
        {},
    ),
    "functional linear": (
        lambda: Net(
            lambda net, x: net.d(torch.tanh(F.linear(x, net.w, net.g))),
            w=parameter(4, 6),
            g=parameter(4),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "functional convolution": (
        lambda: Net(
            lambda net, x: net.d(torch.tanh(F.conv2d(net.k(x), net.w)).flatten(1)),
            k=nn.Conv2d(1, 3, 1),
            w=parameter(4, 3, 2, 2),
            d=nn.Linear(4, 3),
        ),
        (1, 2, 2),
        {"input_shape": (1, 2, 2)},
    ),
    "rows of one weight": (
        lambda: Net(
            lambda net, x: net.d(torch.tanh(F.linear(torch.tanh(F.linear(x, net.w[:4])), net.w[4:, :4]))),
            w=parameter(8, 6),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "parameter from the right": (
        lambda: Net(lambda net, x: net.d(torch.tanh(x @ net.w)), w=parameter(6, 4), d=nn.Linear(4, 3)),
        (6,),
        {},
    ),
    "every other unit": (
        lambda: Net(
            lambda net, x: net.d((h := torch.sigmoid(net.a(x)))[:, ::2] - 2 * h[:, 1::2]),
            a=nn.Linear(6, 8),
            d=nn.Linear(4, 3),
        ),
        (6,),
        {},
    ),
    "halves": (
        lambda: Net(
            lambda net, x: net.d(torch.cat(net.a(x).chunk(2, 1)[::-1], 1)), a=nn.Linear(6, 8), d=nn.Linear(8, 3)
        ),
        (6,),
        {},
    ),
    "shuffled channels": (
        lambda: Net(
            lambda net, x: net.d(F.channel_shuffle(torch.tanh(net.k(x)), 2).flatten(1)),
            k=nn.Conv2d(1, 4, 2),
            d=nn.Linear(4, 3),
        ),
        (1, 2, 2),
        {"input_shape": (1, 2, 2)},
    ),
    "rolled and padded": (
        lambda: Net(
            lambda net, x: net.d(F.pad(torch.roll(torch.sigmoid(net.a(x)), 1, 1), (1, 0))),
            a=nn.Linear(6, 4),
            d=nn.Linear(5, 3),
        ),
        (6,),
        {},
    ),
    "features summed": (lambda: three(lambda net, x: net.c(net.b(torch.tanh(net.a(x)))).cumsum(1)), (6,), {}),
    "one module under two names": (under_two_names, (6,), {}),
    "class token and positions": (Tokens, (2, 6), {"input_shape": (2, 6)}),
}

# Here the graph covers more than reaches the features, as documented: a product goes by one of its factors, and what
# torch makes of values without a rule of its own counts as always in use.
COVER_MORE = {
    "product of branches": (lambda: three(lambda net, x: net.c((h := net.a(x)) * torch.sigmoid(net.b(h)))), (6,), {}),
    "product of zeros": (lambda: three(lambda net, x: net.c((h := net.a(x)) * torch.tanh(net.b(h)))), (6,), {}),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Linear(4, 3)), (6,), {}),
    "sorted": (lambda: three(lambda net, x: net.c(net.b(torch.tanh(net.a(x))).sort(1)[0])), (6,), {}),
    "pool over units": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.MaxPool1d(3, stride=1, padding=1), nn.Linear(4, 4)),
        (6,),
        {},
    ),
    "attention": (
        lambda: Net(
            lambda net, x: net.d(net.m(h := net.k(x), h, h)[0].mean(1)),
            k=nn.Linear(6, 4),
            m=nn.MultiheadAttention(4, 2, batch_first=True),
            d=nn.Linear(4, 3),
        ),
        (2, 6),
        {"input_shape": (2, 6)},
    ),
    "squeeze and excite": (
        lambda: Net(
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


def network(name: str) -> tuple[MaskedModel, torch.Tensor]:
    """The masked network in evaluation mode, and a batch for it."""
    torch.manual_seed(0)
    make, shape, options = ALL[name]
    model = MaskedModel(make(), **options).eval()
    return model, inputs(model, shape, 32)


def inputs(model: MaskedModel, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """Numbers, or tokens where the backbone reads those."""
    tokens = next((m.num_embeddings for m in model.backbone.modules() if isinstance(m, nn.Embedding)), None)
    return torch.randn(size, *shape) if tokens is None else torch.randint(0, tokens, (size, *shape))
