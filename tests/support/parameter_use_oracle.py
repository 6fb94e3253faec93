"""A slow twin of the unit graph's parameter use: change an entry, and compare the features."""

import torch

from avalanche_amnesia.models import MaskedModel


def random_mask(model: MaskedModel, seed: int) -> torch.Tensor:
    return torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < 0.55


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
