"""Data-parallel training: each process computes its part of every mini-batch, then all take the same optimizer step.

The processes are those of torch's default process group. A mini-batch of n samples is the same for any number W of
processes; process r computes its samples ``n·r/W`` to ``n·(r+1)/W``. After the backward pass one flat buffer of all
gradients, weighted by the number of samples, is summed over the processes. So all hold the same bits after every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from inspect import signature
from operator import length_hint
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.benchmarks.utils.data_loader import MultiDatasetDataLoader
from avalanche.models import MultiTaskModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from avalanche_amnesia.benchmarks.data import TaskError, labels_fingerprint, labels_of
from avalanche_amnesia.bits import state_hashes, tensor_hash
from avalanche_amnesia.processes import ProcessError, agree, gathered, n_processes, of_all, rank, summed
from avalanche_amnesia.seeding import derive_seed, rng_state, seed_all, set_rng_state
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.lookup import listens
from avalanche_amnesia.training.plugins.in_memory_loader import TensorBatches

# Mini-batches ---------------------------------------------------------------------------------------------------------


def _part(n: int) -> slice:
    """Return the place of this process's samples among the ``n`` of a mini-batch."""
    return slice(n * rank() // n_processes(), n * (rank() + 1) // n_processes())


def _part_or_one(n: int) -> slice:
    """Return the place of this process's samples, or of one that does not count, because a network needs a sample."""
    part = _part(n)
    return part if part.stop > part.start else slice(1)


class _CommonDraws:
    """State of the random stream that all processes share: only the order of samples is drawn from it."""

    def __init__(self) -> None:
        self.state = rng_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        own = rng_state()
        set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = rng_state()
            set_rng_state(own)

    def each(self, things: Iterable[Any]) -> Iterator[Any]:
        """Yield ``things`` one by one; what they draw comes from this state."""
        with self():
            rest = iter(things)
        while True:
            with self():
                thing = next(rest, None)
            if thing is None:
                return
            yield thing


class _PartSampler:
    """Batch sampler with this process's part of another one's mini-batches."""

    def __init__(self, whole: Any, common: _CommonDraws, counts: deque[int]) -> None:
        self._whole, self._common, self._counts = whole, common, counts

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[list[int]]:
        for whole in map(list, self._common.each(self._whole)):
            self._counts.append(len(whole[_part(len(whole))]))
            yield whole[_part_or_one(len(whole))]


class PartOfBatches:
    """Loader that yields only this process's part of each mini-batch of another loader.

    If that loader samples by index (Avalanche's, torch's DataLoader), only the part is loaded. Otherwise each process
    loads the whole mini-batch and keeps its part.

    Attributes:
        samples: number of samples of the current part; 0 if a small mini-batch has none for this process: then the
            part is one sample whose loss does not count.
    """

    samples = 0

    def __init__(self, whole: Any, common: _CommonDraws) -> None:
        self.whole, self._common = whole, common

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        counts: deque[int] = deque()  # workers fetch ahead
        for batch in self._parts(counts):
            self.samples = counts.popleft()
            yield batch

    def _parts(self, counts: deque[int]) -> Iterator[Any]:
        loader = self.whole
        if isinstance(loader, TensorBatches):
            with self._common():
                batches = loader.positions()
            for batch in batches:
                counts.append(len(batch[_part(len(batch))]))
                yield loader.at(batch[_part_or_one(len(batch))])
            return
        if isinstance(loader, MultiDatasetDataLoader) and type(loader).__iter__ is MultiDatasetDataLoader.__iter__:
            loader = loader._get_loader()
        torchs = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if not torchs or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            yield from self._cut(loader, counts)
            return
        if loader.generator is None:
            with self._common():  # a single process draws the seed of its workers here
                torch.empty((), dtype=torch.int64).random_()
        loader = copy(loader)
        vars(loader)["batch_sampler"] = _PartSampler(loader.batch_sampler, self._common, counts)
        yield from loader

    def _cut(self, loader: Any, counts: deque[int]) -> Iterator[Any]:
        """Yield the part of each mini-batch that ``loader`` has loaded as a whole."""
        for batch in self._common.each(loader):
            n = len(batch[1])
            counts.append(len(range(n)[_part(n)]))
            place = _part_or_one(n)
            yield tree_map_only(Tensor, lambda t: t[place] if t.dim() and len(t) == n else t, batch)  # noqa: B023


def over_all_samples(loader: Any) -> Any:
    """Return Avalanche's loader over all samples; in a process group it would read other ones in each process."""
    if not (isinstance(loader, MultiDatasetDataLoader) and loader.distributed_sampling):
        return loader
    whole = copy(loader)
    MultiDatasetDataLoader.__init__(
        whole,
        loader.datasets,
        loader.batch_sizes,
        loader.termination_dataset,
        loader.oversample_small_datasets,
        distributed_sampling=False,
        never_ending=loader.never_ending,
        **loader.loader_kwargs,
    )
    return whole


class _NormTogether(torch.autograd.Function):
    """BatchNorm over the mini-batch of all processes. torch's SyncBatchNorm does not run on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, running: Any, momentum: float, eps: float, n: int, of_loss: float
    ) -> Any:
        values = x[:, 0].numel() if n else 0
        of_part = x.new_zeros(2 * x.shape[1] + 1, dtype=torch.float64)
        if n:
            _, mean, scale = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)  # faster than var_mean
            mean, square = mean.double(), scale.double().pow(-2) - eps + mean.double().square()
            of_part = torch.cat([values * mean, values * square, mean.new_tensor([values])])
        sums = summed(of_part)
        m = sums[-1]
        if values < 2 and m < 2:  # in this order: m would be waited for on a GPU
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
    def backward(ctx: Any, of_y: Any) -> Any:
        x, weight, mean, variance, m = ctx.saved_tensors
        given = (of_y, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True])
        of_x, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(*given)  # for a fixed mean and variance
        # Gradients are of the mean loss of a part; later each is weighted as the part's loss.
        shared = summed(torch.cat([by_bias, by_weight]) * ctx.of_loss) / m.to(by_bias.dtype)
        of_mean, of_scale = (shared / (ctx.of_loss or 1)).chunk(2)
        scale = (variance + ctx.eps).rsqrt()
        factor = scale if weight is None else scale * weight
        slope, shape = -factor * scale * of_scale, [1, -1, *[1] * (x.dim() - 2)]
        of_x.addcmul_(x, slope.view(shape)).sub_((factor * of_mean + slope * mean).view(shape))
        return of_x, *((None, None) if weight is None else (by_weight, by_bias)), None, None, None, None, None


_BATCH_NORM = signature(F.batch_norm)


class _BatchNormTogether(TorchFunctionMode):
    """Context in which every BatchNorm in training uses the statistics of all processes' samples.

    ``n`` is the number of this process's samples. Later, ``reduce`` multiplies their gradients by ``of_loss``.
    """

    def __init__(self, n: int, of_loss: float) -> None:
        super().__init__()
        self.n, self.of_loss = n, of_loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.batch_norm, torch.batch_norm):
            return func(*args, **(kwargs or {}))
        if func is torch.batch_norm:  # its arguments are in another order
            x, weight, bias, mean, variance, *options, _ = args
            args = (x, mean, variance, weight, bias, *options)
        given = _BATCH_NORM.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, mean, variance, weight, bias, training, *options = given.args
        if not training:
            return F.batch_norm(*given.args)
        return _NormTogether.apply(x, weight, bias, (mean, variance), *options, self.n, self.of_loss)


class StepsTogether:
    """Steps of a training that several processes take together; the strategy's SeedingPlugin calls it.

    Args:
        seed: with task, epoch and rank it seeds the draws of this process (dropout, augmentation).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._common: _CommonDraws | None = None
        self._learning: list[Tensor] = []
        self._layout: list[tuple[Tensor, Tensor | None]] = []
        self._mode: _BatchNormTogether | None = None

    def begin_epoch(self, strategy: Strategy) -> None:
        """Cut the mini-batches of an epoch; before a task's first, check that all processes have the same task."""
        experience = strategy.experience
        if strategy.clock.train_exp_epochs == 0:
            self._learning = []
            _check_loss(strategy._criterion)
            _check_norms(strategy)
            agree(_facts(strategy, self._seed), f"task {labels_of(experience)[0]}, before its first step:")
        self._common = _CommonDraws()
        strategy.dataloader = PartOfBatches(over_all_samples(strategy.dataloader), self._common)
        seed_all(derive_seed(self._seed, "process", rank(), strategy.clock.train_exp_epochs, *labels_of(experience)))

    def end_epoch(self, strategy: Strategy) -> None:
        """Continue with the random stream that all processes share, and with the whole loader."""
        if self._common is not None:
            strategy.dataloader = strategy.dataloader.whole
            set_rng_state(self._common.state)
            self._common = None

    def begin_step(self, strategy: Strategy) -> None:
        """Before the forward pass: let BatchNorm use the samples of all processes."""
        self.leave_step()
        self._mode = _BatchNormTogether(_counted(strategy), _weight(strategy))
        self._mode.__enter__()

    def leave_step(self) -> None:
        """End what :meth:`begin_step` began, also after an error."""
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)

    @torch.no_grad()
    def reduce(self, strategy: Strategy) -> None:
        """Replace the strategy's gradients and loss by their means over all samples of the whole mini-batch."""
        self.leave_step()
        learning = list(getattr(strategy.model, "learned_by_backward", strategy.model.parameters)())
        learning += [t for plugin in strategy.plugins for t in getattr(plugin, "learned_by_backward", list)()]
        if list(map(id, learning)) != list(map(id, self._learning)):
            self._learning, self._layout = learning, _layout(strategy, learning)
        tensors, places = [tensor for tensor, _ in self._layout], [of for _, of in self._layout]
        if sum(t.grad is not None for t in learning) > sum(t.grad is not None for t in tensors):
            raise ProcessError(
                "a parameter got its first gradient after the task's first step: let it get one there, or never"
            )
        weight, loss = _weight(strategy), strategy.loss.detach()
        here = [weight > 0 and t.grad is not None for t in tensors]
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        parts = [g if of is None else g.take(of) for g, of in zip(gradients, places, strict=True)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        shares = torch.tensor([*here, True]).to(loss.device, kind)
        buffer = torch.cat([*(part.flatten().to(kind) for part in (*parts, loss)), shares])
        buffer = summed(buffer.mul_(weight) if weight else buffer.zero_())
        buffer.div_(buffer[-1].clone())
        *means, mean_loss, shares = buffer.split([*(part.numel() for part in parts), 1, len(shares)])
        for i, (tensor, gradient, of, mean) in enumerate(zip(tensors, gradients, places, means, strict=True)):
            if of is None:
                gradient.copy_(mean.view_as(gradient))
            else:  # a plugin of the method sets the others to 0
                gradient.put_(of, mean.to(gradient.dtype))
            # An optimizer takes a step for a gradient of 0, but not for none.
            tensor.grad = gradient if here[i] or shares[i] else None
        strategy.loss = mean_loss.to(loss.dtype)[0]

    @torch.no_grad()
    def gather(self, strategy: Strategy) -> None:
        """Replace outputs, labels and task labels by those of all processes, for metrics; inputs stay this part's."""
        logits, n = strategy.mb_output, _counted(strategy)
        if not isinstance(logits, Tensor) or not listens(strategy.evaluator, "after_training_iteration"):
            return
        first, *others = strategy.mbatch
        rows = [part[:n].flatten(1) if part.dim() > 1 else part[:n, None] for part in (logits, *others)]
        found = gathered(torch.cat([row.double() for row in rows], 1)).split([row.shape[1] for row in rows], 1)
        both = zip(found, (logits, *others), strict=True)
        strategy.mb_output, *others = (part.to(old.dtype).reshape(-1, *old.shape[1:]) for part, old in both)
        strategy.mbatch = [first, *others]

    def finish(self, strategy: Strategy) -> None:
        """After the training: raise ProcessError unless all processes have the same model."""
        agree(_model_facts(strategy), "after the training")


def _counted(strategy: Strategy) -> int:
    """Return the number of this process's samples in the current mini-batch that count."""
    return len(strategy.mb_y) if strategy.dataloader.samples else 0


def _weight(strategy: Strategy) -> float:
    """Return the weight of this part's loss: its number of samples, or the sum of their class weights."""
    n, criterion, y = _counted(strategy), strategy._criterion, strategy.mb_y
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.weight is None or y.is_floating_point():
        return n
    return float(criterion.weight[y[:n]].sum())


def _check_loss(loss: Any) -> None:
    """Raise TaskError for a loss that is no mean over all samples."""
    weight = getattr(loss, "weight", None)
    ignores = getattr(loss, "ignore_index", -1) >= 0 or (weight is not None and not bool((weight > 0).all()))
    if ignores or getattr(loss, "reduction", None) == "sum":
        raise TaskError(
            f"the loss {loss} is a sum, or ignores samples: on several processes it must be the mean over all samples "
            "(reduction='mean', no ignore_index, class weights above 0)"
        )


def _check_norms(strategy: Strategy) -> None:
    """Raise TaskError if a BatchNorm would see only one task of a mini-batch: processes have different tasks."""
    model = strategy.model
    tasks = {task for data in getattr(strategy.dataloader, "datasets", ()) for task in data.targets_task_labels.uniques}
    apart = getattr(model, "features_per_task", type(model).forward is MultiTaskModule.forward)
    if apart and len(tasks) > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise TaskError(
            f"mini-batches of several tasks ({sorted(tasks)}) can't be normalised task by task on several processes: "
            "train in one process, or a network without BatchNorm (with GroupNorm)"
        )


def _layout(strategy: Strategy, learning: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors with a gradient in any process; with places of the entries to send, None for all of them."""
    places = {i for of_one in of_all([i for i, t in enumerate(learning) if t.grad is not None]) for i in of_one}
    moving: dict[int, Tensor] = {}
    for plugin in strategy.plugins:
        moving.update(getattr(plugin, "moving_entries", dict)())
    tensors = [learning[i] for i in sorted(places)]
    return [(t, moving[id(t)].flatten().nonzero()[:, 0] if id(t) in moving else None) for t in tensors]


def _facts(strategy: Strategy, seed: int) -> dict[str, Any]:
    """Return what all processes must agree on before a task's first step."""
    experience, loader = strategy.experience, over_all_samples(strategy.dataloader)
    facts = {"task": labels_of(experience), "number of samples": len(strategy.adapted_dataset), "seed": seed}
    settings = [
        {name: value for name, value in group.items() if isinstance(value, bool | float | int | tuple)}
        for group in strategy.optimizer.param_groups
    ]
    facts |= {"number of epochs": strategy.train_epochs, "optimizer": settings}
    facts |= {"number of mini-batches": length_hint(loader, -1), "labels": labels_fingerprint(experience)}
    if isinstance(loader, TensorBatches):
        facts["samples"] = tensor_hash(loader.x)
    return facts | {"random stream (order of samples)": tensor_hash(torch.get_rng_state()), **_model_facts(strategy)}


def _model_facts(strategy: Strategy) -> dict[str, str]:
    """Return name → hash of every tensor of model and loss, named so that a message reads well."""
    modules = {"model": strategy.model, "loss": strategy._criterion}
    return {
        f"tensor {name} of the {kind}": digest
        for kind, module in modules.items()
        if isinstance(module, nn.Module)
        for name, digest in state_hashes(module.state_dict(keep_vars=True)).items()
    }
