"""User methods, streams, networks, scenarios and optimizers in a study."""

import sys
from collections import OrderedDict
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from support.tiny_study import TINY, AtOnce
from torch import nn

from avalanche_amnesia import MLP, AdjustmentRule, MultiHeadModel, SplitDigits
from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.lab.command_line import main
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.study import settings as kinds
from avalanche_amnesia.lab.study.building import make_network, make_strategy, make_stream, model_class, optimizer_class
from avalanche_amnesia.lab.study.experiment import cells_of
from avalanche_amnesia.lab.study.settings import MethodSettings, NetworkSettings, StreamSettings
from avalanche_amnesia.training import HATPlugin, TaskStrategy
from avalanche_amnesia.training.host.lookup import find_plugin

ROOT = Path(__file__).parents[3]
HERE = __name__


def two_tasks(n_tasks, seed):
    return SplitDigits(n_tasks, seed=seed, n_train=60, n_test=50)


def first_goes(n_tasks, after=1):
    return Scenario({after: [0]})


def narrow(shape, width=8):
    """A network without the attribute features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU())


def of_layers(shape):
    """A network whose layers are called features, as in torchvision."""
    return nn.Sequential(OrderedDict(features=nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 7), nn.ReLU())))


EXPERIMENT = {
    "name": "mine",
    "stream": {"name": f"{HERE}:two_tasks", "n_tasks": 2},
    "network": {"name": f"{HERE}:narrow", "options": {"width": 12}},
    "training": {"epochs": 1, "batch_size": 20},
    "scenarios": {"first goes": {"name": f"{HERE}:first_goes"}},
    "methods": {
        "Piggyback": {"kind": "experiments.piggyback:Piggyback", "options": {"score_lr": 0.003}},
        "MAS": {"kind": "avalanche.training.supervised:MAS", "optimizer": "RMSprop"},
        "WSN": {"kind": "WSN", "options": {"density": 0.5}},
    },
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("avalanche_amnesia.lab.executors.ProcessExecutor", lambda workers, gpus: AtOnce())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(EXPERIMENT, sort_keys=False))
    return tmp_path


def test_a_sweep_runs_user_parts_together_with_those_of_the_package(file, capsys):
    assert main(["sweep", "mine.yaml", "seed=1"]) == 0
    assert main(["report", "runs/mine", "--tables", "tables"]) == 0
    table = (file / "tables" / "results.md").read_text()
    assert all(f"| {name} | 1 |" in table for name in EXPERIMENT["methods"])
    runs = {name: read_run(file / f"runs/mine/{name}/first-goes/seed1") for name in EXPERIMENT["methods"]}
    assert {name: run.last.claim for name, run in runs.items()} == {
        "Piggyback": "conditional",
        "MAS": "approximate",
        "WSN": "approximate",
    }
    assert all(run.last.number("JSD_own_floor_order") is not None for run in runs.values())
    assert runs["Piggyback"].last.number("JSD_own") == 0
    assert main(["sweep", "mine.yaml", "seed=1"]) == 0
    assert "3 runs, 3 done already" in capsys.readouterr().out


def test_run_works_without_a_file(file, capsys):
    words = ["stream.n_tasks=2", f"--network={HERE}:narrow", "training.epochs=1", f"--scenario={HERE}:first_goes"]
    assert main(["run", "--method", "experiments.piggyback:Piggyback", "--stream", f"{HERE}:two_tasks", *words]) == 0
    assert "runs/two_tasks/Piggyback/first_goes/seed1" in capsys.readouterr().out
    assert main(["run"]) == 2
    assert "amnesia list" in capsys.readouterr().err


def test_modules_of_the_working_directory_are_found(file):
    (file / "beside.py").write_text("from avalanche_amnesia.benchmarks import SplitDigits as mine\n")
    assert len(make_stream(StreamSettings("beside:mine", 2, n_train=40, n_test=50), 0).train_stream) == 2
    sys.modules.pop("beside")


class Still(AdjustmentRule):
    """A rule that holds back every update."""

    def protected_share(self, use, name, sparsity):
        """Return 1 for all entries."""
        return torch.ones_like(use.covered[name])


def test_user_rules_and_data_roots_are_used(file, monkeypatch):
    settings = MethodSettings("HAT", options={"adjustment": f"{HERE}:Still"})
    made = make_strategy(settings, lambda: MLP(4, features=3), two_tasks(2, 0), 1, train_mb_size=4, train_epochs=1)
    assert isinstance(find_plugin(made, HATPlugin).rule, Still)
    monkeypatch.setenv("AMNESIA_DATA", "somewhere")
    roots = []
    monkeypatch.setattr(
        sys.modules[HERE], "rooted", lambda n_tasks, root: roots.append(root) or two_tasks(n_tasks, 0), raising=False
    )
    make_stream(StreamSettings(f"{HERE}:rooted", 2), 0)
    make_stream(StreamSettings(f"{HERE}:rooted", 2), 0, root="elsewhere")
    assert roots == ["somewhere", "elsewhere"]


def test_the_number_of_features_is_measured_and_optimizers_are_found_by_name():
    network = make_network(NetworkSettings(f"{HERE}:narrow", options={"width": 5}), torch.zeros(2, 4))
    assert (network.features, network.training) == (5, True)
    network = make_network(NetworkSettings(f"{HERE}:of_layers"), torch.zeros(4))
    assert MultiHeadModel(network).n_features == 7
    assert optimizer_class(MethodSettings("EWC", "NAdam")) is torch.optim.NAdam
    assert optimizer_class(MethodSettings("EWC", "torch.optim.adamw:AdamW")) is torch.optim.AdamW


class Silent(TaskStrategy):
    """A strategy without an annotation of its model."""

    def __init__(self, *, model, optimizer, **options):
        super().__init__(model=model, optimizer=optimizer, method=[], **options)


def test_wrong_parts_from_python_are_refused():
    for call, words in (
        (lambda: model_class(Silent), r"annotate the argument model .* model: MaskedModel"),
        (lambda: make_stream(StreamSettings(f"{HERE}:always_two", 3), 0), r"has 2 tasks: say stream.n_tasks=2"),
        (lambda: cells_of(replace(TINY, methods={"x": MethodSettings("Naiv")})), r"x.kind .*did you mean 'Naive'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


REFUSED = [
    ("methods.WSN.kind=nowhere:Method", "No module named 'nowhere'"),
    ("methods.WSN.kind=experiments.piggyback:Pigyback", "no attribute 'Pigyback'"),
    ("methods.WSN.kind=experiments.piggyback:main", "name a class of strategies"),
    (
        "methods.HAT={kind: HAT, options: {adjustment: hatt}}",
        "MODULE:NAME of your own, got 'hatt'; did you mean 'hat'?",
    ),
    ("methods.HAT={kind: HAT, options: {adjustment: {name: half, share: 1}}}", "MODULE:NAME of your own, got 'half'"),
    ("methods.HAT={kind: HAT, options: {masks: {budjet: 1}}}", "did you mean 'budget'"),
    ("methods.WSN.optimizer=Adamm", "or MODULE:NAME of your own, got 'Adamm'; did you mean 'Adam'?"),
    (f"stream.name={HERE}:no_tasks", "no attribute 'no_tasks'"),
    (f"network.name={HERE}:Wide", "no attribute 'Wide'"),
    ("network.name=MPL", "or MODULE:NAME of your own, got 'MPL'; did you mean 'MLP'?"),
    (f"scenarios.first goes.name={HERE}:last_goes", "no attribute 'last_goes'"),
    ("scenarios.first goes.options.afer=1", "no option 'afer'; did you mean 'after'?"),
]


def test_unknown_names_and_impossible_folders_are_refused_before_anything_trains(file, capsys):
    calls = [(["sweep", "mine.yaml", change], words) for change, words in REFUSED]
    for command in ("run", "sweep"):
        calls += [([command, "mine.yaml", option, "mine.yaml"], f"{option} mine") for option in ("--out", "--store")]
    for command in ("run", "sweep", "plan"):
        calls.append(([command, "mine.yaml", "--out", "/proc/nowhere"], "--out /proc/nowhere"))
    for words, message in calls:
        assert main(words) == 2, words
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in file.iterdir()) == ["mine.yaml"]


def always_two():
    return two_tasks(2, 0)


def test_list_readme_and_docs_name_all_kinds(capsys):
    assert main(["list"]) == 0
    told, readme = capsys.readouterr().out, (ROOT / "README.md").read_text()
    pages = ("command_line", "benchmarks_and_requests")
    methods, streams = [(ROOT / "docs" / f"{name}.md").read_text() for name in pages]
    for names in (kinds.METHODS, kinds.STREAMS, kinds.NETWORKS, kinds.SCENARIOS):
        assert f"| {', '.join(names)} |" in readme
        for name, line in names.items():
            assert f"  {name} " in told
            assert line in told
    assert all(f"| {name} | {line} |" in methods for name, line in kinds.METHODS.items())
    assert all(f"`{name}`" in streams for name in kinds.STREAMS)
    assert all(f"`{name}(" in streams for name in kinds.SCENARIOS)
    assert len(told.partition("metrics\n")[2].splitlines()) > 10
