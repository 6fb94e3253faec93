"""Search of the stock strategies' settings: its trials and table as committed, and every method built from them."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from avalanche_amnesia.benchmarks.digits import digits as digit_images
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.contrib.streams import SmallConvNet
from avalanche_amnesia.lab.study.building import MEMORY, STOCK
from avalanche_amnesia.training import UnlearningPlugin
from avalanche_amnesia.training.host import find_plugin
from experiments import baselines
from experiments.stock import TRIALS, chosen, make_stock
from experiments.streams import STREAMS, Stream, accuracy_on
from experiments.streams import _split as split
from experiments.trials import Settings

ROWS = json.loads(TRIALS.read_text())
DIGITS = Stream(
    lambda root: digit_images(0),
    split,
    lambda: torch.nn.Sequential(torch.nn.Upsample((32, 32)), torch.nn.Conv2d(1, 3, 1), SmallConvNet()),
    {1: [0]},
    n_tasks=2,
    training={"train_mb_size": 16, "train_epochs": 2},
)


@pytest.fixture
def digits(monkeypatch):
    """A stream of digits with the BatchNorm network."""

    def network():
        net = DIGITS.network()
        net.features = 128
        return net

    monkeypatch.setitem(STREAMS, "digits", Stream(**{**vars(DIGITS), "network": network}))


def test_the_table_is_that_of_the_committed_trials():
    assert TRIALS.with_suffix(".md").read_text() == baselines.table(ROWS)


def test_every_method_had_as_many_trials_on_the_same_images():
    streams = {row["stream"] for row in ROWS}
    counts = Counter((row["stream"], row["method"], row["seed"]) for row in ROWS)
    assert set(counts.values()) == {6}
    assert {(stream, method) for stream, method, _ in counts} == {(s, m) for s in streams for m in STOCK}
    assert all(len({row["n_train"] for row in ROWS if row["stream"] == stream}) == 1 for stream in streams)


@pytest.mark.parametrize("method", STOCK)
@pytest.mark.parametrize("stream", {row["stream"]: None for row in ROWS})
def test_chosen_is_the_best_of_its_trials(stream, method):
    mine = [row for row in ROWS if (row["stream"], row["method"]) == (stream, method)]
    best = max(mine, key=lambda row: row["remaining"])
    assert chosen(stream, method) == Settings(best["optimizer"], best["lr"], best["options"])


def test_chosen_by_the_mean_over_seeds(tmp_path):
    what = {"stream": "s", "method": "Naive", "n_train": None, "options": {}, "optimizer": "SGD"}
    cells = [(0.1, 1, 0.9), (0.1, 2, 0.1), (0.2, 1, 0.6), (0.2, 2, 0.6)]
    rows = [what | {"lr": lr, "seed": seed, "remaining": accuracy} for lr, seed, accuracy in cells]
    (tmp_path / "trials.json").write_text(json.dumps(rows))
    assert chosen("s", "Naive", tmp_path / "trials.json") == Settings("SGD", 0.2)
    few = [row | {"n_train": 10, "lr": 0.3, "remaining": 1.0} for row in rows]
    (tmp_path / "trials.json").write_text(json.dumps(few + rows))
    assert chosen("s", "Naive", tmp_path / "trials.json") == Settings("SGD", 0.2)  # of fewer images: not comparable
    with pytest.raises(LookupError, match="no settings of 'EWC' on 's' were tried"):
        chosen("s", "EWC", tmp_path / "trials.json")


@pytest.mark.parametrize("method", STOCK)
def test_a_stock_strategy_on_a_batchnorm_network_learns_and_obeys(digits, method):
    name, value, _ = baselines.STRENGTHS.get(method, (None, None, None))
    settings = Settings("Adam", 1e-3, baselines.FIXED.get(method, {}) | ({} if name is None else {name: value}))
    benchmark = DIGITS.benchmark(Path(), 0, validation=True)
    makes = [make_stock(method, "digits", 0, settings) for _ in range(2)]
    assert len({str([tensor_hash(v) for v in made.model.state_dict().values()]) for made in makes}) == 1
    made = makes[0]
    for experience in benchmark.train_stream:
        made.train(experience)
    assert made.model.tasks == (1,)
    assert [record.plan.tasks for record in find_plugin(made, UnlearningPlugin).records] == [(0,)]
    assert accuracy_on(made.model, benchmark.test_stream[1]) > 0.8


def test_a_trial_is_written_and_not_run_again(digits, tmp_path, monkeypatch, capsys):
    output = tmp_path / "baselines.json"
    flags = {"--root": tmp_path, "--streams": "digits", "--methods": "Naive", "--n-train": 60, "--output": output}
    arguments = [str(part) for flag in flags.items() for part in flag]
    monkeypatch.setattr("sys.argv", ["baselines", *arguments])
    baselines.main()
    rows = json.loads(output.read_text())
    assert len(rows) == 6
    assert all(0 <= row["remaining"] <= 1 and row["n_train"] == 60 for row in rows)
    assert output.with_suffix(".md").read_text() == baselines.table(rows)
    monkeypatch.setattr(baselines, "trial", None)
    baselines.main()
    assert json.loads(output.read_text()) == rows


def test_memories():
    replay = make_stock("Replay", "permuted 20", 0, Settings("SGD", 0.1))
    dark = make_stock("DER++", "permuted 20", 0, Settings("SGD", 0.1))
    memories = {type(plugin).__name__: plugin for plugin in (*replay.plugins, *dark.plugins)}
    assert memories["ReplayPlugin"].mem_size == 20 * MEMORY
    assert memories["DarkReplayPlugin"].memory.memory_per_task == MEMORY
