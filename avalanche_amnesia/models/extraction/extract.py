"""From a masked model and a task to a plain module."""

from __future__ import annotations

from torch import fx, nn

from avalanche_amnesia.models.extraction import entrywise, moves, norms, weighted
from avalanche_amnesia.models.extraction.shrinking import Shrinking
from avalanche_amnesia.models.extraction.specialised import specialise
from avalanche_amnesia.models.graph import ModelError
from avalanche_amnesia.models.masked import MaskedModel
from avalanche_amnesia.models.multi_head import UnknownTaskError
from avalanche_amnesia.models.task_masked import TaskMaskedModel

_ = (entrywise, moves, norms, weighted)  # imported for their registrations


def extract(model: TaskMaskedModel, task: int, *, input_shape: tuple[int, ...] | None = None) -> fx.GraphModule:
    """A task's subnet as a plain module: same logits, without the units that the task's mask closes.

    Layers keep the rows of open units and the columns of live inputs, norms the channels; batch norms are folded into
    the layer in front of them. What can't be cut runs on whole values: ``subnet.meta["whole"]`` counts such operations
    by name. The result holds modules and functions of torch alone (and what the model declared ``frozen`` or
    ``task_owned``, as it is), takes batches of any size, and is in evaluation mode.

    Args:
        model: any :class:`MaskedModel`; not changed, nothing is shared with it.
        task: a task with a head and a kept mask.
        input_shape: shape of one input without the batch, where it is not the one on which the model was traced.

    Returns:
        ``(batch, …)`` → logits ``(batch, classes)``.

    Raises:
        ModelError: for a model whose masks lie over weights, not over units.
        UnknownTaskError: for a task without a head or a mask.
        ValueError: for the task in training.
    """
    model = masked_model(model, task)
    walk = walk_over(model, *specialise(model, task, model.head(task)), input_shape)
    subnet = walk.run().to(next(model.parameters()).device)
    subnet.meta["whole"] = walk.whole_again
    return subnet


def walk_over(
    model: MaskedModel,
    forward: nn.Module,
    graph: fx.Graph,
    input_shape: tuple[int, ...] | None = None,
    *,
    fold: bool = True,
) -> Shrinking:
    """A walk over what :func:`specialise` made of a model, yet to run; the rest is as in :class:`Shrinking`."""
    dtype = model.graph.input_dtype
    if dtype.is_floating_point:
        dtype = next((p.dtype for p in forward.parameters() if p.is_floating_point()), dtype)
    shape = model.graph.input_shape if input_shape is None else input_shape
    return Shrinking(forward, graph, shape, dtype, fold=fold)


def masked_model(model: TaskMaskedModel, task: int) -> MaskedModel:
    """The model, where a task's subnet can be extracted from it.

    Raises:
        ModelError: as :func:`extract`.
        UnknownTaskError: as :func:`extract`.
        ValueError: as :func:`extract`.
    """
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
