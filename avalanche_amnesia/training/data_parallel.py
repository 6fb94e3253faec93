"""Data-parallel training: each process computes its part of every mini-batch, then all take the same optimizer step.

The processes are those of torch's default process group. A mini-batch of n samples is the same for any number W of
processes; process r computes its samples ``n·r/W`` to ``n·(r+1)/W``. After the backward pass one flat buffer of all
gradients, weighted by the number of samples, is summed over the processes. So all have equal weights after every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from operator import length_hint
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.benchmarks.utils.data_loader import MultiDatasetDataLoader
from avalanche.models import MultiTaskModule
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from avalanche_amnesia import seeding
from avalanche_amnesia.benchmarks.data import TaskError, labels_fingerprint, labels_of
from avalanche_amnesia.bits import state_hashes, tensor_hash
from avalanche_amnesia.processes import check_equal, from_all, gather_rows, n_processes, rank, sum_all
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import listens
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches


class _RandomStates:
    """Pair of random states: one that all processes share, and this process's own (for dropout and drawn samples)."""

    def __init__(self, seed: int) -> None:
        with seeding.preserved_rng():
            seeding.seed_all(seed)
            self._other = seeding.rng_state()

    @contextmanager
    def swap_states(self, read_state: Callable[[], seeding.RngState] = seeding.rng_state) -> Iterator[None]:
        """In a ``with`` block, draw random numbers from this process's own state, not from the shared one."""

        def swap() -> None:
            here = read_state()
            seeding.set_rng_state(self._other[: len(here)])
            self._other = (*here, *self._other[len(here) :])

        swap()
        try:
            yield
        finally:
            swap()

    def iterate_with_own_state(self, objects: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of ``objects``, each computed with random numbers from this process's own state."""
        with self.swap_states():
            rest = iter(objects)
        while True:
            with self.swap_states():
                obj = next(rest, None)
            if obj is None:
                return
            yield obj


class PartOfBatches:
    """Loader that yields only this process's part of each mini-batch of another loader.

    If that loader samples by index (Avalanche's, torch's DataLoader), only the part is loaded. Otherwise each process
    loads the whole mini-batch and keeps its part.

    Attributes:
        samples: number of samples of the current part; 0 if a small mini-batch has none for this process: then the
            part is one sample whose loss does not count.
    """

    samples = 0

    def __init__(self, whole: Any, draws: _RandomStates) -> None:
        self.whole, self._draws = whole, draws
        self._counts: deque[int] = deque()  # workers fetch ahead

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        self._counts.clear()
        for batch in self._iterate_parts():
            self.samples = self._counts.popleft()
            yield batch

    def _own_slice(self, n: int) -> slice:
        """Return this process's slice of ``n`` samples; store its length. If that is 0, return sample 0 as a dummy."""
        begin, end = (n * number // n_processes() for number in (rank(), rank() + 1))
        self._counts.append(end - begin)
        return slice(begin, end) if end > begin else slice(1)

    def _iterate_parts(self) -> Iterator[Any]:
        loader = self.whole
        if isinstance(loader, TensorBatches):
            for batch in loader.positions():
                yield loader.batch_at(batch[self._own_slice(len(batch))])
            return
        if isinstance(loader, MultiDatasetDataLoader) and type(loader).__iter__ is MultiDatasetDataLoader.__iter__:
            loader = loader._get_loader()
        torchs = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if not torchs or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            for batch in loader:
                n = len(batch[1])
                place = self._own_slice(n)
                yield tree_map_only(Tensor, lambda t: t[place] if t.dim() and len(t) == n else t, batch)  # noqa: B023
            return
        if loader.generator is None:
            torch.empty((), dtype=torch.int64).random_()  # a single process draws the seed of its workers here
        loader = copy(loader)
        batches = map(list, self._draws.iterate_with_own_state(loader.batch_sampler))
        vars(loader)["batch_sampler"] = (batch[self._own_slice(len(batch))] for batch in batches)
        yield from self._draws.iterate_with_own_state(loader)


def read_all_samples(*loaders: Any) -> None:
    """Make Avalanche's loaders read all samples in every process, instead of a share in each."""
    for loader in loaders:
        if isinstance(loader, MultiDatasetDataLoader) and loader.distributed_sampling:
            names = ("batch_sizes", "termination_dataset", "oversample_small_datasets", "never_ending")
            given = {name: getattr(loader, name) for name in names} | loader.loader_kwargs
            MultiDatasetDataLoader.__init__(loader, loader.datasets, distributed_sampling=False, **given)


class _SyncedNorm(torch.autograd.Function):
    """BatchNorm over the mini-batch of all processes. torch's SyncBatchNorm does not run on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, running: Any, momentum: float, eps: float, n: int, of_loss: float
    ) -> Any:
        values = x[:, 0].numel() if n else 0
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)  # faster than var_mean
        mean, variance = mean.double(), variance.double()
        sums = sum_all(torch.cat([mean, variance + mean.square(), mean.new_ones(1)]) * values)
        m = sums[-1]
        if values < 2 and m < 2:  # values first: reading m waits for a GPU
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        mean, square = (sums[:-1] / m).chunk(2)
        variance = (square - mean.square()).clamp_min(0)
        if running[0] is not None:
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_((variance * m / (m - 1)).to(running[1].dtype), momentum)
        kind = x.dtype if weight is None else weight.dtype
        mean, variance = mean.to(kind), variance.to(kind)
        ctx.save_for_backward(x, weight, mean, variance, m)
        ctx.of_loss, ctx.eps = of_loss, eps
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Any) -> Any:
        x, weight, mean, variance, m = ctx.saved_tensors
        given = (of_y, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True])
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(*given)
        # These are gradients of a part's mean loss; ``reduce`` weights them later, like the loss of the part.
        shared = sum_all(torch.cat([by_bias, by_weight]) * ctx.of_loss) / m.to(by_bias.dtype)
        of_mean, of_scale = (shared / (ctx.of_loss or 1)).chunk(2)
        scale = (variance + ctx.eps).rsqrt()
        factor = scale if weight is None else scale * weight
        slope, shape = -factor * scale * of_scale, [1, -1, *[1] * (x.dim() - 2)]
        offset = -(factor * of_mean + slope * mean)
        of_x = torch.addcmul(offset.view(shape), x, slope.view(shape)).addcmul_(of_y, factor.view(shape))
        own = (None, None) if weight is None else (by_weight, by_bias)
        return of_x.to(x.dtype), *own, None, None, None, None, None


# No TorchFunctionMode: it is inactive in a backward pass, and checkpointing computes layers again there.
@contextmanager
def _sync_norms(n_samples: int, loss_weight: float) -> Iterator[None]:
    """In a ``with`` block, compute the mini-batch statistics of BatchNorm layers over the samples of all processes.

    ``n_samples``: number of this process's samples; ``reduce`` later multiplies their gradients by ``loss_weight``.
    """
    functions: Any = F
    own: Any = torch.batch_norm, functions._verify_batch_size

    def sync_all(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *options: Any) -> Tensor:
        if not training:
            return own[0](x, weight, bias, mean, variance, training, *options)
        return _SyncedNorm.apply(x, weight, bias, (mean, variance), *options[:2], n_samples, loss_weight)

    # F.batch_norm calls both; a part may be a single sample.
    torch.batch_norm, functions._verify_batch_size = sync_all, lambda size: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.batch_norm, functions._verify_batch_size = own


class StepSync:
    """Synchronisation of training steps across processes; the strategy's SeedingPlugin calls the methods.

    Args:
        seed: with task, epoch and rank it seeds the draws of this process (dropout, augmentation).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._gradient_layout: list[tuple[Tensor, Tensor | None]] = []
        self._step = ExitStack()

    def begin_epoch(self, strategy: Strategy) -> None:
        """Divide an epoch's mini-batches among processes. In epoch 0, check that all have equal data and weights."""
        task, epoch = labels_of(strategy.experience), strategy.clock.train_exp_epochs
        read_all_samples(strategy.dataloader)
        if epoch == 0:
            self._gradient_layout = []
            _check_loss_and_norms(strategy)
            check_equal(_facts_to_agree_on(strategy, self._seed), f"task {task[0]}, before its first step:")
        self._draws = _RandomStates(seeding.derive_seed(self._seed, "process", rank(), epoch, *task))
        strategy.dataloader = PartOfBatches(strategy.dataloader, self._draws)

    def begin_step(self, strategy: Strategy) -> None:
        """Before the forward pass: use this process's random state; let BatchNorm use the samples of all processes."""
        self.leave_step()
        self._step.enter_context(self._draws.swap_states(seeding.torch_rng_state))  # all take longer to swap
        self._step.enter_context(_sync_norms(_n_own_samples(strategy), _loss_weight(strategy)))

    def leave_step(self) -> None:
        """Undo :meth:`begin_step`: use the random state that all processes share, and torch's own BatchNorm."""
        self._step.close()

    @torch.no_grad()
    def reduce(self, strategy: Strategy) -> None:
        """Replace gradients and loss by their means over all samples of the mini-batch, i.e. over all processes."""
        self.leave_step()
        learning = list(getattr(strategy.model, "learned_by_backward", strategy.model.parameters)())
        learning += [t for plugin in strategy.plugins for t in getattr(plugin, "learned_by_backward", list)()]
        tensors, places = [tensor for tensor, _ in self._gradient_layout], [of for _, of in self._gradient_layout]
        known = set(map(id, tensors))
        has_more = any(t.grad is not None and id(t) not in known for t in learning)
        weight, loss = _loss_weight(strategy), strategy.loss.detach()
        here = [weight > 0 and t.grad is not None for t in tensors]
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        parts = [g if of is None else g.take(of) for g, of in zip(gradients, places, strict=True)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        parts += [loss, torch.tensor(here, device=loss.device)]
        sizes = [*(part.numel() for part in parts), 2]
        buffer = torch.empty(sum(sizes), dtype=kind, device=loss.device)
        for part, into in zip(parts, buffer.split(sizes), strict=False):
            torch.mul(part.to(kind), weight, out=into.view(part.shape))
        if not weight:
            buffer.zero_()  # even if the loss is NaN
        buffer[-2], buffer[-1] = has_more, weight
        *means, mean_loss, shares, (more, total) = sum_all(buffer).split(sizes)
        if more:  # a tensor has got its first gradient, in some process
            self._gradient_layout = _gradient_layout(strategy, learning, known)
            self.reduce(strategy)
            return
        for tensor, gradient, of, mean, share in zip(tensors, gradients, places, means, shares.tolist(), strict=True):
            if of is None:
                torch.div(mean.view(gradient.shape), total, out=gradient)
            else:  # a plugin of the method sets all other entries to 0
                gradient.put_(of, (mean / total).to(gradient.dtype))
            # An optimizer takes a step if the gradient is 0, but not if it is None.
            tensor.grad = gradient if share else None
        strategy.loss = (mean_loss / total).to(loss.dtype)[0]

    @torch.no_grad()
    def gather(self, strategy: Strategy) -> None:
        """Replace outputs, labels and task labels (not inputs) by those of all processes, so that metrics see them."""
        if strategy.clock.train_exp_iterations == 0:
            check_equal(_tensor_hashes(strategy), f"task {labels_of(strategy.experience)[0]}, after its first step:")
        logits, n = strategy.mb_output, _n_own_samples(strategy)
        if not isinstance(logits, Tensor) or not listens(strategy.evaluator, "after_training_iteration"):
            return
        first, *others = strategy.mbatch
        strategy.mb_output, *others = gather_rows(*(part[:n] for part in (logits, *others)))
        strategy.mbatch = [first, *others]

    def finish(self, strategy: Strategy) -> None:
        """After the training: raise ProcessError unless all processes have the same model."""
        check_equal(_tensor_hashes(strategy), "after the training")


def _n_own_samples(strategy: Strategy) -> int:
    """Return the number of this process's samples in the mini-batch; 0 if the process got only a placeholder sample."""
    return len(strategy.mb_y) if strategy.dataloader.samples else 0


def _loss_weight(strategy: Strategy) -> float:
    """Return the weight of this process's loss in the mean of all: its number of samples, or sum of class weights."""
    n, criterion, y = _n_own_samples(strategy), strategy._criterion, strategy.mb_y
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.weight is None or y.is_floating_point():
        return n
    return float(criterion.weight[y[:n]].sum())


def _check_loss_and_norms(strategy: Strategy) -> None:
    """Raise TaskError for a loss or norm layer whose result would depend on how processes divide a mini-batch."""
    loss, model = strategy._criterion, strategy.model
    weight = getattr(loss, "weight", None)
    ignores = getattr(loss, "ignore_index", -1) >= 0 or (weight is not None and not bool((weight > 0).all()))
    if ignores or getattr(loss, "reduction", None) == "sum":
        raise TaskError(
            f"the loss {loss} is a sum, or ignores samples: on several processes it must be the mean over all samples "
            "(reduction='mean', no ignore_index, class weights above 0)"
        )
    for name, module in model.named_modules():
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise TaskError(
                f"the running statistics of {name} ({module}) would be those of one process's samples: train in one "
                "process, or with track_running_stats=False"
            )
    tasks = {task for data in getattr(strategy.dataloader, "datasets", ()) for task in data.targets_task_labels.uniques}
    apart = getattr(model, "features_per_task", type(model).forward is MultiTaskModule.forward)
    if apart and len(tasks) > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise TaskError(
            f"mini-batches of several tasks ({sorted(tasks)}) can't be normalised task by task on several processes: "
            "train in one process, or a network without BatchNorm (with GroupNorm)"
        )


def _gradient_layout(strategy: Strategy, learning: list[Tensor], known: set[int]) -> list[tuple[Tensor, Tensor | None]]:
    """Return each tensor whose gradient is summed over processes, with the flat indices to send (None: all entries)."""
    mine = [i for i, t in enumerate(learning) if t.grad is not None or id(t) in known]
    places = {i for of_one in from_all(mine) for i in of_one}
    moving: dict[int, Tensor] = {}
    for plugin in strategy.plugins:
        moving.update(getattr(plugin, "trained_entries", dict)())
    tensors = [learning[i] for i in sorted(places)]
    return [(t, moving[id(t)].flatten().nonzero()[:, 0] if id(t) in moving else None) for t in tensors]


def _facts_to_agree_on(strategy: Strategy, seed: int) -> dict[str, Any]:
    """Return settings, sizes and hashes, by name, that must be equal in all processes before a task's first step."""
    experience, loader = strategy.experience, strategy.dataloader
    facts = {"task": labels_of(experience), "number of samples": len(strategy.adapted_dataset), "seed": seed}
    settings = [
        {name: value for name, value in group.items() if isinstance(value, bool | float | int | tuple)}
        for group in strategy.optimizer.param_groups
    ]
    facts |= {"number of epochs": strategy.train_epochs, "optimizer": settings}
    facts |= {"number of mini-batches": length_hint(loader, -1), "labels": labels_fingerprint(experience)}
    if isinstance(loader, TensorBatches):
        facts["samples"] = tensor_hash(loader.x)
    return facts | {"random stream (order of samples)": tensor_hash(torch.get_rng_state()), **_tensor_hashes(strategy)}


def _tensor_hashes(strategy: Strategy) -> dict[str, str]:
    """Return a dict of readable tensor name to hash, for every tensor of the model and of the loss."""
    return {
        f"tensor {name} of the {kind}": digest
        for kind, module in (("model", strategy.model), ("loss", strategy._criterion))
        if isinstance(module, nn.Module)
        for name, digest in state_hashes(module.state_dict(keep_vars=True)).items()
    }
