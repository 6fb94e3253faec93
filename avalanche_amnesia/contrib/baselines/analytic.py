"""Model of a frozen network and ridge regression from sums of whole numbers: any sample can be subtracted exactly."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from math import frexp, sqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError
from avalanche_amnesia.models.multi_head import NO_CLASS, MultiHeadModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import autocast
from avalanche_amnesia.unit_graph.backbones import as_batch, run_on
from avalanche_amnesia.unit_graph.findings import ModelError

_RIDGES = tuple(10.0**power for power in range(-1, 7))
"""Ridges that generalised cross-validation compares."""


@lru_cache(maxsize=4)
def _lower(width: int, device: torch.device) -> Tensor:
    """Return the positions, in a flattened square matrix, of its lower triangle by rows."""
    row, column = torch.tril_indices(width, width, device=device)
    return row * width + column


class TaskSums(nn.Module):
    """Sums over one task's samples: whole numbers in float64, so the samples' order does not matter.

    Attributes: ``φ`` is that of :class:`AnalyticModel`.
        gram: lower triangle of ``Σ φφᵀ``, row by row, float64 ``(D (D + 1) / 2,)``.
        classes: labels of the classes with samples, in order, int64 ``(C,)``.
        counts: number of samples of each class, int64 ``(C,)``.
        sums: sum of ``φ`` of each class, float64 ``(C, D)``.
        hashes: 8 bytes of the BLAKE3 hash of each sample's ``φ`` and label, in the order of learning, int64 ``(n,)``.
        originals: the user's class of each label in the task, int64 ``(n_classes,)``.
        units: the model's ``step``, ``bits`` and ``batch``, float64 ``(3,)``.
        seen: ``φ`` of the current training mini-batch, else None.
    """

    gram: Tensor
    classes: Tensor
    counts: Tensor
    sums: Tensor
    hashes: Tensor
    originals: Tensor
    units: Tensor

    def __init__(self, width: int, n_classes: int, units: Sequence[float], device: torch.device) -> None:
        super().__init__()
        self.out_features = n_classes
        real, whole = torch.zeros(0, dtype=torch.float64, device=device), torch.arange(0, device=device)
        self.register_buffer("gram", real.new_zeros(width * (width + 1) // 2))
        self.register_buffer("sums", real.new_zeros((0, width)))
        for name in ("classes", "counts", "hashes"):
            self.register_buffer(name, whole.clone())
        self.register_buffer("originals", torch.arange(n_classes, device=device))
        self.register_buffer("units", real.new_tensor(units))
        self.seen: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Store the first mini-batch since the last :meth:`add`, which adds it; return zeros as logits."""
        self.seen = features if self.seen is None else self.seen
        return features.new_zeros((len(features), self.out_features))

    @torch.inference_mode(False)
    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add samples, ``φ`` ``(n, D)`` and labels ``(n,)``."""
        self.hashes, self.seen = torch.cat([self.hashes, hashes_of(features, labels)]), None
        self._change(features, labels, 1)

    @torch.inference_mode(False)
    def subtract(self, rows: Tensor, features: Tensor, labels: Tensor) -> bool:
        """Subtract the samples at places ``rows`` of :attr:`hashes`; return False if they have other hashes there."""
        if not torch.equal(self.hashes[rows], hashes_of(features, labels)):
            return False
        kept = torch.ones_like(self.hashes, dtype=torch.bool)
        kept[rows] = False
        self.hashes = self.hashes[kept]
        self._change(features, labels, -1)
        return True

    def _change(self, features: Tensor, labels: Tensor, sign: int) -> None:
        classes = torch.cat([self.classes, labels]).unique()
        counts = self.counts.new_zeros(len(classes))
        sums = self.sums.new_zeros((len(classes), features.shape[1]))
        held, given = torch.searchsorted(classes, self.classes), torch.searchsorted(classes, labels)
        counts[held], sums[held] = self.counts, self.sums
        counts += sign * torch.bincount(given, minlength=len(classes))
        sums += sign * (nn.functional.one_hot(given, len(classes)).to(features).T @ features)
        self.classes, self.counts, self.sums = (part[counts > 0] for part in (classes, counts, sums))
        products = (features.T @ features).view(-1)[_lower(features.shape[1], features.device)]
        self.gram = torch.add(self.gram, products, alpha=sign)


def hashes_of(features: Tensor, labels: Tensor) -> Tensor:
    """Return 8 bytes of the BLAKE3 hash of each sample's ``φ`` and label, int64 ``(n,)``."""
    rows = torch.cat([features.to(torch.int32), labels[:, None].to(torch.int32)], 1).cpu().numpy()
    made = [int.from_bytes(blake3(row.tobytes()).digest(8), "little", signed=True) for row in rows]
    return torch.tensor(made, dtype=torch.int64, device=features.device)


_SOLVED: WeakKeyDictionary[nn.Module, dict[int | None, tuple[Any, nn.Linear]]] = WeakKeyDictionary()
"""Model → its heads, each with the versions of the sums it was computed from; outside of the model: no state of it."""


class AnalyticModel(MultiHeadModel):
    """Frozen network with a ridge regression head that is computed from sums of whole numbers.

    ``z`` is the layer norm of a sample's features. ``u`` is ``ReLU(z R)`` with a random projection ``R``, or else
    ``z``. ``φ`` is ``round(u / step)``, then the constant ``1 / step``: D whole numbers. The state is ``Σ φφᵀ`` and
    ``Σ φyᵀ`` (one-hot labels ``y``) of each task. Whole numbers below 2⁵³ are exact in float64, so subtracting a sample
    undoes its addition exactly. Head: ``W = (Σ φφᵀ + λ / step² I)⁻¹ Σ φyᵀ``.

    ``model(x)`` adds up the sums of all tasks and scores all classes, numbered by the experiences' ``original_classes``
    if they have them. ``model(x, task_labels)`` uses each task's own regression and labels. The given network is frozen
    and set to evaluation mode. ``φ`` must not depend on the mini-batch, so the network always runs on exactly
    ``batch`` samples; copies of the last sample fill up.

    Args:
        backbone: maps ``(N, …)`` to features ``(N, n_features)``; None: features are the flattened inputs.
        n_features: width of the features; by default as of :class:`MultiHeadModel`.
        projection: number of random ReLU features; 0: no projection, ``u`` is ``z``.
        ridge: λ > 0, in the scale of ``Σ uuᵀ``; None: chosen by generalised cross-validation from the sums, at the cost
            of an eigendecomposition.
        step: rounding step of ``u``, a power of 2, at most 1.
        bits: ``round(u / step)`` is limited to ``[-2^bits, 2^bits - 1]``; 1 to 24.
        batch: samples per forward of the network, at least 1.
        seed: seed of the projection.

    Raises:
        ModelError: if the width of the features is unknown, or the module can't be used as a backbone.
        ValueError: for an invalid value.
        TaskError: in a forward, for features that are not finite or of another shape.

    References: Zhuang et al., ACIL, NeurIPS 2022; McDonnell et al., RanPAC, NeurIPS 2023 (the projection).
    """

    state_per_task = True  # no other state ever changes
    isolates = True
    subtracts = True  # a request for samples calls ``subtract`` instead of a training
    _head_entry = "gram"
    hashes = staticmethod(hashes_of)

    def __init__(
        self,
        backbone: nn.Module | None,
        n_features: int | None = None,
        *,
        projection: int = 0,
        ridge: float | None = None,
        step: float = 2.0**-5,
        bits: int = 10,
        batch: int = 8,
        seed: int = 0,
    ) -> None:
        checks.within("step", step, "(0,1]")
        checks.within("ridge", 1.0 if ridge is None else ridge, "(0,inf)")
        if frexp(step)[0] != 0.5:
            raise ValueError(f"step must be a power of 2, such as 2**-5, got {step!r}: dividing by it is then exact")
        checks.within("bits", bits, "[1,24]")
        super().__init__(nn.Flatten() if backbone is None else backbone, n_features)
        self.ridge, self.step, self.bits = ridge, step, checks.whole_number("bits", bits)
        self.batch = checks.whole_number("batch", batch)
        self.width = (checks.whole_number("projection", projection, 0) or self.n_features) + 1
        generator = torch.Generator().manual_seed(derive_seed(seed, "projection"))
        drawn = torch.randn((self.n_features if projection else 0, projection), generator=generator)
        device = next((p.device for p in self.backbone.parameters()), drawn.device)
        self.projection = nn.Parameter((drawn / sqrt(self.n_features)).to(device), requires_grad=False)
        self.backbone.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "AnalyticModel":
        """Set the mode of the model; the frozen network stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    @property
    def _device(self) -> torch.device:
        return self.projection.device

    # Features -------------------------------------------------------------------------------------------------

    def features(self, x: Any, task: int | Tensor = 0) -> Tensor:
        """Return ``φ`` of a batch: whole numbers, float64 ``(N, D)``; the last column is ``1 / step``.

        Raises:
            TaskError: for features that are not finite.
        """
        u = self._real_features(as_batch(x))
        if not bool(u.isfinite().all()):
            raise TaskError("features of these samples are NaN or infinite: mend the samples, or leave them out")
        phi = (u / self.step).round().clamp(-(2.0**self.bits), 2.0**self.bits - 1).double()
        return torch.cat([phi, phi.new_full((len(phi), 1), 1 / self.step)], 1)

    @torch.no_grad()
    def _real_features(self, x: Any) -> Tensor:
        self.backbone.eval()  # its owner may have set it to training mode
        made = [self.projection.new_zeros((0, self.width - 1))]
        with autocast(()):
            for start in range(0, len(x), self.batch):
                rows = torch.arange(start, start + self.batch, device=x.device)
                part = x[rows.clamp(max=len(x) - 1)]  # padded with the last sample
                if isinstance(part, Tensor):  # kernels for another memory format round differently
                    part = part.contiguous()
                z = run_on(self.backbone, part)
                shape = tuple(z.flatten(1).shape) if isinstance(z, Tensor) else type(z).__name__
                if shape != (self.batch, self.n_features):
                    raise TaskError(f"the network returns {shape}, and must return {(self.batch, self.n_features)}")
                z = nn.functional.layer_norm(z.float().flatten(1), (self.n_features,))
                made.append((z @ self.projection).relu() if self.projection.numel() else z)
        return torch.cat(made)[: len(x)]

    def check_network(self, x: Any) -> None:
        """Raise TaskError if a forward changes the network, or a sample's features depend on its mini-batch."""
        buffers = {name: buffer.clone() for name, buffer in self.backbone.named_buffers()}
        first = x[torch.arange(self.batch, device=x.device).clamp(max=len(x) - 1)]
        there, moved = self._real_features(first), torch.arange(self.batch, device=x.device).roll(1)
        changed = [name for name, buffer in self.backbone.named_buffers() if not torch.equal(buffer, buffers[name])]
        if changed:
            raise TaskError(f"the network changes its buffers {changed} in a forward, and must stay as it is")
        same = torch.equal(self._real_features(first[moved]), there[moved])
        alone = first[torch.zeros_like(moved)]  # copies of one sample as its neighbours
        if isinstance(alone, Tensor):
            alone[1:] = 0  # the mini-batch may have only one sample
        same &= torch.equal(self._real_features(alone)[0], there[0])
        if not same:
            raise TaskError(
                f"the features of a sample depend on its place in a mini-batch of {self.batch} or on the other samples "
                "there, or are random: it couldn't be subtracted later. AnalyticModel(…, batch=1) runs each by itself"
            )

    # Sums of tasks --------------------------------------------------------------------------------------------

    @property
    def _units(self) -> tuple[float, int, int]:
        return self.step, self.bits, self.batch

    def add_head(self, task: int, n_classes: int) -> None:
        """Create the empty sums of a task."""
        self.store_task(task, TaskSums(self.width, n_classes, self._units, self._device))

    def adaptation(self, experience: Any) -> None:
        """Create empty sums for an experience's new tasks; store the user's class of each label."""
        before = self.tasks
        super().adaptation(experience)
        for task in set(self.tasks).difference(before):
            sums, named = self.heads[task], getattr(experience, "original_classes", ())
            sums.originals[: len(named)] = torch.as_tensor(list(named), device=self._device)

    def head_like(self, saved: Mapping[str, Tensor]) -> nn.Module:
        """Return sums into which the tensors ``saved`` can be loaded."""
        made = TaskSums(self.width, len(saved["originals"]), self._units, self._device)
        for name, value in saved.items():
            setattr(made, name, torch.zeros_like(value, device=self._device))
        return made

    def learn(self, task: int, labels: Tensor) -> None:
        """Add the mini-batch of the last ``model(x, task)`` in training to the sums of ``task``.

        Raises:
            TaskError: if a sum could exceed 2⁵³, above which float64 rounds; if ``step``, ``bits`` or ``batch`` differ
                from another task's; if labels are negative, or not one per sample.
        """
        sums, parts = self.heads[task], [self.heads[each] for each in self.tasks]
        n, largest = sum(len(part.hashes) for part in parts) + len(labels), max(2**self.bits, 1 / self.step) ** 2
        fault = ""
        if n * largest > 2**53:
            fault = (
                f"sums of {n} samples with bits={self.bits} and step={self.step} may exceed 2**53, and are not exact "
                f"then: at most {int(2**53 / largest)} samples fit; take fewer bits"
            )
        elif (units := parts[0].units.tolist()) != [*self._units]:
            fault = f"(step, bits, batch) of the model are {self._units}, and were {units} for task {self.tasks[0]}"
        elif sums.seen is None or len(sums.seen) != len(labels) or int(labels.min()) < 0:
            fault = "labels must be at least 0, one per sample of the task: did a plugin change the mini-batch?"
        if fault:
            raise TaskError(fault)
        _SOLVED.pop(self, None)
        sums.add(sums.seen, labels)

    def subtract(self, task: int, rows: Tensor, features: Tensor, labels: Tensor) -> bool:
        """Subtract samples from a finished task's sums; see :meth:`TaskSums.subtract`."""
        new = copy(self.heads[task])
        new._buffers = dict(new._buffers)  # they are replaced
        if not new.subtract(rows, features, labels):
            return False
        _SOLVED.pop(self, None)
        self.store_task(task, new)
        self.heads.finish(task)
        return True

    def close_classes(self, task: int, classes: Sequence[int]) -> None:
        """Do nothing: a class without samples has no sums."""

    def remove_task(self, task: int) -> None:
        """Remove the sums of ``task``, and all heads computed with them."""
        _SOLVED.pop(self, None)
        super().remove_task(task)

    # Heads ----------------------------------------------------------------------------------------------------

    def head(self, task: int) -> nn.Module:
        """Return the regression of a task; for the task in training its sums, whose logits are zeros.

        Raises:
            UnknownTaskError: if the task was never trained, or was unlearned.
        """
        found = super().head(task)
        in_training = self.training and task in self.heads.unfinished
        return found if in_training or not isinstance(found, TaskSums) else self._solved(task, [found])

    def forward(self, x: Any, task_labels: int | Tensor | None = None) -> Tensor:
        """Return the logits of a batch.

        Args:
            x: ``(batch, …)``; or a mapping of such tensors.
            task_labels: one label, or one per sample ``(batch,)``; None: all classes of all tasks are compared, by
                their numbers in the user's data (``original_classes`` of the experiences, if they have them).

        Returns:
            ``(batch, largest class + 1)``; ``-1000`` for classes without samples.

        Raises:
            UnknownTaskError: for a task without sums.
            ValueError: without ``task_labels``, if there is no task.
        """
        if task_labels is not None:
            return super().forward(x, task_labels)
        if not self.tasks:
            raise ValueError("the model has no task: none was trained, or all were unlearned")
        joint = self._solved(None, [self.heads[task] for task in self.tasks])
        return joint(self.features(x))

    def _solved(self, task: int | None, parts: Sequence[TaskSums]) -> nn.Linear:
        """Return the regression on the sums ``parts``, computed again if they have changed."""
        buffers = [(id(buffer), buffer._version) for part in parts for buffer in part.buffers()]
        known, versions = _SOLVED.setdefault(self, {}), (self.ridge, self._units, buffers)
        if task not in known or known[task][0] != versions:
            units = {tuple(part.units.tolist()) for part in parts}
            if units != {self._units}:
                raise ModelError(f"(step, bits, batch) are {self._units} now, and {sorted(units)} in the sums")
            known[task] = versions, self._regression(parts, task is None)
        return known[task][1]

    def _regression(self, parts: Sequence[TaskSums], joint: bool) -> nn.Linear:
        """Return the regression on the sums ``parts``, by classes of the user's data if ``joint``, else by labels."""
        labels = [part.originals[part.classes] if joint else part.classes for part in parts]
        classes = torch.cat(labels).unique()
        sums = parts[0].sums.new_zeros((len(classes), self.width))
        for part, named in zip(parts, labels, strict=True):
            sums.index_add_(0, torch.searchsorted(classes, named), part.sums)
        gram = sums.new_zeros((self.width, self.width))
        gram.view(-1)[_lower(self.width, gram.device)] = sum(part.gram for part in parts)
        n, unit = sum(len(part.hashes) for part in parts), self.step**-2
        if self.ridge is not None:
            gram.diagonal().add_(self.ridge * unit)
            factor, failed_at = torch.linalg.cholesky_ex(gram)
            if bool(failed_at):
                raise ModelError(f"ridge={self.ridge} is too small for these features: take a larger one, or None")
            weight = torch.cholesky_solve(sums.T, factor)
        else:
            values, vectors = torch.linalg.eigh(gram)  # of the lower triangle
            weight = vectors @ _best_ridge(values.clamp(min=0), vectors.T @ sums.T, n, [r * unit for r in _RIDGES])[1]
        out = int(max(part.originals.max() for part in parts)) + 1 if joint else parts[0].out_features
        head = nn.utils.skip_init(nn.Linear, self.width, out, device=gram.device, dtype=gram.dtype)
        head.requires_grad_(False)
        head.weight.zero_()[classes] = weight.T
        head.bias.fill_(NO_CLASS)[classes] = 0.0
        return head


def _best_ridge(values: Tensor, turned: Tensor, n: int, ridges: Iterable[float]) -> tuple[float, Tensor]:
    """Return the ridge with the least generalised cross-validation, and ``(Λ + ridge)⁻¹ turned``.

    ``n |y - ŷ|² / (n - tr H)²`` with ``values`` Λ and ``turned = Vᵀ C`` of ``G = V Λ Vᵀ``; ``|y|² = n`` for one-hot y.
    """
    found = []
    for ridge in ridges:
        shrunk = turned / (values + ridge)[:, None]
        error = n - 2 * (turned * shrunk).sum() + (values[:, None] * shrunk.square()).sum()
        freedom = n - (values / (values + ridge)).sum()
        found.append((float(error.clamp(min=0) / freedom.square()), ridge, shrunk))
    return min(found, key=lambda one: one[0])[1:]
