"""Small models of many architectures with random weights, as folders in the hub's format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainable.embedded.tokenizer import build_tokenizer, write_tokenizer

VOCABULARY = 311
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640,
}  # fmt: skip
RUN: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"sliding_window": None},
    "qwen3": _SIZES | {"head_dim": 16},
    "phi3": _SIZES,
    "gemma": _SIZES | {"head_dim": 8, "tie_word_embeddings": True},
    "gpt_neox": {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"},
    "gpt2": {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 640,
        "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": True,
    },
    "olmo2": _SIZES,
    "starcoder2": _SIZES | {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}  # fmt: skip
"""model_type -> the fields of its config; architectures that the wrapper runs exactly."""


def make_config(kind: str, fields: Mapping[str, object]) -> Any:
    """A configuration of transformers for the shipped tokenizer."""
    from transformers import AutoConfig

    eos = build_tokenizer().token_to_id("<|im_end|>")
    return AutoConfig.for_model(kind, **{"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None, **fields})


def make_model(kind: str, fields: Mapping[str, object] | None = None, seed: int = 0, spread: float = 0.3) -> Any:
    """A model in which every parameter is drawn at random, gains about 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(kind, RUN[kind] if fields is None else fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_gain = weight.dim() == 1 and name.endswith("weight") and kind != "gemma"
            weight.copy_(1 + 0.2 * noise if is_gain else spread * noise)
    return model


def write(model: Any, folder: Path) -> Path:
    """The folder of a model with the shipped tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
