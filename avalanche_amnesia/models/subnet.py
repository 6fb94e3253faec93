"""Model with a mask over weights for each task: winning subnetworks (WSN, Kang et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from avalanche_amnesia.models import weight_cover
from avalanche_amnesia.models.mask_codes import decode_scores, encode_masks, encode_scores
from avalanche_amnesia.models.substitutes import Location, TaskCopies, norms_of, state_sites
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.models.weight_choice import ChosenWeights, TopTracker, mark_largest
from avalanche_amnesia.unit_graph.backbones import check_backbone, run_backbone
from avalanche_amnesia.unit_graph.task_owned import OwnModules

_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.grad_input


class SubnetModel(TaskMaskedModel):
    """Multi-head model with one binary mask per task over the weights of any backbone.

    A task uses the share ``c`` of each layer's weights with the largest absolute scores: exactly
    ``k = max(1, round(c·n))`` of ``n`` weights; of equal scores, the lowest index comes first. The backbone runs
    with ``weight ⊙ mask`` instead of its weights. Nothing is traced, so ``forward`` may be any code. A
    task without a mask (trained by a strategy without masks) uses all weights.

    During a task's training, its scores are the parameter :attr:`scores`. Afterwards its mask is stored as packed bits.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, features)``. It is modified: its weights stay the same
            objects, but biases (``bias="off"``) and norms (``norm="batch"``) are removed from it. Masks cover Linear,
            Bilinear, Conv, ConvTranspose and Embedding layers. Parameters without gradients stay constant and are
            shared by all tasks.
        density: ``c`` in (0, 1]: share of each layer's weights that a task uses.
        bias: ``off``: no biases, as in the paper, also none in the heads; ``masked``: a task uses the best-scored ones.
        norm: rule for BatchNorm, InstanceNorm, LayerNorm, GroupNorm and RMSNorm. ``task``: every task has its own
            parameters and running statistics, which start as the backbone's; ``batch``: as in the paper, statistics
            of the current batch (or sample) without learned scale and shift, also in evaluation.
        n_features: width of the features; by default ``backbone.features``, or the width found by running the backbone.

    Raises:
        ModelError: if a parameter has no rule, or the width of the features is unknown.
        ValueError: for an invalid option.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    graph: weight_cover.WeightCover
    keeps_shared_entries = True
    learned_by = "scores"

    def __init__(
        self,
        backbone: nn.Module,
        *,
        density: float = 0.5,
        bias: weight_cover.BiasRule = "off",
        norm: weight_cover.NormRule = "task",
        n_features: int | None = None,
    ) -> None:
        check_backbone(backbone)
        cover, sites, biases = weight_cover.take_inventory(backbone, density, bias, norm)
        super().__init__(backbone, n_features, cover, [tensor.size for tensor in cover.layers.values()])
        self.density, self.bias, self._sites = density, bias, sites
        self._biased_heads = bias != "off"
        for module, attribute in biases:  # equivalent to biases of zero
            module._parameters[attribute] = None
        norms = norms_of(backbone)
        if norm == "batch":
            weight_cover.strip_normalisation(norms.values())
        of_norms = {*norms.values()}
        others = [site for site in state_sites(backbone) if not (site.is_buffer and site.module in of_norms)]
        self._copies = TaskCopies(backbone, norms if norm == "task" else {}, others)
        self.register_buffer("_order", torch.zeros(0, dtype=torch.int64))

    @property
    def n_weights(self) -> int:
        """Return the number of weights (and masked biases) in a mask."""
        return sum(self.sizes)

    def _current_mask(self) -> Tensor:
        return self.choose(self._in_training.scores.detach()).bool()

    def _masks_changed(self) -> None:
        super()._masks_changed()
        self._order = torch.tensor(self.masked_tasks, dtype=torch.int64, device=self._device)

    def choose(self, scores: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the mask for weight scores, float ``(n_weights,)``: 1 at a layer's ``k`` largest ``|score|``, else 0.

        Override this and :meth:`straight_through` for another rule.

        Args:
            scores: ``(n_weights,)``.
            out: tensor to write the mask to; None: a new one.
        """
        marks = torch.empty_like(scores) if out is None else out
        parts = zip(scores.detach().split(self.sizes), marks.split(self.sizes), strict=True)
        for (part, marked), tensor in zip(parts, self.graph.layers.values(), strict=True):
            mark_largest(part, tensor.kept, marked)
        return marks

    def straight_through(self, of_mask: Tensor, scores: Tensor) -> Tensor:
        """Convert the mask's gradient to the scores' straight-through gradient, ``of_mask ⊙ sign(scores)``.

        The sign of 0 is -1 here; with sign 0, such a score would never change.

        Args:
            of_mask: gradient of a part of the mask, ``(n,)``; may be overwritten.
            scores: the scores of this part, ``(n,)``.
        """
        # |s| is a leaky ReLU of slope -1, whose derivative takes one pass instead of two (sign and product).
        return _leaky_relu_backward(of_mask, scores.detach(), -1.0, False, grad_input=of_mask)

    def fresh_parts(self) -> OwnModules | None:
        """Return a new task's copies of the backbone's norms and non-parameter tensors; None if there are neither."""
        return self._copies.make_copies()

    def parts_for(self, saved: Mapping[str, Tensor]) -> nn.Module | None:
        """Return modules that can load a task's tensors ``saved``: copies of the backbone's norms and buffers."""
        return self._copies.make_copies(saved)

    def _open(self, learned: nn.Parameter) -> ChosenWeights:
        weights = {name: self.backbone.get_parameter(name) for name in self.graph.layers}
        plain = all(tensor.dtype == torch.float32 for tensor in (learned, *weights.values()))
        ranks = plain and type(self).choose is SubnetModel.choose
        tops = [TopTracker(tensor.size, tensor.kept) for tensor in self.graph.layers.values() if ranks]
        return ChosenWeights(learned, weights, self.choose, self.straight_through, tops)

    def choose_weights(self) -> None:
        """Choose weights by the current scores; forward passes in training mode use the choice until the next call.

        ``weight ⊙ mask`` are leaf tensors, which accumulate gradients until the next call.
        """
        self._in_training.update()

    def pass_gradients(self) -> None:
        """Compute the gradients of weights and scores after a backward pass; see :class:`ChosenWeights`."""
        self._in_training.pass_gradients()

    def finish_task(self, keep_scores: bool = True, score_bits: int | None = None) -> None:
        """Finish the task in training: store its mask and, if ``keep_scores``, its weight scores.

        Args:
            keep_scores: whether to store the task's scores too, as start values of a later task's scores.
            score_bits: number of bits stored per score, including the mask's bit; None: uncompressed.
        """
        mask, scores = self._current_mask(), self._in_training.scores.detach()
        if keep_scores and score_bits is not None:
            scores = encode_scores(scores, mask, self.sizes, score_bits)
        task = self._store_mask(mask, scores if keep_scores else None)
        self._copies.drop_unchanged(self.task_parts(task))

    def _end_training(self) -> None:
        self._copies.restore()  # in case a forward pass was interrupted
        super()._end_training()

    def _dependent_tasks(self, tasks: Sequence[int]) -> list[int]:
        """Return the earliest trained of ``tasks`` and all tasks trained later, as far as their scores are stored."""
        order = self.masked_tasks
        first = min((order.index(task) for task in tasks if task in order), default=len(order))
        return [task for task in order[first:] if task in self._learned]

    def last_scores(self) -> Tensor | None:
        """Return a copy of the last trained task's weight scores, ``(n_weights,)``, or None if no scores are stored.

        After an unlearning, these are the scores of the last task trained before the first unlearned one.
        """
        task = next((task for task in reversed(self.masked_tasks) if task in self._learned), None)
        if task is None:
            return None
        kept = self._learned[task]
        if kept.dtype == torch.uint8:
            return decode_scores(kept, self.binary_mask(task), self.sizes)
        return kept.clone()

    def drop_scores(self, tasks: Sequence[int]) -> None:
        """Delete the stored weight scores of ``tasks``."""
        for task in set(self._learned.tasks).intersection(tasks):
            self._learned.drop(task)

    def _features(self, x: Tensor, task: int) -> Tensor:
        weights: Mapping[str, Tensor] = {}
        if task == self.current_task and self.training:
            weights = self._opened.leaves
        elif task == self.current_task or task in self._masks:
            weights = self._masked_weights(self.binary_mask(task))
        return self._run(x, weights, self.task_parts(task), learns=self.training and task not in self._masks)

    def masked_features(self, x: Tensor, mask: Tensor, parts: nn.Module | None = None) -> Tensor:
        """Return features ``(batch, features)``, computed with the weights in any mask ``(n_weights,)``."""
        return self._run(x, self._masked_weights(mask), parts, learns=False)

    def shared_state(self) -> list[str]:
        """Return the names of tensors that forward passes changed although tasks can't have their own copies."""
        return self._copies.changed_tensors()

    def _masked_weights(self, mask: Tensor) -> Mapping[str, Tensor]:
        weights = ((name, self.backbone.get_parameter(name), part) for name, part in self.by_layer(mask).items())
        # Adding +0 turns -0 into +0 outside the mask, so that features do not depend on the sign of unused weights.
        return {name: (weight * part.to(weight.dtype).view_as(weight)).add_(0.0) for name, weight, part in weights}

    def _run(self, x: Tensor, weights: Mapping[str, Tensor], parts: Any, *, learns: bool) -> Tensor:
        """Return the backbone's features, computed with ``weights`` and a task's norms and other tensors ``parts``."""
        others: list[tuple[Location, Any]] = [
            ((module._parameters, attribute), weight)
            for name, weight in weights.items()
            for module, attribute in self._sites[name]
        ]
        with self._copies.substitute(parts, others, learns=learns):
            return run_backbone(self.backbone, x)

    def mask_bits(self) -> float | None:
        """Return the compressed size of all masks together, in bits per weight and task; None without masks."""
        if not self.masked_tasks:
            return None
        code = encode_masks([self.binary_mask(task) for task in self.masked_tasks])
        return 8 * len(code) / (self.n_weights * len(self.masked_tasks))

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        super()._match_tasks(state)
        if self.current_task is None and "_order" in state:
            self._masks.reorder(state["_order"].tolist())
            self._masks_changed()
