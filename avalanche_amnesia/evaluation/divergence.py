"""JSD between two models' features of unlearned tasks' data: the main model, and one that never saw the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from avalanche.evaluation.metric_results import MetricValue
from torch import Tensor, nn

from avalanche_amnesia import checks
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation.features import features_of, mean_features
from avalanche_amnesia.evaluation.functional import js_divergence
from avalanche_amnesia.evaluation.probes import Probe, ProbingMetric, unlearning_of
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.models.task_masked import TaskMaskedModel

ProbeKind = Literal["own", "remaining"]
Floor = Literal["order", "seed"]


class JSDivergence(ProbingMetric):
    """``JSD_t``: mean Jensen–Shannon divergence, in bits, between main and reference features of unlearned tasks.

    ``JSD_t = 1/|U(t)| Σ_{τ∈U(t)} 1/|D^τ| Σ_{x∈D^τ} JS( softmax f(x) ‖ softmax f_ref(x) )``: ``U(t)`` are the tasks
    unlearned so far, ``D^τ`` is the test data of task τ, ``f`` and ``f_ref`` are the features of the main model and of
    the reference, which learned the remaining tasks alone.

    In [0, 1], lower is better; a value below its noise floor says no more than one at it. Emitted after
    every evaluation between tasks, per unlearned task and as their mean, as ``JSD_<probe>`` and
    ``JSD_<probe>_floor_<floor>``. ``JSD_<probe>_tasks`` says how many tasks these means cover: ``own`` leaves out
    those of which no mask was kept (``keep_probes=False``).

    Args:
        references: of the run.
        probe: ``own``: through the mask that the task had; ``remaining``: mean features over the masks of the
            remaining tasks. Models without masks use their plain backbone for both.
        noise_floor: what the same number is between two references: trained with another data ``order``, or from
            another ``seed``.

    Raises:
        TypeError: for references that are none.
        ValueError: for a probe or a floor that is not known.
    """

    higher_is_better = False
    lower_bound, upper_bound = 0.0, 1.0

    def __init__(self, references: References, probe: ProbeKind = "own", noise_floor: Sequence[Floor] = ()) -> None:
        super().__init__()
        checks.instance("references", references, References, "References(make_strategy, benchmark)")
        checks.one_of("probe", probe, ProbeKind)
        for floor in noise_floor:
            checks.one_of("noise_floor", floor, Floor)
        self.references, self.probe, self.noise_floor = references, probe, tuple(noise_floor)
        references.expect("same", *noise_floor)

    def before_training_exp(self, strategy: Any) -> None:
        """Check that what is trained is what the references are trained on."""
        self.references.check(strategy.experience)

    def values(self, strategy: Any, unlearned: Sequence[int], remaining: Sequence[int]) -> list[MetricValue]:
        """JSD against the reference of the remaining tasks, then its floors."""
        self.references.check_labels(unlearning_of(strategy).history.data)
        reference = self.references.reference(remaining)
        by_task = self._by_task(strategy.model, reference, strategy.model, unlearned, remaining)
        results = [*self.emit(strategy, str(self), by_task), self.emit_coverage(strategy, by_task)]
        for floor in self.noise_floor:
            other = self.references.reference(remaining, floor)
            by_task = self._by_task(other, reference, strategy.model, unlearned, remaining)
            results += self.emit(strategy, f"{self}_floor_{floor}", by_task)
        return results

    def _by_task(
        self,
        model: nn.Module,
        reference: nn.Module,
        main: nn.Module,
        unlearned: Sequence[int],
        remaining: Sequence[int],
    ) -> dict[int, float]:
        result = {}
        for task in unlearned:
            x, _ = task_data(self.references.test_experience(task))
            features = [self._features(m, main, x, task, remaining) for m in (model, reference)]
            if features[0] is not None and features[1] is not None:
                result[task] = float(js_divergence(features[0], features[1]).mean())
        return result

    def _features(
        self, model: nn.Module, main: nn.Module, x: Tensor, task: int, remaining: Sequence[int]
    ) -> Tensor | None:
        """Features through the probe; None where there is no mask to look through."""
        if not isinstance(main, TaskMaskedModel):
            return features_of(model, x, task=task)
        probe = self.probes.get(task)
        if self.probe == "own":
            return None if probe is None or probe.mask is None else features_of(model, x, probe.mask, parts=probe.parts)
        assert isinstance(model, TaskMaskedModel)
        return mean_features(model, x, remaining) if remaining else None

    def __str__(self) -> str:
        return f"JSD_{self.probe}"


def jsd_metrics(
    references: References,
    *,
    probes: Sequence[ProbeKind] = get_args(ProbeKind),
    noise_floor: Sequence[Floor] = ("order",),
) -> list[JSDivergence]:
    """The JSD metrics of a run, one per probe.

    Args:
        references: of the run.
        probes: which of ``own`` and ``remaining``.
        noise_floor: which of ``order`` and ``seed`` to show beside each; every one costs another reference.
    """
    return [JSDivergence(references, probe, noise_floor) for probe in probes]


def jsd(model: nn.Module, reference: nn.Module, x: Tensor, probe: Probe | None = None) -> float:
    """Mean JSD of two models' features of the same inputs, in bits.

    Args:
        model: any that :func:`features_of` takes.
        reference: the same.
        x: ``(n, …)``.
        probe: a task's mask and norms, through which both are seen (:func:`take_probe`); None: the plain backbones.
    """
    mask, parts = (None, None) if probe is None else (probe.mask, probe.parts)
    features = [features_of(each, x, mask, parts=parts) for each in (model, reference)]
    return float(js_divergence(*features).mean())
