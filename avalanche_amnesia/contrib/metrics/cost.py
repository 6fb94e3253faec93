"""Cost of an unlearning in seconds, compared with retraining without the tasks."""

from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name

from avalanche_amnesia import checks
from avalanche_amnesia.evaluation.bases import CallbackMetric, require_unlearning
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.strategy import Strategy


class UnlearningCost(CallbackMetric):
    """Metric: seconds of each unlearning, and of training a model from scratch without the unlearned tasks.

    Emitted at the first evaluation after the unlearnings, in their order, as ``SecondsToUnlearn``, ``SecondsToRetrain``
    and ``TimesFaster`` (above 0, higher is better; not emitted if no task remains to retrain). These are wall-clock
    times: they vary from run to run, and with the load of the machine.

    Args:
        references: the run's references.

    Raises:
        TypeError: if ``references`` is not a :class:`References`.
    """

    def __init__(self, references: References) -> None:
        super().__init__()
        checks.instance("references", references, References, "References(make_strategy, benchmark)")
        self.references = references
        references.expect("same")
        self._emitted = 0

    def state(self) -> int:
        """Return the state to save: the number of reported unlearnings."""
        return self._emitted

    def load_state(self, state: int) -> None:
        """Load a saved state: the number of reported unlearnings."""
        self._emitted = int(state)

    def before_training_exp(self, strategy: Strategy) -> None:
        """Before a task's training: raise an error if its data differ from those the reference models retrain on."""
        self.references.check(strategy.experience)

    def after_eval(self, strategy: Strategy) -> list[MetricValue] | None:
        """After an evaluation: return the durations of new unlearnings; None if there are none, or during training."""
        plugin = require_unlearning(strategy)
        if plugin.current_task is not None or len(plugin.records) <= self._emitted:
            return None
        references, found = self.references.trained(plugin), list[MetricValue]()
        for record in plugin.records[self._emitted :]:
            retrain = references.seconds(record.remaining)
            faster = retrain / record.seconds if record.seconds and retrain else None
            values = {"SecondsToUnlearn": record.seconds, "SecondsToRetrain": retrain, "TimesFaster": faster}
            found += self.emit(strategy, {get_metric_name(n, strategy, add_task=False): v for n, v in values.items()})
        self._emitted = len(plugin.records)
        return found


def cost_metrics(references: References) -> list[UnlearningCost]:
    """Return a list with the metric that compares the time to unlearn with the time to retrain."""
    return [UnlearningCost(references)]
