"""Logs of small runs: every number against the models and metrics."""

import pytest
import torch
from support.measured_runs import MAKERS
from support.strategies import DIGITS

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.evaluation import References, forgetting, js_divergence, network_capacity
from avalanche_amnesia.lab.report import read_run
from avalanche_amnesia.lab.report.measures import capacity_before
from avalanche_amnesia.lab.runs import measure_run

COMPARED = ("UnlearnedAccuracy", "Relapse", "FewShot", "Membership")
DISTANCES = ("JSD_own", "JSD_remaining", "JSD_none", "Euclidean_own", "Cosine_own", "CKA_own")


@pytest.fixture(scope="module", params=MAKERS)
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
        assert all(
            set(moment.by_task(f"{name}{suffix}")) == {0, 1, 2} for name in DISTANCES for suffix in ("", "_floor_order")
        )
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


def test_means_are_those_of_their_tasks(measured):
    _, run, _, _ = measured
    for moment in run.moments:
        for name in (*COMPARED, *DISTANCES, *(f"{name}_floor_order" for name in DISTANCES)):
            by_task = moment.by_task(name).values()
            if by_task:
                assert moment.number(name) == pytest.approx(sum(by_task) / len(by_task))
        if moment.unlearned:
            ratio = moment.number("JSD_own") / moment.number("JSD_own_floor_order")
            assert moment.number("JSD_own_ratio_order") == pytest.approx(ratio)
        gained = [moment.accuracy[t] - moment.number("Accuracy_full", t) for t in moment.remaining]
        assert moment.number("AccuracyDifference") == pytest.approx(sum(gained) / len(gained))


@torch.no_grad()
def test_accuracies_are_those_of_the_models(measured):
    kind, run, strategy, references = measured
    full, reference = references.full(5), references.reference([3, 4])
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


def test_forgetting_and_transfer_are_those_of_the_rows(measured):
    _, run, _, _ = measured
    rows = [moment.accuracy for moment in run.moments]
    for i, moment in enumerate(run.moments):
        assert moment.number("Forgetting") == (pytest.approx(forgetting(rows[: i + 1])) if i > 1 else None)
    assert run.moments[0].number("BackwardTransfer") is None
    assert run.last.number("BackwardTransfer") == pytest.approx(rows[4][3] - rows[3][3])


def test_capacity_overlap_and_owners_are_those_of_the_model(measured):
    kind, run, strategy, _ = measured
    if kind == "ewc":
        return
    model, third = strategy.model, run.moments[3]
    assert run.last.number("Capacity") == network_capacity(strategy)
    head, *rows = run.last.tables["Figure/Overlap/table"]
    assert (head, [row[0] for row in rows]) == (["task", "3", "4"], [3, 4])
    a, b = (model.binary_mask(task) for task in (3, 4))
    assert rows[0][2] == pytest.approx(float((a & b).sum() / (a | b).sum()))
    for layer in model.graph.layers:
        both = model.by_layer(a & b)[layer]
        assert run.last.number(f"Owners/{layer}/shared") == pytest.approx(both.float().mean().item())
        assert set(run.last.by_task(f"Owners/{layer}")) == {3, 4}
        assert {task for task in third.first[f"OwnersBefore/{layer}"] if task is not None} == {1, 2, 3}
        assert set(third.by_task(f"Owners/{layer}")) == {3}
    assert capacity_before(third) < third.number("Capacity")


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
            assert moment.number("Capacity") == 1 > capacity_before(moment)
            owners = {name: of for name, of in moment.numbers.items() if name.startswith("Owners/")}
            assert all(of == {None: float(name.endswith("/free"))} for name, of in owners.items())
            assert "Figure/Overlap/table" not in moment.tables


def test_an_interrupted_run_keeps_the_earlier_log(tmp_path):
    benchmark = with_unlearning(DIGITS, {})
    measure_run("first", MAKERS["ewc"], benchmark, tmp_path, noise_floor=())
    before = (tmp_path / "run.jsonl").read_bytes()

    def interrupted(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_run("second", MAKERS["ewc"], benchmark, tmp_path, noise_floor=(), progress=interrupted)
    assert (tmp_path / "run.jsonl").read_bytes() == before
    measure_run("second", MAKERS["ewc"], benchmark, tmp_path, noise_floor=())
    assert read_run(tmp_path).name == "second"
