"""Hugging Face networks as masked backbones: masked entries reach no feature, and tasks can be trained in them."""

import copy
import functools

import pytest
import torch
from support.hugging_face_networks import BACKBONES, tokens
from support.soundness_oracle import assert_gradients_are_finite, assert_masks_are_sound, features, some_mask

from avalanche_amnesia import MaskedModel


@functools.cache
def masked(name: str) -> tuple[MaskedModel, torch.nn.Module]:
    """Return a masked backbone and a copy of the original, both in evaluation mode; no test may change them."""
    torch.manual_seed(0)
    backbone = BACKBONES[name].make()
    original = copy.deepcopy(backbone).eval()
    return MaskedModel(backbone, example=BACKBONES[name].batch(3), **BACKBONES[name].options).eval(), original


@pytest.mark.parametrize("name", BACKBONES)
def test_a_network_is_masked_soundly_and_every_layer_learns_its_mask(name):
    model, original = masked(name)
    assert_masks_are_sound(model, original, BACKBONES[name].batch, sizes=(1, 2, 7))
    names = {parameter for parameter, _ in model.backbone.named_parameters()}
    assert names == set(model.graph.factors) | model.graph.owned
    assert names == {parameter for parameter, _ in original.named_parameters()}
    assert sum(model.describe().shares.values()) == pytest.approx(1)

    gate = torch.rand(model.n_units, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert_gradients_are_finite(copy.deepcopy(model).train(), BACKBONES[name].batch(5), gate)
    assert [layer for layer, part in model.by_layer(gate.grad).items() if not part.any()] == []


def test_padding_and_other_sentences_of_the_batch_do_not_change_features():
    model, _ = masked("bert-sdpa")
    mask, x = some_mask(model, 3), tokens(7)
    together = features(model, x, mask)
    for row, sentence in enumerate(x):
        assert torch.allclose(features(model, sentence[None], mask)[0], together[row], atol=1e-6)


# Tasks on the stream of sentences ------------------------------------------------------------------------------------
