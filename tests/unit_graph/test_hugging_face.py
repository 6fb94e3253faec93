"""Hugging Face networks as masked backbones: masked entries reach no feature, and tasks can be trained in them."""

import copy
import functools

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.hugging_face_networks import BACKBONES, TokenFeatures, bert, first, tokens
from support.soundness_oracle import assert_gradients_are_finite, assert_masks_are_sound, features, some_mask
from support.strategies import learn

from avalanche_amnesia import AmnesiacHAT, MaskedModel
from experiments.sentences import MarkovSentences


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


@pytest.mark.slow
def test_unlearning_every_task_restores_the_weights_of_the_file(tmp_path):
    torch.manual_seed(7)
    sizes, still = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}, 0.0
    with torch.no_grad():
        made = bert(**sizes, hidden_dropout_prob=still, attention_probs_dropout_prob=still).model
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content, state = path.read_bytes(), load_file(path)

    torch.manual_seed(0)
    loaded = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False, local_files_only=True)
    stream = MarkovSentences(n_train=96).train_stream
    model = MaskedModel(TokenFeatures(loaded, first), example=stream[0].tensors[0][:4])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=5e-4)
    strategy = AmnesiacHAT(model=model, optimizer=optimizer, train_mb_size=32, train_epochs=2, eval_mb_size=128, seed=0)
    parameters = dict(strategy.model.backbone.named_parameters())
    assert parameters.keys() == {f"model.{name}" for name in state}
    for name, value in state.items():
        assert parameters[f"model.{name}"] is loaded.get_parameter(name)
        assert torch.equal(parameters[f"model.{name}"], value)
    learn(strategy, stream)
    moved = [name for name, value in state.items() if not torch.equal(parameters[f"model.{name}"], value)]
    assert "embeddings.word_embeddings.weight" in moved
    strategy.unlearn([0, 1, 2])
    for name, value in state.items():
        assert torch.equal(parameters[f"model.{name}"], value), name
    assert [name for name in strategy.model.state_dict() if not name.startswith("backbone.")] == []
    assert path.read_bytes() == content
