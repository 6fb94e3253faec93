"""Small backbones, and parts of them: forwards as people write them."""

import torch
import torch.nn.functional as F
from torch import nn


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


class Function(nn.Module):
    """Three linear layers, or the parts given, under a function of the test's choice."""

    def __init__(self, function, **parts) -> None:
        super().__init__()
        if not parts.keys() - {"g"}:
            parts |= {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 3)}
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = (function,)

    def forward(self, x):
        return self.function[0](self, x)


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
