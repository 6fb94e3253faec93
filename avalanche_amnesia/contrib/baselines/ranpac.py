"""Strategy RanPAC: sum the features of each task's samples in one pass, and subtract them to unlearn."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim import SGD

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import single_task
from avalanche_amnesia.contrib.baselines.analytic import AnalyticModel
from avalanche_amnesia.models.task_inference import InferenceRule, Prediction, TaskInference
from avalanche_amnesia.training.host.arguments import check_model
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin
from avalanche_amnesia.training.task_strategy import StrategyOptions, TaskStrategy

_USELESS = "EWC MAS GEM AGEM LwF LFL SynapticIntelligence Replay GDumb MIR RWalk AveragedWeights RandomFeatures"


class _AllClasses(TaskInference):
    """Inference of a sample's class and task by one regression over the classes of all tasks."""

    @torch.no_grad()
    def __call__(self, x: Tensor | Mapping[str, Tensor], task: int | None = None) -> Prediction:
        """Predict each sample's class and task; if several tasks have the class, the task with the highest label."""
        if task is not None:
            return super().__call__(x, task)
        logits = self.model(x)
        tasks, classes, known = torch.zeros((3, logits.shape[1]), dtype=torch.int64, device=logits.device)
        for label in sorted(self.model.tasks):  # in whatever order they were trained
            sums: Any = self.model.heads[label]
            named = sums.originals[sums.classes]
            tasks[named], classes[named], known[named] = label, sums.classes, 1
        present = known.nonzero()[:, 0]
        certainty, found = self.read(logits[:, present])
        return Prediction(tasks[present][found], classes[present][found], certainty)


class RanPAC(TaskStrategy):
    """Strategy with sums of a frozen network's features: unlearns tasks, classes and samples exactly, by subtraction.

    Training adds each sample of a task to the task's sums, in one pass in the order of the data, without an optimizer.
    Later experiences of the task add to it: requests are for all of them, and positions count over them in their order.
    To unlearn samples or classes, it reads their features, computed again from ``data`` or kept by the model, compares
    them with stored hashes, and subtracts them. ``strategy.predict(x)`` chooses among the classes of all tasks.

    Args:
        model: an :class:`AnalyticModel`.
        unlearning: settings of the unlearning, ``UnlearningPlugin(deadline=…, keep_probes=…)``.
        seed: seed of random transforms in the data. If the data has such transforms, only whole tasks can be unlearned.
        options: Avalanche's own options, see :class:`TaskStrategy`; a training refuses ``train_epochs`` other than 1.

    Raises:
        TypeError: if ``model`` is not an :class:`AnalyticModel`, or for an unknown option.
        ValueError: for an invalid value, and for a plugin that needs gradients or replays samples.
        TaskError: in a training, if the :class:`AnalyticModel` raises it; the task was undone.
        RequestError: in a request for samples, if their features have other hashes; nothing changed.

    Reference: McDonnell et al., RanPAC: Random projections and pre-trained models for continual learning, NeurIPS 2023.
    """

    composed = ("method", "optimizer", "reset_optimizer")  # type: ignore[assignment]
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
        for name in (type(plugin).__name__ for plugin in options.get("plugins") or ()):
            if name.removesuffix("Plugin") in _USELESS.split():
                raise ValueError(f"RanPAC trains no parameter and replays no sample: leave {name} out of plugins")
        obeying = checks.object_of("unlearning", unlearning, UnlearningPlugin, "UnlearningPlugin(deadline=...)")
        super().__init__(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.0),  # the host asks for one; no parameter gets a gradient
            method=[TrajectoryPlugin(), obeying],
            seed=seed,
            **options,
        )

    def train(self, experiences: Any, eval_streams: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        """Add samples to their tasks' sums; arguments as in Avalanche, without effect: ``shuffle``, ``drop_last``."""
        if self.train_epochs != 1:
            raise ValueError(f"train_epochs must be 1, got {self.train_epochs}: another pass adds all samples again")
        # Sums have no order, and nothing of a task may depend on the number of its samples.
        return super().train(experiences, eval_streams, **kwargs | {"shuffle": False, "drop_last": False})

    def backward(self) -> None:
        """Do nothing: no parameter is trained."""

    def optimizer_step(self) -> None:
        """Instead of an optimizer step, add the mini-batch's features to the sums of its task."""
        sums, labels = self.model.heads[single_task(self.experience)], self.mb_y
        if not len(sums.hashes):  # the task's first mini-batch: check that its features are repeatable
            self._refuse(self.model.fault_of_network(self.mb_x))
        (low, high), last = labels.aminmax(), sums.out_features - 1
        if sums.seen is None or len(sums.seen) != len(labels) or not 0 <= low <= high <= last:
            self._refuse(f"labels must be 0 to {last}, one per sample, got {low} to {high}: has a plugin changed them?")
        sums.change(self.model.rows(sums.seen, labels))
        sums.seen = None

    def _inference(self, rule: InferenceRule) -> TaskInference:
        return _AllClasses(self.model, rule)
