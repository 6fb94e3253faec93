"""Streams, networks and strategies made from settings equal those of a script."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.strategies import learn
from support.tiny_study import TINY

from avalanche_amnesia.benchmarks import PermutedDigits, SplitDigits
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.contrib.streams.image_sets import DataNotFoundError
from avalanche_amnesia.contrib.streams.scenarios import SCENARIOS
from avalanche_amnesia.lab.study import settings as kinds
from avalanche_amnesia.lab.study.building import (
    OWN,
    STOCK,
    build,
    check_options,
    make_network,
    make_scenario,
    make_stream,
    maker_of,
)
from avalanche_amnesia.lab.study.experiment import cells_of, read_experiment
from avalanche_amnesia.lab.study.settings import Cell, MethodSettings, NetworkSettings, ScenarioSettings, StreamSettings
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import AmnesiacHAT
from avalanche_amnesia.training.host.lookup import find_plugin, unlearning_of
from avalanche_amnesia.training.plugins.wsn import SubnetPlugin

EXPERIMENTS = sorted((Path(__file__).parents[3] / "experiments").glob("*.yaml"))


def test_settings_list_the_kinds_that_exist():
    assert set(kinds.METHODS) == {*OWN, *STOCK}
    assert set(kinds.SCENARIOS) == set(SCENARIOS)
    for stream in kinds.STREAMS:
        assert callable(maker_of(stream, "stream.name"))
    assert all(kind in OWN for kind in kinds.OBEY_NOTHING)


def test_a_strategy_from_settings_has_the_bits_of_one_from_a_script():
    benchmark, make = build(Cell(TINY, "AmnesiacHAT", "published", 3))
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


@pytest.mark.parametrize("kind", [*OWN, "EWC", "Replay", "DER++"])
def test_every_method_learns_and_answers_requests(kind):
    experiment = replace(TINY, methods={"it": MethodSettings(kind)})
    benchmark, make = build(Cell(experiment, "it", "published", 0))
    strategy = learn(make(), benchmark.train_stream[:2])
    assert unlearning_of(strategy).ledger.unlearned == (0,)
    kept = tuple(strategy.model.tasks)
    assert kept == ((0, 1) if kind in kinds.OBEY_NOTHING else (1,))


WRONG = [
    ("EWC", "ewc_lambda", "strong", "options.ewc_lambda of EWC must be float, got 'strong'"),
    ("EWC", "decay_factor", "x", "options.decay_factor of EWC must be float or null, got 'x'"),
    ("EWC", "ewc_lambd", 1.0, "EWC has no option 'ewc_lambd'; did you mean 'ewc_lambda'?"),
    ("LwF", "alpha", ["x"], "options.alpha of LwF must be float or a list of float, got ['x']"),
    ("LwF", "temperature", None, "options.temperature of LwF must be float, got None"),
    ("Replay", "mem_size", 10, "options.mem_size of Replay: this is said by options.memory_per_task"),
    ("Replay", "memory_per_task", "x", "options.memory_per_task of Replay must be int, got 'x'"),
    ("Naive", "criterion", "mse", "options.criterion of Naive: this is said by a class of your own"),
    ("WSN", "density", "x", "options.density of WSN must be float, got 'x'"),
    ("experiments.piggyback:Piggyback", "score_lr", "x", "must be float, got 'x'"),
]


def test_options_of_wrong_names_or_types_are_refused():
    for kind, option, value, words in WRONG:
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            check_options(MethodSettings(kind, options={option: value}))
    omniglot = StreamSettings("experiments.omniglot:SplitOmniglot", n_train=5)
    for make, error, words in (
        (lambda: make_stream(StreamSettings(options={"clas_order": [1]}), 0), TypeError, "did you mean 'class_order'"),
        (lambda: make_stream(omniglot, 0), TypeError, "no option 'n_train'"),
        (lambda: make_stream(StreamSettings("SplitMNIST"), 0, "/nowhere"), DataNotFoundError, "/nowhere"),
        (lambda: make_scenario(ScenarioSettings("bursts", {"sise": 2}), 5), TypeError, "did you mean 'size'"),
        (lambda: make_scenario(ScenarioSettings("at_random", {"rate": 2}), 5), ValueError, "rate must lie in 0 to 1"),
    ):
        with pytest.raises(error, match=words):
            make()


def test_options_of_the_right_types_reach_the_strategy():
    for kind, options in [
        ("EWC", {"ewc_lambda": 1, "decay_factor": None, "mode": "online", "n_features": 8}),
        ("LwF", {"alpha": [1, 0.5]}),
        ("WSN", {"density": 0.3, "masks": {"score_lr": 0.1}}),
        ("avalanche.training.supervised:DER", {"mem_size": 10, "batch_size_mem": None}),
    ]:
        check_options(MethodSettings(kind, options=options))
    method = MethodSettings("WSN", options={"density": 0.3, "masks": {"score_lr": 0.1}})
    experiment = replace(TINY, methods={"it": method})
    made = build(Cell(experiment, "it", "published", 0))[1]()
    assert made.model.density == 0.3
    assert find_plugin(made, SubnetPlugin).masks.score_lr == 0.1


def test_networks_fit_the_shape_of_images():
    for name, shape in (("CharacterNet", (1, 28, 28)), ("SmallConvNet", (3, 32, 32)), ("ResNet18", (3, 32, 32))):
        network = make_network(NetworkSettings(name), torch.zeros(shape))
        assert network(torch.zeros(2, *shape)).shape == (2, network.features)


OWN_QUESTION = {"ablation", "adahat_alpha", "as_published", "hat_cl", "recycling", "wsn"}
"""Experiments that do not compare all methods."""


def test_every_experiment_file_can_be_read_and_has_valid_requests():
    for file in EXPERIMENTS:
        small, full = (read_experiment(file, profile) for profile in ("small", "full"))
        assert small.name == full.name == file.stem
        found = {method.kind for method in full.methods.values()}
        assert file.stem in OWN_QUESTION or found == {*OWN, *STOCK}
        for settings in (small, full):
            assert cells_of(settings)
            data = PermutedDigits(settings.stream.n_tasks, n_train=20, n_test=20)
            for scenario in settings.scenarios.values():
                assert make_scenario(scenario, settings.stream.n_tasks).on(data)


def test_the_stream_of_an_experiment_fits_its_network(data_root):
    found = read_experiment(EXPERIMENTS[0].with_name("split_mnist.yaml"), "small")
    stream = replace(found.stream, n_train=60)
    (cell,) = cells_of(replace(found, stream=stream), ["EWC"], [*found.scenarios][:1], [1])
    _, make = build(cell, data_root)
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
        assert build(Cell(settings, name, "published", 1))[1]().model is not None
