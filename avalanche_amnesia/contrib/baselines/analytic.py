"""Model of a frozen network and a ridge regression on integer sums, so any sample can be subtracted exactly."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from math import sqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, attribute_of
from avalanche_amnesia.models.multi_head import NO_CLASS, MultiHeadModel, NoHead, n_classes
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.strategy import autocast
from avalanche_amnesia.unit_graph.backbones import as_batch, run_backbone
from avalanche_amnesia.unit_graph.findings import ModelError

_AT_ONCE = 2**20  # samples: products of 15 bits, added up, stay below 2**53, where float64 is exact
_RIDGES = [10.0**power for power in range(-1, 7)]  # compared by generalised cross-validation


@lru_cache(maxsize=4)
def _lower(width: int, device: torch.device) -> Tensor:
    """Return the indices of the lower triangle, row by row, in a flattened square matrix."""
    row, column = torch.tril_indices(width, width, device=device)
    return row * width + column


class TaskSums(NoHead):
    """Head of a task, stored as integer sums ``Σ φφᵀ`` and ``Σ φyᵀ``, from which the model solves a ridge regression.

    Attributes: int64 if not stated; ``φ`` is a sample's vector of D whole numbers, see :class:`AnalyticModel`.
        gram: lower triangle of ``Σ φφᵀ``, row by row, ``(D (D + 1) / 2,)``, int32 if all its entries fit.
        classes, sums: labels of the classes with samples, in order, ``(C,)``, and the sum of ``φ`` of each, ``(C, D)``.
        hashes: 8 bytes of the BLAKE3 hash of each sample's ``φ`` and label, in the order of learning, ``(n,)``.
        kept: each sample's ``φ`` and label, int16 ``(n, D + 1)``, if the model keeps features; else ``(n, 0)``.
        originals: the user's class of each label in the task, ``(n_classes,)``.
        seen: ``φ`` of the current training mini-batch, else None.
    """

    gram: Tensor
    classes: Tensor
    sums: Tensor
    hashes: Tensor
    kept: Tensor
    originals: Tensor

    def __init__(self, width: int, n_classes: int, *, keep: bool, device: torch.device) -> None:
        super().__init__(n_classes)
        self.seen: Tensor | None = None
        originals = torch.arange(n_classes, device=device)
        self.register_buffer("gram", originals.new_zeros(width * (width + 1) // 2, dtype=torch.int32))
        self.register_buffer("classes", originals.new_zeros(0))
        self.register_buffer("sums", originals.new_zeros((0, width)))
        self.register_buffer("hashes", originals.new_zeros(0))
        self.register_buffer("kept", originals.new_zeros((0, width + 1 if keep else 0), dtype=torch.int16))
        self.register_buffer("originals", originals)

    def twin(self) -> "TaskSums":
        """Return a copy that shares all tensors; :meth:`change` replaces tensors, so the original keeps its values."""
        made = copy(self)
        made._buffers, made.seen = dict(self._buffers), None
        return made

    def forward(self, features: Tensor) -> Tensor:
        """Keep a training mini-batch's features, to be added to the sums; return zeros, as training needs no logits."""
        self.seen = features if self.seen is None else self.seen  # a plugin may call forward again
        return super().forward(features)

    @torch.inference_mode(False)
    def change(self, rows: Tensor, places: Tensor | None = None) -> None:
        """Add samples, or subtract them if their positions ``places`` are given; ``rows``: features and labels."""
        if places is None:
            self.hashes = torch.cat([self.hashes, self.hashes_of(rows)])
            self.kept = torch.cat([self.kept, rows[:, : self.kept.shape[1]]])
        else:
            left = ~torch.isin(torch.arange(len(self.hashes), device=places.device), places)
            self.hashes, self.kept = self.hashes[left], self.kept[left]
        sign, width, gram = 1 if places is None else -1, self.sums.shape[1], self.gram
        for part in rows[:, :-1].split(_AT_ONCE):
            phi = part.int() if len(part) == 1 else part.double()  # for one sample half the bytes
            square = phi.T * phi if len(part) == 1 else phi.T @ phi
            products = square.view(-1).index_select(0, _lower(width, phi.device))
            kind = torch.int32 if int(gram.max()) + int(products.max()) < 2**31 else torch.int64
            gram = torch.add(gram.to(kind), products.to(kind), alpha=sign)
        self.gram = gram.int() if gram.max() < 2**31 else gram  # the largest entry is one of the diagonal
        classes, of = torch.cat([self.classes, rows[:, -1]]).unique(return_inverse=True)
        terms = torch.cat([self.sums, sign * rows[:, :-1].long()])
        sums = terms.new_zeros((len(classes), width)).index_add_(0, of, terms)
        there = sums[:, -1] > 0  # the constant's
        self.classes, self.sums = classes[there], sums[there]

    @staticmethod
    def hashes_of(rows: Tensor) -> Tensor:
        """Hash each row of whole numbers with BLAKE3; return the first 8 bytes of each hash as int64 ``(n,)``."""
        made = [int.from_bytes(blake3(row.tobytes()).digest(8), "little", signed=True) for row in rows.cpu().numpy()]
        return torch.tensor(made, dtype=torch.int64, device=rows.device)


_SOLVED: WeakKeyDictionary[nn.Module, tuple[Any, nn.Linear, list[Tensor]]] = WeakKeyDictionary()
"""A task's sums, or the model → head, with versions and tensors of the sums it was computed from; no state."""
_TOTAL: WeakKeyDictionary[nn.Module, tuple[Tensor, dict[tuple[int, int], Tensor]]] = WeakKeyDictionary()
"""Model → sum of its tasks' ``gram``, and these by id and version."""


class AnalyticModel(MultiHeadModel):
    """Model of a frozen network and a ridge regression, from which any sample can be subtracted exactly.

    ``z`` is the layer norm of a sample's features. ``u`` is ``ReLU(z R)`` with a random projection ``R``, or else
    ``z``. ``φ`` is ``round(u / step)``, then the constant ``1 / step``: D whole numbers. A task's state is ``Σ φφᵀ``
    and ``Σ φyᵀ`` (one-hot labels ``y``). These sums are exact (int64: for 2³³ samples, and for more with fewer bits),
    so subtracting a sample undoes its addition. Head: ``W = (Σ φφᵀ + λ / step² I)⁻¹ Σ φyᵀ``.

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
        step: rounding step of ``u``, a power of 2, from 2⁻¹⁴ to 1.
        bits: ``round(u / step)`` is limited to ``[-2^bits, 2^bits - 1]``; 1 to 15.
        batch: samples per forward of the network, at least 1.
        keep_features: whether each task also keeps ``φ`` and label of every sample, ``2 (D + 1)`` bytes a sample, so
            that requests for samples and classes need no data.
        seed: seed of the projection.

    Raises:
        ModelError: if the width of the features is unknown, or the module can't be used as a backbone.
        ValueError: for an invalid value.
        TaskError: in a forward, for features that are not finite or of another shape.

    References: Zhuang et al., ACIL, NeurIPS 2022; McDonnell et al., RanPAC, NeurIPS 2023 (the projection).
    """

    state_per_task = True  # no other state ever changes
    isolates = True
    additive = True
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
        keep_features: bool = False,
        seed: int = 0,
    ) -> None:
        if step not in [2.0**-power for power in range(15)]:
            raise ValueError(f"step must be a power of 2 from 2**-14 to 1, such as 2**-5, got {step!r}")
        checks.within("ridge", 1.0 if ridge is None else ridge, "(0,inf)")
        checks.within("bits", bits, "[1,15]")
        super().__init__(nn.Flatten() if backbone is None else backbone, n_features)
        self.ridge = ridge
        self.width = (checks.whole_number("projection", projection, 0) or self.n_features) + 1
        generator = torch.Generator().manual_seed(derive_seed(seed, "projection"))
        drawn = torch.randn((self.n_features if projection else 0, projection), generator=generator)
        device = next((p.device for p in self.backbone.parameters()), drawn.device)
        self.projection = nn.Parameter((drawn / sqrt(self.n_features)).to(device), requires_grad=False)
        numbers = [int(1 / step), checks.whole_number("bits", bits), checks.whole_number("batch", batch), keep_features]
        # The sums depend on these numbers: a state has them, and a proof refuses a model with others.
        self.settings = nn.Parameter(torch.tensor(numbers, device=device), requires_grad=False)
        self.backbone.requires_grad_(False).eval()

    def features(self, x: Any, task: int | Tensor = 0) -> Tensor:
        """Return a batch's features as whole numbers in float64, ``(N, D)``; the last column is always ``1 / step``.

        Raises:
            TaskError: for features that are not finite.
        """
        scale, bits, batch, _ = self.settings.tolist()
        u = self._real_features(as_batch(x), batch)
        if bad := (~u.isfinite()).any(1).nonzero()[:, 0].tolist():
            raise TaskError(f"features of samples {bad[:10]} of the batch are NaN or infinite: mend or leave them out")
        phi = (u * scale).round().clamp(-(2**bits), 2**bits - 1).double()
        return nn.functional.pad(phi, (0, 1), value=scale)

    @torch.no_grad()
    def _real_features(self, x: Any, batch: int) -> Tensor:
        self.backbone.eval()  # also if its owner, or train(), has set it to training mode
        made = [self.projection.new_zeros((0, self.width - 1))]
        with autocast(()):
            for start in range(0, len(x), batch):
                rows = torch.arange(start, start + batch, device=x.device)
                part = x[rows.clamp(max=len(x) - 1)]  # padded with the last sample
                if isinstance(part, Tensor):  # kernels for another memory format round differently
                    part = part.contiguous()
                z = run_backbone(self.backbone, part)
                shape = tuple(z.flatten(1).shape) if isinstance(z, Tensor) else type(z).__name__
                if shape != (wanted := (batch, self.n_features)):
                    raise TaskError(f"the network returns {shape}, and must return {wanted}: mend it, or n_features")
                z = nn.functional.layer_norm(z.double().flatten(1), (self.n_features,)).float()
                made.append((z @ self.projection).relu() if self.projection.numel() else z)
        return torch.cat(made)[: len(x)]

    def fault_of_network(self, x: Any) -> str | None:
        """Return an error message if chance or other samples of a mini-batch change a sample's features, else None."""
        buffers, batch = [buffer.clone() for buffer in self.backbone.buffers()], int(self.settings[2])
        rows = torch.arange(batch, device=x.device)
        first = x[rows.clamp(max=len(x) - 1)]
        there = self._real_features(first, batch)
        if not all(map(torch.equal, buffers, self.backbone.buffers())):
            return "the network changes its buffers in a forward, and must stay as it is"
        alone = first[rows * 0]  # one sample; its neighbours become zeros
        if isinstance(alone, Tensor):
            alone[1:] = 0  # the mini-batch may have only one sample
        moved = self._real_features(first[rows.roll(1)], batch).roll(-1, 0)
        if torch.equal(moved, there) and torch.equal(self._real_features(alone, batch)[0], there[0]):
            return None
        return (
            f"the features of a sample depend on its place in a mini-batch of {batch} or on the other samples there, "
            "or are random: it couldn't be subtracted later. AnalyticModel(…, batch=1) runs each by itself"
        )

    def adaptation(self, experience: Any) -> None:
        """Prepare sums for the experience's task; TaskError if its labels are other classes than in an earlier part."""
        named = attribute_of(experience, "original_classes", ())
        label, largest = n_classes(experience) - 1, max(named, default=0)
        if label >= 2**15 or largest >= 2**20:  # a head would need as many rows
            raise TaskError(f"labels must be below 2^15, original_classes below 2^20, not {label}, {largest}: renumber")
        super().adaptation(experience)
        for task in map(int, experience.task_labels if self.training else ()):
            sums = self.heads[task].twin()
            before = sums.originals.tolist()
            names = [*named, *before[len(named) :]]
            sums.out_features = max(n_classes(experience), len(names))
            sums.originals = sums.originals.new_tensor([*names, *range(len(names), sums.out_features)])
            if any(names[label] != before[label] for label in sums.classes.tolist()):
                raise TaskError(f"task {task}: its labels are the classes {before} in earlier parts, and {names} here")
            self.store_task(task, sums)

    def new_head(self, n_classes: int) -> TaskSums:
        """Return a new task's empty sums, which its head will be computed from."""
        return TaskSums(self.width, n_classes, keep=bool(self.settings[3]), device=self._device)

    def head_for(self, saved: Mapping[str, Tensor]) -> TaskSums:
        """Return empty sums in the shapes of ``saved``, the tensors of a task's saved sums, to load these into."""
        made = self.new_head(len(saved["originals"]))
        for name, like in made.named_buffers():  # one row for each class, or for each sample
            dtype = saved[name].dtype if name == "gram" else like.dtype
            setattr(made, name, like.new_zeros((len(saved[name]), *like.shape[1:]), dtype=dtype))
        return made

    def _match_tasks(self, state: Mapping[str, Any]) -> None:
        """Replace all tasks' sums by new ones with the shapes and dtypes of ``state``, so that it can be loaded."""
        for task in self.tasks:
            self.remove_task(task)
        super()._match_tasks(state)
        for task in self.tasks:
            self.heads.finish(task)

    @staticmethod
    def rows(features: Tensor, labels: Tensor) -> Tensor:
        """Join features ``φ`` ``(n, D)`` and labels ``(n,)`` into one row per sample, int16 ``(n, D + 1)``."""
        return torch.cat([features, labels[:, None]], 1).short()

    def subtract(self, task: int, places: Tensor, rows: Tensor) -> None:
        """Subtract samples from a task's sums: their ``rows`` (features, labels), learned at positions ``places``."""
        new = self.heads[task].twin()
        new.change(rows, places)
        self.store_task(task, new)
        self.heads.finish(task)
        self._update_caches()

    def close_classes(self, task: int, classes: Sequence[int]) -> None:
        """Do nothing: the sums of a class vanish with its last sample, and then it is not predicted any more."""

    def remove_task(self, task: int) -> None:
        """Remove the sums of ``task`` and all heads computed with them, and subtract them from the cached total."""
        super().remove_task(task)
        self._update_caches()

    def _update_caches(self) -> None:
        """After a change of sums: delete the cached head for all tasks, and update the cached total of the sums."""
        _SOLVED.pop(self, None)
        if self in _TOTAL:
            self._total([self.heads[other] for other in self.tasks])

    def head(self, task: int) -> nn.Module:
        """Return a task's ridge regression as a linear layer; during the task's training its sums, a head of zeros."""
        found = super().head(task)
        in_training = self.training and task in self.heads.unfinished
        return found if in_training or not isinstance(found, TaskSums) else self._cached_head(found, [found])

    def forward(self, x: Any, task_labels: int | Tensor | None = None) -> Tensor:
        """Return the logits for each sample's task or, without ``task_labels``, for all classes of all tasks.

        All classes: ``(batch, largest class + 1)``, numbered as in the user's data; ``-1000`` if one has no samples.

        Raises:
            ValueError: without ``task_labels``, if there is no task.
        """
        if task_labels is not None:
            return super().forward(x, task_labels).float()  # losses with class weights need it
        if not self.tasks:
            raise ValueError("the model has no task: none was trained, or all were unlearned")
        return self._cached_head(self, [self.heads[task] for task in self.tasks])(self.features(x)).float()

    def _cached_head(self, key: nn.Module, parts: Sequence[TaskSums]) -> nn.Linear:
        """Return the regression on the sums ``parts`` as a linear layer, cached under ``key`` until a sum changes."""
        buffers = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
        versions = self.ridge, [(id(buffer), buffer._version) for buffer in buffers]
        if key not in _SOLVED or _SOLVED[key][0] != versions:
            _SOLVED[key] = versions, self._regression(parts, key is self), buffers  # no other object gets their ids
        return _SOLVED[key][1]

    @torch.inference_mode(False)
    def _total(self, parts: Sequence[TaskSums]) -> Tensor:
        """Return the sum of all tasks' ``gram`` matrices, int64; update the cached sum by the tasks changed since."""
        now = {(id(part.gram), part.gram._version): part.gram for part in parts}
        total, before = _TOTAL.pop(self, (self.settings, {}))
        if not before.keys() & now.keys() or any(key[1] != gram._version for key, gram in before.items()):
            total, before = self.settings.new_zeros(self.width * (self.width + 1) // 2), {}
        for key in before.keys() ^ now.keys():
            total.add_(now[key] if key in now else before[key], alpha=1 if key in now else -1)
        _TOTAL[self] = total, now
        return total

    def _regression(self, parts: Sequence[TaskSums], joint: bool) -> nn.Linear:
        """Compute the ridge regression on tasks' sums as a linear layer: for all their classes, or for one task."""
        named = torch.cat([part.originals[part.classes] if joint else part.classes for part in parts])
        classes, of = named.unique(return_inverse=True)
        sums = torch.cat([part.sums for part in parts])
        sums = sums.new_zeros((len(classes), self.width)).index_add_(0, of, sums).double()
        gram, lower = sums.new_zeros((self.width, self.width)), self._total(parts) if joint else parts[0].gram
        gram.view(-1).index_copy_(0, _lower(self.width, gram.device), lower.double())
        n, unit = sum(len(part.hashes) for part in parts), float(self.settings[0]) ** 2
        ridge = self.ridge or _best_ridge(gram, sums, n, unit)
        gram.diagonal().add_(ridge * unit)
        factor, failed_at = torch.linalg.cholesky_ex(gram.T, upper=True)  # a fifth faster than the lower factor
        if bool(failed_at):
            raise ModelError(f"ridge={ridge} is too small for these features: take a larger one, or None")
        out = int(max(part.originals.max() for part in parts)) + 1 if joint else parts[0].out_features
        head = nn.utils.skip_init(nn.Linear, self.width, out, device=gram.device, dtype=gram.dtype)
        head.requires_grad_(False).weight.zero_()[classes] = torch.cholesky_solve(sums.T, factor, upper=True).T
        head.bias.fill_(NO_CLASS)[classes] = 0.0
        return head


def _best_ridge(gram: Tensor, sums: Tensor, n: int, unit: float, ridges: Sequence[float] = _RIDGES) -> float:
    """Return the ridge λ with the least generalised cross-validation error of ``W = (gram + λ·unit·I)⁻¹ sumsᵀ``."""
    values, vectors = torch.linalg.eigh(gram)
    values, power = values.clamp(min=0), (sums @ vectors).square().sum(0)
    shrinks = 1 / (values + unit * values.new_tensor(ridges)[:, None])
    errors = n + (values * shrinks.square() - 2 * shrinks) @ power  # |y - ŷ|², for n samples
    return ridges[int((errors.clamp(min=0) / (n - shrinks @ values).square()).argmin())]  # n |y - ŷ|² / (n - tr H)²
