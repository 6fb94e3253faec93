"""Model of a frozen network and ridge regression from sums of whole numbers: any sample can be subtracted exactly."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from math import sqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.models.multi_head import NO_CLASS, MultiHeadModel
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import autocast
from avalanche_amnesia.unit_graph.backbones import run_on
from avalanche_amnesia.unit_graph.findings import ModelError

_RIDGES = tuple(10.0**power for power in range(-1, 7))
"""Ridges that generalised cross-validation compares."""


@lru_cache(maxsize=4)
def _lower(width: int, device: torch.device) -> Tensor:
    """Return the positions, in a flattened square matrix, of its lower triangle by rows."""
    row, column = torch.tril_indices(width, width, device=device)
    return row * width + column


class TaskSums(nn.Module):
    """Sums over the samples of one task: whole numbers in float64, which do not depend on the samples' order.

    Attributes:
        gram: lower triangle, by rows, of the sum of ``φφᵀ``, ``(M (M + 1) / 2,)``.
        classes: labels of the classes with samples, in order, int64 ``(C,)``.
        counts: number of samples of each class, int64 ``(C,)``.
        sums: sum of ``φ`` of each class, ``(C, M)``.
        hashes: 8 bytes of the BLAKE3 hash of each sample's ``φ`` and label, sorted, int64 ``(n,)``.
        originals: label in the task → class in the user's data, int64 ``(n_classes,)``.
    """

    gram: Tensor
    classes: Tensor
    counts: Tensor
    sums: Tensor
    hashes: Tensor
    originals: Tensor

    def __init__(self, width: int, n_classes: int, device: torch.device) -> None:
        super().__init__()
        self.out_features, self.width = n_classes, width
        real, whole = torch.zeros(0, dtype=torch.float64, device=device), torch.arange(0, device=device)
        self.register_buffer("gram", real.new_zeros(width * (width + 1) // 2))
        self.register_buffer("sums", real.new_zeros((0, width)))
        for name in ("classes", "counts", "hashes"):
            self.register_buffer(name, whole.clone())
        self.register_buffer("originals", torch.arange(n_classes, device=device))
        self.seen: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Store the features of a mini-batch in training, to be added; return zeros as logits."""
        self.seen = features
        return features.new_zeros((len(features), self.out_features), dtype=torch.float32)

    def add(self, features: Tensor, labels: Tensor, sign: int = 1) -> bool:
        """Add samples, ``φ`` ``(n, M)`` and labels ``(n,)``, or subtract them with ``sign=-1``; buffers are replaced.

        Return False, and change nothing, if a sample to subtract is not in the sums.
        """
        self.seen, hashes = None, hashes_of(features, labels)
        left = torch.cat([self.hashes, hashes]).sort().values if sign > 0 else _without(self.hashes, hashes)
        if left is None:
            return False
        self.hashes = left
        classes = torch.cat([self.classes, labels]).unique()
        counts = self.counts.new_zeros(len(classes))
        sums = self.sums.new_zeros((len(classes), self.width))
        held, given = torch.searchsorted(classes, self.classes), torch.searchsorted(classes, labels)
        counts[held], sums[held] = self.counts, self.sums
        counts += sign * torch.bincount(given, minlength=len(classes))
        sums += sign * (nn.functional.one_hot(given, len(classes)).to(features).T @ features)
        self.classes, self.counts, self.sums = (part[counts > 0] for part in (classes, counts, sums))
        self.gram = self.gram + sign * (features.T @ features).view(-1)[_lower(self.width, features.device)]
        return True


def hashes_of(features: Tensor, labels: Tensor) -> Tensor:
    """Return 8 bytes of the BLAKE3 hash of each sample's ``φ`` and label, int64 ``(n,)``."""
    rows = torch.cat([features.to(torch.int32), labels[:, None].to(torch.int32)], 1).cpu().numpy()
    made = [int.from_bytes(blake3(row.tobytes()).digest(8), "little", signed=True) for row in rows]
    return torch.tensor(made, dtype=torch.int64, device=features.device)


def _without(held: Tensor, hashes: Tensor) -> Tensor | None:
    """Return the sorted ``held`` without one occurrence of each of ``hashes``; None if one of them is not there."""
    wanted = hashes.sort().values
    # The k-th of equal hashes takes the k-th of its occurrences.
    place = torch.searchsorted(held, wanted) + torch.arange(len(wanted), device=held.device)
    place -= torch.searchsorted(wanted, wanted)
    if not bool((place < len(held)).all()) or not torch.equal(held[place], wanted):
        return None
    left = torch.ones_like(held, dtype=torch.bool)
    left[place] = False
    return held[left]


_SOLVED: WeakKeyDictionary[nn.Module, dict[int | None, tuple[Any, nn.Linear]]] = WeakKeyDictionary()
"""Model → its heads, each with the versions of the sums it was computed from; outside of the model: no state of it."""


class AnalyticModel(MultiHeadModel):
    """Frozen network with ridge regression on its features, computed from sums of whole numbers.

    A sample's ``z`` is the layer norm of its features, ``u = ReLU(z R)`` with a random projection ``R`` (or ``z``), and
    ``φ = round(u / step)``, limited to ``bits`` bits, with a constant. The state is ``G = Σ φφᵀ`` and ``C = Σ φyᵀ`` of
    each task: sums of whole numbers below 2⁵³, which float64 holds exactly. So adding and subtracting samples commute,
    bit for bit. Head: ``W = (G + λI)⁻¹ C``, a function of the sums.

    ``model(x)`` compares all classes of all tasks (their sums are added), numbered as in the data before tasks gave
    them labels of their own; ``model(x, task_labels)`` uses each task's own regression, and its labels. The network
    is set to evaluation mode, and its parameters are frozen. ``φ`` must not depend on a sample's mini-batch, so the
    network runs on ``batch`` samples at a time, the last ones padded; the first mini-batch of each task is checked.

    Args:
        backbone: maps ``(batch, …)`` to features ``(batch, n_features)``; None: the inputs themselves, flattened.
        n_features: width of the features; by default as of :class:`MultiHeadModel`.
        projection: number M of random ReLU features, drawn from ``seed``; 0: the network's features.
        ridge: λ, above 0, in units of ``u``; None: chosen by generalised cross-validation from the sums, which takes
            an eigendecomposition.
        step: size of a unit of ``φ`` in ``u``, a power of 2.
        bits: ``φ`` lies in ``[-2^bits, 2^bits - 1]``; 1 to 24.
        batch: number of samples that run together, at least 1.
        seed: seed of the projection.

    Raises:
        ModelError: if the width of the features is unknown, or the module can't be used as a backbone. In a training:
            for features that are not finite or depend on other samples, and before a sum can reach 2⁵³.
        ValueError: for an invalid value.

    References: Zhuang et al., ACIL, NeurIPS 2022; McDonnell et al., RanPAC, NeurIPS 2023 (the projection).
    """

    state_per_task = True  # no other state ever changes
    isolates = True
    _head_entry = "gram"

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
        checks.whole_number("projection", projection, 0)
        checks.above("step", step, 0)
        if torch.tensor(step).frexp().mantissa != 0.5:
            raise ValueError(f"step must be a power of 2, such as 2**-5, got {step!r}: dividing by it is then exact")
        if ridge is not None:
            checks.above("ridge", ridge, 0)
        super().__init__(nn.Flatten() if backbone is None else backbone, n_features)
        self.ridge, self.step, self.bits = ridge, step, checks.whole_number("bits", bits)
        checks.within("bits", bits, "[1,24]")
        self.batch, self.width = checks.whole_number("batch", batch), (projection or self.n_features) + 1
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
        """Return ``φ`` of a batch, whole numbers in float64 ``(batch, M + 1)``; the last is the constant ``1 / step``.

        Raises:
            ModelError: for features that are not finite.
        """
        u = self._real_features(x)
        if not bool(u.isfinite().all()):
            raise ModelError("features of these samples are NaN or infinite: mend the samples, or leave them out")
        phi = (u / self.step).round().clamp(-(2.0**self.bits), 2.0**self.bits - 1).double()
        return torch.cat([phi, phi.new_full((len(phi), 1), 1 / self.step)], 1)

    @torch.no_grad()
    def _real_features(self, x: Any) -> Tensor:
        made = []
        with autocast(()):
            for start in range(0, len(x), self.batch):
                rows = torch.arange(start, start + self.batch, device=x.device)
                part = x[rows.clamp(max=len(x) - 1)]  # padded with the last sample
                if isinstance(part, Tensor):  # kernels for another memory format round differently
                    part = part.contiguous()
                z = run_on(self.backbone, part).float().flatten(1)
                z = nn.functional.layer_norm(z, z.shape[1:])
                made.append((z @ self.projection).relu() if self.projection.numel() else z)
        return torch.cat(made)[: len(x)] if made else self.projection.new_zeros((0, self.width - 1))

    def check_neighbours(self, x: Any) -> None:
        """Raise ModelError if the features of a sample depend on its place in a mini-batch, or on other samples."""
        first = x[torch.arange(min(self.batch, len(x)), device=x.device)]
        alone = self._real_features(first[torch.tensor([len(first) - 1], device=x.device)])
        if not torch.equal(alone[0], self._real_features(first)[-1]):
            raise ModelError(
                f"the features of a sample depend on the other samples of its mini-batch (batch={self.batch}), so that "
                f"it can't be subtracted later: AnalyticModel(…, batch=1) runs each by itself"
            )

    # Sums of tasks --------------------------------------------------------------------------------------------

    def add_head(self, task: int, n_classes: int) -> None:
        """Create the empty sums of a task."""
        self.store_task(task, TaskSums(self.width, n_classes, self._device))

    def adaptation(self, experience: Any) -> None:
        """Create the sums of an experience's new tasks; store which class of the user's data each label names."""
        before = self.tasks
        super().adaptation(experience)
        for task in set(self.tasks).difference(before):
            sums, named = self.heads[task], getattr(experience, "original_classes", ())
            sums.originals[: len(named)] = torch.as_tensor(list(named), device=self._device)

    def head_like(self, saved: Mapping[str, Tensor]) -> nn.Module:
        """Return sums into which the tensors ``saved`` can be loaded."""
        made = TaskSums(self.width, 0, self._device)
        for name, value in saved.items():
            setattr(made, name, torch.zeros_like(value, device=self._device))
        return made

    def learn(self, task: int, labels: Tensor) -> None:
        """Add the mini-batch that ``model(x, task)`` last ran on to the sums of ``task``, the one in training.

        Raises:
            ModelError: if a sum could reach 2⁵³ then, above which float64 rounds.
        """
        sums = self.heads[task]
        n = sum(len(self.heads[t].hashes) for t in self.tasks) + len(labels)
        largest = max(2**self.bits, 1 / self.step) ** 2
        if n * largest >= 2**53:
            raise ModelError(
                f"sums of {n} samples with bits={self.bits} and step={self.step} may reach 2**53, above which they are "
                f"not exact: at most {int(2**53 / largest)} samples fit; take fewer bits"
            )
        sums.add(sums.seen, labels)

    def hashes(self, features: Tensor, labels: Tensor) -> list[int]:
        """Return the hash of each sample's ``φ`` and label."""
        return hashes_of(features, labels).tolist()

    def count(self, task: int, hashed: int) -> int:
        """Return the number of samples with a hash in the sums of ``task``."""
        return int((self.heads[task].hashes == hashed).sum())

    def subtract(self, task: int, features: Tensor, labels: Tensor) -> bool:
        """Subtract samples, ``φ`` and labels, from a finished task's sums; return False if one is not there."""
        new = copy(self.heads[task])
        new._buffers = dict(new._buffers)  # ``add`` replaces them
        if not new.add(features, labels, sign=-1):
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
        if not isinstance(found, TaskSums) or (self.training and task in self.heads.unfinished):
            return found
        return self._solved(task, [found])

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
        versions = self.ridge, [(id(buffer), buffer._version) for part in parts for buffer in part.buffers()]
        known = _SOLVED.setdefault(self, {})
        if task not in known or known[task][0] != versions:
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
            weight = torch.cholesky_solve(sums.T, torch.linalg.cholesky(gram))
        else:
            values, vectors = torch.linalg.eigh(gram)  # of the lower triangle
            weight = vectors @ _best_ridge(values.clamp(min=0), vectors.T @ sums.T, n, [r * unit for r in _RIDGES])[1]
        head = nn.utils.skip_init(nn.Linear, self.width, int(classes.max()) + 1, device=gram.device, dtype=gram.dtype)
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
    _, ridge, shrunk = min(found, key=lambda one: one[0])
    return ridge, shrunk
