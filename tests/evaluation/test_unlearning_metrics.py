"""JSD, accuracy difference and accuracy of old heads against a computation by hand."""

from copy import deepcopy

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import avalanche_forward
from avalanche.training import LwF
from scipy.spatial.distance import jensenshannon
from support.measured_runs import BENCHMARK, PERMUTED, TEST, Witness, make, stock_maker, wide
from support.strategies import learn, quiet
from torch import nn

from avalanche_amnesia import AmnesiacHAT, MaskedModel, UnlearningPlugin, evaluation
from avalanche_amnesia.evaluation.capacity import network_capacity
from avalanche_amnesia.evaluation.probes import Probe, take_probe
from avalanche_amnesia.training.host.lookup import find_plugin


def naive_jsd(model, reference, x, masks):
    with torch.no_grad():
        p, q = (
            torch.stack([m.masked_features(x, mask) for mask in of]).mean(0).double().softmax(1)
            for m, of in ((model, masks[0]), (reference, masks[1]))
        )
    return float((jensenshannon(p, q, axis=1, base=2) ** 2).mean())


def plain_jsd(model, reference, x):
    """Return the JSD of the plain networks, without this package's models."""
    of_both = []
    for masked in (model, reference):
        net = wide()
        net.load_state_dict(dict(masked.backbone.named_parameters()))
        with torch.no_grad():
            of_both.append(net(x).double().softmax(1))
    return float((jensenshannon(*of_both, axis=1, base=2) ** 2).mean())


def test_values_equal_a_computation_by_hand(references):
    probes = Witness()
    evaluator = quiet(
        *evaluation.jsd_metrics(references, noise_floor=("order", "seed")),
        *evaluation.jsd_metrics(references, probes=["own"], scope="all"),
        *evaluation.jsd_metrics(references, probes=["none"], scope="remaining"),
        *evaluation.accuracy_difference_metrics(references),
        *evaluation.unlearned_accuracy_metrics(BENCHMARK),
        *evaluation.capacity_metrics(),
        *accuracy_metrics(experience=True),
    )
    # The probes are residue.
    strategy = make(evaluator=evaluator, plugins=[probes], unlearning=UnlearningPlugin(allow_unknown=True))
    for experience in BENCHMARK.train_stream:
        strategy.train(experience)
        results = strategy.eval(TEST)
    model, reference = strategy.model.eval(), references.reference([1, 3])
    assert find_plugin(strategy, UnlearningPlugin).ledger.remaining == (1, 3)
    means = {}
    for task in (0, 2):
        mask, head = probes.kept[task]
        x, y = TEST[task].tensors
        both = [[model.binary_mask(t) for t in (1, 3)], [reference.binary_mask(t) for t in (1, 3)]]
        expected = {
            "JSD_own": naive_jsd(model, reference, x, [[mask], [mask]]),
            "JSD_remaining": naive_jsd(model, reference, x, both),
            "JSD_none": plain_jsd(model, reference, x),
            "UnlearnedAccuracy": float((head(model.masked_features(x, mask)).argmax(1) == y).float().mean()),
        }
        for floor in ("order", "seed"):
            other = references.reference([1, 3], floor)
            masks = [[other.binary_mask(t) for t in (1, 3)], both[1]]
            expected[f"JSD_own_floor_{floor}"] = naive_jsd(other, reference, x, [[mask], [mask]])
            expected[f"JSD_remaining_floor_{floor}"] = naive_jsd(other, reference, x, masks)
            expected[f"JSD_none_floor_{floor}"] = plain_jsd(other, reference, x)
        for name, value in expected.items():
            got = results[f"{name}/eval_phase/test_stream/Task{task:03d}"]
            assert got == pytest.approx(value, abs=1e-6), name
            means.setdefault(name, []).append(got)
    for name, values in means.items():
        assert results[f"{name}/eval_phase/test_stream"] == pytest.approx(sum(values) / 2)
    for probe in ("own", "remaining", "none"):
        pairs = list(zip(means[f"JSD_{probe}"], means[f"JSD_{probe}_floor_order"], strict=True))
        for task, (distance, floor) in zip((0, 2), pairs, strict=True):
            got = results[f"JSD_{probe}_ratio_order/eval_phase/test_stream/Task{task:03d}"]
            assert got == pytest.approx(distance / floor)
        of_means = sum(distance for distance, _ in pairs) / sum(floor for _, floor in pairs)
        assert results[f"JSD_{probe}_ratio_order/eval_phase/test_stream"] == pytest.approx(of_means)
    assert not [name for name in results if "ratio_seed" in name]
    own, plain = {task: means["JSD_own"][place] for place, task in enumerate((0, 2))}, {}
    for task in (1, 3):
        mask, x = model.binary_mask(task), TEST[task].tensors[0]
        own[task] = naive_jsd(model, reference, x, [[mask], [mask]])
        plain[task] = plain_jsd(model, reference, x)
    for name, expected in (("JSD_own_on_all", own), ("JSD_none_on_remaining", plain)):
        got = {task: results[f"{name}/eval_phase/test_stream/Task{task:03d}"] for task in expected}
        assert got == pytest.approx(expected, abs=1e-6)
        assert results[f"{name}/eval_phase/test_stream"] == pytest.approx(sum(got.values()) / len(got))
        assert results[f"{name}_tasks/eval_phase/test_stream"] == len(got)
        assert f"{name}_ratio_order/eval_phase/test_stream" in results
    full, differences = references.full(4), []
    for task in (1, 3):
        x, y = TEST[task].tensors
        with torch.no_grad():
            ours, theirs = ((m(x, task).argmax(1) == y).float().mean().item() for m in (model, full))
        got = results[f"AccuracyDifference/eval_phase/test_stream/Task{task:03d}"]
        assert got == pytest.approx(ours - theirs, abs=1e-6)
        differences.append(got)
    assert results["AccuracyDifference/eval_phase/test_stream"] == pytest.approx(sum(differences) / 2)
    history = evaluator.get_all_metrics()
    assert history["Capacity"][1][-1] == network_capacity(strategy)
    assert history["TrajectoryBytes"][1][-1] == evaluation.trajectory_bytes(strategy)
    assert len(history["Capacity"][1]) == 4 + 2  # tasks and unlearnings
    use = strategy.model.by_layer(strategy.model.cumulative_mask())
    for layer in strategy.model.graph.layers:
        assert history[f"MaskUse/{layer}"][1][-1] == pytest.approx(use[layer].float().mean().item())


def test_exact_unlearning_has_distance_0(references):
    metrics = evaluation.jsd_metrics(references, noise_floor=("order",))
    strategy = learn(make(evaluator=quiet(*metrics)), PERMUTED.train_stream[:3])
    assert strategy.unlearn([2], keep_probes=True).claim == "exact"
    results = strategy.eval(TEST)
    assert results["JSD_own/eval_phase/test_stream"] == 0
    assert results["JSD_remaining/eval_phase/test_stream"] == 0
    assert results["JSD_own_floor_order/eval_phase/test_stream"] > 0
    assert "JSD_own_ratio_order/eval_phase/test_stream" not in results  # rounding is no multiple of a floor


def test_there_is_no_ratio_to_a_floor_of_0(references):
    (metric,) = evaluation.jsd_metrics(references, probes=["own"])
    strategy = learn(make(evaluator=quiet(metric)), PERMUTED.train_stream[:2])
    strategy.unlearn([1], keep_probes=True)
    strategy.eval(TEST[:1])
    strategy.experience = TEST[0]  # an evaluation ends without one
    for remaining, there in (((), False), ((0,), True)):  # none: references of any order are the initial model
        emitted = {value.name.split("/")[0]: value.value for value in metric.values(strategy, (1,), remaining)}
        assert (emitted["JSD_own_floor_order"] > 0) == there
        assert ("JSD_own_ratio_order" in emitted) == (there and emitted["JSD_own"] > 0)


def test_stock_strategies_are_measured_through_their_plain_backbone():
    maker = stock_maker(LwF, alpha=1.0, temperature=2.0)
    references = evaluation.References(maker, BENCHMARK)
    evaluator = quiet(
        *evaluation.jsd_metrics(references),
        *evaluation.accuracy_difference_metrics(references),
        *evaluation.unlearned_accuracy_metrics(BENCHMARK),
        *evaluation.capacity_metrics(),
    )
    strategy = learn(maker(evaluator=evaluator), BENCHMARK.train_stream[:2])
    results = strategy.eval([TEST[1]])
    x, _ = TEST[0].tensors
    value = evaluation.jsd(strategy.model, references.reference([1]), x)
    assert results["JSD_own/eval_phase/test_stream/Task000"] == pytest.approx(value)
    assert results["JSD_remaining/eval_phase/test_stream/Task000"] == pytest.approx(value)
    assert "UnlearnedAccuracy/eval_phase/test_stream/Task000" in results
    x, y = TEST[1].tensors
    accuracies = []
    for model in (strategy.model, references.full(2)):
        model.eval()
        with torch.no_grad():
            labels = torch.full((len(x),), 1)
            accuracies.append((avalanche_forward(model, x, labels).argmax(1) == y).float().mean().item())
    got = results["AccuracyDifference/eval_phase/test_stream/Task001"]
    assert got == pytest.approx(accuracies[0] - accuracies[1], abs=1e-6)


def test_full_models_exist_for_other_orders_and_for_a_relearned_task(references):
    strategy = make(evaluator=quiet(*evaluation.accuracy_difference_metrics(references, controls=())))
    stream = PERMUTED.train_stream
    for task in (2, 0, 3):
        strategy.train(stream[task])
        results = strategy.eval(TEST)
        differences = {value for name, value in results.items() if name.startswith("AccuracyDifference")}
        assert differences == {0.0}  # nothing was unlearned: it is the full model
    strategy.unlearn([2])
    strategy.train(stream[2])
    assert "AccuracyDifference/eval_phase/test_stream/Task002" in strategy.eval(TEST)


def test_jsd_uses_the_norms_of_a_task():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
    model = MaskedModel(net, input_shape=(1, 8, 8))
    strategy = AmnesiacHAT(model=model, optimizer=torch.optim.Adam(model.parameters()), train_mb_size=32, seed=0)
    reference = deepcopy(model)
    strategy.train(BENCHMARK.train_stream[0])
    x, _ = TEST[0].tensors
    probe = take_probe(model, 0)
    model.eval()
    with torch.no_grad():
        seen = model.features(x, 0)
        through = reference.eval().masked_features(x, probe.mask, probe.parts)
    assert evaluation.jsd(model, reference, x, probe) == pytest.approx(
        float(evaluation.js_divergence(seen, through).mean())
    )
    bare = evaluation.jsd(model, reference, x, Probe(probe.mask, None))
    assert bare != pytest.approx(evaluation.jsd(model, reference, x, probe), rel=1e-3)
    strategy.unlearn([0])
    assert evaluation.jsd(model, reference, x, probe) == 0  # the same initial bits, through the same mask and norms
