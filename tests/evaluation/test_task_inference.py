"""Predictions without task labels against a computation sample by sample."""

import math
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from support import strategies
from support.measured_runs import BENCHMARK, PERMUTED, TEST, make, wide
from support.small_networks import Net
from support.strategies import quiet
from torch import nn
from torch.optim import Adam

from avalanche_amnesia import DisjointModel, DisjointSubnets, MultiHeadModel, Pools
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.evaluation import task_inference_metrics
from avalanche_amnesia.models.task_inference import TaskInference

disjoint = partial(strategies.make, DisjointSubnets, net=wide, train_mb_size=20, train_epochs=3, isolation=Pools(4))


@pytest.fixture(scope="module", params=[make, disjoint], ids=["units", "weight pools"])
def trained(request):
    strategy = request.param(evaluator=quiet(*task_inference_metrics(), accuracy_metrics(experience=True, stream=True)))
    strategy.train(PERMUTED.train_stream)
    return strategy


def by_hand(model, x, tasks, rule):
    """Return task, class and certainty of each sample."""
    answers = []
    with torch.no_grad():
        logits = {task: model.eval()(x, task).double() for task in tasks}
    for row in range(len(x)):
        certainty = {}
        for task, of_task in logits.items():
            p = of_task[row].softmax(0)
            entropy = -sum(float(v) * math.log(float(v)) for v in p if v > 0)
            n = len(p)
            certainty[task] = 1 - entropy / math.log(n) if rule == "entropy" else (float(p.max()) - 1 / n) / (1 - 1 / n)
        task = max(certainty, key=certainty.get)
        answers.append((task, int(logits[task][row].argmax()), certainty[task]))
    return answers


@pytest.mark.parametrize("rule", ["entropy", "confidence"])
def test_a_sample_is_assigned_to_the_most_certain_head(trained, rule):
    x = torch.cat([task_data(experience)[0][:25] for experience in TEST])
    trained.model.train()
    predicted = trained.predict(x, rule=rule)
    assert trained.model.training
    tasks, classes, certainty = zip(*by_hand(trained.model, x, range(4), rule), strict=True)
    assert (predicted.tasks.tolist(), predicted.classes.tolist()) == (list(tasks), list(classes))
    assert predicted.certainty.tolist() == pytest.approx(certainty, abs=1e-4)
    assert len(set(tasks)) > 1


def test_batches_with_several_named_inputs_are_predicted():
    torch.manual_seed(0)
    model = DisjointModel(Net(lambda s, ids, scale: s.layer(ids * scale).relu(), layer=nn.Linear(4, 8), features=8))
    for task in (0, 1):
        model.add_head(task, 3)
    strategy = DisjointSubnets(model=model, optimizer=Adam(model.parameters()))
    batch = {"ids": torch.rand(5, 4), "scale": torch.rand(5, 1)}
    for predicted in (strategy.predict(batch, task=1), TaskInference(model)(batch, task=1)):
        assert predicted.tasks.tolist() == [1] * 5
        assert torch.equal(predicted.classes, model.heads[1](model.backbone(**batch)).argmax(1))
    with pytest.raises(ValueError, match=r"samples of shape \(4,\), torch.float32 by the names \['ids'\]"):
        strategy.predict({"ids": batch["ids"]})


def test_inputs_that_are_no_batch_of_the_network_are_refused(trained):
    for x, kind, words in (
        (torch.rand(3, 5), ValueError, r"a batch of 3: the model can't run on its samples of shape \(5,\)"),
        (torch.rand(64), ValueError, r"a batch of 64: the backbone returns \(\d+,\)|samples of shape \(\)"),
        (torch.full((2, 64), float("nan")), ValueError, "x can't be predicted: 2 of 2 samples hold NaN or infinity"),
        (TEST[0], TypeError, r"x must be a batch .*; got TaskExperience"),
        ({"x": [1.0]}, TypeError, r"x must be a batch .*; got dict of \['list'\]"),
    ):
        with pytest.raises(kind, match=words):
            trained.predict(x)
    with pytest.raises(TypeError, match="give a MultiHeadModel, not Linear"):
        TaskInference(nn.Linear(2, 2))
    for call in (lambda: TaskInference(MultiHeadModel(wide()), "loudest"), lambda: task_inference_metrics("loudest")):
        with pytest.raises(ValueError, match="rule"):
            call()


def test_metrics_of_task_inference_equal_a_count_by_hand(trained):
    measured = trained.eval(TEST)
    shares = []
    for experience in TEST:
        task, (x, y) = experience.task_label, task_data(experience)
        predicted = trained.predict(x)
        right = predicted.tasks == task
        shares.append(float((right & (predicted.classes == y)).float().mean()))
        place = f"eval_phase/test_stream/Task{task:03d}/Exp{task:03d}"
        assert measured[f"TaskInference_Acc_Exp/{place}"] == pytest.approx(shares[-1])
        assert measured[f"TaskInference_Task_Exp/{place}"] == pytest.approx(float(right.float().mean()))
        assert shares[-1] <= measured[f"Top1_Acc_Exp/{place}"] + 1e-6
    stream = next(value for name, value in measured.items() if name.startswith("TaskInference_Acc_Stream"))
    assert stream == pytest.approx(sum(shares) / len(shares))


def test_no_sample_is_assigned_to_an_unlearned_task():
    strategy = make(evaluator=quiet(*task_inference_metrics()))
    strategy.train(BENCHMARK.train_stream)
    x, _ = task_data(TEST[0])
    assert set(strategy.predict(x).tasks.tolist()) <= {1, 3}
    assert {name.split("/")[3] for name in strategy.eval(TEST) if "Acc_Exp" in name} == {"Task001", "Task003"}
    strategy.unlearn([1, 3])
    with pytest.raises(ValueError, match="has no task"):
        strategy.predict(x)
