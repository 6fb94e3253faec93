"""Runs of JSON lines: readable after a kill, sent to W&B once, and equal to other logs."""

import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from avalanche.evaluation.metric_results import AlternativeValues, MetricValue
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
from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.contrib import metrics
from avalanche_amnesia.contrib.metrics import capacity_pictures_metrics
from avalanche_amnesia.evaluation import accuracy_matrix_metrics, capacity_metrics, unlearned_accuracy_metrics
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.lab.logging import JSONLogger, sync
from avalanche_amnesia.lab.logging.run_lines import RUN_FILE, JSONRunError
from avalanche_amnesia.lab.report import read_run

BENCHMARK = with_unlearning(DIGITS, {1: [0]})


def test_without_pictures_their_tables_are_kept(tmp_path: Path) -> None:
    metrics = accuracy_metrics(experience=True), loss_metrics(epoch=True), unlearned_accuracy_metrics(BENCHMARK)
    pictures = capacity_metrics(), capacity_pictures_metrics(), accuracy_matrix_metrics()
    with JSONLogger(tmp_path / "run", pictures=False) as logger:
        evaluator = EvaluationPlugin(*metrics, *pictures, loggers=[logger])
        strategy = amnesiac(train_epochs=1, seed=7, evaluator=evaluator)
        for experience in BENCHMARK.train_stream[:3]:
            strategy.train(experience)
            strategy.eval(BENCHMARK.test_stream)
    run = read_json_run(tmp_path / "run")
    rows = run.rows
    assert not any(name.startswith("Top1") and "Task000" in name for name in run.summary)  # it is unlearned
    assert not (tmp_path / "run" / "media").exists()
    assert not any(isinstance(value, Image.Image) for row in rows for value in row.values())
    assert sum("Figure/AccuracyMatrix/table" in row for row in rows) == 3


def test_log_events_ends_a_moment_of_a_task_without_evaluation(tmp_path: Path) -> None:
    with JSONLogger(tmp_path / "run") as logger:
        evaluator = EvaluationPlugin(capacity_metrics(), loggers=[logger])
        strategy = amnesiac(train_epochs=1, evaluator=evaluator)
        for experience in DIGITS.train_stream[:2]:
            strategy.train(experience)
            logger.log_events()
            logger.log_events()  # nothing happened since
    run = read_run(tmp_path / "run")
    assert [(moment.task, moment.remaining) for moment in run.moments] == [(0, (0,)), (1, (0, 1))]
    assert run.last.number("Capacity") == network_capacity(strategy)


def test_values_of_every_type_are_read_back(tmp_path: Path) -> None:
    table = Table(("a", "b"), ((1, None), ("x", 2.5)))
    values: dict[str, Any] = {"float": 0.1, "nan": math.nan, "infinite": -math.inf, "table": table, "text": "exact"}
    values |= {"picture": AlternativeValues(Image.new("RGB", (3, 2), (255, 0, 0))), "parts": {"x": np.float32(0.5)}}
    with JSONLogger(tmp_path / "run") as logger:
        logger.log_metrics([MetricValue(None, name, value, 4) for name, value in values.items()])
    run = read_json_run(tmp_path / "run")
    (row,) = run.rows
    assert (row["float"], row["infinite"], row["parts/x"], row["iteration"]) == (0.1, -math.inf, 0.5, 4)
    assert math.isnan(row["nan"])
    assert row["picture"].getpixel((2, 1)) == (255, 0, 0)
    assert row["table"] == table
    assert run.summary["text"] == "exact"
    for line in (tmp_path / "run" / RUN_FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_killed_run_is_read_without_its_cut_line(tmp_path: Path) -> None:
    with JSONLogger(tmp_path / "run") as logger:
        for step in range(5):
            logger.log_single_metric("x", step, step)
    file = tmp_path / "run" / RUN_FILE
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[0], len(whole), 5):
        file.write_bytes(whole[:size])
        run = read_json_run(tmp_path / "run")
        assert not run.complete
        assert [row["x"] for row in run.rows] == list(range(max(0, sum(end <= size for end in ends) - 2)))


def test_pickled_and_finished_loggers_take_no_values(tmp_path: Path) -> None:
    logger = JSONLogger(tmp_path / "run")
    logger.log_single_metric("x", 1, 0)
    loaded = pickle.loads(pickle.dumps(logger))
    with pytest.raises(RuntimeError, match=r"loaded without its run, .*: make a new JSONLogger"):
        loaded.log_single_metric("x", 2, 1)
    logger.finish()
    logger.finish()
    with pytest.raises(RuntimeError, match="is finished"):
        logger.log_single_metric("x", 3, 2)
    run = read_json_run(tmp_path / "run")
    assert [row["x"] for row in run.rows] == [1]
    assert run.complete


def test_damaged_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JSONRunError, match=f"holds no {RUN_FILE}"):
        read_json_run(tmp_path)
    with JSONLogger(tmp_path / "run") as logger:
        logger.log_single_metric("x", 1, 0)
    whole = (tmp_path / "run" / RUN_FILE).read_text()
    for content, words in (
        ("", "no whole line"),
        ('{"kind": "row"}\n', "does not begin like"),
        ("[]\n", "line 1 of .* is broken"),
        ('{"kind": "run", "format": "avalanche-amnesia run", "version": 2}\n', "does not begin like"),
        (whole.replace('"metric": "x"', '"metric: "x"'), "line 2 of"),
    ):
        (tmp_path / RUN_FILE).write_text(content)
        with pytest.raises(JSONRunError, match=words):
            read_json_run(tmp_path)


def test_wrong_arguments_and_used_folders_are_refused(tmp_path: Path) -> None:
    JSONLogger(tmp_path / "run").finish()
    with pytest.raises(JSONRunError, match="not an empty folder"):
        JSONLogger(tmp_path / "run")
    with pytest.raises(TypeError, match="not JSON serializable"):
        JSONLogger(tmp_path / "other", config={"net": object()})
    assert not (tmp_path / "other").exists()


def short_run(folder: Path, value: float = 1.0, **about: Any) -> Path:
    with JSONLogger(folder, **about) as logger:
        for step in range(3):
            logger.log_single_metric("Loss/train_phase", value * step, step)
        logger.log_single_metric("MaskUse/layers.1", 0.5, 3)
        logger.log_single_metric("claim", "exact", 3)
    return folder


def test_a_run_is_sent_once(tmp_path: Path, amnesia: Any) -> None:
    short_run(tmp_path / "runs" / "a", name="A", group="seeds", job_type="reference", config={"lr": 0.1})
    short_run(tmp_path / "runs" / "b", value=2.0)
    command = ["sync", str(tmp_path / "runs"), "--mode", "offline", "--project", "digits"]
    said = amnesia(*command).splitlines()
    assert [line.endswith(read_json_run(tmp_path / "runs" / name).id) for name, line in zip("ab", said, strict=True)]
    assert "4 rows written as an offline run of project digits" in said[0]
    ours = read_json_run(tmp_path / "runs" / "a")
    theirs = read_offline_run(*run_folders(tmp_path / "runs" / "a"))
    assert theirs.project == "digits"
    for name in ("id", "name", "group", "job_type", "config", "metrics", "complete"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in theirs.rows] == ours.rows
    assert theirs.summary["claim"] == "exact"
    for name in ("Loss/train_phase", "MaskUse/layers.1"):
        assert theirs.summary[name] == ours.summary[name]
    assert all("was sent before" in line for line in amnesia(*command).splitlines())
    assert len(run_folders(tmp_path / "runs" / "a")) == 1


def test_a_run_that_has_grown_is_sent_again_under_its_identifier(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    logger = JSONLogger(folder)
    logger.log_single_metric("x", 1.0, 0)
    (outcome,) = sync([folder], mode="offline")
    assert outcome.result == "sent"
    assert read_offline_run(*run_folders(folder)).complete
    logger.log_single_metric("x", 2.0, 1)
    logger.finish()
    (outcome,) = sync([folder], mode="offline")
    assert outcome.result == "sent"
    run = read_offline_run(*run_folders(folder))
    assert [row["x"] for row in run.rows] == [1, 2]
    assert run.id == read_json_run(folder).id


def test_a_broken_run_does_not_stop_the_other_runs(tmp_path: Path, amnesia: Any) -> None:
    file = short_run(tmp_path / "a") / RUN_FILE
    file.write_text(file.read_text().replace('"kind": "row"', '"kind": row', 1))
    short_run(tmp_path / "b")
    broken, whole = amnesia("sync", str(tmp_path), "--mode", "offline", status=1).splitlines()
    assert "failed, JSONRunError: line 3 of" in broken
    assert "4 rows written" in whole
    assert run_folders(tmp_path / "a") == []


def test_folders_without_runs_of_json_lines_are_refused(tmp_path: Path, amnesia: Any) -> None:
    amnesia("sync", str(tmp_path / "absent"), status=2)
    assert "holds no run" in amnesia("sync", str(tmp_path), status=2)
    with pytest.raises(ValueError, match="'disabled' sends nothing"):
        sync([], mode="disabled")
    with WandBLogger(dir=tmp_path / "theirs", mode="offline") as logger:
        logger.log_single_metric("x", 1, 0)
    with pytest.raises(FileNotFoundError, match="`wandb sync` sends runs"):
        sync([tmp_path], mode="offline")


def test_a_run_sent_online_keeps_its_id_and_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JSONLogger(tmp_path / "audit", job_type="audit") as logger:
        logger.log_single_metric("x", 1, 0)
    begun: dict[str, Any] = {}
    begin = wandb.init

    def init(**options: Any) -> Any:
        begun.update(options)
        run = begin(**{**options, "mode": "offline"})
        monkeypatch.setattr(type(run), "offline", False)
        return run

    monkeypatch.setattr(wandb, "init", init)
    (outcome,) = sync([tmp_path], mode="online")
    assert outcome.result == "sent", outcome
    assert (begun["mode"], begun["id"], begun["job_type"]) == ("online", read_json_run(tmp_path / "audit").id, "audit")
    assert "resume" not in begun


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
                *(accuracy_metrics(experience=True), loss_metrics(minibatch=True, epoch=True)),
                *(evaluation.capacity_metrics(), metrics.capacity_pictures_metrics(), metrics.mask_overlap_metrics()),
                *(evaluation.accuracy_matrix_metrics(), evaluation.jsd_metrics(references)),
                *(metrics.distance_metrics(references), evaluation.unlearned_accuracy_metrics(DIGITS, references)),
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
