"""Extraction of a task's dense subnet from a masked model."""

import torch
from torch import fx, nn

from avalanche_amnesia.contrib.export.parts import taken_along
from avalanche_amnesia.contrib.export.shrinking import Shrinking
from avalanche_amnesia.contrib.export.shrunk_layers import dense
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import UnknownTaskError
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.unit_graph.findings import ModelError


def extract(model: TaskMaskedModel, task: int, *, input_shape: tuple[int, ...] | None = None) -> fx.GraphModule:
    """A task's subnet as a plain module: same logits, without the units that the task's mask closes.

    Layers keep the rows of open units and the columns of live inputs, norms the channels; batch norms are folded into
    the layer in front of them. What can't be cut runs on whole values: ``subnet.meta["whole"]`` counts such operations
    by name. The result holds modules and functions of torch only (and what the model declared ``frozen`` or
    ``task_owned``, as it is), takes batches of any size, and is in evaluation mode.

    Args:
        model: any :class:`MaskedModel`; not changed, nothing is shared with it.
        task: a task with a head and a kept mask.
        input_shape: shape of one input without the batch, where it is not the one on which the model was traced.

    Returns:
        ``(batch, …)`` → logits ``(batch, classes)``.

    Raises:
        ModelError: for a model whose masks lie over weights, not over units; for an input shape that it can't take.
        UnknownTaskError: for a task without a head or a mask.
        ValueError: for the task in training.
    """
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
    if input_shape is not None:
        _try_on(subnet, model, input_shape)
    return subnet.to(next(model.parameters()).device)


@torch.no_grad()
def _try_on(subnet: nn.Module, model: MaskedModel, shape: tuple[int, ...]) -> None:
    inputs, like = model.graph.inputs, next(subnet.parameters())
    dtype = like.dtype if inputs.dtype.is_floating_point else inputs.dtype
    try:
        subnet(torch.zeros((1, *shape), dtype=dtype))
    except Exception as error:  # torch raises errors of many types
        raise ModelError(
            f"the network was traced on inputs of shape {inputs.shape} and takes none of shape {tuple(shape)} "
            f"({error}); give MaskedModel that input_shape="
        ) from error


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
