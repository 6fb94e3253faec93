"""Strategies WSN (each task chooses its weights) and DisjointSubnets (each task is assigned its weights)."""

from typing import Unpack

from torch.optim import Optimizer

from avalanche_amnesia import checks
from avalanche_amnesia.isolation.pools import Pools
from avalanche_amnesia.models.disjoint import DisjointModel
from avalanche_amnesia.models.subnet import SubnetModel
from avalanche_amnesia.training.plugins.disjoint import DisjointPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.plugins.wsn import ScoredWeights, SubnetPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy


class WSN(TaskStrategy):
    """Strategy of winning subnetworks: a task uses each layer's best-scored weights; earlier tasks' weights are frozen.

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~TaskStrategy.unlearn`. Weights used only by an unlearned task return to their initial bits. Weights that it
    trained and that a remaining task uses do not change, so that no remaining task's logits change by a bit; the record
    lists these weights (``record.plan.shared``) and claims ``approximate``. Scores return to their values before the
    first unlearned task.

    Args:
        model: a :class:`SubnetModel`.
        optimizer: any torch optimizer over ``model.parameters()``.
        masks: settings of learning which weights a task uses, ``ScoredWeights(score_lr=…)``.
        trajectory: how updates are stored, ``TrajectoryPlugin(dtype=…)``; by default all of them, lossless.
        unlearning: how requests are obeyed, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an invalid value.

    Reference: Kang et al., Forget-free continual learning with winning subnetworks, ICML 2022.
    """

    def __init__(
        self,
        *,
        model: SubnetModel,
        optimizer: Optimizer,
        masks: ScoredWeights | None = None,
        trajectory: TrajectoryPlugin | None = None,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        recorder = checks.object_of("trajectory", trajectory, TrajectoryPlugin, "TrajectoryPlugin(dtype=...)")
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[SubnetPlugin(masks=masks, seed=seed), recorder, obeying],
            seed=seed,
            **options,
        )


class DisjointSubnets(TaskStrategy):
    """Strategy that trains each task on its own share of the weights, so that unlearning a task is exact.

    A fixed random partition cuts every layer's weights into as many shares as there are slots. After an unlearning
    the model equals, bit for bit, one that never saw the unlearned tasks; later tasks reuse their shares. Later tasks
    also read the shares of permanent tasks.

    Requests come with the experiences (:func:`~avalanche_amnesia.benchmarks.with_unlearning`) or from
    :meth:`~TaskStrategy.unlearn`.

    Args:
        model: a :class:`DisjointModel`.
        optimizer: any torch optimizer over ``model.parameters()``. A share has fewer weights than the network, and
            may need larger steps: begin with twice the network's learning rate.
        isolation: number of shares, and which task gets which; by default one for each task of the stream.
            ``Pools.planned(benchmark)``: as few as the stream's requests allow.
        fit_head: whether a task's head is fitted again when the task ends, by logistic regression on the features of
            all samples of its experience, whatever loss and sampler the training has.
        unlearning: how requests are obeyed, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: every random draw derives from it and the task.
        options: ``reset_optimizer`` and Avalanche's own, as of :class:`TaskStrategy`.

    Raises:
        TypeError: if ``model`` is of another kind, or for an unknown option.
        ValueError: for an invalid value.
    """

    def __init__(
        self,
        *,
        model: DisjointModel,
        optimizer: Optimizer,
        isolation: Pools | None = None,
        fit_head: bool = True,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=optimizer,
            method=[DisjointPlugin(isolation, fit_head=fit_head, seed=seed), TrajectoryPlugin(), obeying],
            seed=seed,
            **options,
        )
