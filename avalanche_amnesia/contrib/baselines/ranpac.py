"""Strategy RanPAC: one pass over each task's samples, whose features are summed; unlearning subtracts them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from avalanche.core import SupervisedPlugin
from torch import Tensor
from torch.optim import SGD

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task
from avalanche_amnesia.contrib.baselines.analytic import AnalyticModel
from avalanche_amnesia.models.task_inference import InferenceRule, Prediction, TaskInference
from avalanche_amnesia.strategy import Strategy
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.host.lookup import refuse_unfinished
from avalanche_amnesia.training.host.rollback import begin_finishing
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy
from avalanche_amnesia.unit_graph.backbones import as_batch
from avalanche_amnesia.unit_graph.findings import ModelError


class _FinishSums(SupervisedPlugin):
    """Plugin that takes a finished task's sums out of the parts of the model that trainings copy."""

    finishing_step = 1

    def after_training_exp(self, strategy: Strategy, **kwargs: Any) -> None:
        """After a task's training: finish its sums."""
        begin_finishing(strategy)
        strategy.model.heads.finish(single_task(strategy.experience))


class RanPAC(TaskStrategy):
    """Strategy over a frozen network: tasks, classes and samples are unlearned by subtraction, exactly.

    One pass over the samples of each task adds them to the task's sums; no optimizer. A request for samples or classes
    computes their features again from the task's data, compares their hashes, and subtracts them.

    Args:
        model: an :class:`AnalyticModel`.
        unlearning: settings of the unlearning, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: seed of random transforms in the data; sums depend on nothing else.
        options: Avalanche's own options, see :class:`TaskStrategy`; ``train_epochs`` is 1.

    Raises:
        TypeError: if ``model`` is not an :class:`AnalyticModel`, or for an unknown option.
        ValueError: for an invalid value.

    Reference: McDonnell et al., RanPAC: Random projections and pre-trained models for continual learning, NeurIPS 2023.
    """

    settings: ClassVar = {"unlearning": UnlearningPlugin}
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
        if options.get("train_epochs", 1) != 1:
            raise ValueError(
                f"train_epochs must be 1, got {options['train_epochs']!r}: a second pass would count each sample twice"
            )
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.0),  # the host asks for one; no parameter gets a gradient
            method=[_FinishSums(), TrajectoryPlugin(), obeying],
            seed=seed,
            **options,
        )

    def forward(self) -> Any:
        """Return the logits, zeros in training; check at the first mini-batch that a sample's features are its own."""
        output = super().forward()
        if self.is_training and not self.clock.train_exp_iterations:
            try:
                self.model.check_neighbours(self.mb_x)
            except ModelError as error:
                self._refuse(str(error), error)
        return output

    def backward(self) -> None:
        """Do nothing: no parameter is trained."""

    def optimizer_step(self) -> None:
        """Add the mini-batch to the sums of its task."""
        try:
            self.model.learn(single_task(self.experience), self.mb_y)
        except ModelError as error:
            self._refuse(str(error), error)

    def predict(
        self, x: Tensor | Mapping[str, Tensor], task: int | None = None, rule: InferenceRule = "entropy"
    ) -> Prediction:
        """Return each sample's class, among those of all tasks, and the last remaining task with samples of that class.

        With ``task`` its own regression is used. Arguments and errors are those of :meth:`TaskStrategy.predict`.
        """
        if task is not None:
            return super().predict(x, task, rule)
        refuse_unfinished(self)
        self.model.eval()
        certainty, found = TaskInference(self.model, rule).read(self.model(as_batch(x).to(self.device)))
        tasks, classes = torch.zeros_like(found), torch.zeros_like(found)
        for task in self.model.tasks:
            sums = self.model.heads[task]
            for label in sums.classes:
                here = found == sums.originals[label]
                tasks[here], classes[here] = task, label
        return Prediction(tasks, classes, certainty)
