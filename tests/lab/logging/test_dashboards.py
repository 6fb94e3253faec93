"""The same run in W&B, TensorBoard and JSON lines: equal numbers, pictures and tables."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import CSVLogger, InteractiveLogger, TensorboardLogger
from avalanche.training.plugins import EvaluationPlugin
from PIL import Image
from support.logged_runs import read_json_run
from support.strategies import DIGITS, PRICED, amnesiac
from support.wandb_files import read_offline_run, run_folders
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from avalanche_amnesia import WandBLogger, evaluation
from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.contrib import metrics
from avalanche_amnesia.lab.logging import JSONLogger

DISTANCES = ("JSD_own", "JSD_remaining", "JSD_none", "Euclidean_own", "Cosine_own", "CKA_own")
BESIDE = ("", "_floor_order", "_ratio_order")
PICTURES = ("Figure/Masks", "Figure/Overlap", "Figure/Capacity", "Figure/AccuracyMatrix")

ABOUT: dict[str, Any] = {"group": "seeds", "job_type": "reference", "config": {"note": "mine"}}


class Shown:
    """Tasks 3, 0 and 2, then 0 is unlearned and trained again, in three logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        references = evaluation.References(lambda **options: amnesiac(train_epochs=1, **options), DIGITS)
        self.board = TensorboardLogger(folder / "tb")
        with WandBLogger(dir=folder, mode="offline", **ABOUT) as logger, JSONLogger(folder / "json", **ABOUT) as lines:
            self.evaluator = EvaluationPlugin(
                accuracy_metrics(experience=True),
                loss_metrics(minibatch=True, epoch=True),
                evaluation.capacity_metrics(),
                metrics.capacity_pictures_metrics(),
                metrics.mask_overlap_metrics(),
                evaluation.accuracy_matrix_metrics(),
                evaluation.jsd_metrics(references),
                metrics.distance_metrics(references),
                evaluation.unlearned_accuracy_metrics(DIGITS, references),
                evaluation.accuracy_difference_metrics(references),
                loggers=[InteractiveLogger(), CSVLogger(str(folder / "csv")), self.board, logger, lines],
            )
            # With a regulariser to show.
            self.strategy = amnesiac(train_epochs=1, evaluator=self.evaluator, masks=PRICED)
            for task in (3, 0, 2):
                self.strategy.train(DIGITS.train_stream[task])
                self.strategy.eval(DIGITS.test_stream)
            self.record = self.strategy.unlearn([0], keep_probes=True)
            self.strategy.eval(DIGITS.test_stream)
            self.strategy.train(DIGITS.train_stream[0])
            self.results = self.strategy.eval(DIGITS.test_stream)
        self.board.writer.flush()
        self.run = read_offline_run(*run_folders(folder))
        self.events = EventAccumulator(str(folder / "tb"), size_guidance={"images": 0, "scalars": 0})
        self.events.Reload()

    def last_table(self, name: str) -> list[dict[str, Any]]:
        (folder,) = run_folders(self.folder)
        table = json.loads((folder / "files" / self.run.rows_with(name)[-1][name]["path"]).read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Shown(tmp_path_factory.mktemp("shown"))


def test_all_logs_have_the_same_numbers(shown: Shown) -> None:
    names = {f"{distance}{suffix}/eval_phase/test_stream" for distance in DISTANCES for suffix in BESIDE}
    collected = shown.evaluator.get_all_metrics()
    numbers = {name: values for name, (_, values) in collected.items() if isinstance(values[0], float | int)}
    assert {"Capacity", "AccuracyDifference/eval_phase/test_stream", *names} <= set(numbers)
    assert set(shown.events.Tags()["scalars"]) == set(numbers)
    for name, values in numbers.items():
        assert [event.value for event in shown.events.Scalars(name)] == pytest.approx(values, rel=1e-6)
        assert [row[name] for row in shown.run.rows_with(name)] == values


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float) and not name.startswith("_")}


def test_json_lines_have_the_content_of_wandbs_offline_run(shown: Shown) -> None:
    ours, theirs = read_json_run(shown.folder / "json"), shown.run
    for name in ("name", "project", "group", "job_type", "config", "metrics", "complete"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [numbers(row) for row in ours.rows] == [numbers(row) for row in theirs.rows]
    assert [set(row) for row in ours.rows] == [{n for n in row if not n.startswith("_")} for row in theirs.rows]
    summaries = [
        {name: value for name, value in run.summary.items() if isinstance(value, dict) and "last" in value}
        for run in (ours, theirs)
    ]
    named = {name for name in summaries[0] if "Figure" not in name and "Task000" not in name}  # it is learned again
    assert len(named) > 10
    assert {name: summaries[0][name] for name in named} == {name: summaries[1][name] for name in named}
    assert ours.records == [UnlearningRecord.from_json(shown.record.to_json())]
    pictures = sum(isinstance(value, Image.Image) for row in ours.rows for value in row.values())
    assert len(list((shown.folder / "json" / "media").glob("*.png"))) == pictures > 0


def test_tensorboard_and_wandb_show_the_same_pictures(shown: Shown) -> None:
    (folder,) = run_folders(shown.folder)
    for name in PICTURES:
        boards = [np.asarray(Image.open(io.BytesIO(e.encoded_image_string))) for e in shown.events.Images(name)]
        files = [np.asarray(Image.open(folder / "files" / row[name]["path"])) for row in shown.run.rows_with(name)]
        # Four tasks and an unlearning; a single task has no overlap.
        assert len(boards) == len(files) == (4 if name == "Figure/Overlap" else 5)
        assert all((board == file).all() for board, file in zip(boards, files, strict=True))
        assert any(not np.array_equal(files[0], later) for later in files[1:])


def test_the_table_of_events_has_a_row_for_each_event(shown: Shown) -> None:
    rows = shown.last_table("Events")
    assert [(row["event"], row["what"], row["task"], row["unlearned"], row["remaining"]) for row in rows] == [
        (1, "trained", 3, None, "3"),
        (2, "trained", 0, None, "3, 0"),
        (3, "trained", 2, None, "3, 0, 2"),
        (4, "unlearned", 2, "0", "3, 2"),
        (5, "trained", 0, None, "3, 2, 0"),
    ]
    assert (rows[3]["claim"], rows[3]["affected"]) == (shown.record.claim, ", ".join(map(str, shown.record.affected)))
    assert rows[3]["JSD_own_ratio_order"] == pytest.approx(rows[3]["JSD_own"] / rows[3]["JSD_own_floor_order"])
