"""A real Avalanche strategy with its own loggers beside ours."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics, loss_metrics
from avalanche.logging import InteractiveLogger, TensorboardLogger, TextLogger
from avalanche.models import MultiHeadClassifier, MultiTaskModule
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from avalanche.training.utils import trigger_plugins
from PIL import Image
from sklearn.datasets import load_digits
from support.logged_runs import LoggedRun
from support.strategies import NoMetric
from support.wandb_files import read_offline_run, run_folders
from torch import Tensor, nn
from torch.utils.data import Dataset

from avalanche_amnesia.logging import WandBLogger


class Digits(Dataset):
    def __init__(self, part: slice) -> None:
        data = load_digits()
        self.images = torch.tensor(data.data[part], dtype=torch.float32) / 16
        self.targets = data.target[part].tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]


class MultiHeadMLP(MultiTaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 16), nn.ReLU())
        self.classifier = MultiHeadClassifier(16, 5)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        return self.classifier(self.features(x), task_labels)


class UnlearnAfterTask(SupervisedPlugin):
    """Fires the events of an unlearning when so many tasks have ended, behind the loggers, as UnlearningPlugin does."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.trained = trained

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        if strategy.clock.train_exp_counter == self.trained:
            trigger_plugins(strategy, "before_unlearning")
            trigger_plugins(strategy, "after_unlearning")


class EventMetrics(NoMetric):
    """A picture at every task end and the same value before and after an unlearning."""

    axis = "event"

    def after_training_exp(self, strategy: Any) -> MetricValue:
        mask = torch.rand(8)
        value = AlternativeValues(Image.fromarray((mask[None] * 255).byte().numpy()), mask)
        return MetricValue(self, "Mask/layer0", value, strategy.clock.train_iterations)

    def before_unlearning(self, strategy: Any) -> MetricValue:
        return MetricValue(self, "weight norm", strategy.model.features[0].weight.norm(), 0)

    after_unlearning = before_unlearning


class Finished:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[dict[str, Any]] = []
        benchmark = nc_benchmark(
            Digits(slice(0, 600)),
            Digits(slice(600, 900)),
            n_experiences=2,
            task_labels=True,
            shuffle=False,
            class_ids_from_zero_in_each_exp=True,
        )
        torch.manual_seed(0)
        model = MultiHeadMLP()
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
            for experience in benchmark.train_stream:
                strategy.train(experience)
                self.results.append(strategy.eval(benchmark.test_stream))
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


def test_the_last_logged_accuracy_is_what_eval_returned(finished: Finished) -> None:
    names = [name for name in finished.results[-1] if "eval_phase" in name and "Acc" in name]
    assert len(names) >= 3
    for name in names:
        assert finished.rows_with(name)[-1][name] == finished.results[-1][name]
        assert finished.run.summary[name]["last"] == finished.results[-1][name]


def test_every_value_that_avalanche_collected_is_in_a_row(finished: Finished) -> None:
    logged = Counter(name for row in finished.run.rows for name in row)
    assert len(finished.all_metrics) > 10
    for name, (_, values) in finished.all_metrics.items():
        assert logged[name] == len(values)
        if isinstance(values[0], float):
            assert [row[name] for row in finished.rows_with(name)] == values


def test_every_row_has_the_axes_and_they_only_grow(finished: Finished) -> None:
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


def test_evaluations_lie_at_the_task_trained_last(finished: Finished) -> None:
    name = next(n for n in finished.all_metrics if n.startswith("Top1_Acc_Stream/eval_phase/test_stream"))
    assert [row["task"] for row in finished.rows_with(name)] == [0, 1]


def test_an_unlearning_has_a_before_and_an_after(finished: Finished) -> None:
    rows = finished.rows_with("weight norm")
    assert [(row["task"], row["event"]) for row in rows] == [(1, 2), (1, 3), (1, 3), (1, 4)]
    assert [row["event"] for row in finished.rows_with("Mask/layer0")] == [1, 2]


def test_pictures_of_metrics_are_files(finished: Finished) -> None:
    (folder,) = run_folders(finished.folder)
    for row in finished.rows_with("Mask/layer0"):
        with Image.open(folder / "files" / row["Mask/layer0"]["path"]) as picture:
            assert picture.size == (8, 1)
