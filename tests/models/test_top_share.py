"""The largest entries of a vector: exactly so many, whatever is guessed of their threshold."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from avalanche_amnesia.models.weight_choice import MovingTop, count_of_share, mark_by_sorting, mark_largest


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
    top.threshold = before or 0.0
    for _ in range(2):  # with a guess that may be bad, and with one that is good
        top.update(values)
        assert sifted(top, values) == slow_marks(values.abs().tolist(), k)


def test_scores_that_move_are_ranked_around_the_last_threshold_alone(monkeypatch):
    """Values between two steps of a training, many of them equal; the whole is ranked in the first step alone."""
    generator, ranked, k = torch.Generator().manual_seed(0), [], 9_000
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda values, place: ranked.append(len(values)) or partition(values, place))
    values, top = torch.rand(100_003, generator=generator) - 0.5, MovingTop(100_003, k)
    for step in range(30):
        slow = torch.empty_like(values)
        top.update(values)
        assert len(ranked) == 1
        assert ranked == [len(values)] if step == 0 else max(ranked) < len(values) / 20
        mark_by_sorting(values.abs(), k, slow)
        assert sifted(top, values) == slow.tolist()
        ranked.clear()
        values = values + 5e-4 * torch.randn(len(values), generator=generator)
        if step % 2:
            values = (values * 5000).round() / 5000  # ties
        if step % 7 == 3:
            values = 1.003 * values  # beyond the narrower band
