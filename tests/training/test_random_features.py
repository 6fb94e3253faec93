"""A regression on random features of the inputs adds to a task's logits."""

from functools import partial

import pytest
import torch
from avalanche.training import Naive
from support.small_runs import make, split
from support.strategies import learn, logits, stock
from support.strategy_state import same_state, state
from torch import nn

from avalanche_amnesia import HAT, WSN, AmnesiacHAT, DisjointSubnets
from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.benchmarks.data import TaskError, task_data
from avalanche_amnesia.contrib.baselines import CLPUDERpp, Independent
from avalanche_amnesia.models.random_features import fitted_ridge, random_features
from avalanche_amnesia.training import RandomFeatures, load_state, save_state

STREAM = split(300)
KINDS = [HAT, AmnesiacHAT, WSN, DisjointSubnets, Independent, CLPUDERpp]


def with_regression(kind=DisjointSubnets, width=50, **options):
    return make(kind, plugins=[RandomFeatures(width)], optimizer="adam", **options)


@pytest.mark.parametrize("width", [20, 200])  # fewer and more than samples
def test_a_ridge_is_that_of_the_normal_equations(width):
    x, y = torch.randn(60, 5, 7, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    features = random_features(x, width)
    rows = features.double() - features.double().mean(0)
    wanted = nn.functional.one_hot(y, 3).double()
    gram = rows.T @ rows
    ridge = 0.1 * gram.trace() / width
    weight = torch.linalg.solve(gram + ridge * torch.eye(width), rows.T @ (wanted - wanted.mean(0)))
    expected = 2 * (rows @ weight + wanted.mean(0))
    found = fitted_ridge(features, y, 3, 2.0).double()
    assert torch.allclose(features.double() @ found[:, :-1].T + found[:, -1], expected, atol=5e-3)
    assert expected.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_scores_add_to_the_logits_of_the_task_alone(kind):
    plain, strategy = (
        learn(make(kind, plugins=plugins, optimizer="adam"), STREAM, 2) for plugins in ([], [RandomFeatures(50)])
    )
    for experience in STREAM.test_stream[:2]:
        x, y = task_data(STREAM.train_stream[experience.task_label])
        ridge = fitted_ridge(random_features(x, 50), y, 2, 2.0)
        scores = random_features(task_data(experience)[0], 50) @ ridge[:, :-1].float().T + ridge[:, -1].float()
        assert torch.allclose(logits(strategy, experience), logits(plain, experience) + scores, atol=2e-3)
        assert scores.std() > 0.1


def test_logits_of_mixed_tasks_are_those_of_each():
    model = learn(with_regression(), STREAM, 2).model.eval()
    x = torch.cat([task_data(STREAM.test_stream[task])[0][:3] for task in (0, 1)])
    mixed = model(x, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert torch.equal(mixed[:3], model(x[:3], 0))
    assert torch.equal(mixed[3:], model(x[3:], 1))
    assert torch.equal(model(x)[1], model(x, 1))


def test_a_saved_state_holds_the_regressions(tmp_path):
    strategy = learn(with_regression(), STREAM, 2)
    save_state(strategy, tmp_path)
    loaded = with_regression()
    load_state(loaded, tmp_path)
    assert same_state(state(loaded.model), state(strategy.model))
    assert loaded.model.heads[1].ridge.shape == (2, 51)
    for one in (strategy, loaded):
        learn(one, STREAM, [2])
    assert same_state(state(loaded.model), state(strategy.model))
    loaded.model.remove_task(1)
    assert not any("ridge" in name and "heads.1." in name for name in loaded.model.state_dict())


def test_stock_strategies_take_it_too():
    plain, strategy = (learn(stock(Naive, plugins=plugins), STREAM, 1) for plugins in ([], [RandomFeatures(50)]))
    assert not torch.equal(logits(strategy, STREAM.test_stream[0]), logits(plain, STREAM.test_stream[0]))


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (torch.arange(320).view(5, 64) % 9, "that are one tensor of floating-point numbers, task 0 has torch.int64"),
        (torch.randn(5, 64) * 1e30, "whose features are finite and vary, unlike those of task 0"),
    ],
)
def test_inputs_that_have_no_regression_are_refused_and_the_task_is_undone(x, fault):
    pair = x, torch.arange(5) % 2
    net = partial(nn.Sequential, Bounded(), nn.Linear(64, 16))
    strategy = with_regression(net=net)
    with pytest.raises(TaskError, match=f"RandomFeatures needs inputs {fault}: leave RandomFeatures out"):
        learn(strategy, task_benchmark(pair, pair, [[0, 1]]))
    assert not strategy.model.tasks
    assert (strategy.clock.train_iterations == 0) is (x.dtype == torch.int64)  # a wrong kind costs no training


class Bounded(nn.Module):
    def forward(self, x):
        return x.float().tanh()


def test_equal_samples_have_a_regression_without_weights():
    assert not fitted_ridge(torch.ones(4, 7), torch.tensor([0, 1, 1, 1]), 2, 2.0)[:, :-1].any()
    assert fitted_ridge(torch.ones(4, 7), torch.tensor([0, 1, 1, 1]), 2, 2.0)[:, -1].tolist() == [0.5, 1.5]
