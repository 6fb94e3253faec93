"""Models of masked weights: they read only a task's own, choose the largest, and keep masks and scores in few bytes."""

import copy
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_networks import Net
from support.strategy_state import same, values
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from avalanche_amnesia.bits import pack_bits, unpack_bits
from avalanche_amnesia.models import MLP, MaskedModel, SubnetModel, UnknownTaskError
from avalanche_amnesia.models.mask_codes import decode_scores, encode_masks, encode_scores
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.models.weight_choice import ChosenWeights, TopTracker, count_of_share, mark_by_sort, mark_largest
from avalanche_amnesia.unit_graph import ModelError


def conv_net():
    def forward(s, x):
        x = torch.relu(s.norm(s.conv(x.view(-1, 1, 8, 8))))
        return s.layer_norm(s.linear(torch.relu(s.group(s.up(x))).flatten(1)))

    maps = {"conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4), "up": nn.ConvTranspose2d(4, 3, 2, stride=2)}
    return Net(forward, **maps, group=nn.GroupNorm(1, 3), linear=nn.Linear(3 * 144, 5), layer_norm=nn.LayerNorm(5))


def untraceable():
    """Control flow on data, a tied weight, an embedding and a constant."""

    def forward(s, x):
        x = s.words((x.abs() * 15).long().clamp(0, 15)).mean(1)
        if float(x.detach().sum()) > 0:
            x = torch.tanh(s.first(x))
        return s.second(x) * s.scale

    net = Net(forward, words=nn.Embedding(16, 8), first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    net.second.weight, net.scale = net.first.weight, nn.Parameter(torch.tensor(2.0), requires_grad=False)
    return net


BACKBONES = {
    "mlp": (lambda: MLP(64, hidden=(7,), features=5), 5, {}),
    "masked biases": (lambda: MLP(64, hidden=(7,), features=5), 5, {"bias": "masked"}),
    "conv": (conv_net, 5, {}),
    "conv, batch statistics": (conv_net, 5, {"norm": "batch", "bias": "masked"}),
    "untraceable": (untraceable, 8, {"density": 0.2}),
}


def build(name, tasks=(3, 1), kind=SubnetModel):
    """Return a model with tasks that look trained, in evaluation mode, and a batch."""
    make, width, options = BACKBONES[name]
    torch.manual_seed(0)
    model = kind(make(), n_features=width, **options)
    x = torch.rand(20, 64)
    for task in tasks:
        model.train()
        model.add_head(task, 2)
        model.start_task(task, torch.randn(sum(model.sizes)))
        model(x + task, task)  # the norms read the task
        model.finish_task()
    return model.eval(), x


@pytest.mark.parametrize("name", BACKBONES)
def test_a_task_reads_only_its_own_weights(name):
    model, x = build(name)
    for task in model.tasks:
        masks = model.masks[task]
        before = model(x, task)
        assert [int(mask.sum()) for mask in masks.values()] == [t.kept for t in model.graph.layers.values()]
        real = values(model.backbone)
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


@pytest.mark.parametrize("name", [*BACKBONES, "units"])
def test_users_of_entries_are_the_tasks_that_read_them(name):
    units = lambda net, **_: MaskedModel(net, input_shape=(64,))  # noqa: E731
    model, _ = build("conv", (3, 1, 4), units) if name == "units" else build(name, (3, 1, 4))
    reads = {task: dict(model.entries_of(task)) for task in model.tasks}
    generator, found = torch.Generator().manual_seed(0), []
    with register_all(model):
        shapes = {n: p.shape for n, p in model.named_parameters()}
    for share in (0.0, 0.003, 0.05, 1.0):
        entries = {n: torch.rand(shape, generator=generator) < share for n, shape in shapes.items()}
        for asked in (entries, *({n: where} for n, where in entries.items())):
            slow = {t for t, of in reads.items() if any((of[n] & asked[n]).any() for n in of.keys() & asked.keys())}
            assert {*model.users_of(asked, model.tasks)} == slow
            assert {*model.users_of(asked, [4])} == slow & {4}
            found.append(len(slow))
    assert {0, 3} < set(found)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_cumulative_mask_is_the_union_of_the_tasks_masks(name):
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


def test_gradients_equal_autograd_s_through_a_straight_through_estimator():
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


def test_gradients_of_scores_take_the_sign_of_the_score_and_zero_counts_as_negative():
    dtype = torch.bfloat16
    model = SubnetModel(MLP(6, hidden=(5,), features=4))
    scores = torch.tensor([2.0, -3.0, 1e-30, -1e-30, 0.0, -0.0, float("inf")], dtype=dtype)
    slopes = torch.randn(7, dtype=dtype)
    signs = torch.tensor([1, -1, 1, -1, -1, -1, 1], dtype=dtype)
    assert torch.equal(model.straight_through(slopes.clone(), scores), slopes * signs)


def test_biases_are_removed_or_masked_in_layers_and_heads():
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


def plain():
    return nn.Sequential(nn.Linear(3, 2))


def max_norm():
    return nn.ModuleDict({"words": nn.Embedding(4, 2, max_norm=1.0)})


LOOSE = r"parameter 'offset' of Net, held by Net: .* freeze it with requires_grad_\(False\)"
DENSITY = r"density must lie in \(0, 1\].* got"
REFUSED = [
    (lambda: Net(None, layer=nn.Linear(3, 2), offset=nn.Parameter(torch.zeros(2))), {}, ModelError, LOOSE),
    (lambda: nn.GRU(3, 2), {}, ModelError, r"parameter 'weight_ih_l0' of GRU"),
    (lambda: nn.MultiheadAttention(4, 2), {}, ModelError, r"parameter 'in_proj_weight' of MultiheadAttention"),
    (lambda: weight_norm(nn.Linear(3, 2)), {}, ModelError, r"parametrizations.weight.original0"),
    (max_norm, {}, ModelError, r"parameter 'words.weight' of ModuleDict: an Embedding with max_norm="),
    (nn.ReLU, {}, ModelError, r"ReLU has no Linear, Conv or Embedding"),
    (plain, {"density": 0}, ValueError, f"{DENSITY} 0"),
    (plain, {"density": -0.1}, ValueError, f"{DENSITY} -0.1"),
    (plain, {"density": 1.01}, ValueError, f"{DENSITY} 1.01"),
    (plain, {"bias": "on"}, ValueError, "bias must be one of 'off', 'masked', got 'on'"),
    (plain, {"norm": None}, ValueError, "norm must be one of 'task', 'batch', got None"),
    (plain, {"n_features": 0}, ValueError, "n_features="),
]


@pytest.mark.parametrize(("backbone", "options", "error", "message"), REFUSED)
def test_parameters_without_an_owner_and_wrong_options_are_refused_before_any_change(backbone, options, error, message):
    made = backbone()
    before = [name for name, _ in made.named_parameters()]
    with pytest.raises(error, match=message):
        SubnetModel(made, **{"n_features": 2, **options})
    assert [name for name, _ in made.named_parameters()] == before


def test_taking_a_task_out_takes_everything_of_it_and_scores_that_came_of_it():
    model, x = build("conv", tasks=(5, 6, 7))
    names = set(model.state_dict())
    with register_all(model):
        announced = set(model.buffer_names([6])) | {n for n, _ in model.named_parameters() if ".6." in n}
    state = model.task_state()
    logits = model(x, 7)
    model.remove_task(6)
    assert names - set(model.state_dict()) == announced
    assert "_learned.7" in announced
    assert "_learned.5" not in announced
    assert torch.equal(model(x, 7), logits)
    with pytest.raises(UnknownTaskError, match="task 6 has no mask"):
        model.binary_mask(6)
    model.restore_task_state(state)
    assert set(model.state_dict()) == names
    assert model.masked_tasks == (5, 6, 7)


def test_an_error_in_the_backbone_leaves_its_weights_in_place():
    model, _ = build("conv")
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 63), 3)
    assert {n: id(p) for n, p in model.named_parameters()} == before


def slow_marks(values, k):
    """Mark the k largest, one by one: larger first, then the lower index; NaN last."""
    numbers = [-1.0 if value != value else value for value in values]
    best = sorted(range(len(values)), key=lambda i: (-numbers[i], i))[:k]
    return [1.0 if i in best else 0.0 for i in range(len(values))]


magnitudes = st.one_of(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=40),
    st.lists(st.floats(0, 2.0**90, width=32), min_size=1, max_size=40),
    st.lists(st.sampled_from([0.0, 1.0, 2.0**127, float("nan"), float("inf")]), min_size=1, max_size=12),
)


@given(magnitudes, st.floats(0.001, 1))
def test_exactly_k_are_marked_and_ties_take_the_lowest_index(values, share):
    k = count_of_share(share, len(values))
    marks = torch.full((len(values),), 7.0)
    mark_largest(torch.tensor(values), k, marks)
    sorted_marks = torch.full((len(values),), 7.0)
    mark_by_sort(torch.tensor(values), k, sorted_marks)  # the way of accelerators
    assert marks.tolist() == sorted_marks.tolist() == slow_marks(values, k)
    assert 1 <= k <= len(values)


def sifted(top, values):
    """Return the marks of the values above the threshold, and of the listed ties."""
    marks = (values.abs() > top.threshold).float()
    if top.others is not None:
        assert not marks[top.others].any()
        marks[top.others] = 1.0
    return marks.tolist()


@given(magnitudes, st.floats(0.001, 1), st.one_of(st.none(), st.floats(0, 2.0**90)), st.randoms())
def test_a_threshold_finds_the_largest_magnitudes_from_any_first_guess(values, share, before, random):
    values = torch.tensor([value * random.choice([-1, 1]) for value in values])
    k = count_of_share(share, len(values))
    top = TopTracker(len(values), k)
    top.threshold = before or 0.0
    for _ in range(2):  # a guess that may be bad, then a good one
        top.update(values)
        assert sifted(top, values) == slow_marks(values.abs().tolist(), k)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ties", [False, True])
def test_thresholds_choose_the_same_weights_as_marks(ties, layout):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(432, 5))
    model, generator = SubnetModel(net, n_features=5, bias="masked"), torch.Generator().manual_seed(0)
    weights = {name: model.backbone.get_parameter(name) for name in model.graph.layers}
    scores = torch.randn(model.n_weights, generator=generator)
    scores = (4 * scores).round() if ties else scores
    learned = nn.Parameter(scores.clone())
    tops = [TopTracker(t.size, t.kept) for t in model.graph.layers.values()]
    by_marks = ChosenWeights(learned, weights, model.choose, model.straight_through)
    by_thresholds = ChosenWeights(learned, weights, model.choose, model.straight_through, tops)
    for step in range(3):
        learned.data.copy_(scores)
        by_marks.update()
        by_thresholds.update()
        for layer, (name, part) in enumerate(model.by_layer(scores).items()):
            values = torch.randn(model.graph.layers[name].shape, generator=generator)
            values = values.contiguous(memory_format=layout) if values.dim() == 4 else values
            slow, fast = torch.empty(values.shape), torch.empty(values.shape)
            by_marks.copy_chosen(layer, part, values, slow)
            by_thresholds.copy_chosen(layer, part, values, fast)
            assert torch.equal(slow, fast)
            assert not (fast.signbit() & (fast == 0)).any()
            values = values.contiguous()
            by_thresholds.copy_chosen(layer, part, values, values)  # in place
            assert torch.equal(slow, values)
        scores = scores + (1 if ties else 0.001) * torch.randn(len(scores), generator=generator).round(decimals=step)


SIZES, KEPT = [700, 40, 1, 9], [210, 4, 1, 9]


def drawn(seed, n, tasks, stay, share=0.5):
    """Masks of successive tasks: each entry keeps its bit with probability ``stay``, or is drawn again."""
    rng = np.random.default_rng(seed)
    rows = [rng.random(n) < share]
    for _ in range(tasks - 1):
        rows.append(np.where(rng.random(n) < stay, rows[-1], rng.random(n) < share))
    return [torch.from_numpy(row) for row in rows]


def decoded(code, n_tasks, n):
    """Read masks from their code: groups of up to 8 tasks, whose bits follow each other weight by weight."""
    bits, rows = np.unpackbits(np.frombuffer(zlib.decompress(code), np.uint8)), []
    for first in range(0, n_tasks, 8):
        count = min(8, n_tasks - first)
        width = 1 << (count - 1).bit_length()
        part, bits = bits[: n * width].reshape(n, width)[:, :count], bits[-(-n * width // 8) * 8 :]
        rows += [row ^ rows[first - 1] if first else row for row in part.T.astype(bool)]
    return list(map(torch.from_numpy, rows))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 8, 9, 100, 4095, 8192, 8193]),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.sampled_from([0.0, 0.03, 0.5, 1.0]),
)
def test_masks_are_decoded_exactly(seed, n, tasks, stay, share):
    masks = drawn(seed, n, tasks, stay, share)
    assert same(decoded(encode_masks(masks), tasks, n), masks)
    for mask in masks:
        packed = pack_bits(mask)
        assert packed.nbytes == -(-n // 8)
        assert torch.equal(unpack_bits(packed, n), mask)


def entropy(p):
    return 0.0 if p in (0, 1) else float(-p * np.log2(p) - (1 - p) * np.log2(1 - p))


@pytest.mark.parametrize("tasks", [5, 16])
@pytest.mark.parametrize(("stay", "share"), [(0.0, 0.5), (0.5, 0.5), (0.9, 0.5), (0.0, 0.1), (0.9, 0.3)])
def test_the_code_takes_little_more_than_the_entropy(tasks, stay, share):
    n = 50_000
    bits = 8 * len(encode_masks(drawn(0, n, tasks, stay, share))) / (n * tasks)
    after_one, after_zero = stay + (1 - stay) * share, (1 - stay) * share
    rate = (entropy(share) + (tasks - 1) * (share * entropy(after_one) + (1 - share) * entropy(after_zero))) / tasks
    assert rate * 0.99 < bits < rate + 0.04


def mask_of(scores):
    marked = [part.new_zeros(len(part)).index_fill_(0, part.abs().topk(k).indices, 1) for part, k in layers(scores)]
    return torch.cat(marked).bool()


def layers(scores):
    return zip(scores.split(SIZES), KEPT, strict=True)


@pytest.fixture(params=range(5))
def scores(request):
    generator = torch.Generator().manual_seed(request.param)
    drawn = torch.randn(sum(SIZES), generator=generator) ** 3
    return drawn.round(decimals=1) if request.param == 4 else drawn  # many ties


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
def test_the_code_keeps_mask_and_levels(scores, bits):
    mask = mask_of(scores)
    code = encode_scores(scores, mask, SIZES, bits)
    assert code.dtype == torch.uint8
    back = decode_scores(code, mask, SIZES)
    assert back.dtype == torch.float32
    for size, chosen in zip(back.split(SIZES), mask.split(SIZES), strict=True):
        if 0 < chosen.sum() < len(chosen):
            assert size[chosen].min() >= size[~chosen].max()
    levels = 2 ** (bits - 1)
    for before, after, chosen in zip(scores.abs().split(SIZES), back.split(SIZES), mask.split(SIZES), strict=True):
        for part in (chosen, ~chosen):
            if int(part.sum()) < levels or len(before[part].unique()) < int(part.sum()):  # ties have any order
                continue
            edges = [-(-int(part.sum()) * level // levels) for level in range(1, levels)]
            old, new = before[part].sort().values, after[part][before[part].argsort(stable=True)]
            assert old[0] - 1e-6 <= new.min()
            assert new.max() <= old[-1] + 1e-6
            for edge in edges:  # no score changes its level
                assert new[:edge].max() <= new[edge:].min()
