"""Small models of many architectures with random weights, and chat templates, in the folder format of the hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from trainable.models.hub_config import make_shape
from trainable.models.hub_model import HubModel
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.tokenizer import write_tokenizer

VOCAB_SIZE = 311
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"sliding_window": None},
    "qwen3": _SIZES | {"head_dim": 16},
    "phi3": _SIZES,
    "gemma": _SIZES | {"head_dim": 8, "tie_word_embeddings": True},
    "gpt_neox": {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 640,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    "olmo2": _SIZES,
    "starcoder2": _SIZES | {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}
"""model_type -> the fields of its config; architectures that the wrapper runs exactly."""


def make_config(model_type: str, fields: Mapping[str, object]) -> Any:
    """Make a configuration of transformers for the shipped tokenizer."""
    from transformers import AutoConfig

    eos = SOKOBAN_TINY.build_tokenizer().token_to_id("<|im_end|>")
    return AutoConfig.for_model(
        model_type, **{"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None, **fields}
    )


def make_model(model_type: str, fields: Mapping[str, object] | None = None, seed: int = 0, std: float = 0.3) -> Any:
    """Make a model in which every parameter is drawn at random; gains are drawn around 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        make_config(model_type, ARCHITECTURES[model_type] if fields is None else fields)
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_gain = weight.dim() == 1 and name.endswith("weight") and model_type != "gemma"
            weight.copy_(1 + 0.2 * noise if is_gain else std * noise)
    return model


def write_model(model: Any, folder: Path) -> Path:
    """Write the folder of a model with the shipped tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder, SOKOBAN_TINY.pieces)
    return folder


def make_wrapped_model(model_type: str) -> tuple[Any, HubModel]:
    """Make a model of transformers, and a HubModel with the same weights."""
    hub_model = make_model(model_type)
    return hub_model, HubModel(hub_model, make_shape(hub_model, Path()))


def make_tokens(n_rows: int, length: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randint(0, vocab_size, (n_rows, length), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------- conversations

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|turn|>", "<|end|>")
STRIPPING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n\n{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<|turn|>{{ role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
DROPS_THOUGHTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def make_byte_tokenizer(adds_start: bool = False) -> Tokenizer:
    """Make a tokenizer with one token per byte and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL_TOKENS])
    if adds_start:
        start = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


def write_tokenizer_config(folder: Path, template: object) -> Path:
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_small_model(folder: Path, model_type: str = "llama", template: str = STRIPPING_TEMPLATE) -> Path:
    """Write a model with one token per byte and a chat template, small enough that a step takes seconds."""
    tokenizer = make_byte_tokenizer()
    fields = ARCHITECTURES[model_type] | {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
        "eos_token_id": tokenizer.token_to_id("</s>"),
    }
    make_model(model_type, fields, std=0.1).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return write_tokenizer_config(folder, template)
