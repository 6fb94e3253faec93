"""Try ``MaskedModel`` on networks of torchvision, timm and transformers: print their mask coverage, or the error.

``python -m experiments.tried_networks`` prints a table, which ``docs/mask_your_network.md`` summarises. Weights are
random. Networks of timm and transformers are omitted if the library is not installed.
"""

from __future__ import annotations

import importlib.util
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models as vision

from avalanche_amnesia.models import MaskedModel
from avalanche_amnesia.unit_graph import ModelError

Maker = Callable[[], tuple[nn.Module, dict[str, Any]]]
_VISION = {
    **dict.fromkeys(("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "googlenet", "inception_v3"), "fc"),
    **dict.fromkeys(("shufflenet_v2_x0_5", "regnet_x_400mf", "regnet_y_400mf"), "fc"),
    **dict.fromkeys(
        ("mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "mnasnet0_5", "densenet121"), "classifier"
    ),
    **dict.fromkeys(("vgg11_bn", "alexnet", "squeezenet1_0"), "classifier"),
    "convnext_tiny": "classifier.2",
    **dict.fromkeys(("vit_b_16",), "heads"),
    **dict.fromkeys(("swin_t", "swin_v2_t"), "head"),
    **dict.fromkeys(("maxvit_t",), "classifier"),
}
_TIMM = (
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "beit_base_patch16_224", "mixer_s32_224", "gmlp_s16_224"),
    *(
        "tf_efficientnet_b0",
        "mobilevit_xxs",
        "efficientvit_b0",
        "levit_128s",
        "resnetv2_50",
        "nfnet_f0",
        "convmixer_768_32",
    ),
    *("poolformer_s12", "coat_tiny", "convnext_atto", "ghostnet_100", "hrnet_w18_small", "res2net50_26w_4s"),
)
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def networks() -> Iterator[tuple[str, Maker]]:
    """Yield (name, function) for every network; the function returns a backbone and arguments of ``MaskedModel``."""
    for name, classifier in _VISION.items():
        yield f"torchvision {name}", lambda name=name, classifier=classifier: _of_torchvision(name, classifier)
    if importlib.util.find_spec("timm"):
        for name in _TIMM:
            yield f"timm {name}", lambda name=name: _of_timm(name)
    if importlib.util.find_spec("transformers"):
        for name in ("Bert", "GPT2", "Llama", "Mistral", "DistilBert", "Albert", "Electra", "ModernBert"):
            yield f"transformers {name}", lambda name=name: _of_transformers(name)
        yield "transformers ViT", _vit


def _of_torchvision(name: str, classifier: str) -> tuple[nn.Module, dict[str, Any]]:
    options = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    side = 299 if name == "inception_v3" else 224
    made = getattr(vision, name)(weights=None, **options)
    return made, {"classifier": classifier, "input_shape": (3, side, side)}


def _of_timm(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import timm

    made = timm.create_model(name, num_classes=0)
    return made, {"input_shape": made.default_cfg["input_size"]}


class MeanOfTokens(nn.Module):
    """Text encoder with mean pooling of the last hidden states, without padding tokens (token 0)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features ``(batch, width)`` of token numbers ``(batch, length)``."""
        present = (tokens != 0).long()
        states: Tensor = self.encoder(input_ids=tokens, attention_mask=present).last_hidden_state
        share = present.unsqueeze(-1).to(states.dtype)
        return (states * share).sum(1) / share.sum(1).clamp_min(1.0)


def _of_transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 60, "max_position_embeddings": 32, "pad_token_id": 0, **_SMALL}
    if name == "GPT2":
        sizes = {"vocab_size": 60, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    elif name == "DistilBert":
        sizes = {
            "vocab_size": 60,
            "max_position_embeddings": 32,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
        }
    config = getattr(transformers, f"{name}Config")(**sizes)
    config.use_cache = False
    tokens = torch.randint(1, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    options = {"add_pooling_layer": False} if name in ("Bert", "Albert") else {}
    return MeanOfTokens(getattr(transformers, f"{name}Model")(config, **options)), {"example": tokens}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL)
    return transformers.ViTModel(config), {"example": torch.rand(4, 3, 32, 32)}


def row(name: str, make: Maker) -> tuple[str, ...]:
    """Build a network, wrap it in a MaskedModel, and return the cells of its table row."""
    torch.manual_seed(0)
    try:
        backbone, options = make()
    except Exception as error:  # whatever a library raises
        return name, "", "", f"not made: {_short(error)}"
    try:
        model = MaskedModel(backbone, **options)
    except ModelError as error:
        return name, "", "", f"refused: {_short(error)}"
    graph = model.backbone.program(training=True).graph
    kinds = {str(node.target) for node in graph.nodes if str(node.target).startswith("aten.")}
    shares = model.describe().shares
    covered = ", ".join(f"{rule} {share:.1%}" for rule, share in shares.items() if share)
    return name, str(len(kinds)), covered, "goes in"


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error).replace("|", "/"), 200, placeholder=" …")


def main() -> None:
    """Print the table, one row per network."""
    warnings.simplefilter("ignore")
    print("| network | kinds of operations | parameters | |\n|---|---|---|---|")
    for name, make in networks():
        print("| " + " | ".join(row(name, make)) + " |", flush=True)


if __name__ == "__main__":
    main()
