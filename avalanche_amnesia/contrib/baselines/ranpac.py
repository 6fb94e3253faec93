"""Strategy RanPAC: one pass over each task's samples, whose features are summed; unlearning subtracts them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from avalanche.training import plugins as stock
from torch import Tensor
from torch.optim import SGD

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import TaskError, single_task
from avalanche_amnesia.contrib.baselines.analytic import AnalyticModel
from avalanche_amnesia.models.multi_head import NO_CLASS
from avalanche_amnesia.models.task_inference import InferenceRule, Prediction, TaskInference
from avalanche_amnesia.strategy import Plugin, Strategy
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.host.rollback import begin_finishing
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.unit_graph.backbones import as_batch

_NAMES = ("EWC", "MAS", "GEM", "AGEM", "LwF", "LFL", "SynapticIntelligence", "Replay", "GDumb", "MIR", "RWalk")
_USELESS = tuple(getattr(stock, f"{name}Plugin") for name in _NAMES)  # they need gradients, or replay samples


class _FinishSums(Plugin):
    """Plugin that takes a finished task's sums out of the parts of the model that trainings copy."""

    finishing_step = 1

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: finish its sums."""
        begin_finishing(strategy)
        strategy.model.heads.finish(single_task(strategy.experience))


class _AllClasses(TaskInference):
    """Inference of class and task by the regression over the classes of all tasks."""

    @torch.no_grad()
    def __call__(self, x: Tensor | Mapping[str, Tensor], task: int | None = None) -> Prediction:
        """Return each sample's class; its task is the one with samples of the class that was learned last."""
        if task is not None:
            return super().__call__(x, task)
        logits = self.model(as_batch(x))
        present = (logits != NO_CLASS).any(0).nonzero()[:, 0]
        certainty, found = self.read(logits[:, present])
        tasks, classes = torch.zeros_like(found), torch.zeros_like(found)
        for label in self.model.tasks:
            sums: Any = self.model.heads[label]
            for own in sums.classes:
                here = present[found] == sums.originals[own]
                tasks[here], classes[here] = label, own
        return Prediction(tasks, classes, certainty)


class RanPAC(TaskStrategy):
    """Strategy with a frozen network: unlearns tasks, classes and samples exactly, by subtraction.

    Training adds each sample of a task to the task's sums, in one pass in the order of the data, without an optimizer.
    To unlearn samples or classes, it computes their features again, compares them with stored hashes, and subtracts
    them. No task is trained again. ``strategy.predict(x)`` chooses among the classes of all tasks.

    Args:
        model: an :class:`AnalyticModel`.
        unlearning: settings of the unlearning, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: seed of random transforms in the data. If the data has such transforms, only whole tasks can be unlearned.
        options: Avalanche's own options, see :class:`TaskStrategy`; ``train_epochs`` is 1.

    Raises:
        TypeError: if ``model`` is not an :class:`AnalyticModel`, or for an unknown option.
        ValueError: for an invalid value, and for a plugin that needs gradients or replays samples.
        TaskError: in a training, if the :class:`AnalyticModel` raises it; the task was undone.
        RequestError: in a request for samples, if their features have other hashes; nothing changed.

    Reference: McDonnell et al., RanPAC: Random projections and pre-trained models for continual learning, NeurIPS 2023.
    """

    composed = ("method", "optimizer", "reset_optimizer")  # type: ignore[assignment]
    settings: ClassVar = {"unlearning": UnlearningPlugin}
    divides_batches = False  # on several processes each computes all sums
    model: AnalyticModel

    def __init__(
        self,
        *,
        model: AnalyticModel,
        unlearning: UnlearningPlugin | None = None,
        seed: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        check_model(model, AnalyticModel)
        wrong = [type(plugin).__name__ for plugin in options.get("plugins") or () if isinstance(plugin, _USELESS)]
        if wrong:
            raise ValueError(f"RanPAC trains no parameter and replays no sample: leave {wrong[0]} out of plugins")
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.0),  # the host asks for one; no parameter gets a gradient
            method=[_FinishSums(), TrajectoryPlugin(), obeying],
            seed=seed,
            **options,
        )
        self._check_epochs()

    def _check_epochs(self) -> None:
        if self.train_epochs != 1:
            raise ValueError(
                f"train_epochs must be 1, got {self.train_epochs}: a second pass would count samples twice"
            )

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Add samples to their tasks' sums, with the arguments of the base class; ``shuffle`` has no effect."""
        self._check_epochs()
        return super().train(experiences, eval_streams, **kwargs | {"shuffle": False})  # sums have no order

    def backward(self) -> None:
        """Do nothing: no parameter is trained."""

    def optimizer_step(self) -> None:
        """Add the mini-batch to the sums of its task; before the first one, check the network with it."""
        try:
            if not self.clock.train_exp_iterations:
                self.model.check_network(self.mb_x)
            self.model.learn(single_task(self.experience), self.mb_y)
        except TaskError as error:
            self._refuse(str(error), error)

    def _inference(self, rule: InferenceRule) -> TaskInference:
        return _AllClasses(self.model, rule)
