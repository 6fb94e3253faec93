"""A stock Avalanche strategy with Avalanche's loggers and this package's."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import InteractiveLogger, TensorboardLogger, TextLogger
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from avalanche.training.utils import trigger_plugins
from PIL import Image
from support.logged_runs import LoggedRun
from support.strategies import DIGITS, NoMetric
from support.wandb_files import read_offline_run, run_folders
from torch import nn

from avalanche_amnesia import MLP, MultiHeadModel
from avalanche_amnesia.logging import WandBLogger


class UnlearnAfterTask(SupervisedPlugin):
    """Fires the events of an unlearning after the loggers, as UnlearningPlugin does."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.trained = trained

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        if strategy.clock.train_exp_counter == self.trained:
            trigger_plugins(strategy, "before_unlearning")
            trigger_plugins(strategy, "after_unlearning")


class EventMetrics(NoMetric):
    """A picture at every task end, and one value before and after an unlearning."""

    axis = "event"

    def after_training_exp(self, strategy: Any) -> MetricValue:
        mask = torch.rand(8)
        value = AlternativeValues(Image.fromarray((mask[None] * 255).byte().numpy()), mask)
        return MetricValue(self, "Mask/layer0", value, strategy.clock.train_iterations)

    def before_unlearning(self, strategy: Any) -> MetricValue:
        return MetricValue(self, "weight norm", strategy.model.head(0).weight.norm(), 0)

    after_unlearning = before_unlearning


class Finished:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[dict[str, Any]] = []
        torch.manual_seed(0)
        model = MultiHeadModel(MLP(64, hidden=(16,), features=16))
        with WandBLogger(dir=folder, mode="offline") as logger, (folder / "log.txt").open("w") as text:
            evaluator = EvaluationPlugin(
                accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True),
                loss_metrics(epoch=True, experience=True),
                forgetting_metrics(experience=True, stream=True),
                EventMetrics(),
                loggers=[InteractiveLogger(), TextLogger(text), TensorboardLogger(folder / "tb"), logger],
            )
            strategy = Naive(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                criterion=nn.CrossEntropyLoss(),
                train_mb_size=64,
                train_epochs=2,
                eval_mb_size=256,
                evaluator=evaluator,
            )
            strategy.plugins.append(UnlearnAfterTask(2))
            for experience in DIGITS.train_stream[:2]:
                strategy.train(experience)
                self.results.append(strategy.eval(DIGITS.test_stream[:2]))
            trigger_plugins(strategy, "before_unlearning")  # on the user's request
            trigger_plugins(strategy, "after_unlearning")
            self.all_metrics = evaluator.get_all_metrics()
            self.iterations = strategy.clock.train_iterations
        self.run: LoggedRun = read_offline_run(*run_folders(folder))

    def rows_with(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.run.rows if name in row]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"))


def test_the_last_logged_accuracy_is_the_result_of_eval(finished: Finished) -> None:
    names = [name for name in finished.results[-1] if "eval_phase" in name and "Acc" in name]
    assert len(names) >= 3
    for name in names:
        assert finished.rows_with(name)[-1][name] == finished.results[-1][name]
        assert finished.run.summary[name]["last"] == finished.results[-1][name]


def test_every_value_collected_by_avalanche_is_in_a_row(finished: Finished) -> None:
    logged = Counter(name for row in finished.run.rows for name in row)
    assert len(finished.all_metrics) > 10
    for name, (_, values) in finished.all_metrics.items():
        assert logged[name] == len(values)
        if isinstance(values[0], float):
            assert [row[name] for row in finished.rows_with(name)] == values


def test_the_axes_of_the_rows_never_decrease(finished: Finished) -> None:
    axes = [(row["iteration"], row["task"], row["event"]) for row in finished.run.rows]
    for before, after in pairwise(axes):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert axes[0] == (0, -1, 0)
    assert axes[-1] == (finished.iterations, 1, 4)  # two task ends, two unlearnings


def test_each_metric_has_its_axis(finished: Finished) -> None:
    for name in finished.all_metrics:
        if name in ("Mask/layer0", "weight norm"):
            expected = "event"
        else:
            expected = "task" if "eval_phase" in name else "iteration"
        assert finished.run.metrics[name] == expected


def test_evaluations_and_unlearnings_have_the_counters_of_their_moment(finished: Finished) -> None:
    name = next(n for n in finished.all_metrics if n.startswith("Top1_Acc_Stream/eval_phase/test_stream"))
    assert [row["task"] for row in finished.rows_with(name)] == [0, 1]
    rows = finished.rows_with("weight norm")
    assert [(row["task"], row["event"]) for row in rows] == [(1, 2), (1, 3), (1, 3), (1, 4)]
    assert [row["event"] for row in finished.rows_with("Mask/layer0")] == [1, 2]
    (folder,) = run_folders(finished.folder)
    for row in finished.rows_with("Mask/layer0"):
        with Image.open(folder / "files" / row["Mask/layer0"]["path"]) as picture:
            assert picture.size == (8, 1)
