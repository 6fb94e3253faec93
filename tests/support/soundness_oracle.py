"""Oracle of any masked backbone: all entries outside a mask are changed, and the features must stay."""

import copy

import torch
from torch import Tensor

from avalanche_amnesia.models import MaskedModel


def batch(shape: tuple[int, ...], size: int, tokens: int | None = None) -> Tensor:
    """Random inputs, the same for the same size."""
    generator = torch.Generator().manual_seed(size)
    if tokens is not None:
        return torch.randint(0, tokens, (size, *shape), generator=generator)
    return torch.randn(size, *shape, generator=generator)


def some_mask(model: MaskedModel, seed: int, share: float = 0.5) -> Tensor:
    return torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < share


def features(model: MaskedModel, x: Tensor, mask: Tensor) -> Tensor:
    """Features with fresh own modules, and the same dropout at every call."""
    torch.manual_seed(1)
    with torch.no_grad():
        return model.masked_features(x, mask)


@torch.no_grad()
def move(model: MaskedModel, use: dict[str, Tensor], *, used: bool) -> None:
    """Change all used entries, or all unused ones."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.backbone.named_parameters():
        if name in model.graph.owned or not parameter.requires_grad:
            continue
        other = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 3
        parameter.copy_(torch.where((use[name] > 0).expand_as(parameter) == used, other, parameter))


def assert_sound(model: MaskedModel, x: Tensor, mask: Tensor, *, reaches: bool = True) -> None:
    """Unused entries reach no feature in either mode; used entries reach one, if ``reaches``."""
    use = model.graph.parameter_use(model.by_layer(mask))
    learning = {name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}
    assert learning >= set(use)
    assert set(use) | set(model.graph.owned) >= learning
    for training in (False, True):
        moved = copy.deepcopy(model).train(training)
        before = features(moved, x, mask)
        move(moved, use, used=False)
        assert torch.equal(features(moved, x, mask), before), f"a leak, training={training}"
        if reaches and before.any():
            move(moved, use, used=True)
            assert not torch.equal(features(moved, x, mask), before), "nothing reaches the features at all"
