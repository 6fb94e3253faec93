"""Streams, networks and strategies made from settings equal those of a script, and may be the user's own."""

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from support.strategies import learn
from support.tiny_study import TINY, AtOnce
from torch import nn

from avalanche_amnesia import MLP, AdjustmentRule, MultiHeadModel, SplitDigits
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.contrib.streams import scenarios
from avalanche_amnesia.contrib.streams.image_sets import DataNotFoundError
from avalanche_amnesia.contrib.streams.scenarios import Scenario
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.study import building
from avalanche_amnesia.lab.study import settings as kinds
from avalanche_amnesia.lab.study.experiment import cells_of, read_experiment
from avalanche_amnesia.lab.study.settings import Cell, MethodSettings, NetworkSettings, ScenarioSettings, StreamSettings
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import AmnesiacHAT, HATPlugin, TaskStrategy
from avalanche_amnesia.training.host.lookup import find_plugin, unlearning_of
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin

EXPERIMENTS = sorted((Path(__file__).parents[3] / "experiments").glob("*.yaml"))


def test_settings_list_the_kinds_that_exist():
    assert set(kinds.METHODS) == {*building.OWN, *building.STOCK}
    assert all(callable(getattr(scenarios, name)) for name in kinds.SCENARIOS)
    for stream in kinds.STREAMS:
        assert callable(building.get_maker(stream, "stream.name"))
    assert all(kind in building.OWN for kind in kinds.OBEY_NOTHING)


def test_a_strategy_from_settings_has_the_bits_of_one_from_a_script():
    benchmark, make = building.build(Cell(TINY, "AmnesiacHAT", "published", 3))
    torch.manual_seed(3)
    model = MaskedModel(MLP(64, hidden=(16,), features=12))
    options = {"train_mb_size": 20, "train_epochs": 1, "eval_mb_size": 512, "seed": 3}
    plain = AmnesiacHAT(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), **options)
    made = make()
    for strategy in (made, plain):
        learn(strategy, benchmark.train_stream)
    assert state_hashes(made.model.state_dict()) == state_hashes(plain.model.state_dict())
    assert made.model.tasks == (2, 3)
    data = SplitDigits(5, seed=3, n_train=100, n_test=50)
    assert torch.equal(benchmark.train_stream[4].tensors[0], data.train_stream[4].tensors[0])


@pytest.mark.parametrize("kind", [*building.OWN, "EWC", "Replay", "DER++"])
def test_every_method_learns_and_answers_requests(kind):
    experiment = replace(TINY, methods={"it": MethodSettings(kind)})
    benchmark, make = building.build(Cell(experiment, "it", "published", 0))
    strategy = learn(make(), benchmark.train_stream[:2])
    assert unlearning_of(strategy).ledger.unlearned == (0,)
    assert tuple(strategy.model.tasks) == ((0, 1) if kind in kinds.OBEY_NOTHING else (1,))


def check(kind, **options):
    building.check_options(MethodSettings(kind, options=options))


OMNIGLOT = StreamSettings("experiments.omniglot:SplitOmniglot", n_train=5)
WRONG = [
    (lambda: check("EWC", ewc_lambda="strong"), "options.ewc_lambda of EWC must be float, got 'strong'"),
    (lambda: check("EWC", decay_factor="x"), "options.decay_factor of EWC must be float or null, got 'x'"),
    (lambda: check("EWC", ewc_lambd=1.0), "EWC has no option 'ewc_lambd'; did you mean 'ewc_lambda'?"),
    (lambda: check("LwF", alpha=["x"]), r"options.alpha of LwF must be float or a list of float, got \['x'\]"),
    (lambda: check("LwF", temperature=None), "options.temperature of LwF must be float, got None"),
    (lambda: check("Replay", mem_size=10), "Replay has no option 'mem_size'"),
    (lambda: check("Replay", memory_per_task="x"), "options.memory_per_task of Replay must be int, got 'x'"),
    (lambda: check("Naive", criterion="mse"), "Naive has no option 'criterion'"),
    (lambda: check("WSN", density="x"), "options.density of WSN must be float, got 'x'"),
    (lambda: check("experiments.piggyback:Piggyback", score_lr="x"), "must be float, got 'x'"),
    (lambda: building.make_stream(StreamSettings(options={"clas_order": [1]}), 0), "did you mean 'class_order'"),
    (lambda: building.make_stream(OMNIGLOT, 0), "no option 'n_train'"),
    (lambda: building.make_stream(StreamSettings("SplitMNIST"), 0, "/nowhere"), "/nowhere"),
    (lambda: building.make_stream(StreamSettings(f"{HERE}:always_two", 3), 0), "has 2: say stream.n_tasks=2"),
    (lambda: building.make_scenario(ScenarioSettings("bursts", {"sise": 2}), 5), "did you mean 'size'"),
    (lambda: building.make_scenario(ScenarioSettings("at_random", {"rate": 2}), 5), r"rate must lie in \[0, 1\]"),
    (lambda: building.model_class(Silent), "annotate its argument model: MaskedModel"),
    (lambda: cells_of(replace(TINY, methods={"x": MethodSettings("Naiv")})), "x.kind .*did you mean 'Naive'"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_parts_and_options_of_wrong_names_or_types_are_refused(call, words):
    with pytest.raises((TypeError, ValueError, DataNotFoundError), match=words):
        call()


def test_options_of_the_right_types_reach_the_strategy():
    for kind, options in [
        ("EWC", {"ewc_lambda": 1, "decay_factor": None, "mode": "online", "n_features": 8}),
        ("LwF", {"alpha": [1, 0.5]}),
        ("WSN", {"density": 0.3, "masks": {"score_lr": 0.1}}),
        ("avalanche.training.supervised:DER", {"mem_size": 10, "batch_size_mem": None}),
    ]:
        building.check_options(MethodSettings(kind, options=options))
    method = MethodSettings("WSN", options={"density": 0.3, "masks": {"score_lr": 0.1}})
    experiment = replace(TINY, methods={"it": method})
    made = building.build(Cell(experiment, "it", "published", 0))[1]()
    assert made.model.density == 0.3
    assert find_plugin(made, SubnetPlugin).masks.score_lr == 0.1


def test_networks_fit_the_shape_of_images():
    for name, shape in (("CharacterNet", (1, 28, 28)), ("SmallConvNet", (3, 32, 32)), ("ResNet18", (3, 32, 32))):
        network = building.make_network(NetworkSettings(name), torch.zeros(shape))
        assert network(torch.zeros(2, *shape)).shape == (2, network.features)


OWN_QUESTION = {"ablation", "adahat_alpha", "as_written", "hat_cl", "recycling", "wsn"}
"""Experiments that do not compare all methods."""


def test_every_experiment_file_can_be_read_and_has_valid_requests():
    for file in EXPERIMENTS:
        small, full = (read_experiment(file, profile) for profile in ("small", "full"))
        assert small.name == full.name == file.stem
        found = {method.kind for method in full.methods.values()}
        learning = {*building.OWN, *building.STOCK} - {"RanPAC"}  # whose network learns nothing
        assert file.stem in OWN_QUESTION or found == learning
        for settings in (small, full):
            assert cells_of(settings)
            data = PermutedDigits(settings.stream.n_tasks, n_train=20, n_test=20)
            for scenario in settings.scenarios.values():
                assert building.make_scenario(scenario, settings.stream.n_tasks).on(data)


def test_the_stream_of_an_experiment_fits_its_network(data_root):
    found = read_experiment(EXPERIMENTS[0].with_name("split_mnist.yaml"), "small")
    stream = replace(found.stream, n_train=60)
    (cell,) = cells_of(replace(found, stream=stream), ["EWC"], [*found.scenarios][:1], [1])
    _, make = building.build(cell, data_root)
    assert make().model is not None


def test_methods_of_all_experiments_can_be_made():
    """Make every method once on digits, unless it differs only in a number."""
    made = {}
    for file in EXPERIMENTS:
        for name, method in read_experiment(file).methods.items():
            words = {key: value for key, value in method.options.items() if not isinstance(value, float)}
            made.setdefault((method.kind, json.dumps(words, sort_keys=True)), (file.stem, name, method))
    for stem, name, method in made.values():
        settings = replace(TINY, name=stem, methods={name: method})
        assert building.build(Cell(settings, name, "published", 1))[1]().model is not None


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


def test_a_sweep_runs_user_parts_together_with_those_of_the_package(file, amnesia):
    amnesia("sweep", "mine.yaml", "seed=1")
    amnesia("report", "runs/mine", "--tables", "tables")
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
    assert "3 runs, 3 done already" in amnesia("sweep", "mine.yaml", "seed=1")


def test_run_works_without_a_file(file, amnesia):
    words = ["stream.n_tasks=2", f"--network={HERE}:narrow", "training.epochs=1", f"--scenario={HERE}:first_goes"]
    words += ["--method", "experiments.piggyback:Piggyback", "--stream", f"{HERE}:two_tasks"]
    assert "runs/two_tasks/Piggyback/first_goes/seed1" in amnesia("run", *words)
    assert "amnesia list" in amnesia("run", status=2)


def test_modules_of_the_working_directory_are_found(file):
    (file / "beside.py").write_text("from avalanche_amnesia.benchmarks import SplitDigits as mine\n")
    assert len(building.make_stream(StreamSettings("beside:mine", 2, n_train=40, n_test=50), 0).train_stream) == 2
    sys.modules.pop("beside")


class Still(AdjustmentRule):
    """A rule that holds back every update."""

    def protected_share(self, use, name, sparsity):
        """Return 1 for all entries."""
        return torch.ones_like(use.covered[name])


def test_user_rules_and_data_roots_are_used(file, monkeypatch):
    settings = MethodSettings("HAT", options={"adjustment": f"{HERE}:Still"})
    of_run = {"train_mb_size": 4, "train_epochs": 1}
    made = building.make_strategy(settings, lambda: MLP(4, features=3), two_tasks(2, 0), 1, **of_run)
    assert isinstance(find_plugin(made, HATPlugin).rule, Still)
    monkeypatch.setenv("AMNESIA_DATA", "somewhere")
    roots = []
    monkeypatch.setattr(
        sys.modules[HERE], "rooted", lambda n_tasks, root: roots.append(root) or two_tasks(n_tasks, 0), raising=False
    )
    building.make_stream(StreamSettings(f"{HERE}:rooted", 2), 0)
    building.make_stream(StreamSettings(f"{HERE}:rooted", 2), 0, root="elsewhere")
    assert roots == ["somewhere", "elsewhere"]


def test_the_number_of_features_is_measured_and_optimizers_are_found_by_name():
    network = building.make_network(NetworkSettings(f"{HERE}:narrow", options={"width": 5}), torch.zeros(2, 4))
    assert (network.features, network.training) == (5, True)
    network = building.make_network(NetworkSettings(f"{HERE}:of_layers"), torch.zeros(4))
    assert MultiHeadModel(network).n_features == 7
    assert building.optimizer_class(MethodSettings("EWC", "NAdam")) is torch.optim.NAdam
    assert building.optimizer_class(MethodSettings("EWC", "torch.optim.adamw:AdamW")) is torch.optim.AdamW


class Silent(TaskStrategy):
    """A strategy without an annotation of its model."""

    def __init__(self, *, model, optimizer, **options):
        super().__init__(model=model, optimizer=optimizer, method=[], **options)


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


def test_unknown_names_and_impossible_folders_are_refused_before_anything_trains(file, amnesia):
    calls = [(["sweep", "mine.yaml", change], words) for change, words in REFUSED]
    for command in ("run", "sweep"):
        calls += [([command, "mine.yaml", option, "mine.yaml"], f"{option} mine") for option in ("--out", "--store")]
    for command in ("run", "sweep", "plan"):
        calls.append(([command, "mine.yaml", "--out", "/proc/nowhere"], "--out /proc/nowhere"))
    for words, message in calls:
        assert message in amnesia(*words, status=2)
        assert sorted(path.name for path in file.iterdir()) == ["mine.yaml"]


def always_two():
    return two_tasks(2, 0)


def test_list_readme_and_docs_name_all_kinds(amnesia):
    told, readme = amnesia("list"), (ROOT / "README.md").read_text()
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
