"""Shadow: a copy of backbone entries, trained on the current task as if an earlier task were unlearned."""

import copy
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import backbone_entries
from avalanche_amnesia.optimizers import BareStep, sibling_optimizer
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training import HATPlugin, TrajectoryPlugin
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.trajectory.sparse import SparseValues


class Shadow:
    """Copy of an earlier task's weights (the region), trained on a later task as if the earlier one were unlearned.

    One forward pass uses the shadow's values in the region, and the main weights elsewhere.
    With region ``C``, shadow ``B`` and the earlier task's update ``D``: ``W_b = C ⊙ B + (1 − C) ⊙ (W − D)``.
    """

    def __init__(
        self,
        model: MaskedModel,
        task: int,
        region: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
        offset: Mapping[str, Tensor],
        optimizer: Optimizer,
    ) -> None:
        self.model, self.task = model, task
        self.region, self.offset = dict(region), dict(offset)
        self._main = {name: parameter.detach() for name, parameter in model.backbone.named_parameters()}
        self._values = {name: nn.Parameter(start[name].clone()) for name in self.region}
        self._all = {**self._main, **self._values}
        # Lists for ``_foreach_lerp_``, which fills the shadow's tensors with the main weights outside the region.
        self._copies = [values.data for values in self._values.values()]
        self._originals = [self._main[name] for name in self._values]
        self._outside = [(~self.region[name]).to(values.dtype) for name, values in self._values.items()]
        self._start = {name: start[name][inside] for name, inside in self.region.items()}
        self.parts = copy.deepcopy(model.task_parts(task)).train()
        self.parameters = [*self._values.values(), *self.parts.parameters()]
        self._step = BareStep(sibling_optimizer(optimizer, self.parameters))

    def logits(self, x: Tensor) -> Tensor:
        """Return logits ``(batch, classes)`` of the task in training, with the shadow's weights and a soft mask."""
        head, gate = self.model.head(self.task), self.model.gate.leaves.detach_masks()
        features = functional_call(self.model.backbone, self._weights(), (x, self.parts, gate))
        return F.linear(features, head.get_parameter("weight").detach(), head.get_parameter("bias").detach())

    @torch.no_grad()
    def _weights(self) -> dict[str, Tensor]:
        """Return weights without the earlier task: shadow values in its region, else main values minus its update."""
        torch._foreach_lerp_(self._copies, self._originals, self._outside)  # exact at 0 and 1, and faster than where()
        for name, offset in self.offset.items():
            self._values[name].data.sub_(offset)
        return self._all

    @torch.no_grad()
    def step(self) -> None:
        """Update the shadow's weights, and its copy of the task's normalisation layers, by one optimizer step."""
        self._step()
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def settle(self) -> bool:
        """After the training: reset norms at units outside the task's mask; return True if all values are finite."""
        self.model.finish_parts(self.parts, self.task)
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)

    def masked_features(self, x: Tensor) -> Tensor:
        """Return features ``(batch, features)`` computed with the shadow's weights and the task's binary mask."""
        mask = self.model.read_mask(self.model.binary_mask(self.task))
        return functional_call(self.model.backbone, self._weights(), (x, self.parts, mask))

    def learned_change(self, use: Mapping[str, Tensor]) -> dict[str, SparseValues]:
        """Return trained minus initial values of the shadow's weights where ``use`` is True, by parameter name."""
        result = {}
        for name, inside in self.region.items():
            learned_change = torch.zeros_like(self._values[name].data)
            learned_change[inside] = self._values[name].data[inside] - self._start[name]
            result[name] = SparseValues.select(learned_change, inside & use[name])
        return result


def entries_in_use(model: MaskedModel, task: int) -> dict[str, Tensor]:
    """Return masks, by backbone parameter name, of the entries that the task uses (all, if the task has no mask)."""
    return backbone_entries(model.entries_of(task))


def entries_first_used(model: MaskedModel, task: int, earlier: Iterable[int]) -> dict[str, Tensor]:
    """Return masks, by parameter name, of the backbone entries that ``task`` uses but no task in ``earlier``."""
    result = entries_in_use(model, task)
    for other in earlier:
        used = entries_in_use(model, other)
        result = {name: own & ~used[name] for name, own in result.items()}
    return result


def method_plugins(strategy: Strategy, call: str) -> tuple[HATPlugin, TrajectoryPlugin]:
    """Return a strategy's (HATPlugin, TrajectoryPlugin); if one is missing, raise ValueError that quotes ``call``."""
    masking, recorder = find_plugin(strategy, HATPlugin), find_plugin(strategy, TrajectoryPlugin)
    if masking is None or recorder is None:
        raise ValueError(
            f"{call.partition('(')[0]}() needs HATPlugin(), TrajectoryPlugin() first: AmnesiacHAT(compensation={call})"
        )
    return masking, recorder
