"""References and the metrics over them, against computation by hand; measuring never changes a training."""

import io
from copy import deepcopy

import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.logging import BaseLogger, CSVLogger, InteractiveLogger, TextLogger
from avalanche.models import avalanche_forward
from avalanche.training import EWC, LwF, Naive
from avalanche.training.plugins import EvaluationPlugin
from scipy.spatial.distance import jensenshannon
from torch import nn
from torch.optim import SGD, Adam

from avalanche_amnesia.benchmarks import PermutedDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.evaluation import (
    Probe,
    References,
    ReferencesError,
    accuracy_difference_metrics,
    capacity_metrics,
    cost_metrics,
    distance_metrics,
    features_of,
    js_divergence,
    jsd,
    jsd_metrics,
    mask_overlap_metrics,
    membership_metrics,
    network_capacity,
    owners_metrics,
    relapse_metrics,
    take_probe,
    trajectory_bytes,
    unlearned_accuracy_metrics,
)
from avalanche_amnesia.models import MLP, MaskedModel, MultiHeadModel
from avalanche_amnesia.training import AmnesiacHAT
from avalanche_amnesia.training.host import find_plugin
from avalanche_amnesia.training.plugins import SeedingPlugin, TrajectoryPlugin, UnlearningPlugin

PLAIN = PermutedDigits(4, n_train=200, n_test=100)
BENCHMARK = with_unlearning(PLAIN, {1: [0], 3: [2]})
TEST = BENCHMARK.test_stream


def make(**options):
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(32,), features=16))
    return AmnesiacHAT(
        model=model,
        optimizer=Adam(model.parameters(), lr=1e-2),
        **{"train_mb_size": 40, "train_epochs": 3, "eval_mb_size": 64, **options},
    )


def stock_maker(kind, **method):
    def make_stock(plugins=(), **options):
        torch.manual_seed(0)
        model = MultiHeadModel(MLP(64, hidden=(32,), features=16))
        return kind(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=40,
            train_epochs=2,
            plugins=[SeedingPlugin(0), TrajectoryPlugin(), UnlearningPlugin(), *plugins],
            **method,
            **options,
        )

    return make_stock


def hashes(model):
    return [(name, tensor_hash(value)) for name, value in model.state_dict().items()]


def silent(*metrics):
    return EvaluationPlugin(*metrics, loggers=[BaseLogger()])


@pytest.fixture(scope="module")
def references():
    return References(make, BENCHMARK)


class Probes(SupervisedPlugin):
    """Keeps mask and head of what goes, independently of the metrics."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def before_unlearning(self, strategy, **kwargs):
        for task in find_plugin(strategy, UnlearningPlugin).current.tasks:
            self.kept[task] = (strategy.model.binary_mask(task), deepcopy(strategy.model.head(task)))


def naive_jsd(model, reference, x, masks):
    with torch.no_grad():
        p, q = (
            torch.stack([m.masked_features(x, mask) for mask in of]).mean(0).double().softmax(1)
            for m, of in ((model, masks[0]), (reference, masks[1]))
        )
    return float((jensenshannon(p, q, axis=1, base=2) ** 2).mean())


# References -------------------------------------------------------------------------------------------------------


def test_a_maker_that_does_not_seed_itself_is_refused():
    def unseeded(**options):
        model = MaskedModel(MLP(64, hidden=(8,), features=4))
        return AmnesiacHAT(model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(ReferencesError, match=r"different initial values of \['backbone.*torch.manual_seed"):
        References(unseeded, BENCHMARK)

    def undetermined(**options):
        torch.manual_seed(0)
        model = MultiHeadModel(MLP(64, hidden=(8,), features=4))
        return Naive(model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(ReferencesError, match=r"running random stream.*SeedingPlugin"):
        References(undetermined, BENCHMARK)


def test_wrong_lists_of_tasks_are_refused(references):
    for tasks in ([0, 0], [9], [1, -1]):
        with pytest.raises(ReferencesError, match=r"distinct tasks of the benchmark: \[0, 1, 2, 3\]"):
            references.reference(tasks)
    for n in (-1, 5):
        with pytest.raises(ReferencesError, match=r"0\.\.4, got"):
            references.full(n)
    with pytest.raises(ValueError, match="variant"):
        references.reference([0], "other")


@pytest.mark.parametrize(
    "maker", [make, stock_maker(Naive), stock_maker(EWC, ewc_lambda=1.0)], ids=["hat", "naive", "ewc"]
)
def test_a_shared_prefix_gives_the_bits_of_training_from_scratch(maker):
    shared = References(maker, BENCHMARK)
    state = torch.get_rng_state()
    for path in ([], [1], [1, 3], [1, 3, 0], [1, 2], [1, 2, 3], [1, 3]):
        alone = References(maker, BENCHMARK).reference(path)
        assert hashes(shared.reference(path)) == hashes(alone), path
        assert shared.reference(path) is shared.reference(path)
        assert not alone.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_reference_is_the_run_that_never_had_the_request(references):
    plain = make()
    stream = PLAIN.train_stream
    for task in (1, 3):
        plain.train(stream[task])
    assert hashes(references.reference([1, 3])) == hashes(plain.model)


def test_variants_differ_in_what_they_say(references):
    same, order, seed = (references.reference([1], variant) for variant in ("same", "order", "seed"))
    initial = [hashes(references.reference([], variant)) for variant in ("same", "order", "seed")]
    assert initial[0] == initial[1] != initial[2]
    assert len({str(hashes(m)) for m in (same, order, seed)}) == 3
    again = References(make, BENCHMARK)
    assert hashes(again.reference([1], "order")) == hashes(order)
    assert hashes(again.reference([1], "seed")) == hashes(seed)


@pytest.mark.parametrize("kind", [Naive, None], ids=["naive", "hat"])
def test_an_interrupted_reference_is_not_continued(kind):
    box = {"breaks": False}

    class Breaks(SupervisedPlugin):
        def after_update(self, strategy, **kwargs):
            if box["breaks"] and strategy.experience.task_label == 2:
                raise KeyboardInterrupt

    def maker(**options):
        torch.manual_seed(0)
        if kind is None:
            return make(plugins=[Breaks()], **options)
        model = MultiHeadModel(MLP(64, hidden=(8,), features=4))
        return Naive(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.1),
            train_mb_size=40,
            plugins=[SeedingPlugin(0), Breaks()],
            **options,
        )

    references = References(maker, BENCHMARK)
    expected = hashes(References(maker, BENCHMARK).reference([0, 1, 2]))
    references.reference([0])
    box["breaks"] = True
    with pytest.raises(KeyboardInterrupt):
        references.reference([0, 1, 2])
    box["breaks"] = False
    assert hashes(references.reference([0, 1, 2])) == expected


# Metrics ----------------------------------------------------------------------------------------------------------


def test_values_are_those_of_a_computation_by_hand(references):
    probes = Probes()
    evaluator = silent(
        *jsd_metrics(references, noise_floor=("order", "seed")),
        *accuracy_difference_metrics(references),
        *unlearned_accuracy_metrics(BENCHMARK),
        *capacity_metrics(images=False),
        *accuracy_metrics(experience=True),
    )
    strategy = make(evaluator=evaluator, plugins=[probes], allow_unknown=True)  # the probes are residue
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
            "UnlearnedAccuracy": float((head(model.masked_features(x, mask)).argmax(1) == y).float().mean()),
        }
        for floor in ("order", "seed"):
            other = references.reference([1, 3], floor)
            masks = [[other.binary_mask(t) for t in (1, 3)], both[1]]
            expected[f"JSD_own_floor_{floor}"] = naive_jsd(other, reference, x, [[mask], [mask]])
            expected[f"JSD_remaining_floor_{floor}"] = naive_jsd(other, reference, x, masks)
        for name, value in expected.items():
            got = results[f"{name}/eval_phase/test_stream/Task{task:03d}"]
            assert got == pytest.approx(value, abs=1e-6), name
            means.setdefault(name, []).append(got)
    for name, values in means.items():
        assert results[f"{name}/eval_phase/test_stream"] == pytest.approx(sum(values) / 2)
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
    assert history["TrajectoryBytes"][1][-1] == trajectory_bytes(strategy)
    assert len(history["Capacity"][1]) == 4 + 2  # tasks and unlearnings
    use = strategy.model.by_layer(strategy.model.cumulative_mask())
    for layer in strategy.model.graph.layers:
        assert history[f"MaskUse/{layer}"][1][-1] == pytest.approx(use[layer].float().mean().item())


def test_the_old_head_reads_chance_where_a_removed_head_alone_would_not():
    probes = Probes()
    strategy = make(plugins=[probes], train_epochs=15, sparsity_weight=0.1)
    for experience in PLAIN.train_stream[:2]:
        strategy.train(experience)
    x, y = TEST[0].tensors
    before = {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
    strategy.unlearn([0])
    mask, head = probes.kept[0]

    def reads():
        with torch.no_grad():
            return (head(features_of(strategy.model, x, mask)).argmax(1) == y).float().mean().item()

    after = reads()
    with torch.no_grad():  # the control: the backbone as it was, without the head
        for name, parameter in strategy.model.named_parameters():
            parameter.copy_(before[name])
    assert reads() > 0.6
    assert after < 0.3


@pytest.mark.parametrize("evaluations", [1, 3])
def test_measuring_never_changes_a_training(evaluations):
    refs = References(make, BENCHMARK)
    measured = make(
        evaluator=silent(
            *jsd_metrics(refs),
            *accuracy_difference_metrics(refs),
            *unlearned_accuracy_metrics(BENCHMARK),
            *relapse_metrics(BENCHMARK, refs),
            *membership_metrics(BENCHMARK, refs),
            *distance_metrics(refs),
            *cost_metrics(refs),
            *mask_overlap_metrics(),
            *owners_metrics(),
            *capacity_metrics(),
        ),
        eval_every=1 if evaluations > 1 else -1,
    )
    plain = make()
    stream = with_unlearning(
        PLAIN, [UnlearningRequest((0,), 1, "iteration", 2), UnlearningRequest((1,), 2)]
    ).train_stream
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for experience in stream:
        measured.train(experience, eval_streams=[TEST] if evaluations > 1 else None)
        for _ in range(evaluations):
            measured.eval(TEST)
        plain.train(experience)
    assert hashes(measured.model) == hashes(plain.model)
    assert torch.equal(torch.get_rng_state(), before)


def test_probes_are_dropped_unless_they_are_allowed(references):
    metrics = [*jsd_metrics(references, noise_floor=()), *unlearned_accuracy_metrics(BENCHMARK)]
    strategy = make(evaluator=silent(*metrics))
    for experience in PLAIN.train_stream[:3]:
        strategy.train(experience)
    strategy.unlearn([2])
    names = strategy.eval(TEST)
    assert all(metric.probes == {} for metric in metrics)
    assert any("JSD_remaining/" in name for name in names)
    of_probes = {name: value for name, value in names.items() if "JSD_own" in name or "UnlearnedAccuracy" in name}
    covered = [f"{metric}_tasks/eval_phase/test_stream" for metric in ("JSD_own", "UnlearnedAccuracy")]
    assert of_probes == dict.fromkeys(covered, 0)
    assert names["JSD_remaining_tasks/eval_phase/test_stream"] == 1
    strategy.unlearn([1], keep_probes=True)
    assert all(set(metric.probes) == {1} for metric in metrics)
    names = strategy.eval(TEST)
    assert "JSD_own/eval_phase/test_stream/Task001" in names
    assert "JSD_own/eval_phase/test_stream/Task002" not in names
    assert [names[name] for name in covered] == [1, 1]
    assert names["JSD_remaining_tasks/eval_phase/test_stream"] == 2
    assert names["JSD_own/eval_phase/test_stream"] == names["JSD_own/eval_phase/test_stream/Task001"]
    strategy.train(BENCHMARK.train_stream[2])
    silent_one = make(evaluator=silent(*unlearned_accuracy_metrics(BENCHMARK)), keep_probes=False)
    for experience in BENCHMARK.train_stream[:2]:
        silent_one.train(experience)
    assert silent_one.evaluator.metrics[0].probes == {}


def test_exact_unlearning_is_at_distance_zero(references):
    metrics = jsd_metrics(references, noise_floor=("order",))
    strategy = make(evaluator=silent(*metrics))
    for experience in PLAIN.train_stream[:3]:
        strategy.train(experience)
    assert strategy.unlearn([2], keep_probes=True).claim == "exact"
    results = strategy.eval(TEST)
    assert results["JSD_own/eval_phase/test_stream"] == 0
    assert results["JSD_remaining/eval_phase/test_stream"] == 0
    assert results["JSD_own_floor_order/eval_phase/test_stream"] > 0


@pytest.mark.parametrize(
    "maker", [stock_maker(EWC, ewc_lambda=1.0), stock_maker(LwF, alpha=1.0, temperature=2.0)], ids=["ewc", "lwf"]
)
def test_stock_strategies_are_measured_through_their_plain_backbone(maker):
    references = References(maker, BENCHMARK)
    evaluator = silent(
        *jsd_metrics(references),
        *accuracy_difference_metrics(references),
        *unlearned_accuracy_metrics(BENCHMARK),
        *capacity_metrics(),
    )
    strategy = maker(evaluator=evaluator)
    for experience in BENCHMARK.train_stream[:2]:
        strategy.train(experience)
    results = strategy.eval([TEST[1]])
    x, _ = TEST[0].tensors
    value = jsd(strategy.model, references.reference([1]), x)
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


def test_a_task_learned_again_and_another_order_have_a_full_model_too(references):
    strategy = make(evaluator=silent(*accuracy_difference_metrics(references, controls=())))
    stream = PLAIN.train_stream
    for task in (2, 0, 3, 1):
        strategy.train(stream[task])
        results = strategy.eval(TEST)
        assert set(results.values()) == {0.0}  # nothing was unlearned: it is the full model
    strategy.unlearn([2])
    strategy.train(stream[2])
    assert "AccuracyDifference/eval_phase/test_stream/Task002" in strategy.eval(TEST)


def test_nothing_is_emitted_in_the_middle_of_a_task_or_before_an_unlearning(references):
    strategy = make(evaluator=silent(*jsd_metrics(references), *accuracy_difference_metrics(references)), eval_every=1)
    stream = with_unlearning(PLAIN, {2: [0]}).train_stream
    strategy.train(stream[0])
    assert not [name for name in strategy.eval(TEST) if "JSD" in name]
    n = len(strategy.evaluator.get_all_metrics().get("AccuracyDifference/eval_phase/test_stream", ([], []))[1])
    strategy.train(stream[1], eval_streams=[TEST])
    history = strategy.evaluator.get_all_metrics()
    assert len(history["AccuracyDifference/eval_phase/test_stream"][1]) <= n + 1  # the one behind the task
    assert not [name for name in history if "JSD" in name]


def test_the_text_loggers_of_the_host_run_along(references, tmp_path, capsys):
    text = io.StringIO()
    evaluator = EvaluationPlugin(
        *accuracy_metrics(experience=True, stream=True),
        *jsd_metrics(references),
        *accuracy_difference_metrics(references),
        *unlearned_accuracy_metrics(BENCHMARK),
        *relapse_metrics(BENCHMARK),
        *cost_metrics(references),
        *mask_overlap_metrics(),
        *owners_metrics(),
        *capacity_metrics(),
        loggers=[InteractiveLogger(), TextLogger(text), CSVLogger(log_folder=str(tmp_path))],
    )
    strategy = make(evaluator=evaluator, train_epochs=1)
    for experience in with_unlearning(PLAIN, {1: [0]}).train_stream[:2]:
        strategy.train(experience)
        strategy.eval(TEST)
    for output in (text.getvalue(), capsys.readouterr().out):
        assert "JSD_own/eval_phase/test_stream/Task000" in output
        assert "CapacityReturned" in output
        assert "Owners/" in output
        assert "Relapse/eval_phase/test_stream/Task000" in output
    assert (tmp_path / "eval_results.csv").read_text().count("\n") > 1


def test_metrics_without_an_unlearning_plugin_say_what_is_missing(references):
    model = MultiHeadModel(MLP(64, hidden=(8,), features=4))
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        train_mb_size=40,
        evaluator=silent(*jsd_metrics(references)),
    )
    strategy.train(BENCHMARK.train_stream[0])
    with pytest.raises(TypeError, match=r"need an UnlearningPlugin, which Naive does not have"):
        strategy.eval([TEST[0]])


def test_jsd_looks_through_a_task_s_norms_too():
    torch.manual_seed(0)
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
    assert jsd(model, reference, x, probe) == pytest.approx(float(js_divergence(seen, through).mean()))
    bare = jsd(model, reference, x, Probe(probe.mask, None))
    assert bare != pytest.approx(jsd(model, reference, x, probe), rel=1e-3)
    strategy.unlearn([0])
    assert jsd(model, reference, x, probe) == 0  # the same initial bits, through the same mask and norms
