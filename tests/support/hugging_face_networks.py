"""Tiny Hugging Face backbones with random weights: tokens or images in, features out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH, PADDING = 50, 10, 0
"""Sizes of the random batches; id 0 is padding, at the end of a sequence."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": PADDING,
}
TEXT = {**SIZES, "max_position_embeddings": 32}
DECODER = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 1}
UNPOOLED = {"add_pooling_layer": False}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "use_cache": False}


class TokenFeatures(nn.Module):
    """Maps token ids ``(batch, length)`` to features ``(batch, width)``, without the positions of padding.

    Args:
        model: returns ``last_hidden_state``.
        pool: function that reduces the positions to features.
    """

    def __init__(self, model: nn.Module, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.pool = pool

    def forward(self, tokens: Tensor) -> Tensor:
        seen = (tokens != PADDING).long()
        return self.pool(self.model(input_ids=tokens, attention_mask=seen).last_hidden_state, seen)


class ImageFeatures(nn.Module):
    """Maps images to the output of the model's pooler, or to its first position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.model(pixel_values=pixels)
        pooled = getattr(found, "pooler_output", None)
        return found.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)


def first(hidden: Tensor, seen: Tensor) -> Tensor:
    """The first position, which BERT's family reads."""
    return hidden[:, 0]


def last(hidden: Tensor, seen: Tensor) -> Tensor:
    """The last position without padding, which decoders read."""
    return hidden.gather(1, (seen.sum(1) - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)


def mean(hidden: Tensor, seen: Tensor) -> Tensor:
    """The mean over the positions without padding."""
    share = seen.to(hidden.dtype) / seen.sum(1, keepdim=True).clamp(min=1)
    return (hidden * share.unsqueeze(2)).sum(1)


def text(name: str, pool: Callable[[Tensor, Tensor], Tensor] = first, made: Any = (), **config: Any) -> nn.Module:
    """Return a text model by its name in transformers; ``made``: arguments besides the configuration."""
    kind = getattr(transformers, name)
    return TokenFeatures(kind(kind.config_class(**config), **dict(made)), pool)


def bert(**sizes: Any) -> nn.Module:
    return text("BertModel", made=UNPOOLED, **{**TEXT, **sizes}, attn_implementation="sdpa")


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 4}
    return text("GPT2Model", last, **sizes, **DECODER, attn_implementation="eager")


def llama() -> nn.Module:
    """Rotary positions, RMS norms, gated layers, and fewer key heads than query heads."""
    return text("LlamaModel", last, **TEXT, num_key_value_heads=2, **DECODER, attn_implementation="sdpa")


def vit() -> nn.Module:
    sizes = {name: value for name, value in SIZES.items() if name not in ("vocab_size", "pad_token_id")}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, attn_implementation="sdpa")
    return ImageFeatures(transformers.ViTModel(config, add_pooling_layer=False))


@dataclass(frozen=True)
class Backbone:
    """A factory, the shape of its input images (None: tokens), and the options of MaskedModel."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, size: int) -> Tensor:
        return tokens(size) if self.shape is None else torch.randn(size, *self.shape, generator=_generator(size))


def tokens(size: int, length: int = LENGTH) -> Tensor:
    """Random sequences of different lengths, with padding at the end; the same for the same size."""
    generator = _generator(size)
    ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
    return torch.where(torch.arange(length) < lengths, ids, PADDING)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BACKBONES: dict[str, Backbone] = {
    "bert-sdpa": Backbone(bert),
    "roberta": Backbone(lambda: text("RobertaModel", made=UNPOOLED, **TEXT)),
    # All layers share their weights; embeddings are projected.
    "albert": Backbone(lambda: text("AlbertModel", made=UNPOOLED, **TEXT | {"num_hidden_layers": 2}, embedding_size=8)),
    "gpt2-eager": Backbone(gpt2),
    "llama-sdpa": Backbone(llama),
    # The attention mask holds the biases of the positions, which are no units.
    "t5-encoder": Backbone(
        lambda: text("T5EncoderModel", mean, vocab_size=VOCABULARY, **T5),
        options={"task_owned": ["model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]},
    ),
    "vit-sdpa": Backbone(vit, (1, 8, 8)),
}
