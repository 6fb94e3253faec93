"""From a masked model and a task to a plain module."""

from __future__ import annotations

import copy

from torch import fx

from avalanche_amnesia.models.extraction import entrywise, moves, norms, weighted
from avalanche_amnesia.models.extraction.shrinking import Shrinking
from avalanche_amnesia.models.extraction.specialised import specialise
from avalanche_amnesia.models.masked import MaskedModel

_ = (entrywise, moves, norms, weighted)  # imported for their registrations


def extract(model: MaskedModel, task: int, *, input_shape: tuple[int, ...] | None = None) -> fx.GraphModule:
    """A task's subnet as a plain module: same logits, without the units that the task's mask closes.

    Layers keep the rows of open units and the columns of live inputs, norms the channels; batch norms are folded into
    the layer in front of them. What can't be cut runs on whole values. The result holds modules and functions of torch
    alone (and what the model declared ``frozen`` or ``task_owned``, as it is), takes batches of any size, and is in
    evaluation mode.

    Args:
        model: any masked model; not changed, nothing is shared with it.
        task: a task with a head and a kept mask.
        input_shape: shape of one input without the batch, where it is not the one on which the model was traced.

    Returns:
        ``(batch, …)`` → logits ``(batch, classes)``.

    Raises:
        UnknownTaskError: for a task that was never trained, or was unlearned.
        ValueError: for the task in training.
    """
    forward, graph = specialise(model, task)
    device = next(forward.parameters()).device
    twin = copy.deepcopy(forward).cpu().eval()
    dtype = model.graph.input_dtype
    if dtype.is_floating_point:
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), dtype)
    walk = Shrinking(twin, graph, model.graph.input_shape if input_shape is None else input_shape, dtype)
    subnet = walk.run().to(device)
    subnet.whole_again = walk.whole_again
    return subnet
