"""Choice of weights by their scores: exactly k of them, and by thresholds the same as by marks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from avalanche_amnesia.models import SubnetModel
from avalanche_amnesia.models.weight_choice import MovingTop, OpenSubnet, count_of_share, mark_by_sorting, mark_largest


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
    mark_by_sorting(torch.tensor(values), k, sorted_marks)  # the way of accelerators
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
    top = MovingTop(len(values), k)
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
    tops = [MovingTop(t.size, t.kept) for t in model.graph.layers.values()]
    by_marks = OpenSubnet(learned, weights, model.choose, model.straight_through)
    by_thresholds = OpenSubnet(learned, weights, model.choose, model.straight_through, tops)
    for step in range(3):
        learned.data.copy_(scores)
        by_marks.open()
        by_thresholds.open()
        for layer, (name, part) in enumerate(model.by_layer(scores).items()):
            values = torch.randn(model.graph.layers[name].shape, generator=generator)
            values = values.contiguous(memory_format=layout) if values.dim() == 4 else values
            slow, fast = torch.empty(values.shape), torch.empty(values.shape)
            by_marks.sift(layer, part, values, slow)
            by_thresholds.sift(layer, part, values, fast)
            assert torch.equal(slow, fast)
            assert not (fast.signbit() & (fast == 0)).any()
            values = values.contiguous()
            by_thresholds.sift(layer, part, values, values)  # in place
            assert torch.equal(slow, values)
        scores = scores + (1 if ties else 0.001) * torch.randn(len(scores), generator=generator).round(decimals=step)
