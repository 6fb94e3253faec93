"""Values of the metrics against a computation by hand, for AmnesiacHAT, WSN and EWC."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from sklearn.metrics import roc_auc_score
from support.measured_runs import MAKERS, Witness, make_ewc, make_hat, narrow
from support.strategies import DIGITS, learn, quiet
from torch import nn

from avalanche_amnesia import UnlearningPlugin, evaluation, task_benchmark, with_unlearning
from avalanche_amnesia.benchmarks.families import draw_positions
from avalanche_amnesia.contrib.metrics import few_shot_metrics, membership_metrics, relapse_metrics
from avalanche_amnesia.contrib.metrics.distances import cka_distance, cosine_distance, euclidean_distance
from avalanche_amnesia.contrib.metrics.mask_use import mask_overlap, owners, owners_by_layer
from avalanche_amnesia.contrib.metrics.relapse import few_shot_accuracy, linear_probe_accuracy
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.lab.runs.measuring import metrics_of
from avalanche_amnesia.seeding import derive_seed
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.unlearning.logistic import fit_head

BENCHMARK = with_unlearning(DIGITS, {1: [0], 3: [2]})
TRAIN, TEST = BENCHMARK.train_stream, BENCHMARK.test_stream
END, FLOORS = "/eval_phase/test_stream", ("order", "seed")


@pytest.fixture(scope="module", params=MAKERS)
def finished(request):
    torch.set_num_threads(1)
    references, witness = evaluation.References(MAKERS[request.param], BENCHMARK), Witness()
    more = [
        *few_shot_metrics(BENCHMARK, references, shots=4),
        *evaluation.jsd_metrics(references, probes=["own"], scope="all"),
        *evaluation.jsd_metrics(references, probes=["none"], scope="remaining"),
    ]
    strategy = MAKERS[request.param](
        evaluator=quiet(*metrics_of(BENCHMARK, references, FLOORS), *more), plugins=[witness]
    )
    find_plugin(strategy, UnlearningPlugin).allow_unknown = True
    for experience in TRAIN:
        strategy.train(experience)
        results = strategy.eval(TEST)
    assert find_plugin(strategy, UnlearningPlugin).ledger.unlearned == (0, 2)
    return request.param, strategy, references, witness, results


@torch.no_grad()
def features(model, x, mask):
    model.eval()
    return model.backbone(x) if mask is None else model.masked_features(x, mask)


def values(results, name, tasks):
    """Return a metric's value of each task, and check that their mean is the value of all tasks."""
    by_task = {task: results[f"{name}{END}/Task{task:03d}"] for task in tasks}
    assert results[f"{name}{END}"] == pytest.approx(np.mean([*by_task.values()]))
    return by_task


REMAINING = (1, 3, 4)


def plain(model, x):
    """Return the features of the network without masks, by none of this package's models."""
    net = narrow()
    biases = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}  # WSN has none
    net.load_state_dict(biases | dict(model.backbone.named_parameters()))
    return net(x)


@torch.no_grad()
def seen_through(probe, model, task, mask):
    """Return the features of a task's test samples through a probe: the task's mask, the other tasks' or none."""
    x = TEST[task].tensors[0]
    if mask is None or probe == "none":
        return plain(model, x)
    masks = [mask] if probe == "own" else [model.binary_mask(other) for other in REMAINING]
    return torch.stack([features(model, x, each) for each in masks]).mean(0)


def js_divergence(a, b):
    return torch.from_numpy(jensenshannon(*(x.double().softmax(1) for x in (a, b)), axis=1, base=2) ** 2)


DISTANCES = [
    *((f"JSD_{probe}", probe, js_divergence, ("order", "seed")) for probe in ("own", "remaining", "none")),
    ("Euclidean_own", "own", euclidean_distance, ("order",)),
    ("Cosine_own", "own", cosine_distance, ("order",)),
    ("CKA_own", "own", cka_distance, ("order",)),
]


def test_distances_equal_those_of_the_models_features(finished):
    _, strategy, references, witness, results = finished
    reference = references.reference(REMAINING)
    for name, probe, distance, floors in DISTANCES:
        models = {"": strategy.model} | {f"_floor_{floor}": references.reference(REMAINING, floor) for floor in floors}
        for suffix, model in models.items():
            for task, got in values(results, f"{name}{suffix}", (0, 2)).items():
                both = (seen_through(probe, each, task, witness.kept[task][0]) for each in (model, reference))
                assert got == pytest.approx(float(distance(*both).mean()), abs=1e-6), name
                assert got > 0
        assert results[f"{name}_tasks{END}"] == 2
        for place in ("", *(f"/Task{task:03d}" for task in (0, 2) if name.startswith("JSD"))):
            ratio = results[f"{name}{END}{place}"] / results[f"{name}_floor_order{END}{place}"]
            assert results[f"{name}_ratio_order{END}{place}"] == pytest.approx(ratio)
    assert not [name for name in results if "ratio_seed" in name]


def test_distances_on_remaining_tasks_equal_those_of_the_models_features(finished):
    _, strategy, references, witness, results = finished
    model, reference = strategy.model, references.reference(REMAINING)
    for name, probe, tasks in (("JSD_own_on_all", "own", range(5)), ("JSD_none_on_remaining", "none", REMAINING)):
        for task, got in values(results, name, tasks).items():
            mask = witness.kept[task][0] if task in witness.kept else witness.mask_of(model, task)
            both = (seen_through(probe, each, task, mask) for each in (model, reference))
            assert got == pytest.approx(float(js_divergence(*both).mean()), abs=1e-6)
        assert results[f"{name}_tasks{END}"] == len(tasks)
        assert f"{name}_ratio_order{END}" in results


def test_relapse_and_membership_equal_a_computation_by_hand(finished):
    _, strategy, references, witness, results = finished
    for suffix, model in (("", strategy.model), ("_reference", references.reference(REMAINING))):
        relapse, membership = (values(results, f"{name}{suffix}", (0, 2)) for name in ("Relapse", "Membership"))
        for task in (0, 2):
            mask, head = witness.kept[task]
            (x, y), (test_x, test_y) = DIGITS.train_stream[task].tensors, TEST[task].tensors
            train, test = features(model, x, mask), features(model, test_x, mask)
            assert relapse[task] == pytest.approx(linear_probe_accuracy(train, y, test, test_y))
            with torch.no_grad():
                of_members, of_others = (
                    -head(seen).double().log_softmax(1)[range(len(labels)), labels].numpy()
                    for seen, labels in ((train, y), (test, test_y))
                )
            auc = roc_auc_score([1] * len(y) + [0] * len(test_y), -np.concatenate([of_members, of_others]))
            assert membership[task] == pytest.approx(auc, abs=1e-6)
            if not suffix:
                right = float((head(test).argmax(1) == test_y).float().mean())
                assert results[f"UnlearnedAccuracy{END}/Task{task:03d}"] == pytest.approx(right, abs=1e-6)
    assert results[f"Relapse_tasks{END}"] == results[f"Membership_tasks{END}"] == 2


def test_few_shots_are_the_same_samples_for_model_and_reference(finished):
    _, strategy, references, witness, results = finished
    for suffix, model in (("", strategy.model), ("_reference", references.reference(REMAINING))):
        for task, got in values(results, f"FewShot4{suffix}", (0, 2)).items():
            mask = witness.kept[task][0]
            (x, y), (test_x, test_y) = DIGITS.train_stream[task].tensors, TEST[task].tensors
            shots = draw_positions(y, dict.fromkeys(y.unique().tolist(), 4), derive_seed(0, "shots", task))
            assert y[shots].bincount().tolist() == [4, 4]
            train, test = features(model, x[shots], mask), features(model, test_x, mask)
            assert got == pytest.approx(few_shot_accuracy(train, y[shots], test, test_y))
    assert results[f"FewShot4_tasks{END}"] == 2


def test_accuracy_differences_equal_a_computation_by_hand(finished):
    _, strategy, references, _, results = finished
    full, reference = references.full(5), references.reference(REMAINING)
    controls = values(results, "AccuracyDifference_control", REMAINING)
    gained = values(results, "AccuracyDifference_reference", REMAINING)
    for task in REMAINING:
        (x, y), (test_x, test_y) = DIGITS.train_stream[task].tensors, TEST[task].tensors
        with torch.no_grad():
            weight, bias = fit_head(full.features(x, task).double(), y, 2)
            refitted = (full.features(test_x, task).double() @ weight.T + bias).argmax(1)
            models = (full, reference, strategy.model)
            right = [(model(test_x, task).argmax(1) == test_y).double().mean().item() for model in models]
        assert controls[task] == pytest.approx((refitted == test_y).double().mean().item() - right[0], abs=1e-12)
        assert gained[task] == pytest.approx(right[1] - right[0], abs=1e-12)
        of_others = [results[f"Accuracy_{who}{END}/Task{task:03d}"] for who in ("full", "reference")]
        assert of_others == pytest.approx(right[:2])
        assert results[f"AccuracyDifference{END}/Task{task:03d}"] == pytest.approx(right[2] - right[0], abs=1e-6)
    metric = next(m for m in strategy.evaluator.metrics if str(m) == "AccuracyDifference")
    assert set(metric.accuracies) == {"main", "full", "heads", "reference"}
    for who, name in (("main", ""), ("heads", "_control"), ("reference", "_reference")):
        for task, got in values(results, f"AccuracyDifference{name}", REMAINING).items():
            assert got == metric.differences[who][task]
            assert got == pytest.approx(metric.accuracies[who][task] - metric.accuracies["full"][task])


def test_capacity_rises_by_the_returned_capacity(finished):
    kind, strategy, _, witness, _ = finished
    history = strategy.evaluator.get_all_metrics()
    assert history["TrajectoryBytes"][1][-1] == evaluation.trajectory_bytes(strategy)
    if kind == "ewc":
        assert not any(name.startswith(("Capacity", "Owners", "MaskOverlap")) for name in history)
        return
    assert history["Capacity"][1][-1] == network_capacity(strategy)
    assert len(history["Capacity"][1]) == 5 + 2  # tasks and unlearnings
    use = strategy.model.by_layer(strategy.model.cumulative_mask())
    for layer in strategy.model.graph.layers:
        assert history[f"MaskUse/{layer}"][1][-1] == pytest.approx(use[layer].float().mean().item())
    before, returned, after = (history[name][1] for name in ("CapacityBefore", "CapacityReturned", "Capacity"))
    assert before == witness.capacities
    assert len(returned) == 2
    assert after[-2] == pytest.approx(before[-1] + returned[-1])  # task 2 goes after task 3; then comes task 4
    assert all(0 < gain < 1 for gain in returned)


def test_overlap_and_owners_equal_a_count_over_the_masks(finished):
    kind, strategy, _, _, _ = finished
    model, history = strategy.model, strategy.evaluator.get_all_metrics()
    if kind == "ewc":
        assert owners_by_layer(model) is None
        return
    masks = {task: model.binary_mask(task) for task in REMAINING}
    expected = np.mean([mask_overlap(a, b) for a, b in combinations(masks.values(), 2)])
    assert history["MaskOverlap"][1][-1] == pytest.approx(expected)
    pictures = history["Figure/Overlap"][1]
    assert len(history["MaskOverlap"][1]) == len(pictures) == 5 + 2 - 2  # not with one task alone
    for layer in model.graph.layers:
        got = owners_by_layer(model)[layer]
        assert got == owners({task: model.by_layer(mask)[layer] for task, mask in masks.items()})
        names = {"free": "free", "shared": "shared"} | {str(task): f"Task{task:03d}" for task in REMAINING}
        for owner, name in names.items():
            assert history[f"Owners/{layer}/{name}"][1][-1] == got[owner]


def test_cost_is_emitted_once_per_unlearning(finished):
    _, strategy, references, _, _ = finished
    records, history = find_plugin(strategy, UnlearningPlugin).records, strategy.evaluator.get_all_metrics()
    names = ("SecondsToUnlearn", "SecondsToRetrain", "TimesFaster")
    unlearn, retrain, faster = (history[name + END][1] for name in names)
    assert unlearn == [record.seconds for record in records]
    assert retrain == [references.seconds((1,)), references.seconds((1, 3))]
    assert faster == [pytest.approx(b / a) for a, b in zip(unlearn, retrain, strict=True)]


@pytest.mark.parametrize("kind", ["hat", "ewc"])
def test_without_probes_only_metrics_without_probes_are_measured(kind):
    references = evaluation.References(MAKERS[kind], BENCHMARK)
    strategy = learn(MAKERS[kind](evaluator=quiet(*metrics_of(BENCHMARK, references, FLOORS))), DIGITS.train_stream[:2])
    find_plugin(strategy, UnlearningPlugin).unlearn(strategy, [0])
    results = strategy.eval(TEST[1:2])
    plain = int(kind == "ewc")  # a backbone without masks needs no probe
    assert results[f"Relapse_tasks{END}"] == results[f"CKA_own_tasks{END}"] == plain
    assert (f"Relapse{END}" in results) == (f"CKA_own{END}" in results) == bool(plain)
    assert results[f"Membership_tasks{END}"] == 0
    assert f"Membership{END}" not in results
    assert f"Membership_reference{END}" not in results


def test_tasks_of_one_class_or_of_one_sample_are_measured():
    torch.manual_seed(1)
    x, y = torch.rand(41, 1, 8, 8), torch.tensor([0] * 20 + [1, 2] * 10 + [3])
    benchmark = with_unlearning(task_benchmark((x, y), (x, y), task_classes=[[0], [3], [1, 2]]), {2: [0, 1]})
    references = evaluation.References(make_hat, benchmark)
    strategy = make_hat(evaluator=quiet(*metrics_of(benchmark, references, FLOORS)))
    for experience in benchmark.train_stream:
        strategy.train(experience)
        results = strategy.eval(benchmark.test_stream)
    assert values(results, "Relapse", (0, 1)) == {0: 1.0, 1: 1.0}
    assert values(results, "Membership", (0, 1)) == {0: 0.5, 1: 0.5}  # test samples are the training samples
    assert values(results, "CKA_own", (0, 1))[1] in (0.0, 1.0)  # one sample: constant features


@pytest.mark.parametrize("samples", [1, 7])
def test_membership_of_few_samples_takes_them_evenly_spaced(samples, monkeypatch):
    monkeypatch.setattr("avalanche_amnesia.contrib.metrics.membership.SAMPLES", samples)
    strategy = learn(make_ewc(evaluator=quiet(*membership_metrics(BENCHMARK))), TRAIN[:2])
    probe = strategy.evaluator.metrics[0].probes[0]
    results = strategy.eval(TEST[1:2])
    (x, y), (test_x, test_y) = DIGITS.train_stream[0].tensors, TEST[0].tensors
    chosen = [round(i * (len(y) - 1) / max(1, samples - 1) - 0.499999) for i in range(samples)]
    x, y = x[chosen], y[chosen]
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(probe.head(features(strategy.model, a, None)), b, reduction="none")
            for a, b in ((x, y), (test_x, test_y))
        ]
    auc = roc_auc_score([1] * len(y) + [0] * len(test_y), -torch.cat(losses).numpy())
    assert results[f"Membership{END}"] == pytest.approx(auc, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*not finite.*:UserWarning")
def test_a_network_that_diverged_is_left_out_with_a_warning():
    metrics = [*relapse_metrics(BENCHMARK), *membership_metrics(BENCHMARK)]
    strategy = learn(make_ewc(evaluator=quiet(*metrics)), TRAIN[:2])
    with torch.no_grad():
        next(strategy.model.backbone.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match="features of task 0 are not finite"):
        results = strategy.eval(TEST[1:2])
    assert results[f"Relapse_tasks{END}"] == results[f"Membership_tasks{END}"] == 0
