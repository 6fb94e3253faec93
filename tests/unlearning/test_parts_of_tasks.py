"""Requests for samples and classes: the task is trained again in its place, as in a life that never had them."""

import copy
import functools
import json

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
from avalanche.benchmarks.utils import _make_taskaware_tensor_classification_dataset
from avalanche.training.plugins import EarlyStoppingPlugin, LRSchedulerPlugin
from support.interruptions import Interrupted, comparable_state, first_and_last, interrupted_at, lines_of
from support.small_runs import OPTIMIZERS, make, split
from support.strategies import ConvNet, NoMetric, learn, mlp, quiet
from support.strategy_state import fingerprint, same_state, state, unlearning_plugin

from avalanche_amnesia import DisjointModel, DisjointSubnets, task_benchmark
from avalanche_amnesia.audit import UnlearningRecord
from avalanche_amnesia.benchmarks import UnlearningRequest, with_unlearning, without_samples
from avalanche_amnesia.benchmarks.requests import reorder
from avalanche_amnesia.contrib.baselines import CLPUDERpp, Independent
from avalanche_amnesia.contrib.metrics import forgotten_samples_metrics
from avalanche_amnesia.evaluation import References, accuracy_difference_metrics, jsd_metrics
from avalanche_amnesia.isolation import Pools
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.training import HAT, AmnesiacHAT
from avalanche_amnesia.training.host.saving import load_state
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.training.plugins.unlearning import UnlearningPlugin

STREAM = split(160)
IDS = (0, 3, 7, 30)
NETS = {"mlp": mlp, "conv": ConvNet}


def disjoint(net="mlp", kind=DisjointSubnets, **options):
    return make(kind, net=NETS[net], optimizer="adam", **{"train_epochs": 1, **options})


def learned(strategy, benchmark=STREAM, tasks=3, **options):
    return learn(strategy, benchmark, tasks, **options)


@functools.cache
def _three_tasks():
    return learned(disjoint())


def three_tasks():
    """Weight pools that have learned three tasks: trained once, and copied."""
    return copy.deepcopy(_three_tasks())


@functools.cache
def never_seen():
    """The same, trained without some samples of task 1; no test may change it."""
    return learned(disjoint(), without_samples(STREAM, {1: IDS}))


def of_class(task, label):
    return [at for at, own in enumerate(STREAM.train_stream[task].targets) if own == label]


def same_models(one, other):
    return same_state(state(one.model), state(other.model))


# Exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("mlp", Independent), ("conv", DisjointSubnets)])
def test_the_model_equals_one_trained_without_the_samples(given):
    strategy = learned(disjoint(*given))
    before = state(strategy.model)
    record = strategy.unlearn(task=1, samples=IDS)
    assert (record.claim, record.reasons, record.task, record.tasks) == ("exact", (), 1, ())
    assert not same_state(before, state(strategy.model))
    assert same_models(strategy, learned(disjoint(*given), without_samples(STREAM, {1: IDS})))
    # A second time, the first samples stay away; then a whole class, which is no longer predicted.
    assert strategy.unlearn(task=1, samples=[3, 5]).claim == "exact"
    record = strategy.unlearn(task=0, classes=[1])
    assert (record.claim, record.plan.classes, len(record.plan.samples)) == ("exact", (1,), len(of_class(0, 1)))
    left_out = {0: of_class(0, 1), 1: (*IDS, 5)}
    never = learned(disjoint(*given), without_samples(STREAM, left_out))
    assert same_models(strategy, never)
    assert set(strategy.model.eval()(STREAM.test_stream[0].tensors[0], 0).argmax(1).tolist()) == {0}
    for one in (strategy, never):  # later tasks and unlearnings do not differ either
        one.train(STREAM.train_stream[3])
        assert one.unlearn([1]).claim == "exact"
    assert same_models(strategy, never)
    assert strategy.unlearn([0]).claim == "exact"


def test_a_task_reads_what_it_read_at_first_though_permanent_tasks_came_since():
    stream = with_unlearning(STREAM, permanent=[0, 2])
    strategy = learned(disjoint(isolation=Pools(5)), stream)
    assert strategy.model.share(1).reads == (0,)
    assert strategy.unlearn(task=1, samples=IDS).claim == "exact"
    assert strategy.model.share(1).reads == (0,)
    assert same_models(strategy, learned(disjoint(isolation=Pools(5)), without_samples(stream, {1: IDS})))
    with pytest.raises(RequestError, match="declared permanent"):
        strategy.unlearn(task=0, samples=[1])


def test_the_training_has_the_keyword_arguments_of_the_first_one(tmp_path):
    options = {"shuffle": False, "drop_last": True}
    learned(disjoint(), **options).save(tmp_path)
    loaded = DisjointSubnets.load(tmp_path, **_arguments())
    assert loaded.unlearn(task=1, samples=IDS, data=STREAM.train_stream[1]).claim == "exact"
    assert same_models(loaded, learned(disjoint(), without_samples(STREAM, {1: IDS}), **options))
    assert not same_models(loaded, never_seen())


def _arguments():
    torch.manual_seed(0)
    model = DisjointModel(NETS["mlp"]())
    options = {"train_mb_size": 16, "train_epochs": 1, "eval_mb_size": 64, "seed": 3}
    return {"model": model, "optimizer": OPTIMIZERS["adam"](model.parameters()), **options}


def test_a_task_in_another_place_is_a_reason():
    strategy = learned(disjoint(isolation=Pools(5)), with_unlearning(STREAM, permanent=[0]))
    record = strategy.unlearn(task=1, samples=IDS, data=STREAM.train_stream[1])  # no task reads task 0 in this stream
    assert record.claim == "approximate"
    assert any("has other weights, or reads other tasks" in reason for reason in record.reasons)


def test_values_in_the_place_of_unlearned_samples_are_not_read():
    blank = copy.deepcopy(STREAM.train_stream[1])
    blank.samples.base[blank.samples.index[list(IDS)]] = float("nan")
    strategy = three_tasks()
    before = fingerprint(strategy)
    with pytest.raises(RequestError, match=r"again with all of its samples .*: task 1: 4 of"):
        strategy.unlearn(task=1, samples=IDS, data=blank)
    assert fingerprint(strategy) == before
    assert strategy.unlearn(task=1, samples=IDS, data=blank, reproduce=False).claim == "conditional"
    assert same_models(strategy, never_seen())


def test_data_sets_of_avalanche_are_filtered_and_heads_keep_their_width():
    benchmark = _of_others()  # a request finds its data while they are in memory
    strategy = learned(disjoint(), benchmark)
    gone = of_class(1, 1)
    assert strategy.unlearn(task=1, samples=IDS).claim == "exact"
    assert same_models(strategy, learned(disjoint(), _of_others(IDS)))
    assert strategy.unlearn(task=1, classes=[1]).plan.classes == (1,)
    assert strategy.model.heads[1].out_features == 2
    assert same_models(strategy, learned(disjoint(), without_samples(_of_others(), {1: {*IDS, *gone}})))
    strategy.eval(_of_others().test_stream[:3])


def _of_others(left_out=()):
    """The stream as data sets of Avalanche, which knows the classes by the labels that are there alone."""
    made = []
    for task, experience in enumerate(STREAM.train_stream):
        keep = [at for at in range(len(experience.targets)) if task != 1 or at not in left_out]
        x, y = (part[keep] for part in experience.tensors)
        made.append(_make_taskaware_tensor_classification_dataset(x, y, task_labels=task))
    return task_incremental_benchmark(benchmark_from_datasets(train=made, test=made), reset_task_labels=True)


# Streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_carries_requests_for_parts():
    requests = [
        UnlearningRequest(task=1, samples=IDS, at=2),
        UnlearningRequest((0,), 2),
        UnlearningRequest(task=2, classes=[0], at=2),
        UnlearningRequest(task=1, samples=[9]),  # at the end
    ]
    stream = with_unlearning(STREAM, requests)
    assert [len(e.requests) for e in stream.train_stream] == [0, 0, 3, 0, 1]
    strategy, never = disjoint(isolation=Pools(5)), disjoint(isolation=Pools(5))
    strategy.train(stream.train_stream)
    assert [record.claim for record in unlearning_plugin(strategy).records] == ["exact"] * 4
    learned(never, without_samples(STREAM, {1: (*IDS, 9), 2: of_class(2, 0)}), [1, 2, 3, 4])
    assert same_models(strategy, never)
    assert strategy.clock.train_exp_counter == 5
    assert set(unlearning_plugin(strategy).ledger.remaining) == {1, 2, 3, 4}


class Interrupts(NoMetric):
    """Interrupts the first unlearning when all is done but to let it stand."""

    left = 1

    def after_unlearning(self, strategy):
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def test_a_request_of_a_stream_that_was_interrupted_is_obeyed_before_the_next_task(tmp_path):
    stream = with_unlearning(STREAM, {1: UnlearningRequest(task=0, samples=IDS)})
    strategy = learn(disjoint(evaluator=quiet(Interrupts())), stream.train_stream[:1])
    with pytest.raises(Interrupted):
        strategy.train(stream.train_stream[1])
    assert same_models(strategy, learned(disjoint(), tasks=[0, 1]))
    strategy.save(tmp_path)
    strategy.train(stream.train_stream[2])
    loaded = learn(DisjointSubnets.load(tmp_path, **_arguments()), [stream.train_stream[2]])
    never = learned(disjoint(), without_samples(STREAM, {0: IDS}))
    for one in (strategy, loaded):
        assert [record.claim for record in unlearning_plugin(one).records] == ["conditional"]  # on the metric
        assert same_models(one, never)


def test_a_plan_names_the_samples_and_changes_nothing():
    strategy = three_tasks()
    before = fingerprint(strategy)
    plan = strategy.plan_unlearning(task=1, classes=[1])
    assert plan.classes == strategy.plan_unlearning(UnlearningRequest(task=1, classes=[1])).classes
    assert (plan.task, plan.classes, len(plan.samples), plan.claim) == (1, (1,), len(of_class(1, 1)), "exact")
    assert f"Plan: unlearn {len(of_class(1, 1))} samples of task 1 (all of classes 1)" in str(plan).replace("\n", " ")
    assert fingerprint(strategy) == before


def test_a_plugin_that_reads_evaluations_refuses_requests_for_samples():
    strategy = three_tasks()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(strategy.optimizer)
    by_val, by_train = (LRSchedulerPlugin(schedule, metric=f"{name}_loss") for name in ("val", "train"))
    host, before = [*strategy.plugins], fingerprint(strategy)
    for plugin in (EarlyStoppingPlugin(2, "test_stream"), by_val):
        strategy.plugins = [*host, plugin]
        with pytest.raises(RequestError, match=f"{type(plugin).__name__} reads evaluations, which a retraining lacks"):
            strategy.unlearn(task=1, samples=[0], reproduce=False)
        assert fingerprint(strategy) == before
    strategy.plugins = [*host, by_train]
    assert strategy.plan_unlearning(task=1, samples=[0]).samples


# All or nothing ----------------------------------------------------------------------------------------------------


def test_an_interruption_at_any_line_leaves_the_state_before():
    strategy = three_tasks()
    before, held = fingerprint(strategy), comparable_state(strategy)
    twin, ask = copy.deepcopy(strategy), {"task": 1, "samples": IDS, "data": STREAM.train_stream[1]}
    copy.deepcopy(strategy).unlearn(**ask)  # some lines run once in a process
    lines = lines_of(lambda: twin.unlearn(**ask))
    places = first_and_last(lines)
    marks = [place for place in places[:: len(places) // 12] if place < len(lines) - 40]
    undone = [at for at, (file, _) in enumerate(lines) if file.endswith("rollback.py")]  # of the reproduction
    marks += [*undone[:: len(undone) // 6], len(lines) - 40]
    for number in marks:
        with pytest.raises(Interrupted), interrupted_at(number):
            strategy.unlearn(**ask)
        assert fingerprint(strategy) == before, number
        assert comparable_state(strategy) == held, number
    assert strategy.unlearn(**ask).claim == "exact"
    assert same_models(strategy, never_seen())


def test_a_training_that_fails_leaves_the_state_before():
    strategy = learned(disjoint(train_mb_size=32))
    before = fingerprint(strategy)
    n = len(STREAM.train_stream[1].targets)
    rate = strategy.optimizer.param_groups[0]["lr"]
    strategy.optimizer.param_groups[0]["lr"] = 1e36
    with pytest.raises(RequestError, match="can't be trained without these samples: task 1 diverged"):
        strategy.unlearn(task=1, samples=IDS, reproduce=False)
    strategy.optimizer.param_groups[0]["lr"] = rate
    assert fingerprint(strategy) == before
    with pytest.raises(RequestError, match="would be left without samples"):
        strategy.unlearn(task=1, samples=range(n))
    other = learned(disjoint(), drop_last=True)
    before = fingerprint(other)
    with pytest.raises(RequestError, match="can't be trained without these samples"):
        other.unlearn(task=1, samples=range(n - 5))
    assert fingerprint(other) == before
    other.train(STREAM.train_stream[3])


# Refusals ----------------------------------------------------------------------------------------------------------


def test_other_methods_refuse_by_name():
    side = disjoint(kind=CLPUDERpp)
    for strategy in (make(AmnesiacHAT), make(HAT, plugins=[TrajectoryPlugin(), UnlearningPlugin()]), side):
        learned(strategy, tasks=[0])
        before = fingerprint(strategy)
        with pytest.raises(RequestError, match=f"{type(strategy).__name__} can't train task 0 again"):
            strategy.unlearn(task=0, samples=[1])
        assert fingerprint(strategy) == before


def test_samples_and_classes_that_a_task_does_not_have_are_refused(tmp_path):
    strategy = three_tasks()
    before = fingerprint(strategy)
    n = len(STREAM.train_stream[1].targets)
    for ask, message in (
        ({"samples": [n]}, f"has {n} samples"),
        ({"classes": [7]}, r"no samples of classes \[7\]"),
        ({"samples": [1], "data": STREAM.train_stream[2]}, "its data is needed .*, not task 2$"),
        ({"samples": [1], "data": split(100).train_stream[1]}, "its labels differ"),
        ({"samples": [1], "data": 5}, "not 5"),
    ):
        with pytest.raises(RequestError, match=message):
            strategy.unlearn(task=1, **ask)
        assert fingerprint(strategy) == before
    for wrong in ({"samples": 3}, {"samples": None}, {"classes": 1}, {"samples": [1], "reproduce": "no"}):
        with pytest.raises(ValueError, match=r"must be (a list of|one of)"):
            strategy.unlearn(task=1, **wrong)
    with pytest.raises(RequestError, match="not yet trained"):
        strategy.unlearn(task=4, samples=[1])
    with pytest.raises(RequestError, match=r"give unlearn\(task=1, …\), not tasks \[1\]"):
        strategy.unlearn([1], samples=[1])
    strategy.unlearn(task=1, samples=IDS)
    with pytest.raises(RequestError, match="forgotten already"):
        strategy.unlearn(task=1, samples=IDS)
    strategy.save(tmp_path)
    loaded = disjoint()
    load_state(loaded, tmp_path)
    with pytest.raises(RequestError, match="give its experience"):
        loaded.unlearn(task=1, samples=[1])
    with pytest.raises(RequestError, match="forgotten already"):
        loaded.unlearn(task=1, samples=IDS, data=STREAM.train_stream[1])


def test_options_that_no_state_keeps_are_refused():
    strategy = disjoint()
    strategy.train(STREAM.train_stream[0], collate_fn=lambda batch: batch)
    with pytest.raises(RequestError, match="collate_fn"):
        strategy.unlearn(task=0, samples=[1])


# Records -----------------------------------------------------------------------------------------------------------


def test_a_record_names_no_position_and_survives_its_way_through_json():
    strategy = three_tasks()
    record = strategy.unlearn(task=1, samples=IDS)
    assert UnlearningRecord.from_json(record.to_json()) == record
    assert len(set(record.plan.samples)) == len(IDS)
    salt = unlearning_plugin(strategy).forgotten.salt
    assert salt
    assert salt not in record.to_json()
    assert set(json.loads(record.to_json())["plan"]["samples"]) == unlearning_plugin(strategy).forgotten.hashes[1]
    assert "Unlearned 4 samples of task 1" in str(record)
    assert record.after == {name: record.after[name] for name in strategy.model.state_dict()}
    strategy.unlearn([1])
    assert not unlearning_plugin(strategy).forgotten.hashes


# Measures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_references_are_trained_without_the_samples_too(stored):
    requests = [UnlearningRequest(task=1, samples=range(20), at=1), UnlearningRequest(task=0, classes=[1], at=1)]
    stream = with_unlearning(reorder(STREAM, [0, 1]), requests)
    references = References(disjoint, stream, store=RunStore() if stored else None)
    metrics = [
        jsd_metrics(references, scope="all"),
        forgotten_samples_metrics(stream, references),
        accuracy_difference_metrics(references, controls=("reference",)),
    ]
    strategy = disjoint(evaluator=quiet(*metrics))
    strategy.train(stream.train_stream)
    results = strategy.eval(stream.test_stream)
    read = {name.removesuffix("/eval_phase/test_stream"): value for name, value in results.items()}
    assert read["JSD_own_on_all"] == 0
    for kind in ("accuracy", "membership"):
        name = f"ForgottenSamples_{kind}"
        assert read[name] == read[f"{name}_reference"]
        assert read[f"{name}_tasks"] == 2
    assert results["ForgottenSamples_accuracy/eval_phase/test_stream/Task000"] == 0  # a closed class
    assert read["AccuracyDifference"] == read["AccuracyDifference_reference"]
    beside = references.of(unlearning_plugin(strategy))
    assert same_state(state(strategy.model), state(beside.reference([0, 1])))
    assert not same_state(state(strategy.model), state(references.reference([0, 1])))
    assert references.of(unlearning_plugin(strategy)) is beside
    assert references.without({}) is references


# The task is trained again as before, first ---------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["pixel", "mini-batch", "learning rate", "loss"])
def test_a_task_that_can_t_be_reproduced_is_not_trained_without_samples(change):
    strategy, data = three_tasks(), None
    if change == "pixel":
        data = copy.deepcopy(STREAM.train_stream[1])
        data.samples.base[data.samples.index[5]] += 1
    elif change == "learning rate":
        strategy.optimizer.param_groups[0]["lr"] = strategy.optimizer.defaults["lr"] = 0.02
    elif change == "loss":
        strategy._criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.2)
    else:
        strategy.train_mb_size = 7
    before = fingerprint(strategy)
    with pytest.raises(RequestError, match=r"task 1, trained again with all of its samples, has other bits"):
        strategy.unlearn(task=1, samples=[3], data=data)
    assert fingerprint(strategy) == before
    assert strategy.unlearn(task=1, samples=[3], data=data, reproduce=False).claim != "exact"


def test_without_a_reproduction_the_claim_rests_on_code_and_data():
    strategy = three_tasks()
    record = strategy.unlearn(task=1, samples=[3], reproduce=False)
    assert record.claim == "conditional"
    assert record.rests_on == ("code and data of task 1, unchanged since its training",)
    assert strategy.unlearn([2]).rests_on == record.rests_on  # as long as this training counts
    assert strategy.unlearn(task=1, samples=[4]).claim == "exact"
    skipping = learned(disjoint(unlearning=UnlearningPlugin(reproduce=False)))
    assert skipping.unlearn(task=1, samples=[3]).claim == "conditional"
    assert skipping.unlearn(task=1, samples=[4], reproduce=True).claim == "exact"


def test_a_part_that_only_this_task_used_is_named():
    x, y = STREAM.train_stream[0].tensors
    benchmark = task_benchmark((x, y), (x, y), [[0, 1]] * 2, transforms=[None, lambda x: x * 2])
    strategy = learn(disjoint(), benchmark)
    plan, record = strategy.plan_unlearning(task=1, samples=[3]), strategy.unlearn(task=1, samples=[3])
    assert record.claim == plan.claim == "conditional"
    assert "lambda at test_parts_of_tasks.py:" in record.rests_on[0] == plan.rests_on[0]
    assert strategy.unlearn(task=0, samples=[3]).claim == "conditional"
