"""Heads fitted to the features that a task ends with, and features without other tasks, as of a pass over all units."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support import small_networks
from support.fault_injection import raiser
from support.small_networks import L, last_state, parts
from support.strategies import trained
from support.strategy_state import bits
from torch import nn
from torch.nn import functional as F

from avalanche_amnesia import HAT, WSN, AmnesiacHAT, HardAttention, MaskedModel, ScoredWeights, SubnetModel
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.benchmarks.data import task_data
from avalanche_amnesia.models import MLP
from avalanche_amnesia.training import EVEN_BUDGET, head_fit
from avalanche_amnesia.training.head_fit import CounterfactualFeatures
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.norm_statistics import recompute, running_norms
from avalanche_amnesia.training.plugins.task_mask import TaskMaskPlugin
from avalanche_amnesia.training.task_faults import MaskWarning
from avalanche_amnesia.unlearning.compensation import FittedHead
from avalanche_amnesia.unlearning.logistic import PENALTY, FitError

PERMUTED = PermutedDigits(2, n_train=600, n_test=300)
BUDGET = {"train_mb_size": 10, "train_epochs": 4}
KINDS = [(HAT, MaskedModel), (WSN, SubnetModel), (AmnesiacHAT, MaskedModel)]


MASKS = {WSN: ScoredWeights(), AmnesiacHAT: EVEN_BUDGET}


def learned(kind, wrap, n_tasks=2, **settings):
    masks = replace(MASKS.get(kind, HardAttention()), **settings)
    options = {"hidden": (32,), "wrap": wrap, "optimizer": partial(torch.optim.Adam, lr=3e-3), **BUDGET}
    strategy = trained(n_tasks, PERMUTED, kind=kind, masks=masks, **options)
    strategy.model.eval()
    return strategy


@torch.no_grad()
def loss(model, experience):
    x, y = task_data(experience)
    return float(F.cross_entropy(model(x, experience.task_label), y))


@pytest.mark.parametrize(("kind", "wrap"), KINDS)
def test_fitting_changes_only_the_head_and_improves_it(kind, wrap):
    trained, fitted = (learned(kind, wrap, fit_head=fit_head).model for fit_head in (False, True))
    heads = {name for name in fitted.state_dict() if name.startswith("heads.")}
    before, after = bits(trained), bits(fitted)
    assert {name for name in after if before[name] != after[name]} == heads
    for experience in PERMUTED.test_stream if kind is HAT else []:
        assert loss(fitted, experience) < loss(trained, experience)


def test_a_fitted_head_is_the_logistic_regression_of_scikit_learn():
    model = learned(AmnesiacHAT, MaskedModel, n_tasks=1).model
    x, y = task_data(PERMUTED.train_stream[0])
    features, probabilities = model.features(x, 0).detach(), model(x, 0).softmax(1).detach()
    white = (features - features.mean(0)).double()
    covariance = white.T @ white / len(x)
    floor = (1e-4 * covariance.diagonal().mean() + 1e-9) * torch.eye(len(covariance))
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance + floor), white.T, upper=False).T
    theirs = LogisticRegression(C=1 / PENALTY, tol=1e-8, max_iter=2000).fit(white, y).predict_proba(white)
    assert torch.allclose(probabilities.double(), torch.from_numpy(theirs), atol=0.02)


def test_hat_keeps_its_trained_head_as_published():
    assert [find_plugin(learned(*kind, n_tasks=0), TaskMaskPlugin).fit_head for kind in KINDS] == [False, True, True]


def test_a_head_that_cant_be_fitted_stays_as_it_was_trained(monkeypatch):
    trained = learned(HAT, MaskedModel)
    monkeypatch.setattr(head_fit, "fitted_head", raiser(FitError))
    with pytest.warns(MaskWarning, match="task 0 keeps the head that it was trained with"):
        kept = learned(HAT, MaskedModel, fit_head=True)
    assert bits(kept.model) == bits(trained.model)


def placed(head, like):
    model = SimpleNamespace(head=lambda task: like)
    return next(value for tensor, value in head.replacements(model, 0) if tensor.data_ptr() == like.weight.data_ptr())


@pytest.mark.parametrize(("largest", "dtype"), [(3.0, torch.float16), (1e6, torch.float32)])
def test_a_compacted_head_is_the_head_to_half_precision_without_columns_of_closed_units(largest, dtype):
    weight, opened = torch.randn(4, 10), torch.arange(10) % 3 == 0
    weight[:, ~opened] = 0
    weight[0, 0] = largest
    kept = head_fit.compact_head(FittedHead(weight, torch.randn(4)))
    assert (kept.weight.shape, kept.weight.dtype, kept.bias.dtype) == ((4, 4), dtype, torch.float16)
    assert torch.equal(kept.columns, opened)
    value = placed(kept, nn.Linear(10, 4))
    assert value.dtype == torch.float32
    assert torch.equal(value, weight.to(dtype).float())


GRU = {"r": lambda: nn.GRU(6, 6, batch_first=True)}
RECURRENT = parts(lambda s, x: last_state(s, torch.relu(s.inner(x))), inner=L(4, 6), out=L(6, 4), **GRU)
NAMES = ["lenet", "residual 1x1", "concatenated maps", "grouped", "batch norm", "embedding", "squeeze and excite"]
NETWORKS = {name: small_networks.ALL[name] for name in NAMES} | {
    "mlp": (lambda: MLP(20, hidden=(16, 12), features=8), (20,), {}),
    "the batch's statistics": (*small_networks.ALL["batch norm"][:2], {"input_shape": (1, 3, 3), "norm": "batch"}),
    "frozen": (RECURRENT, (5, 4), {"input_shape": (5, 4), "frozen": ["r"]}),
    "task-owned": (RECURRENT, (5, 4), {"input_shape": (5, 4), "task_owned": ["r"]}),
}
HALF, STARVED = 0, 1


def embedding(model: MaskedModel, task: int, seed: int) -> torch.Tensor:
    """Open half of the units, and at least one of each layer; or only one of each third layer, and none of one."""
    values = torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed + task)) - 0.5
    layers = list(model.by_layer(values).values())
    for layer in layers:
        layer[-1] = 1.0
    if task == STARVED:
        for layer in layers[::3]:
            layer[:-1] = -1.0
        layers[len(layers) // 2].fill_(-1.0)
    return values


@torch.no_grad()
def with_tasks(model: MaskedModel, seed: int = 0) -> MaskedModel:
    """Tasks with masks, heads, and norms of their own that learned something."""
    generator = torch.Generator().manual_seed(seed)
    for task in (HALF, STARVED):
        model.add_head(task, 4 + task)
        for name, value in (*model.task_parts(task).named_parameters(), *model.task_parts(task).named_buffers()):
            if value.is_floating_point():
                low = 0.5 if name.endswith("running_var") else -0.3
                value.add_(low + 0.6 * torch.rand(value.shape, generator=generator))
        model.start_task(task, embedding(model, task, seed))
        model.finish_task()
    return model.eval()


def model_of(name: str, seed: int = 0) -> MaskedModel:
    make, _, options = NETWORKS[name]
    torch.manual_seed(seed)
    return with_tasks(MaskedModel(make(), **options), seed=seed)


def batch(name: str, size: int) -> torch.Tensor:
    torch.manual_seed(size)
    return small_networks.inputs(model_of(name), NETWORKS[name][1], size)


@torch.no_grad()
def over_all_units(model, task, x, mb_size):
    """Features with closed units computed and masked afterwards; and whether norms have statistics."""
    parts, masks = deepcopy(model.task_parts(task)), model.by_layer(model.binary_mask(task).double())
    model.eval()
    if norms := running_norms(parts):
        recompute(norms, x.split(mb_size), lambda part: model.backbone(part, parts, masks))
    return model.backbone(x, parts, masks), bool(norms)


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_features_equal_those_of_a_pass_over_all_units(name):
    model, x = model_of(name).double(), batch(name, 12)
    x = x.double() if x.is_floating_point() else x
    for task in (HALF, STARVED):
        before = bits(model)
        expected, has_statistics = over_all_units(model, task, x, 6)
        found = CounterfactualFeatures(model, task, x, x.split(6))
        statistics, features = found(), found.features
        assert task != HALF or features.abs().max() > 1e-3  # few units may let nothing through
        assert torch.allclose(features, expected, atol=1e-8 * float(expected.abs().max().clamp_min(1)))
        assert bits(model) == before
        buffers = dict(model.task_parts(task).named_buffers())
        assert set(statistics) == (set(buffers) if has_statistics else set())
        for buffer, value in statistics.items():
            buffers[buffer].copy_(value)
        assert torch.equal(model.features(x, task), features)
