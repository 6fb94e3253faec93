"""Adapters on a frozen network: every task reads the whole network, none changes it, and masks choose ranks."""

import copy

import peft
import pytest
import torch
from support.hugging_face_networks import BACKBONES, LENGTH, VOCABULARY, llama
from support.small_networks import Net, RankNet
from support.small_runs import assert_retained, make
from support.soundness_oracle import assert_sound, batch, some_mask
from support.strategies import DIGITS, learn
from support.strategy_state import bits, unchanged
from torch import nn

from avalanche_amnesia import HAT, MaskedModel, ModelError, task_benchmark


def images() -> nn.Module:
    """Convolutions and BatchNorm without gradients, and parallel convolutions of 6 channels."""
    return nn.Sequential(
        Net(
            lambda s, x: torch.relu(s.norm(s.base(x) + s.up(s.down(x)))),
            base=nn.Conv2d(1, 8, 3, padding=1).requires_grad_(False),
            down=nn.Conv2d(1, 6, 3, padding=1),
            up=nn.Conv2d(6, 8, 1, bias=False),
            norm=nn.BatchNorm2d(8).requires_grad_(False),
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


RANKS = peft.LoraConfig(r=6, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
MADE = {
    "by hand": (RankNet, {"input_shape": (1, 8, 8)}),
    "images": (images, {"input_shape": (1, 8, 8)}),
    "llama": (lambda: peft.get_peft_model(llama(), RANKS), {"example": BACKBONES["llama-sdpa"].batch(3)}),
}
ADAPTED = pytest.mark.parametrize("name", MADE)


@pytest.fixture(scope="module")
def made():
    """Model and original of each network, made when first asked for; for tests to copy or read."""
    known = {}

    def ask(name: str) -> tuple[MaskedModel, nn.Module]:
        if name not in known:
            torch.manual_seed(0)
            backbone = MADE[name][0]()
            known[name] = MaskedModel(backbone, **MADE[name][1]).eval(), copy.deepcopy(backbone).eval()
        return known[name]

    return ask


@ADAPTED
def test_a_task_reads_the_whole_network_and_the_ranks_in_its_mask(made, name):
    model, original = made(name)
    shape = MADE[name][1].get("input_shape")
    x = batch((LENGTH,), 5, VOCABULARY) if shape is None else batch(shape, 5)
    everything = torch.ones(model.n_units)
    with torch.no_grad():
        assert torch.allclose(model.masked_features(x, everything), original(x), atol=1e-5, rtol=1e-4)
        without_ranks = model.masked_features(x, torch.zeros(model.n_units))
        for parameter in original.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.zero_()  # no adapter is left: the network equals the given one
        assert torch.allclose(without_ranks, original(x), atol=1e-5, rtol=1e-4)
    assert_sound(model, x, some_mask(model, 0, 0.5))


@ADAPTED
def test_only_adapters_have_gates(made, name):
    model, _ = made(name)
    layers = [layer.kind for layer in model.graph.layers.values()]
    assert {layer.units for layer in model.graph.layers.values()} == {6}, layers
    gradients = {parameter: value.requires_grad for parameter, value in model.backbone.named_parameters()}
    still = {parameter for parameter, learns in gradients.items() if not learns}
    assert not still & model.graph.factors.keys()
    learning = {parameter for parameter, learns in gradients.items() if learns}
    assert learning == model.graph.factors.keys() | (model.graph.owned - still)
    for parameter, factors in model.graph.factors.items():  # a weight belongs to one rank
        assert sum(factor.numel() > 1 for factor in factors) == 1, parameter
    sizes = {parameter: value.numel() for parameter, value in model.backbone.named_parameters()}
    common = sum(sizes[parameter] for parameter in still - model.graph.owned)
    shares = model.describe().shares
    assert shares["without gradients"] == common / sum(sizes.values())
    assert shares["first task only"] == 0


TASKS_OF_TOKENS = (torch.arange(90)[:, None] * torch.arange(1, LENGTH + 1)) % (VOCABULARY - 1) + 1


def stream(name: str):
    """Three tasks of two classes."""
    if "example" not in MADE[name][1]:
        return DIGITS
    samples = TASKS_OF_TOKENS, torch.arange(90) % 6
    return task_benchmark(samples, samples, [[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize("name", ["by hand", "images", "llama"])
def test_logits_and_parameters_without_gradients_keep_their_bits(made, name):
    model = copy.deepcopy(made(name)[0]).train()
    start = {n: p.detach().clone() for n, p in model.backbone.named_parameters() if not p.requires_grad}
    strategy = make(HAT, model=model, optimizer="adam decay")
    assert_retained(strategy, stream(name), 3, must_move=name != "images")  # few ranks, and the first task takes all
    held = dict(model.backbone.named_parameters())
    assert start
    assert all(torch.equal(held[n], value) for n, value in start.items())


# Norms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LayerNorm, lambda width: nn.GroupNorm(2, width)])
def test_a_norm_without_gradients_after_gates_uses_open_units_and_learns_nothing(kind):
    norm = kind(12).requires_grad_(False)
    model = MaskedModel(nn.Sequential(nn.Linear(64, 12), norm, nn.Linear(12, 6)), input_shape=(64,)).train()
    assert_sound(model, torch.randn(5, 64), some_mask(model, 1))
    model.add_head(0, 2)
    for trainable in (False, True):
        model.set_trainable(0, trainable)
        own = list(model.task_parts(0).parameters())
        assert own
        assert not any(parameter.requires_grad for parameter in own)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_parameter_that_gets_gradients_later_is_refused_before_anything_changed(made):
    model = copy.deepcopy(made("by hand")[0]).train()
    strategy = learn(make(HAT, model=model, optimizer="adam"), DIGITS.train_stream[:1])
    base = model.backbone.get_submodule("1").base.requires_grad_(True)
    words = r"'1\.base\.bias', '1\.base\.weight'.* had no gradients when the model was made"
    with unchanged(lambda: bits(model)), pytest.raises(ModelError, match=words):
        strategy.train(DIGITS.train_stream[1])
    base.requires_grad_(False)
    strategy.train(DIGITS.train_stream[1])
    assert model.masked_tasks == (0, 1)
