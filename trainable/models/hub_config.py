"""Read sizes and limits of a hub model of any architecture from its config.json alone (imports torch)."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from trainable.models.interface import HubShape

SUPPORTED_MODELS = (
    "The torch engine runs decoder-only causal LMs of transformers whose logits are a linear head on the last hidden "
    "state (Llama, Mistral, Qwen2, Qwen3, Gemma, Phi3, GPT-NeoX, GPT-2 and similar): choose one with --model."
)
_GROWING_ROPE = ("dynamic", "longrope")
"""Rotary positions whose angles depend on the sequence length, so that cached keys would become wrong."""


def make_refusal_error(folder: Path, model_name: str, reason: str) -> ValueError:
    """Make the error for an unsupported model, which says why and which models are supported."""
    return ValueError(f"The model in {folder} is {model_name}, and {reason}. {SUPPORTED_MODELS}")


def read_config(folder: Path) -> Any:
    """Read the transformers config of the model in `folder`, with every dropout at 0, so that passes are deterministic.

    Raise ValueError unless the model is a decoder-only causal LM with unquantized weights that transformers supports
    without code from the folder.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise make_refusal_error(
            folder, "of a kind unknown to transformers", f"code from its folder is not run ({_format_error(error)})"
        ) from None
    model_name = _format_name(config)
    if config.is_encoder_decoder:
        raise make_refusal_error(folder, model_name, "has an encoder in addition to its decoder")
    if getattr(config, "quantization_config", None):
        raise make_refusal_error(folder, model_name, "its weights are quantized, while training needs full precision")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise make_refusal_error(folder, model_name, "has no causal LM in transformers")
    # Names of dropouts vary (attn_pdrop, hidden_dropout, ...), and some are in a nested text config.
    for section in (config, config.get_text_config()):
        for name, value in section.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(section, name, 0.0)
    return config


def make_empty_model(folder: Path) -> Any:
    """Build the model of `folder` on torch's meta device, where tensors take no memory."""
    config = read_config(folder)
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        raise make_refusal_error(folder, _format_name(config), f"cannot be built ({_format_error(error)})") from None


def check_parts(causal_lm: Any, folder: Path) -> None:
    """Raise ValueError unless `causal_lm` is a trunk with a linear head without bias, as our passes require."""
    model_name, head = _format_name(causal_lm.config), causal_lm.get_output_embeddings()
    if causal_lm.base_model is causal_lm or not isinstance(head, nn.Linear):
        raise make_refusal_error(folder, model_name, "its head is not a linear layer on its trunk")
    if head.bias is not None:
        raise make_refusal_error(folder, model_name, "its head has a bias")


def make_shape(causal_lm: Any, folder: Path) -> HubShape:
    """Read the sizes of a model. Its context length is the most tokens that every layer sees in full."""
    text_config = causal_lm.config.get_text_config()
    head_weight = causal_lm.get_output_embeddings().weight
    layers, experts_per_token = int(text_config.num_hidden_layers), getattr(text_config, "num_experts_per_tok", None)
    heads = int(text_config.num_attention_heads)
    return HubShape(
        vocab_size=head_weight.shape[0],
        hidden_size=head_weight.shape[1],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text_config, "head_dim", None) or text_config.hidden_size // heads),
        max_position_embeddings=_read_context_length(text_config, folder),
        eos_token_id=_read_eos_token_id(causal_lm, folder),
        block_weights=(_count_multiplied_weights(causal_lm.base_model, experts_per_token) // layers, 0),
    )


def read_sizes(folder: Path) -> dict[str, Any]:
    """Read the sizes that determine memory use from config.json alone, with exact numbers of parameters.

    Raise ValueError if config.json alone shows that the model is not supported. A model that passes may still be
    refused when it is loaded and its passes are compared (`hub_model.check_exact`).

    head_size: channels of one attention head. trunk: elements of each parameter except the head. linear: elements of
    all linear layers of the trunk. matrices: (inputs, outputs) of each of them.
    """
    causal_lm = make_empty_model(folder)
    check_parts(causal_lm, folder)
    shape, text_config = make_shape(causal_lm, folder), causal_lm.config.get_text_config()
    head_weight = causal_lm.get_output_embeddings().weight
    linear_layers = [module for module in causal_lm.base_model.modules() if isinstance(module, nn.Linear)]
    # Keyed by identity, so that a weight shared by two layers counts once.
    linear_sizes = {id(weight): weight.numel() for layer in linear_layers for weight in layer.parameters()}
    # The feed-forward width is intermediate_size in most architectures. In GPT-2 it is n_inner, or 4 x hidden if
    # n_inner is None.
    widths = (getattr(text_config, name, None) for name in ("intermediate_size", "n_inner"))
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": int(next(filter(None, widths), 4 * shape.hidden_size)),
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_size": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": any(weight is head_weight for weight in causal_lm.base_model.parameters()),
        "trunk": tuple(weight.numel() for weight in causal_lm.base_model.parameters()),
        "linear": sum(linear_sizes.values()),
        "matrices": tuple((layer.in_features, layer.out_features) for layer in linear_layers),
    }


def _format_name(config: Any) -> str:
    return f"a {(config.architectures or [type(config).__name__])[0]}"


def _format_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _read_context_length(text_config: Any, folder: Path) -> int:
    """Read how many tokens every layer sees in full: limited by sliding windows and by changes of rotary angles."""
    max_positions = getattr(text_config, "max_position_embeddings", None)
    if max_positions is None:
        raise make_refusal_error(
            folder, _format_name(text_config), "its config.json has no context length (max_position_embeddings)"
        )
    limits = [
        max_positions,
        getattr(text_config, "sliding_window", None),
        getattr(text_config, "attention_chunk_size", None),
    ]
    rope_parameters = getattr(text_config, "rope_parameters", None) or {}
    # `rope_parameters` is one dictionary, or contains one per kind of layer.
    limits += [
        rope.get("original_max_position_embeddings")
        for rope in (rope_parameters, *(value for value in rope_parameters.values() if isinstance(value, dict)))
        if rope.get("rope_type") in _GROWING_ROPE
    ]
    return min(int(limit) for limit in limits if limit)


def _read_eos_token_id(causal_lm: Any, folder: Path) -> int:
    """Read the end-of-text token, or the first one of several."""
    eos = causal_lm.config.get_text_config().eos_token_id
    file = folder / "generation_config.json"
    if eos is None and file.is_file():
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is not None:
        return int(eos[0] if isinstance(eos, list) else eos)
    raise make_refusal_error(
        folder, _format_name(causal_lm.config), "its config.json names no eos_token_id (end-of-text token)"
    )


def _count_multiplied_weights(trunk: nn.Module, experts_per_token: int | None) -> int:
    """Count the weights that multiply one token, for FLOP counts.

    All matrices count except embedding tables, which are looked up. In mixtures of experts, weights (E, a, b) count for
    `experts_per_token` of the E experts.
    """
    tables = {id(module.weight) for module in trunk.modules() if isinstance(module, nn.Embedding)}
    weights = [weight for weight in trunk.parameters() if weight.dim() > 1 and id(weight) not in tables]
    return sum(
        weight.numel() * experts_per_token // len(weight) if experts_per_token and weight.dim() == 3 else weight.numel()
        for weight in weights
    )
