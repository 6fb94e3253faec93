"""Compressed masks are exact and near the entropy; more bits of compressed scores keep more of their order."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategy_state import same

from avalanche_amnesia.bits import pack_bits, unpack_bits
from avalanche_amnesia.models.mask_codes import decode_scores, encode_masks, encode_scores

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
