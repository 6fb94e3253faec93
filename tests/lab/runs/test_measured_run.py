"""Logs of small runs: every number against the models and metrics."""

import pytest
import torch
from support.measured_runs import MAKERS
from support.strategies import DIGITS

from avalanche_amnesia.benchmarks import PermutedDigits, with_unlearning
from avalanche_amnesia.evaluation import References, js_divergence
from avalanche_amnesia.evaluation.accuracy_matrix import forgetting
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.report.measures import capacity_before
from avalanche_amnesia.lab.runs import measure_run

COMPARED = ("UnlearnedAccuracy", "Relapse", "FewShot", "Membership")
DISTANCES = ("JSD_own", "JSD_remaining", "JSD_none", "Euclidean_own", "Cosine_own", "CKA_own")


@pytest.fixture(scope="module", params=["hat", "ewc"])
def measured(request, tmp_path_factory):
    """Kind, the run read from its log, the strategy and references."""
    torch.set_num_threads(1)
    maker, folder = MAKERS[request.param], tmp_path_factory.mktemp("run")
    benchmark = with_unlearning(DIGITS, {1: [0], 3: [2, 1]})
    strategy = measure_run(request.param, maker, benchmark, folder, noise_floor=("order",))
    return request.param, read_run(folder), strategy, References(maker, benchmark)


def has_owners(numbers, kind):
    return any(name.startswith(kind) for name in numbers)


def test_every_number_is_logged_exactly_where_it_exists(measured):
    kind, run, _, _ = measured
    first, _, _, third, last = run.moments
    beside = ("UnlearnedAccuracy_chance", *COMPARED, *(f"{name}_reference" for name in COMPARED))
    assert not {*beside, *DISTANCES} & first.numbers.keys()
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
        assert (capacity_before(moment) is not None) == (masked and after in (1, 3))
        assert has_owners(moment.first, "OwnersBefore/") == (masked and after in (1, 3))
        assert has_owners(moment.numbers, "Owners/") == masked
        assert ("Figure/Overlap/table" in moment.tables) == (masked and len(moment.remaining) > 1)
    assert [cost.after for cost in run.costs] == [1, 3]
    assert [cost.unlearn for cost in run.costs] == [record["seconds"] for record in run.records]


@torch.no_grad()
def test_logged_numbers_are_those_of_the_models(measured):
    kind, run, strategy, references = measured
    full, reference = references.full(5), references.reference([3, 4])
    rows = [moment.accuracy for moment in run.moments]
    for i, moment in enumerate(run.moments):
        assert moment.number("Forgetting") == (pytest.approx(forgetting(rows[: i + 1])) if i > 1 else None)
    if kind != "ewc":
        assert run.last.number("Capacity") == network_capacity(strategy)
        assert capacity_before(run.moments[3]) < run.moments[3].number("Capacity")
    for task in (3, 4):
        x, y = DIGITS.test_stream[task].tensors
        for model, of_model in (
            (strategy.model.eval(), run.last.accuracy[task]),
            (full, run.last.number("Accuracy_full", task)),
            (reference, run.last.number("Accuracy_reference", task)),
        ):
            assert of_model == pytest.approx((model(x, task).argmax(1) == y).double().mean().item())
    if kind == "ewc":
        x, _ = DIGITS.test_stream[2].tensors
        expected = js_divergence(strategy.model.backbone(x), reference.backbone(x)).mean().item()
        assert run.last.number("JSD_own", 2) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["wsn", "ewc"])
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
            assert moment.number("Capacity") == 1 > capacity_before(moment)
            owners = {name: of for name, of in moment.numbers.items() if name.startswith("Owners/")}
            assert all(of == {None: float(name.endswith("/free"))} for name, of in owners.items())
            assert "Figure/Overlap/table" not in moment.tables


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
