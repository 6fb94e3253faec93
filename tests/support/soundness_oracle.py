"""Oracle of any masked backbone: all entries outside a mask are changed, and the features must stay."""

import copy
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from avalanche_amnesia.bits import same_bits
from avalanche_amnesia.models import MaskedModel

MOVES = (lambda old, noise: noise * 3, lambda old, noise: old + noise * 1e4, lambda old, noise: -old)


def open_behind(model: MaskedModel, name: str, mask: torch.Tensor) -> torch.Tensor:
    """Return the mask with all layers open after the last layer that the parameter's use depends on."""
    numbers = torch.cat([factor.reshape(-1) for factor in model.graph.factors[name]]).unique().tolist()
    last = max((unit for number in numbers for unit in model.graph.sets.members(number)), default=-1)
    ends = torch.tensor([layer.units for layer in model.graph.layers.values()]).cumsum(0)
    behind = int(ends[ends > last][0]) if last >= 0 else 0
    return torch.where(torch.arange(len(mask)) < behind, mask, True)


@torch.no_grad()
def use_by_perturbation(model: MaskedModel, mask: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Change one parameter entry at a time, with all later layers open, and mark it if the features change.

    Later layers do not matter to the use of an entry, because a later task may open them.
    """
    own, result = model.fresh_parts().eval(), {}
    for name, parameter in model.backbone.named_parameters():
        if name in model.graph.owned:
            continue
        opened = open_behind(model, name, mask)
        base = model.masked_features(x, opened, own)
        flat, reaches = parameter.data.view(-1), torch.zeros(parameter.numel())
        for entry in range(parameter.numel()):
            old = flat[entry].clone()
            for step in (37, -37, 0.5):
                flat[entry] = old + step
                reaches[entry] += not torch.equal(model.masked_features(x, opened, own), base)
                if reaches[entry]:
                    break
            flat[entry] = old
        result[name] = reaches.view_as(parameter)
    return result


def batch(shape: tuple[int, ...], size: int, tokens: int | None = None) -> Tensor:
    """Random inputs, the same for the same size."""
    generator = torch.Generator().manual_seed(size)
    if tokens is not None:
        return torch.randint(0, tokens, (size, *shape), generator=generator)
    return torch.randn(size, *shape, generator=generator)


def some_mask(model: MaskedModel, seed: int, share: float = 0.5) -> Tensor:
    return torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < share


def features(model: MaskedModel, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
    """Features with these own modules, or with fresh ones, and the same random numbers at every call."""
    torch.manual_seed(1)
    random.seed(1)
    with torch.no_grad():
        own = model.fresh_parts() if parts is None else copy.deepcopy(parts)
        return model.masked_features(x.clone(), mask, own.train(model.training))


def have_equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(same_bits(a, b).all())


@torch.no_grad()
def assert_sound(model: MaskedModel, x: Tensor, mask: Tensor, *, reaches: bool = True) -> int:
    """Unused entries reach no feature in either mode; used entries reach one, if ``reaches``. Return the unused ones.

    Modules that each task copies are left out, because no task trains the originals.
    """
    parts, was_training, generator = model.fresh_parts(), model.training, torch.Generator().manual_seed(5)
    use = model.graph.parameter_use(model.by_layer(mask))
    learning = {name: parameter for name, parameter in model.backbone.named_parameters() if parameter.requires_grad}
    assert set(use) <= learning.keys() <= set(use) | set(model.graph.owned), "nothing is known of a parameter"
    entries = [(learning[name], (use[name] > 0).expand_as(learning[name])) for name in use]
    kept = [parameter.clone() for parameter, _ in entries]
    for training in (False, True):
        before = features(model.train(training), x, mask, parts)
        for number, moved in enumerate((*MOVES, MOVES[0])):
            last = number == len(MOVES)
            if last and not (reaches and before.any()):
                continue
            for (parameter, used), old in zip(entries, kept, strict=True):
                other = moved(old, torch.randn(old.shape, generator=generator).to(old.dtype))
                parameter.copy_(torch.where(used == last, other, old))
            wrong = "nothing reaches the features" if last else "a leak"
            same = have_equal_bits(features(model, x, mask, parts), before)
            assert same != last, f"{wrong}, training={training}, move {number}"
        for (parameter, _), old in zip(entries, kept, strict=True):
            parameter.copy_(old)
    model.train(was_training)
    return sum(int((~used).sum()) for _, used in entries)


def assert_masks_are_sound(model: MaskedModel, original: nn.Module, batch_of: Callable[[int], Tensor], sizes) -> None:
    """Every mask is sound, and an open mask computes the original, for batches of any size."""
    for size in sizes:
        x = batch_of(size)
        found = features(model, x, torch.ones(model.n_units))
        assert found.shape == (size, model.n_features)
        with torch.no_grad():
            assert torch.allclose(found, original(x), atol=1e-5, rtol=1e-4), "an open mask changes the function"
        for seed, share in enumerate((0.5, 0.3, 0.8, 0.0) if size > 2 else ()):
            assert_sound(model, x, some_mask(model, seed, share))


def assert_gradients_are_finite(model: MaskedModel, x: Tensor, mask: Tensor) -> None:
    model.masked_features(x, mask).square().sum().backward()
    for name, parameter in (("mask", mask), *model.backbone.named_parameters()):
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), f"gradient of {name}"
