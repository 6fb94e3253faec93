"""A training step leaves out units whose gates are 0, and no unit that could still learn."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import trained

from avalanche_amnesia import HAT, MLP, MaskedModel
from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.models.gate import EVERY, FAR, SHUT, ComputedUnits
from avalanche_amnesia.unit_graph import graph as unit_graph
from avalanche_amnesia.unit_graph import masking


def computed():
    """Computed units whose entries are the units themselves instead of weights."""
    return ComputedUnits(lambda units: {} if bool(units.all()) else {"units": units})


def units_of(found, n):
    return found.entries.get("units", torch.ones(n, dtype=torch.bool))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.01, 3.0, 60.0, 300.0]), st.integers(0, 5)), max_size=50))
def test_no_unit_with_an_open_gate_is_left_out(steps):
    draw = torch.Generator().manual_seed(len(steps))
    e, found = torch.randn(12, generator=draw), computed()
    for scale, moved in steps:
        e[moved] = torch.randn((), generator=draw)
        exponent = scale * e
        found.update_selection(exponent)
        left_out = ~units_of(found, 12)
        assert bool((exponent[left_out] < -FAR).all())
        assert bool((exponent[left_out].sigmoid() <= SHUT).all())


def test_closed_units_are_left_out_at_the_next_look_and_return_at_once():
    e = torch.tensor([1.0, -1.0, -0.2, 0.3])
    found = computed()
    found.update_selection(200 * e)
    assert units_of(found, 4).tolist() == [True, False, True, True]
    for _ in range(EVERY - 1):
        found.update_selection(500 * e)  # the third one as well by now
        assert not bool(units_of(found, 4)[1])
    found.update_selection(500 * e)
    assert units_of(found, 4).tolist() == [True, False, False, True]
    found.update_selection(0.01 * e)
    assert bool(units_of(found, 4).all())


STRATEGIES = {"HAT": {"kind": HAT}, "shadows": {"compensation": BackupPlugin}}


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_on_open_entries_equals_training_on_all_entries(name, monkeypatch):
    """Masks are equal; weights differ only by the order of additions."""
    options = {"hidden": (40,), "features": 30, "train_mb_size": 32, "train_epochs": 2, "seed": 1, **STRATEGIES[name]}
    stream = PermutedDigits(3, n_train=320)
    optimizer = partial(torch.optim.SGD, lr=0.05) if name == "HAT" else partial(torch.optim.Adam, lr=1e-3)
    monkeypatch.setattr(unit_graph, "_MUCH_LESS", 0.0)
    whole = trained(3, stream, optimizer=optimizer, **options)
    monkeypatch.setattr(masking, "WORTH_IT", 0)
    monkeypatch.setattr(unit_graph, "_MUCH_LESS", 0.999)
    used, real = [], masking.OpenEntries
    monkeypatch.setattr(unit_graph, "OpenEntries", lambda *parts: used.append(1) or real(*parts))
    found = trained(3, stream, optimizer=optimizer, **options)
    assert len(used) > 3
    for task in whole.model.masked_tasks:
        assert torch.equal(found.model.binary_mask(task), whole.model.binary_mask(task))
    for (at, ours), twin in zip(found.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(ours, twin, atol=2e-3, rtol=1e-3), at


@pytest.mark.usefixtures("every_entry_counts")
@pytest.mark.parametrize("learns", [True, False])
def test_a_loaded_embedding_is_read_again(learns):
    """Early stopping restores an earlier step of the same training."""
    model = MaskedModel(MLP(64, hidden=(20,), features=10))
    model.add_head(0, 2)
    opens = torch.arange(model.n_units) % 2 == 0
    model.start_task(0, torch.where(opens, -1.0, 1.0))
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.embedding.mul_(-1)
    model.gate.update(400.0, learns=learns)
    model.load_state_dict(state)
    gate = model.gate.update(400.0, learns=learns)
    assert torch.equal(gate > 0.5, ~opens)
    assert model.gate.leaves.entries["layers.0.weight"].rows.tolist() == list(range(1, 20, 2))


@pytest.mark.usefixtures("every_entry_counts")
def test_features_of_fixed_masks_equal_those_of_all_entries(monkeypatch):
    torch.manual_seed(0)
    model = MaskedModel(MLP(64, hidden=(40,), features=30)).double().eval()
    x, parts = torch.rand(8, 64, dtype=torch.float64), model.fresh_parts().eval()
    asked, real = [], masking.OpenEntries
    monkeypatch.setattr(unit_graph, "OpenEntries", lambda *parts: asked.append(1) or real(*parts))
    for share in (0.2, 0.5, 0.2, 1.0, 0.0):
        mask = torch.rand(model.n_units, generator=torch.Generator().manual_seed(int(10 * share))) < share
        found, whole = [], []
        for features, read in ((found, model.read_mask(mask)), (whole, model.by_layer(mask.double()))):
            model.zero_grad()
            features += [model.backbone(x, parts, read)]
            features[0].square().sum().backward()
            features += [p.grad.clone() for p in model.backbone.parameters() if p.grad is not None]
        assert len(found) == len(whole) > 2
        for ours, twin in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-12, atol=1e-14)
        assert torch.equal(model.masked_features(x, mask, parts), found[0])
    assert len(asked) == 4  # two weights of two masks; the repeated mask was cached


@pytest.mark.usefixtures("every_entry_counts")
def test_an_overwritten_mask_of_a_task_is_read_again():
    model = MaskedModel(MLP(64, hidden=(20,), features=10)).eval()
    model.add_head(0, 2)
    model.start_task(0, torch.linspace(-1, 1, model.n_units))
    model.finish_task()
    x = torch.rand(8, 64)
    before = model.features(x, 0)
    model.state_dict()["_masks.0"].data.fill_(255)
    opened = model.features(x, 0)
    assert not torch.equal(opened, before)
    assert torch.equal(opened, model.masked_features(x, torch.ones(model.n_units)))
