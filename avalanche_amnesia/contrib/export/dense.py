"""Extraction of a task's dense subnet from a masked model, and what it saves."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from avalanche_amnesia.contrib.export.shrinking import Shrinking, taken_along
from avalanche_amnesia.contrib.export.shrunk_layers import dense
from avalanche_amnesia.models.disjoint import DisjointModel
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import UnknownTaskError
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.text_table import text_table
from avalanche_amnesia.unit_graph.backbones import evaluating
from avalanche_amnesia.unit_graph.findings import ModelError


def extract(model: TaskMaskedModel | DisjointModel, task: int) -> nn.Module:
    """A task's subnet as a plain module: same logits, without the units that the task's mask closes.

    Layers keep the rows of open units and the columns of live inputs, norms the channels; batch norms are folded into
    the layer in front of them. What can't be cut runs on whole values: ``subnet.meta["whole"]`` counts such operations
    by name. The result holds modules and functions of torch only (and what the model declared ``frozen`` or
    ``task_owned``, as it is), takes batches of any size, and is in evaluation mode.

    Args:
        model: any :class:`MaskedModel`; not changed, nothing is shared with it. Of a :class:`DisjointModel` it is the
            network with the task's share alone, and its head: single weights are closed there, and no units.
        task: a task with a head and a kept mask.

    Returns:
        ``(batch, …)`` → logits ``(batch, classes)``.

    Raises:
        ModelError: for a model whose masks lie over weights, not over units.
        UnknownTaskError: for a task without a head or a mask.
        ValueError: for the task in training.
    """
    if isinstance(model, DisjointModel):
        return nn.Sequential(deepcopy(model.network(task)), deepcopy(model.head(task))).eval()
    model = masked_model(model, task)
    walk, head = Shrinking(model, task), model.head(task)
    with torch.no_grad():
        features = walk.run()
        if isinstance(head, nn.Linear) and features.along(-1):
            rows = torch.arange(len(head.weight))
            bias = None if head.bias is None else head.bias.cpu()
            logits = dense(walk, "head", features, head.weight.cpu(), bias, rows)
        else:
            logits = walk.layer("head", "head", walk.whole(features).node, taken_along(head))
        subnet = walk.finished(logits)
    subnet.meta["whole"] = walk.whole_again
    return subnet.to(next(model.parameters()).device)


def masked_model(model: TaskMaskedModel, task: int) -> MaskedModel:
    """The model, where a task's subnet can be extracted from it."""
    if not isinstance(model, MaskedModel):
        raise ModelError(
            f"{type(model).__name__} has no masks over units: where single weights are masked, hardly a unit loses all "
            "of its own, and nothing smaller can be taken out of a dense layer. extract takes a MaskedModel"
        )
    if task == model.current_task:
        raise ValueError(f"task {task} is in training, its mask still moves: finish it, then extract its subnet")
    if task not in model.tasks:
        raise UnknownTaskError(
            f"task {task} has no head: it was never trained, or was unlearned; tasks with a head: {list(model.tasks)}"
        )
    if task not in model.masks:
        raise UnknownTaskError(
            f"task {task} was trained without a mask and uses all units, so that none could be taken out; tasks with "
            f"a mask: {list(model.masks)}. Train with HAT, AdaHAT or AmnesiacHAT"
        )
    return model


@dataclass(frozen=True)
class SubnetReport:
    """Cost of one task's forward, masked and extracted; printed, it is a table.

    Attributes:
        task: its label.
        input_shape: of the one input that FLOPs are counted on, without the batch.
        masked_parameters: of the masked network: the whole backbone, the task's own norms and its head.
        subnet_parameters: of the subnet, head included.
        masked_flops: of the masked network with all of its units computed, for one input: products and sums of
            convolutions, matrix products and attention (``torch.utils.flop_counter``).
        subnet_flops: of the subnet.
    """

    task: int
    input_shape: tuple[int, ...]
    masked_parameters: int
    subnet_parameters: int
    masked_flops: int
    subnet_flops: int

    @property
    def parameter_share(self) -> float:
        """Parameters of the subnet by those of the masked network."""
        return self.subnet_parameters / self.masked_parameters

    @property
    def flop_share(self) -> float:
        """FLOPs of the subnet by those of the masked network; 1 where neither has any."""
        return self.subnet_flops / self.masked_flops if self.masked_flops else 1.0

    def __str__(self) -> str:
        counts = (
            ("parameters", self.masked_parameters, self.subnet_parameters, self.parameter_share),
            (f"FLOPs, input {self.input_shape}", self.masked_flops, self.subnet_flops, self.flop_share),
        )
        rows = [(name, f"{masked:,}", f"{subnet:,}", f"{share:.1%}") for name, masked, subnet, share in counts]
        return text_table((f"task {self.task}", "masked", "subnet", "share"), rows)


def subnet_report(model: TaskMaskedModel, task: int) -> SubnetReport:
    """Extract a task's subnet and count what it needs.

    Args:
        model: any :class:`MaskedModel`; not changed.
        task: a task with a head and a kept mask.

    Raises:
        ModelError: as :func:`extract`.
        UnknownTaskError: as :func:`extract`.
        ValueError: as :func:`extract`.
    """
    model = masked_model(model, task)
    subnet = extract(model, task)
    backbone, head, parts = model.backbone, model.head(task), model.parts_of(task)
    shared = model.graph.owned  # what the task has a copy of
    masked = {id(p): p for name, p in backbone.named_parameters() if name not in shared}
    masked |= {id(p): p for p in (*parts.parameters(), *head.parameters())}
    x = model.graph.inputs.batch(1, like=next(iter(model.parameters())))
    mask = model.binary_mask(task)
    with evaluating(model):
        return SubnetReport(
            task=task,
            input_shape=model.graph.input_shape,
            masked_parameters=sum(p.numel() for p in masked.values()),
            subnet_parameters=sum(p.numel() for p in subnet.parameters()),
            masked_flops=_flops(lambda: head(backbone(x, parts, model.by_layer(mask.float())))),
            subnet_flops=_flops(lambda: subnet(*model.graph.inputs.tensors(x))),
        )


def _flops(run: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
