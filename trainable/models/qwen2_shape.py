"""Sizes of a Qwen2 model, read from its config.json, and its rotary position embedding."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Qwen2Shape:
    """Sizes of a model, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    eos_token_id: int

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Channels of all query heads."""
        return self.hidden_size

    @property
    def block_weights(self) -> tuple[int, int]:
        """Weights per block that multiply a token, before and after the attention (see `interface.HubShape`)."""
        hidden, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        return hidden * (hidden + 2 * kv), hidden * (hidden + 3 * self.intermediate_size)

    @staticmethod
    def read(folder: Path) -> "Qwen2Shape":
        """Read the shape of the model in `folder`, which must pass `is_plain_qwen2`."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # transformers 5 writes rope_parameters; earlier versions wrote rope_theta.
        rope, eos = config.get("rope_parameters") or {}, config["eos_token_id"]
        return Qwen2Shape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
        )


def compute_rotary(positions: Tensor, shape: Qwen2Shape) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines `(*positions.shape, head_dim)` of the rotary embedding."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None].float() * (1.0 / shape.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
