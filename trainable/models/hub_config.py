"""What the config.json of a model of any architecture says of it, without its weights. Importing this loads torch."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

WORKS = (
    "The torch engine runs decoder-only causal LMs of transformers whose logits are the head's products with the last "
    "hidden state (Llama, Mistral, Qwen2, Qwen3, Gemma, Phi3, GPT-NeoX, GPT-2 and the like): give one with --model."
)
_GROWING_ROPE = ("dynamic", "longrope")  # whose angles depend on how long the sequence is


@dataclass(frozen=True)
class HubShape:
    """Sizes of a model (see `trainable.models.interface.Shape`)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    eos_token_id: int
    attention_size: int
    block_weights: tuple[int, int]


class Sizes(NamedTuple):
    """What memory depends on: the config's widths, and elements of every parameter of all but the head.

    head_size: channels of one attention head. linear: elements of linear layers, less a head that is the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    tie_word_embeddings: bool
    trunk: tuple[int, ...]
    linear: int


def refusal(folder: Path, found: str, reason: str) -> ValueError:
    """The one sentence for a model that is not run, and what is."""
    return ValueError(f"The model in {folder} is {found}, and {reason}. {WORKS}")


def read_config(folder: Path) -> Any:
    """The configuration of the model in `folder`, with every dropout at 0: passes draw no random numbers.

    ValueError for what is no decoder-only causal LM of transformers, or needs code or weights of another kind.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise refusal(
            folder, "of no kind that transformers knows", f"code from its folder is not run ({_first_line(error)})"
        ) from None
    found = _name(config)
    if config.is_encoder_decoder:
        raise refusal(folder, found, "has an encoder beside its decoder")
    if getattr(config, "quantization_config", None):
        raise refusal(folder, found, "its weights are quantised, while training needs them in full")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(folder, found, "has no causal LM in transformers")
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def empty_model(folder: Path) -> Any:
    """The model of `folder` on torch's meta device: every tensor's shape, and no number."""
    config = read_config(folder)
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        raise refusal(folder, _name(config), f"cannot be made ({_first_line(error)})") from None


def check_parts(causal: Any, folder: Path) -> None:
    """ValueError unless `causal` is a trunk and a head that is one matrix."""
    found, head = _name(causal.config), causal.get_output_embeddings()
    if causal.base_model is causal or not isinstance(head, nn.Linear):
        raise refusal(folder, found, "its head is no linear layer on its trunk")
    if head.bias is not None:
        raise refusal(folder, found, "its head has a bias")


def shape_of(causal: Any, folder: Path) -> HubShape:
    """The sizes of a model; its context is no longer than what all layers see whole."""
    text = causal.config.get_text_config()
    head = causal.get_output_embeddings().weight
    blocks = int(text.num_hidden_layers)
    width = int(text.num_attention_heads * _head_dim(text))
    return HubShape(
        vocab_size=head.shape[0], hidden_size=head.shape[1], num_hidden_layers=blocks,
        max_position_embeddings=_context(text, folder), eos_token_id=_eos(causal, folder), attention_size=width,
        block_weights=(_multiplied(causal.base_model, getattr(text, "num_experts_per_tok", None)) // blocks, 0),
    )  # fmt: skip


def check(folder: Path) -> None:
    """ValueError where the config.json alone tells that the model is not run; its weights may tell more."""
    causal = empty_model(folder)
    check_parts(causal, folder)
    shape_of(causal, folder)


def sizes(folder: Path) -> Sizes:
    """What memory depends on, from config.json alone: exact counts of parameters."""
    causal = empty_model(folder)
    check_parts(causal, folder)
    text, head = causal.config.get_text_config(), causal.get_output_embeddings().weight
    is_tied = any(weight is head for weight in causal.base_model.parameters())
    linear = {id(weight): weight.numel() for part in causal.modules() if isinstance(part, nn.Linear)
              for weight in part.parameters() if weight is not head or not is_tied}  # fmt: skip
    heads = int(text.num_attention_heads)
    wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * head.shape[1]
    return Sizes(
        hidden_size=head.shape[1], intermediate_size=int(wide), num_hidden_layers=int(text.num_hidden_layers),
        num_attention_heads=heads, num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=_head_dim(text), vocab_size=head.shape[0], tie_word_embeddings=is_tied,
        trunk=tuple(weight.numel() for weight in causal.base_model.parameters()), linear=sum(linear.values()),
    )  # fmt: skip


def _name(config: Any) -> str:
    return f"a {(config.architectures or [type(config).__name__])[0]}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _context(text: Any, folder: Path) -> int:
    """Tokens that every layer sees whole: no more than a sliding window, nor than rotary angles that stay the same."""
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None:
        raise refusal(folder, _name(text), "does not say how long its context is (max_position_embeddings)")
    limits = [longest, getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    limits += [
        part.get("original_max_position_embeddings")
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if part.get("rope_type") in _GROWING_ROPE
    ]
    return min(int(limit) for limit in limits if limit)


def _eos(causal: Any, folder: Path) -> int:
    """The first id of those that end a text."""
    eos = causal.config.get_text_config().eos_token_id
    file = folder / "generation_config.json"
    if eos is None and file.is_file():
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is not None:
        return int(eos[0] if isinstance(eos, list) else eos)
    raise refusal(folder, _name(causal.config), "its config.json names no eos_token_id, which ends a text")


def _multiplied(trunk: nn.Module, experts: int | None) -> int:
    """Weights that a token is multiplied with: all matrices but tables that are looked up, and `experts` of a mixture's
    (E, a, b)."""
    tables = {id(part.weight) for part in trunk.modules() if isinstance(part, nn.Embedding)}
    weights = [weight for weight in trunk.parameters() if weight.dim() > 1 and id(weight) not in tables]
    return sum(
        weight.numel() * experts // len(weight) if experts and weight.dim() == 3 else weight.numel()
        for weight in weights
    )
