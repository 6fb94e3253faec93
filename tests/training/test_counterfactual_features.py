"""Features without given tasks, through a task's open units alone: those of the masked model, statistics included."""

import pytest
import torch
from support.export_networks import HALF, NETWORKS, SPARSE, batch, trained
from torch.utils.flop_counter import FlopCounterMode

from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.contrib.export.subnet_features import feature_subnet
from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.training import counterfactual_features
from avalanche_amnesia.training.counterfactual_features import CounterfactualFeatures
from avalanche_amnesia.training.norm_statistics import running_norms


def both_ways(monkeypatch, model, task, x, mb_size):
    found = []
    for threshold in (float("inf"), 0.0):
        monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", threshold)
        found.append(CounterfactualFeatures(model, task, x, mb_size)())
    return found


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("task", [HALF, SPARSE])
def test_they_are_the_masked_model_s(monkeypatch, name, task):
    model, x = trained(name, seed=int(name == "tokens")).double(), batch(name, 12)
    x = x.double() if x.is_floating_point() else x
    before = state_hashes(model.state_dict())
    (masked, all_statistics), (cut, statistics) = both_ways(monkeypatch, model, task, x, 6)
    assert task != HALF or masked.abs().max() > 1e-3  # a twentieth of the units may let nothing through
    assert torch.allclose(cut, masked, atol=1e-8 * float(masked.abs().max().clamp_min(1)))
    parts, subnet = model.task_parts(task), feature_subnet(model, task)
    assert set(statistics) == {name for name in all_statistics if not name.endswith("num_batches_tracked")}
    assert bool(statistics) == bool(running_norms(parts))
    of_parts = dict(parts.named_buffers())
    for norm, (_, channels) in subnet.norms.items():
        for name in (f"{norm}.running_mean", f"{norm}.running_var"):
            closed = torch.ones(len(statistics[name]), dtype=torch.bool).index_fill(0, channels, False)
            assert torch.allclose(statistics[name][channels], all_statistics[name][channels], atol=1e-8)
            assert torch.equal(statistics[name][closed], of_parts[name][closed])
    assert state_hashes(model.state_dict()) == before


@torch.no_grad()
@pytest.mark.parametrize("name", ["mlp", "lenet", "SimpleCNN", "vit", "timm vit", "gated", "mixed norms", "tokens"])
def test_no_pass_that_takes_long_is_left_uncounted(monkeypatch, name):
    model = trained(name)
    features = CounterfactualFeatures(model, HALF, batch(name, 4), 4)
    with FlopCounterMode(display=False) as counter:
        model.masked_features(features.x, model.binary_mask(HALF), model.task_parts(HALF))
    monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", counter.get_total_flops())
    assert features._takes_long()
    monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", 1e10)
    counted = []
    monkeypatch.setattr(counterfactual_features, "FlopCounterMode", lambda **options: counted.append(options))
    assert not features._takes_long()
    assert counted == []


def test_closed_units_are_not_computed():
    model = trained("SlimResNet18")
    subnet = feature_subnet(model, SPARSE)
    assert len(subnet.units) < model.n_features / 4
    assert sum(p.numel() for p in subnet.network.parameters()) < 0.05 * sum(p.numel() for p in model.parameters())


class Twice(torch.nn.Module):
    """One norm behind two layers: its statistics are those of both."""

    features = 6

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Linear(5, 6), torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.relu(self.norm(self.second(torch.relu(self.norm(self.first(x))))))


@pytest.mark.parametrize("case", ["a norm that runs twice", "a norm in a module of the user's"])
def test_statistics_that_cannot_be_cut_are_taken_by_the_masked_model(monkeypatch, case):
    torch.manual_seed(0)
    if case == "a norm that runs twice":
        model = MaskedModel(Twice(), input_shape=(5,))
    else:
        own = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
        net = torch.nn.Sequential(torch.nn.Linear(5, 6), own, torch.nn.ReLU(), torch.nn.Linear(6, 4))
        net.features = 4
        model = MaskedModel(net, input_shape=(5,), task_owned=["1"])
    model.add_head(0, 2)
    model.start_task(0, torch.arange(model.n_units) % 2 - 0.5)
    model.finish_task()
    assert feature_subnet(model, 0) is None
    (masked, expected), (cut, statistics) = both_ways(monkeypatch, model, 0, torch.randn(20, 5), 10)
    assert torch.equal(cut, masked)
    assert set(statistics) == set(expected) != set()
    assert all(torch.equal(value, expected[name]) for name, value in statistics.items())


class LooksAtValues(torch.nn.Module):
    """A forward that can't run as shapes and types alone."""

    def forward(self, x):
        return x * float(x.abs().max() >= 0)


def test_a_frozen_module_that_looks_at_values_is_kept_whole(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), LooksAtValues(), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    net.features = 5
    model = MaskedModel(net, input_shape=(4,), frozen=["1"])
    model.add_head(0, 2)
    model.start_task(0, torch.arange(model.n_units) % 2 - 0.5)
    model.finish_task()
    x = torch.randn(20, 4)
    (masked, _), (cut, _) = both_ways(monkeypatch, model, 0, x, 10)
    assert len(feature_subnet(model, 0).units) < 5
    assert torch.allclose(cut, masked, atol=1e-6)


def test_a_network_that_cannot_be_cut_costs_a_warning_and_no_task(monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel for this")

    model, x = trained("mlp"), batch("mlp", 12)
    monkeypatch.setattr(counterfactual_features, "feature_subnet", fails)
    monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", 0.0)
    with pytest.warns(UserWarning, match=r"task 0 can't be cut .*no kernel for this"):
        features, statistics = CounterfactualFeatures(model, HALF, x, 6)()
    assert torch.equal(features, model.features(x, HALF))
    assert statistics == {}


def test_what_cannot_be_cut_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(counterfactual_features, "feature_subnet", lambda *args: tried.append(args))
    monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", 0.0)
    features = CounterfactualFeatures(trained("mlp"), HALF, batch("mlp", 12), 6)
    assert torch.equal(features()[0], features()[0])
    assert len(tried) == 1


def test_a_network_that_no_counter_runs_on_goes_through_all_units(monkeypatch):
    class Refuses(torch.nn.Module):
        def forward(self, x):
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("not under a dispatch mode")
            return x

    net = torch.nn.Sequential(torch.nn.Linear(4, 6), Refuses(), torch.nn.ReLU())
    net.features = 6
    model = MaskedModel(net, input_shape=(4,), frozen=["1"])
    model.add_head(0, 2)
    model.start_task(0, torch.ones(model.n_units))
    model.finish_task()
    monkeypatch.setattr(counterfactual_features, "WORTH_CUTTING", 0.0)
    x = torch.randn(8, 4)
    assert torch.equal(CounterfactualFeatures(model, 0, x, 4)()[0], model.eval().features(x, 0))
