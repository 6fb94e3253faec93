"""A saved and loaded strategy continues with the same bits as the original."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from avalanche.training import AGEM, ER_ACE, EWC, GEM, LwF, Naive, Replay, SynapticIntelligence
from support.strategies import (
    DIGITS,
    PRICED,
    ConvNet,
    Hears,
    RunningScale,
    amnesiac,
    brief,
    learn,
    make,
    quiet,
    ranpac,
    stock,
)
from support.strategy_state import bits, frozen
from torch.optim import Adam

from avalanche_amnesia import DisjointSubnets, evaluation
from avalanche_amnesia.benchmarks import task_benchmark, with_unlearning
from avalanche_amnesia.contrib.baselines import PALL, CLPUDERpp, Independent
from avalanche_amnesia.contrib.metrics import cost_metrics, membership_metrics, relapse_metrics
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.saving import StateError
from avalanche_amnesia.saving.files import read_state, write_state
from avalanche_amnesia.training import HAT, WSN, AmnesiacHAT, load_state, save_state
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.seeding import SeedingPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin


def ours(kind: Any, **options: Any) -> Callable[[], Any]:
    """Return a function that makes a new strategy of this package."""
    return partial(make, kind, **{"train_epochs": 1, **options})


SHORT = {"train_mb_size": 40, "train_epochs": 1, "eval_mb_size": 200}


STRATEGIES = {
    "HAT that unlearns": ours(HAT, plugins=lambda: [TrajectoryPlugin(), UnlearningPlugin()]),
    "AmnesiacHAT": ours(AmnesiacHAT),
    "kept momentum": ours(AmnesiacHAT, optimizer="momentum", reset_optimizer=False),
    "backup": ours(AmnesiacHAT, compensation=BackupPlugin),
    "repair": ours(AmnesiacHAT, repair=RepairPlugin),
    "int8": ours(AmnesiacHAT, trajectory=lambda: TrajectoryPlugin(dtype=torch.int8)),
    "deadline": ours(AmnesiacHAT, unlearning=partial(UnlearningPlugin, deadline=4)),
    "convolutions": ours(AmnesiacHAT, net=ConvNet),
    "WSN": ours(WSN),
    "weight pools": ours(DisjointSubnets),
    "CLPU": ours(CLPUDERpp),
    "PALL": ours(PALL),
    "Independent": ours(Independent),
    "RanPAC": ranpac,
    "EWC": lambda: stock(EWC, ewc_lambda=1.0, epochs=1),
    "LwF": lambda: stock(LwF, alpha=1.0, temperature=2.0, epochs=1),
    "SI": lambda: stock(SynapticIntelligence, si_lambda=1.0, epochs=1),
    "Replay": lambda: stock(Replay, mem_size=50, epochs=1),
    "ER-ACE": lambda: stock(ER_ACE, mem_size=50, epochs=1),
    "GEM": lambda: stock(GEM, patterns_per_exp=10, memory_strength=0.5, epochs=1),
}

ALSO_USED = ("AmnesiacHAT", "WSN", "weight pools", "CLPU", "EWC", "Replay")
"""Strategies that also load a state after they have learned another task."""


def go_on(strategy: Any, first: int, last: int = 4) -> None:
    """Train tasks, and unlearn one after the third and one after the fourth."""
    unlearning = find_plugin(strategy, UnlearningPlugin)
    for task in range(first, last):
        strategy.train(DIGITS.train_stream[task])
        for requested in {2: [0], 3: [2]}.get(task, ()):
            if unlearning is not None:
                unlearning.unlearn(strategy, [requested])


def outcome(strategy: Any) -> dict[str, Any]:
    """Return everything that affects the rest of a run, as comparable values."""
    result: dict[str, Any] = {"model": bits(strategy.model)}
    unlearning, recorder = find_plugin(strategy, UnlearningPlugin), find_plugin(strategy, TrajectoryPlugin)
    if unlearning is not None:
        result["logs"] = frozen(dict(recorder.trajectory.logs))
        result["ledger"] = unlearning.ledger.state_dict()
        result["claims"] = [(record.claim, record.reasons, record.after) for record in unlearning.records]
    return result


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loaded_strategy_continues_bit_for_bit(name, tmp_path):
    whole = STRATEGIES[name]()
    go_on(whole, 0, 3)
    save_state(whole, tmp_path / "state")
    go_on(whole, 3)
    for used in (False, True) if name in ALSO_USED else (False,):
        loaded = STRATEGIES[name]()
        if used:
            loaded.train(DIGITS.train_stream[4])
        load_state(loaded, tmp_path / "state")
        go_on(loaded, 3)
        assert outcome(loaded) == outcome(whole)


def test_saved_metrics_contain_no_samples_and_no_references(tmp_path):
    benchmark = with_unlearning(DIGITS, {1: [0]})

    references = evaluation.References(lambda **options: amnesiac(**SHORT, **options), benchmark)

    def measured(order):
        compared = (evaluation.unlearned_accuracy_metrics, relapse_metrics, membership_metrics)
        metrics = [metric for helper in compared for metric in helper(benchmark, references)]
        for helper in (evaluation.jsd_metrics, evaluation.accuracy_difference_metrics, cost_metrics):
            metrics += helper(references)
        return amnesiac(**SHORT, evaluator=quiet(metrics[::order]))

    strategy = measured(1)
    for experience in benchmark.train_stream[:3]:
        strategy.train(experience)
        results = strategy.eval(benchmark.test_stream)
    strategy.save(tmp_path / "state")
    body, tensors = read_state(tmp_path / "state")
    assert body["metrics"]
    assert "references" not in json.dumps(body["metrics"])
    sample = DIGITS.train_stream[0].dataset[0][0].flatten()
    flat = [t.flatten().float() for group in tensors.values() for t in group.values() if t.numel() % 64 == 0]
    assert not any((t.reshape(-1, 64) == sample).all(1).any() for t in flat)
    loaded = measured(-1)
    load_state(loaded, tmp_path / "state")
    again = loaded.eval(benchmark.test_stream)
    compared = [name for name in results if name.split("/")[0] in ("JSD_own", "Relapse", "AccuracyDifference")]
    assert compared
    assert {name: again[name] for name in compared} == {name: results[name] for name in compared}


def test_equal_states_are_equal_files(tmp_path):
    for folder in ("one", "two"):
        strategy = STRATEGIES["backup"]()
        go_on(strategy, 0, 2)
        strategy.save(tmp_path / folder)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / f).iterdir()} for f in ("one", "two"))
    assert one == two


def test_a_save_replaces_changed_files_and_deletes_those_of_an_unlearned_task(tmp_path):
    strategy = STRATEGIES["AmnesiacHAT"]()
    go_on(strategy, 0, 1)
    strategy.save(tmp_path / "state")
    first = {file.name for file in (tmp_path / "state").iterdir()}
    go_on(strategy, 1, 2)
    strategy.save(tmp_path / "state")
    before = {file.name for file in (tmp_path / "state").iterdir()}
    assert len(first - before) == 1  # shared by all tasks
    assert len(before - first) == 5  # shared, the task, its log, its prepared heads, its settings
    strategy.unlearn([1])
    strategy.save(tmp_path / "state")
    after = {file.name for file in (tmp_path / "state").iterdir()}
    assert before - after  # the task's files are deleted
    assert before & after - {"state.json"}  # the log of task 0 is kept


def test_an_interrupted_training_is_saved_as_before_the_training(tmp_path, monkeypatch):
    make = STRATEGIES["AmnesiacHAT"]
    whole = make()
    go_on(whole, 0, 1)
    expected = outcome(whole)
    monkeypatch.setattr(AmnesiacHAT, "optimizer_step", lambda strategy: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole.train(DIGITS.train_stream[1])
    monkeypatch.undo()
    whole.save(tmp_path / "state")
    loaded = make()
    load_state(loaded, tmp_path / "state")
    assert outcome(loaded) == outcome(whole) == expected
    go_on(loaded, 1)
    uninterrupted = make()
    go_on(uninterrupted, 0)
    assert outcome(loaded)["model"] == outcome(uninterrupted)["model"]


def test_a_strategy_in_training_is_not_saved(tmp_path):
    saving = Hears(after_training_iteration=lambda made: save_state(made, tmp_path / "state"))
    recording = [SeedingPlugin(0), TrajectoryPlugin()]
    for strategy in (brief(plugins=[saving]), make(Naive, optimizer="sgd", plugins=[*recording, saving])):
        with pytest.raises(RequestError, match="task 0 is in training"):
            strategy.train(DIGITS.train_stream[0])
        assert not (tmp_path / "state").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of the state of an AmnesiacHAT that has learned a task."""
    strategy = STRATEGIES["AmnesiacHAT"]()
    go_on(strategy, 0, 1)
    return strategy.save(tmp_path_factory.mktemp("saved") / "state")


REFUSED = [
    (ours(AmnesiacHAT, train_epochs=2), "train_epochs=1 .here 2."),
    (ours(AmnesiacHAT, optimizer="adamw"), "optimizer='Adam' .here 'AdamW'."),
    (ours(AmnesiacHAT, seed=1), "seed=0 .here 1."),
    (ours(AmnesiacHAT, masks=replace(PRICED, sparsity_weight=0.1)), "sparsity_weight"),
    (ours(AmnesiacHAT, compensation="none"), "other plugins: this strategy lacks .*CounterfactualPlugin; build"),
    (ours(AmnesiacHAT, net=ConvNet), "another model"),
    (ours(HAT), "state of a .*AmnesiacHAT, not of a .*HAT"),
    (ours(AmnesiacHAT, hidden=(20,)), "has shape .24"),
    (ours(AmnesiacHAT, optimizer=lambda of: Adam([{"params": [next(of)]}, {"params": [*of]}])), "1 parameter groups"),
]


def test_a_strategy_of_other_parts_is_refused_by_name_and_unchanged(saved):
    for other, words in REFUSED:
        strategy = other()
        before = bits(strategy.model)
        with pytest.raises(StateError, match=words):
            load_state(strategy, saved)
        assert bits(strategy.model) == before


def test_classes_of_a_script_are_loaded_by_programs_that_import_it(tmp_path, monkeypatch):
    saved, loaded = (STRATEGIES["weight pools"]() for _ in range(2))
    for strategy in (saved, loaded):
        strategy.plugins.append(Hears())
    go_on(saved, 0, 1)
    saved.plugins[-1].told = "task 0"
    saved.save(tmp_path / "state")
    for kind in (type(loaded.model.backbone), Hears):
        monkeypatch.setattr(kind, "__module__", "__main__")
    load_state(loaded, tmp_path / "state")
    assert bits(loaded.model) == bits(saved.model)
    assert loaded.plugins[-1].told == "task 0"
    monkeypatch.setattr(Hears, "__module__", "elsewhere")
    with pytest.raises(StateError, match=r"lacks support\.strategies\.Hears and .* has elsewhere\.Hears besides"):
        load_state(loaded, tmp_path / "state")


def test_a_plugin_that_cannot_be_saved_is_named(tmp_path):
    strategy = learn(stock(AGEM, patterns_per_exp=10, sample_size=10, epochs=1), DIGITS, 1)
    with pytest.raises(StateError, match=r"AGEMPlugin\.buffer_dliter is a generator"):
        save_state(strategy, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_replayed_samples_of_a_lazy_data_set_are_refused(tmp_path):
    samples = torch.utils.data.TensorDataset(torch.rand(40, 64), torch.arange(40) % 2)
    strategy = learn(stock(Replay, mem_size=10, epochs=1), task_benchmark(samples, samples, [[0, 1]]), 1)
    with pytest.raises(StateError, match="samples of LazyTask"):
        save_state(strategy, tmp_path / "state")


def test_a_changed_state_with_a_new_checksum_is_refused(saved, tmp_path):
    for part in ("model", "plugins", "optimizer", "host"):
        body, tensors = read_state(saved)
        changed = {"plugins": [[name, {"object": 1}] for name, _ in body["plugins"]], "host": {"seed": {"tensor": 1}}}
        body[part] = changed.get(part, {})
        write_state(tmp_path / part, body, tensors)
        with pytest.raises(StateError, match="has entries that no state"):
            load_state(STRATEGIES["AmnesiacHAT"](), tmp_path / part)


class Counting(RunningScale):
    """A criterion that counts its calls, too."""

    calls = 0

    def forward(self, *given):
        self.calls += 1
        return super().forward(*given)


def test_the_state_of_the_criterion_is_saved(tmp_path):
    strategy, loaded = (brief(criterion=Counting(), evaluator=quiet) for _ in range(2))
    go_on(strategy, 0, 1)
    load_state(loaded, strategy.save(tmp_path / "state"))
    assert loaded._criterion.calls == strategy._criterion.calls > 0
    assert torch.equal(loaded._criterion.mean, strategy._criterion.mean)


@pytest.mark.parametrize("reset", [True, False])
def test_a_state_has_no_moments_that_the_next_training_drops(reset, tmp_path):
    strategy, twin = (make(AmnesiacHAT, reset_optimizer=reset) for _ in range(2))
    save_state(learn(strategy, DIGITS, 1), tmp_path)
    load_state(twin, tmp_path)
    assert strategy.optimizer.state
    assert bool(twin.optimizer.state) is not reset
