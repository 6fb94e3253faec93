"""Scores in few bits: the same mask, places that get finer with every bit, a code that stays."""

import pytest
import torch

from avalanche_amnesia.models.weight_masks.score_code import decode_scores, encode_scores

SIZES, KEPT = [700, 40, 1, 9], [210, 4, 1, 9]


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
            for edge in edges:  # nobody changes the level
                assert new[:edge].max() <= new[edge:].min()


def test_places_get_finer_with_every_bit():
    scores = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(7))
    mask = mask_of(scores)
    misses = []
    for bits in (1, 2, 4, 8):
        back = decode_scores(encode_scores(scores, mask, SIZES, bits), mask, SIZES)
        misses.append(float((back.argsort().argsort() - scores.abs().argsort().argsort()).abs().double().mean()))
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] < 0.05 * misses[0]
