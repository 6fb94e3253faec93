"""Observations of small runs: every measurement against the models and metrics themselves; none where there is none."""

import json
from dataclasses import fields

import pytest
import torch
from support.measured_runs import MAKERS
from support.strategies import DIGITS

from avalanche_amnesia.benchmarks import with_unlearning
from avalanche_amnesia.evaluation import References, forgetting, js_divergence, network_capacity
from avalanche_amnesia.lab.runs.observation import Observation, observe


@pytest.fixture(scope="module", params=MAKERS)
def run(request):
    torch.set_num_threads(1)
    maker = MAKERS[request.param]
    benchmark = with_unlearning(DIGITS, {1: [0], 3: [2, 1]})
    return request.param, observe(request.param, maker, benchmark, noise_floor=("order",)), References(maker, benchmark)


def test_every_number_stands_where_there_is_one(run):
    kind, observed, _ = run
    first, _, _, third, last = observed.observations
    mappings = ("chance", "relapse", "relapse_reference", "membership", "membership_reference", "reference_unlearned")
    mappings += ("few_shot", "few_shot_reference")
    assert all(getattr(first, name) == {} for name in (*mappings, "jsd", "jsd_by_task", "distances"))
    for seen in (third, last):
        assert all(set(getattr(seen, name)) == {0, 2, 1} == set(seen.unlearned) for name in mappings)
        assert all(set(by_task) == {0, 1, 2} for by_task in seen.jsd_by_task.values())
        assert set(seen.jsd_by_task) == set(seen.jsd)
        names = {
            f"{name}_own{floor}"
            for name in ("Euclidean", "Cosine", "CKA")
            for floor in ("", "_floor_order", "_ratio_order")
        }
        assert set(seen.distances) == names
        assert set(seen.full_accuracy) == set(seen.reference_accuracy) == set(seen.accuracy) == set(seen.remaining)
        assert seen.chance == {0: 0.5, 1: 0.5, 2: 0.5}
    masked = kind != "ewc"
    assert [seen.capacity_before is not None for seen in observed.observations] == [
        masked and t in (1, 3) for t in range(5)
    ]
    assert [seen.owners_before is not None for seen in observed.observations] == [
        masked and t in (1, 3) for t in range(5)
    ]
    assert all((seen.overlap is not None) == (seen.owners is not None) == masked for seen in observed.observations)


def test_means_are_those_of_their_tasks(run):
    _, observed, _ = run
    for seen in observed.observations:
        for name, by_task in seen.jsd_by_task.items():
            if "ratio" not in name:
                assert seen.jsd[name] == pytest.approx(sum(by_task.values()) / len(by_task))
        if seen.jsd:
            assert seen.jsd["JSD_own_ratio_order"] == pytest.approx(
                seen.jsd["JSD_own"] / seen.jsd["JSD_own_floor_order"]
            )
        gained = [seen.accuracy[t] - seen.full_accuracy[t] for t in seen.remaining]
        assert seen.accuracy_difference == pytest.approx(sum(gained) / len(gained))
        if seen.unlearned:
            mean = sum(seen.reference_unlearned.values()) / len(seen.unlearned)
            assert seen.reference_unlearned_accuracy == pytest.approx(mean)


@torch.no_grad()
def test_accuracies_are_those_of_the_models(run):
    kind, observed, references = run
    last = observed.observations[-1]
    full, reference = references.full(5), references.reference([3, 4])
    for task in (3, 4):
        x, y = DIGITS.test_stream[task].tensors
        for model, of_model in (
            (observed.strategy.model.eval(), last.accuracy),
            (full, last.full_accuracy),
            (reference, last.reference_accuracy),
        ):
            assert of_model[task] == pytest.approx((model(x, task).argmax(1) == y).double().mean().item())
    if kind == "ewc":
        x, _ = DIGITS.test_stream[2].tensors
        expected = js_divergence(observed.strategy.model.backbone(x), reference.backbone(x)).mean().item()
        assert last.jsd_by_task["JSD_own"][2] == pytest.approx(expected)


def test_forgetting_and_transfer_are_those_of_the_rows(run):
    _, observed, _ = run
    rows = [seen.accuracy for seen in observed.observations]
    for i, seen in enumerate(observed.observations):
        assert seen.average_forgetting == forgetting(rows[: i + 1])
    assert observed.observations[0].average_forgetting is observed.observations[0].backward_transfer is None
    assert observed.observations[-1].backward_transfer == pytest.approx(rows[4][3] - rows[3][3])


def test_capacity_overlap_and_owners_are_the_model_s(run):
    kind, observed, _ = run
    if kind == "ewc":
        return
    seen, model = observed.observations[-1], observed.strategy.model
    assert seen.capacity == network_capacity(observed.strategy)
    assert seen.overlap["tasks"] == [3, 4]
    a, b = (model.binary_mask(task) for task in (3, 4))
    assert seen.overlap["shares"][0][1] == pytest.approx(float((a & b).sum() / (a | b).sum()))
    for layer, shares in seen.owners.items():
        both = model.by_layer(a & b)[layer]
        assert shares["shared"] == pytest.approx(both.float().mean().item())
        assert set(shares) == {"free", "shared", "3", "4"}
    third = observed.observations[3]
    assert third.capacity_before < third.capacity
    assert all(set(shares) == {"free", "shared", "1", "2", "3"} for shares in third.owners_before.values())
    assert all(set(shares) == {"free", "shared", "3"} for shares in third.owners.values())


def test_an_observation_is_plain_json(run):
    _, observed, _ = run
    for seen in observed.observations:
        written = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
        names = {field.name for field in fields(Observation)}
        assert set(written) == names | {"mean_accuracy", "mean_unlearned_accuracy"}


@pytest.mark.parametrize("kind", MAKERS)
def test_where_nothing_remains_nothing_is_measured(kind):
    benchmark = with_unlearning(DIGITS, {t: [t] for t in range(5)})
    for seen in observe(kind, MAKERS[kind], benchmark, noise_floor=()).observations:
        assert seen.unlearned_now == (seen.task,)
        for name in ("accuracy", "full_accuracy", "reference_accuracy", "relapse", "jsd", "distances", "membership"):
            assert getattr(seen, name) == {}
        assert seen.accuracy_difference is seen.accuracy_difference_control is seen.average_forgetting is None
        assert seen.mean_accuracy is None
        if kind != "ewc":
            assert seen.capacity == 1 > seen.capacity_before
            assert seen.overlap == {"tasks": [], "shares": []}
            assert all(shares == {"free": 1.0, "shared": 0.0} for shares in seen.owners.values())
