"""Small backbones of every shape the unit graph has a rule for, and a slow twin of its parameter use."""

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


class Function(nn.Module):
    """Three linear layers under a function of the test's choice."""

    def __init__(self, function, width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.function = (function,)

    def forward(self, x):
        return self.function[0](self, x)


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
        lambda: Function(lambda net, x: net.c(torch.tanh(net.a(x)).add_(net.b(x)).sigmoid_())),
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
}


def network(name: str, seed: int = 0) -> tuple[MaskedModel, torch.Tensor]:
    """The masked network in evaluation mode, and a batch for it."""
    torch.manual_seed(seed)
    make, shape, options = NETWORKS[name]
    model = MaskedModel(make(), **options).eval()
    return model, torch.randn(32, *shape)


def random_mask(model: MaskedModel, seed: int) -> torch.Tensor:
    return torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < 0.55


@torch.no_grad()
def probe(model: MaskedModel, mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Features, and every layer's masked outputs over all its calls."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in model.graph.layers}
    masks = model.by_layer(mask)
    hooks = []
    for name in model.graph.layers:

        def keep(module, inputs, output, name=name):
            seen[name].append(output[:, masks[name]].clone())

        hooks.append(model.backbone.get_submodule(name).register_forward_hook(keep))
    features = model.masked_features(x, mask)
    for hook in hooks:
        hook.remove()
    return features, {name: torch.cat(values) for name, values in seen.items()}


@torch.no_grad()
def use_by_perturbation(model: MaskedModel, mask: torch.Tensor, x: torch.Tensor) -> tuple[dict, dict]:
    """Move one parameter entry at a time, by a lot: does its layer's masked output change, do the features?"""
    base, outputs = probe(model, mask, x)
    of_layer, of_features = {}, {}
    for name, parameter in model.backbone.named_parameters():
        layer = name.rpartition(".")[0]
        changed, moved = torch.zeros(parameter.numel()), torch.zeros(parameter.numel())
        flat = parameter.data.view(-1)
        for entry in range(parameter.numel()):
            old = flat[entry].clone()
            flat[entry] = old + 37
            features, now = probe(model, mask, x)
            flat[entry] = old
            changed[entry] = not torch.equal(now[layer], outputs[layer])
            moved[entry] = not torch.equal(features, base)
        of_layer[name], of_features[name] = changed.view_as(parameter), moved.view_as(parameter)
    return of_layer, of_features
