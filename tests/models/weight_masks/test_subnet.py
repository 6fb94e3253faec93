"""Subnetworks: exactly so many weights, straight-through scores, any backbone, nothing left without an owner."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from avalanche_amnesia.models import MLP, SubnetModel, UnknownTaskError
from avalanche_amnesia.models.weight_masks.choice import MarkedChoice, TopChoice
from avalanche_amnesia.models.weight_masks.top_share import MovingTop, count_of_share, mark_by_sorting, mark_largest
from avalanche_amnesia.unit_graph import ModelError


def slow_marks(values, k):
    """The k largest, one by one: larger first, then the lower index; NaN last."""
    numbers = [-1.0 if value != value else value for value in values]
    best = sorted(range(len(values)), key=lambda i: (-numbers[i], i))[:k]
    return [1.0 if i in best else 0.0 for i in range(len(values))]


magnitudes = st.one_of(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40),
    st.lists(st.floats(0, 2.0**90, width=32), min_size=1, max_size=40),
    st.lists(st.sampled_from([0.0, 1.0, 2.0**127, float("nan"), float("inf")]), min_size=1, max_size=12),
)


@given(magnitudes, st.floats(0.001, 1))
def test_exactly_k_are_marked_and_ties_go_to_the_lowest_index(values, share):
    k = count_of_share(share, len(values))
    marks = torch.full((len(values),), 7.0)
    mark_largest(torch.tensor(values), k, marks)
    sorted_marks = torch.full((len(values),), 7.0)
    mark_by_sorting(torch.tensor(values), k, sorted_marks)  # as on an accelerator
    assert marks.tolist() == sorted_marks.tolist() == slow_marks(values, k)
    assert 1 <= k <= len(values)


@given(magnitudes, st.floats(0.001, 1), st.floats(0.98, 1.02), st.one_of(st.none(), st.floats(0, 2.0**90)))
def test_a_guess_of_the_threshold_changes_no_mark(values, share, off, far):
    k, values = count_of_share(share, len(values)), torch.tensor(values)
    marks, guessed = torch.full((len(values),), 7.0), torch.full((len(values),), 7.0)
    threshold = mark_largest(values, k, marks)
    near = threshold * off if far is None else far
    assert mark_largest(values, k, guessed, near) == threshold
    assert torch.equal(guessed, marks)


def sifted(top, values):
    """Marks of what passes: the two ways in which a choice tells them."""
    marks = (values.abs() > top.threshold).float()
    if top.others is not None:
        assert not marks[top.others].any()
        marks[top.others] = 1.0
    return marks.tolist()


@given(magnitudes, st.floats(0.001, 1), st.one_of(st.none(), st.floats(0, 2.0**90)), st.randoms())
def test_a_threshold_tells_the_largest_magnitudes_whatever_it_was_before(values, share, before, random):
    values = torch.tensor([value * random.choice([-1, 1]) for value in values])
    k = count_of_share(share, len(values))
    top = MovingTop(len(values), k)
    top.threshold = before
    for _ in range(2):  # with a guess that may be bad, and with one that is good
        top.update(values)
        assert sifted(top, values) == slow_marks(values.abs().tolist(), k)


def test_scores_that_move_are_ranked_around_the_last_threshold_alone(monkeypatch):
    """Values between two steps of a training, many of them equal; the whole is ranked in the first step alone."""
    generator, ranked, k = torch.Generator().manual_seed(0), [], 9_000
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda values, place: ranked.append(len(values)) or partition(values, place))
    values, near, top = torch.rand(100_003, generator=generator) - 0.5, None, MovingTop(100_003, k)
    for step in range(30):
        sizes, marks, slow = values.abs(), torch.empty_like(values), torch.empty_like(values)
        near = mark_largest(sizes, k, marks, near)
        top.update(values)
        assert len(ranked) == 2
        assert ranked == [len(values)] * 2 if step == 0 else max(ranked) < len(values) / 20
        mark_largest(sizes, k, slow)
        assert torch.equal(marks, slow)
        assert sifted(top, values) == slow.tolist()
        ranked.clear()
        values = values + 5e-4 * torch.randn(len(values), generator=generator)
        if step % 2:
            values = (values * 5000).round() / 5000  # ties
        if step % 7 == 3:
            values = 1.003 * values  # beyond the narrower band


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ties", [False, True])
def test_what_passes_by_thresholds_is_what_passes_by_marks(ties, layout):
    model, generator = SubnetModel(ConvNet(), n_features=5, bias="masked"), torch.Generator().manual_seed(0)
    sizes = [tensor.size for tensor in model.graph.layers.values()]
    scores = torch.randn(model.n_weights, generator=generator)
    scores = (4 * scores).round() if ties else scores
    by_marks = MarkedChoice(sizes, model.choose)
    tops = [MovingTop(tensor.size, tensor.kept) for tensor in model.graph.layers.values()]
    by_thresholds = TopChoice(tops, by_marks)
    for step in range(3):
        by_marks.renew(scores)
        by_thresholds.renew(scores)
        for layer, (name, part) in enumerate(model.by_layer(scores).items()):
            values = torch.randn(model.graph.layers[name].shape, generator=generator)
            values = values.contiguous(memory_format=layout) if values.dim() == 4 else values
            slow, fast = torch.empty_like(values), torch.empty_like(values)
            by_marks.sift(layer, part, values, slow)
            by_thresholds.sift(layer, part, values, fast)
            assert torch.equal(slow, fast)
            assert not (fast.signbit() & (fast == 0)).any()
            by_thresholds.sift(layer, part, values, values)  # in place
            assert torch.equal(slow, values)
        scores = scores + (1 if ties else 0.001) * torch.randn(len(scores), generator=generator).round(decimals=step)


def test_a_training_is_the_same_with_marks_and_with_thresholds(monkeypatch):
    """Weights and scores of a few steps."""

    def trained():
        torch.manual_seed(0)
        model = SubnetModel(MLP(40, hidden=(50,), features=30))
        model.add_head(0, 3)
        model.start_task(0, torch.randn(model.n_weights))
        steps = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([model.scores], lr=1e-2)]
        for _ in range(10):
            model.open_subnet()
            F.cross_entropy(model(torch.randn(9, 40), 0), torch.arange(9) % 3).backward()
            model.pass_gradients()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    class Marked(SubnetModel):
        def choose(self, scores, out=None):
            return super().choose(scores, out)

    fast = trained()
    monkeypatch.setitem(globals(), "SubnetModel", Marked)
    slow = trained()
    assert all(map(torch.equal, fast, slow))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.up, self.group = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.GroupNorm(1, 3)
        self.linear, self.layer_norm = nn.Linear(3 * 144, 5), nn.LayerNorm(5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x.view(-1, 1, 8, 8))))
        x = torch.relu(self.group(self.up(x)))
        return self.layer_norm(self.linear(x.flatten(1)))


class Untraceable(nn.Module):
    """Control flow by data, a tied weight, an embedding, a constant of its own."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        x = self.words((x.abs() * 15).long().clamp(0, 15)).mean(1)
        if float(x.detach().sum()) > 0:
            x = torch.tanh(self.first(x))
        return self.second(x) * self.scale


BACKBONES = {
    "mlp": (lambda: MLP(64, hidden=(7,), features=5), 5, {}),
    "masked biases": (lambda: MLP(64, hidden=(7,), features=5), 5, {"bias": "masked"}),
    "conv": (ConvNet, 5, {}),
    "conv, batch statistics": (ConvNet, 5, {"norm": "batch", "bias": "masked"}),
    "untraceable": (Untraceable, 8, {"density": 0.2}),
}


def build(name, tasks=(3, 1)):
    """A model with trained looking tasks, in evaluation mode, and a batch."""
    make, width, options = BACKBONES[name]
    torch.manual_seed(0)
    model = SubnetModel(make(), n_features=width, **options)
    x = torch.rand(20, 64)
    for task in tasks:
        model.train()
        model.add_head(task, 2)
        model.start_task(task, torch.randn(model.n_weights))
        model(x + task, task)  # normalisation sees the task
        model.finish_task()
    return model.eval(), x


@pytest.mark.parametrize("name", BACKBONES)
def test_a_task_reads_its_weights_and_no_others(name):
    model, x = build(name)
    for task in model.tasks:
        masks = model.masks[task]
        before = model(x, task)
        assert [int(mask.sum()) for mask in masks.values()] == [t.kept for t in model.graph.layers.values()]
        real = {n: p.detach().clone() for n, p in model.backbone.named_parameters()}
        for parameter_name, mask in masks.items():
            weight = model.backbone.get_parameter(parameter_name)
            with torch.no_grad():
                weight.view(-1)[~mask] += 3.0
            assert torch.equal(model(x, task), before), parameter_name
            moved = model.backbone.get_parameter(parameter_name)
            with torch.no_grad():
                moved.view(-1)[mask] *= -1.5
            assert not torch.equal(model(x, task), before), parameter_name
            with torch.no_grad():
                moved.copy_(real[parameter_name])
        assert torch.equal(model(x, task), before)


@pytest.mark.parametrize("name", BACKBONES)
def test_users_of_entries_are_the_tasks_whose_reads_meet_them(name):
    model, _ = build(name, tasks=(3, 1, 4))
    reads = {task: dict(model.entries_of(task)) for task in model.tasks}
    generator, found = torch.Generator().manual_seed(0), []
    for share in (0.0, 0.003, 0.05, 1.0):
        entries = {n: torch.rand(p.shape, generator=generator) < share for n, p in model.named_parameters()}
        for asked in (entries, *({n: where} for n, where in entries.items())):
            slow = {
                t for t, of in reads.items() if any(bool((of[n] & asked[n]).any()) for n in of.keys() & asked.keys())
            }
            assert model.users_of(asked, model.tasks) == slow
            assert model.users_of(asked, [4]) == slow & {4}
            found.append(len(slow))
    assert {0, 3} < set(found)


@pytest.mark.parametrize("name", BACKBONES)
def test_cumulative_masks_are_the_union_of_those_asked_for(name):
    model, _ = build(name, tasks=(3, 1, 4))
    for tasks in ([], [1], [4, 3], None):
        masks = [model.binary_mask(task) for task in (model.tasks if tasks is None else tasks)]
        union = torch.stack([torch.zeros(model.n_weights, dtype=torch.bool), *masks]).any(0)
        assert torch.equal(model.cumulative_mask(tasks), union)
    assert list(model.masks) == [3, 1, 4]
    assert len(model.masks) == 3
    assert 2 not in model.masks
    with pytest.raises(KeyError):
        model.masks[2]


@pytest.mark.parametrize("name", ["mlp", "masked biases", "conv"])
def test_a_mixed_batch_is_what_each_task_makes_of_its_samples(name):
    model, x = build(name)
    labels = torch.tensor([3, 1] * 10)
    mixed = model(x, labels)
    for task in (3, 1):
        assert torch.allclose(mixed[labels == task], model(x[labels == task], task))


def test_gradients_are_those_of_autograd_through_a_straight_through_estimator():
    torch.manual_seed(0)
    model = SubnetModel(MLP(6, hidden=(5,), features=4), density=0.4, bias="masked")
    model.add_head(0, 3)
    model.start_task(0, torch.randn(model.n_weights))
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    for _ in range(2):  # two backward passes of one step add up
        F.cross_entropy(model(x, 0), y).backward()
    model.pass_gradients()
    twin = copy.deepcopy(model.backbone)
    scores = model.scores.detach().clone().requires_grad_()
    marks = model.choose(scores.detach())
    through = dict(model.by_layer(marks + scores.abs() - scores.abs().detach()))
    for parameter in twin.parameters():
        parameter.grad = None
    masked = {n: p * through[n].view_as(p) for n, p in twin.named_parameters()}
    loss = F.cross_entropy(model.head(0)(torch.func.functional_call(twin, masked, (x,))), y)
    (2 * loss).backward()
    assert torch.allclose(model.scores.grad, scores.grad, rtol=1e-5, atol=1e-7)
    assert (scores.grad != 0).float().mean() > 0.5
    for name, parameter in twin.named_parameters():
        ours = model.backbone.get_parameter(name).grad
        assert torch.allclose(ours, parameter.grad, rtol=1e-5, atol=1e-7)
        assert not ours.view(-1)[~model.by_layer(marks)[name].bool()].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_scores_take_their_sign_and_zero_s_is_minus(dtype):
    model = SubnetModel(MLP(6, hidden=(5,), features=4))
    scores = torch.tensor([2.0, -3.0, 1e-30, -1e-30, 0.0, -0.0, float("inf")], dtype=dtype)
    slopes = torch.randn(7, dtype=dtype)
    signs = torch.tensor([1, -1, 1, -1, -1, -1, 1], dtype=dtype)
    assert torch.equal(model.straight_through(slopes.clone(), scores), slopes * signs)


def test_a_layer_that_no_backward_pass_reached_passes_no_gradient():
    class TwoPaths(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    model = SubnetModel(TwoPaths(), n_features=2)
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_weights))
    model(torch.rand(4, 3), 0).sum().backward()
    model.pass_gradients()
    by_name = model.by_layer(model.scores.grad)
    assert by_name["used.weight"].any()
    assert not by_name["unused.weight"].any()
    assert model.backbone.unused.weight.grad is None


def test_biases_are_off_or_masked_and_heads_follow():
    off = SubnetModel(MLP(6, hidden=(5,), features=4))
    off.add_head(0, 2)
    assert all(layer.bias is None for layer in off.backbone.layers)
    assert off.head(0).bias is None
    assert list(off.graph.layers) == ["layers.0.weight", "layers.1.weight"]
    masked = SubnetModel(MLP(6, hidden=(5,), features=4), bias="masked", density=0.4)
    masked.add_head(0, 2)
    assert {n: t.kept for n, t in masked.graph.layers.items()} == {
        "layers.0.weight": 12,
        "layers.0.bias": 2,
        "layers.1.weight": 8,
        "layers.1.bias": 2,
    }
    assert masked.head(0).bias is not None


def test_a_task_s_normalisation_begins_as_the_backbone_s_and_stops_with_its_training():
    backbone = ConvNet()
    with torch.no_grad():
        backbone.norm.weight.fill_(1.7)
        backbone.norm.running_mean.fill_(0.3)
    model = SubnetModel(backbone, n_features=5).train()
    x = torch.rand(20, 64)
    for task in (0, 1):
        model.add_head(task, 2)
        own = model.task_parts(task)[0]
        assert own.weight.unique().tolist() == [pytest.approx(1.7)]
        assert own.running_mean.unique().tolist() == [pytest.approx(0.3)]
        model.start_task(task, torch.randn(model.n_weights))
        model(x, task)
        assert not torch.equal(own.running_mean, backbone.norm.running_mean)
        model.finish_task()
    kept = {n: v.clone() for n, v in model.state_dict().items()}
    model.train()(x, torch.tensor([0, 1] * 10))
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
    assert not backbone.norm.weight.requires_grad
    assert model.task_parts(0)[0].weight.requires_grad


def test_a_frozen_parameter_stays_frozen_in_every_task_s_copy():
    backbone = ConvNet()
    backbone.norm.weight.requires_grad_(False)
    backbone.linear.weight.requires_grad_(False)
    model = SubnetModel(backbone, n_features=5)
    model.add_head(0, 2)
    model.set_trainable(0, True)
    assert not model.task_parts(0)[0].weight.requires_grad
    assert model.task_parts(0)[0].bias.requires_grad
    assert "linear.weight" not in model.graph.layers


def test_normalisation_by_batch_statistics_holds_nothing():
    model, _ = build("conv, batch statistics")
    assert not [n for n in model.state_dict() if "norm" in n or "group" in n]


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.offset = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 2, max_norm=1.0)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (Loose, r"parameter 'offset' of Loose, held by Loose: .* freeze it with requires_grad_\(False\)"),
        (lambda: nn.GRU(3, 2), r"parameter 'weight_ih_l0' of GRU"),
        (lambda: nn.MultiheadAttention(4, 2), r"parameter 'in_proj_weight' of MultiheadAttention"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), r"parametrizations.weight.original0"),
        (MaxNorm, r"parameter 'words.weight' of MaxNorm: an Embedding with max_norm="),
        (nn.ReLU, r"ReLU has no Linear, Conv or Embedding"),
    ],
)
def test_what_nobody_would_own_is_refused_before_anything_changed(backbone, message):
    made = backbone()
    before = [name for name, _ in made.named_parameters()]
    with pytest.raises(ModelError, match=message):
        SubnetModel(made, n_features=2)
    assert [name for name, _ in made.named_parameters()] == before


@pytest.mark.parametrize("density", [0, -0.1, 1.01])
def test_a_share_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match=rf"density must lie in \(0, 1\].* got {density}"):
        SubnetModel(MLP(3, hidden=(), features=2), density=density)


def test_unknown_rules_and_unknown_widths_are_refused():
    with pytest.raises(ValueError, match="bias must be one of 'off', 'masked', got 'on'"):
        SubnetModel(MLP(3, hidden=(), features=2), bias="on")
    with pytest.raises(ValueError, match="norm must be one of 'task', 'batch', got None"):
        SubnetModel(MLP(3, hidden=(), features=2), norm=None)
    sequential = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ModelError, match="n_features="):
        SubnetModel(sequential)
    assert sequential[0].bias is not None  # it was refused before it was taken over


@pytest.mark.parametrize("name", ["conv", "masked biases"])
@pytest.mark.parametrize("how", ["plain", "compressed"])
def test_save_and_load(name, how, tmp_path):
    model, x = build(name, tasks=(10, 2, 7))
    state = model.state_dict() if how == "plain" else model.compressed_state()
    save_file(state, tmp_path / "model.safetensors")
    other, _ = build(name, tasks=(7, 4))
    loaded = load_file(tmp_path / "model.safetensors")
    if how == "plain":
        other.load_state_dict(loaded)
    else:
        other.load_compressed_state(loaded)
    assert set(other.tasks) == {10, 2, 7}
    assert other.masked_tasks == model.masked_tasks == (10, 2, 7)  # a file knows no order, the model does
    assert torch.equal(other.last_scores(), model.last_scores())
    for task in model.tasks:
        assert torch.equal(other.binary_mask(task), model.binary_mask(task))
        assert torch.equal(other.eval()(x, task), model(x, task))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compressed_masks_are_read_without_the_weights_and_damaged_ones_change_nothing(dtype):
    (model, _), (other, _) = build("conv", tasks=(10, 2)), build("conv", tasks=())
    state = model.compressed_state()
    with pytest.raises(ValueError, match="no encoded masks of 2 tasks over"):
        other.load_compressed_state(state | {"masks": state["masks"][:-1]})
    assert other.tasks == ()
    moved = {name: value + 1 if name.startswith("backbone.") else value for name, value in state.items()}
    other.to(dtype).load_compressed_state(moved)
    assert all(torch.equal(other.binary_mask(task), model.binary_mask(task)) for task in (10, 2))


@pytest.mark.parametrize("gone", [(), (5,), (6,), (5, 6, 7)])
def test_compressed_masks_after_tasks_were_taken_out(gone):
    model, _ = build("conv", tasks=(5, 6, 7))
    masks = {task: model.binary_mask(task) for task in model.masked_tasks if task not in gone}
    for task in gone:
        model.remove_task(task)
    other, _ = build("conv", tasks=())
    other.load_compressed_state(copy.deepcopy(model).compressed_state())
    assert other.masked_tasks == tuple(masks)
    assert all(torch.equal(other.binary_mask(task), mask) for task, mask in masks.items())


def test_a_state_from_the_middle_of_a_task_is_refused():
    model = SubnetModel(MLP(3, hidden=(), features=2))
    model.add_head(0, 2)
    model.start_task(0, torch.randn(model.n_weights))
    with pytest.raises(ValueError, match="middle of a task"):
        SubnetModel(MLP(3, hidden=(), features=2)).load_state_dict(model.state_dict())


def test_taking_a_task_out_takes_everything_of_it_and_scores_that_came_of_it():
    model, x = build("conv", tasks=(5, 6, 7))
    names = set(model.state_dict())
    announced = set(model.buffer_names([6])) | {n for n, _ in model.named_parameters() if ".6." in n}
    state = model.task_state()
    logits = model(x, 7)
    model.remove_task(6)
    assert names - set(model.state_dict()) == announced
    assert "_scores.7" in announced
    assert "_scores.5" not in announced
    assert torch.equal(model(x, 7), logits)
    with pytest.raises(UnknownTaskError, match="task 6 has no mask"):
        model.binary_mask(6)
    model.restore_task_state(state)
    assert set(model.state_dict()) == names
    assert model.masked_tasks == (5, 6, 7)


def test_a_copy_runs_on_its_own():
    model, x = build("conv")
    copied = copy.deepcopy(model)
    before = model(x, 3)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(x, 3), before)
    assert not torch.equal(copied(x, 3), before)


def test_an_error_in_the_backbone_leaves_its_weights_in_place():
    model, _ = build("conv")
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 63), 3)
    assert {n: id(p) for n, p in model.named_parameters()} == before
