"""Logs of small runs: every number against the models and metrics."""

import pytest
import torch
from support.measured_runs import MAKERS
from support.strategies import DIGITS

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.runs import measure_run

COMPARED = ("UnlearnedAccuracy", "Relapse", "FewShot", "Membership")
DISTANCES = ("JSD_own", "JSD_remaining", "JSD_none", "Euclidean_own", "Cosine_own", "CKA_own")


@pytest.mark.parametrize("kind", ["hat", "ewc"])
def test_every_number_is_logged_exactly_where_it_exists(kind, tmp_path):
    benchmark = with_unlearning(DIGITS, {1: [0], 3: [2, 1]})
    strategy = measure_run(kind, MAKERS[kind], benchmark, tmp_path, noise_floor=("order",))
    run = read_run(tmp_path)
    first, _, _, third, last = run.moments
    beside = ("UnlearnedAccuracy_chance", *COMPARED, *(f"{name}_reference" for name in COMPARED))
    assert not {*beside, *DISTANCES} & first.numbers.keys()
    assert not [name for name in first.numbers if name.endswith("_tasks")]  # counts of unlearned tasks
    for moment in (third, last):
        assert moment.unlearned == (0, 2, 1)
        assert all(set(moment.by_task(name)) == {0, 1, 2} for name in beside)
        for suffix in ("", "_floor_order"):
            assert all(set(moment.by_task(f"{name}{suffix}")) == {0, 1, 2} for name in DISTANCES)
        for name in ("Accuracy_full", "Accuracy_reference", "AccuracyDifference", "AccuracyDifference_control"):
            assert set(moment.by_task(name)) == set(moment.accuracy) == set(moment.remaining)
        assert moment.by_task("UnlearnedAccuracy_chance") == {0: 0.5, 1: 0.5, 2: 0.5}
    masked = kind != "ewc"
    for after, moment in enumerate(run.moments):
        assert (moment.capacity_before is not None) == (masked and after in (1, 3))
        assert any(name.startswith("Owners/") for name in moment.numbers) == masked
        assert ("MaskOverlap" in moment.numbers) == (masked and len(moment.remaining) > 1)
    for task in (3, 4):
        x, y = DIGITS.test_stream[task].tensors
        with torch.no_grad():
            right = strategy.model.eval()(x, task).argmax(1) == y
        assert run.last.accuracy[task] == pytest.approx(right.double().mean().item())
    assert [cost.after for cost in run.costs] == [1, 3]
    assert [cost.unlearn for cost in run.costs] == [record["seconds"] for record in run.records]


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_is_measured_if_no_task_remains(kind, tmp_path):
    benchmark = with_unlearning(DIGITS, {t: [t] for t in range(5)})
    measure_run(kind, MAKERS[kind], benchmark, tmp_path, noise_floor=())
    run = read_run(tmp_path)
    assert [moment.unlearned_now for moment in run.moments] == [(t,) for t in range(5)]
    for moment in run.moments:
        assert moment.accuracies == {}
        assert moment.numbers.keys() <= {"Capacity", "CapacityReturned", "TrajectoryBytes", "MaskBits"} | {
            name for name in moment.numbers if name.startswith(("Owners/", "MaskUse/"))
        }
        if kind != "ewc":
            assert moment.number("Capacity") == 1 > moment.capacity_before
            owners = {name: of for name, of in moment.numbers.items() if name.startswith("Owners/")}
            assert all(of == {None: float(name.endswith("/free"))} for name, of in owners.items())


def test_an_interrupted_run_keeps_the_earlier_log(tmp_path):
    benchmark = with_unlearning(PermutedDigits(1, n_train=60, n_test=40), {})
    measure_run("first", MAKERS["ewc"], benchmark, tmp_path, noise_floor=())
    before = (tmp_path / "run.jsonl").read_bytes()

    def interrupted(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_run("second", MAKERS["ewc"], benchmark, tmp_path, noise_floor=(), progress=interrupted)
    assert (tmp_path / "run.jsonl").read_bytes() == before
    measure_run("second", MAKERS["ewc"], benchmark, tmp_path, noise_floor=())
    assert read_run(tmp_path).name == "second"
