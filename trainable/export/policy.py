"""Load the trained policy of a checkpoint, without critic, optimizer and engine, and export it for the hub."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from trainable.backend.torch_backend import select_below
from trainable.config.run_config import RunConfig
from trainable.config.seeds import make_rng
from trainable.config.setting_types import PromptStyle
from trainable.envs.prompts import ChatFormat, get_reply_start
from trainable.models.load import Policy, check_fingerprint, compute_fingerprint, load_policy
from trainable.models.lora import iter_hub_weights, make_adapted_policy, make_frozen_base
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.flat_state import check_shapes, compute_flat_shapes, load_flat_state

POLICY_NAME = "actor"
"""Name of the policy in checkpoints (see `trainable.backend.make`)."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "LICENSE*",
)
"""Patterns of files of the base model that the exported model needs besides weights and config.json."""


def load_trained_policy(config: RunConfig, checkpoint: Path) -> Policy:
    """Load the policy of a run from `checkpoint`, on the CPU and in float32.

    Raises CheckpointError if the checkpoint is damaged, and ValueError if it was written by another run, or if the
    model of `config` cannot be loaded or is not the checkpoint's.
    """
    tensors, values = read_checkpoint(checkpoint)
    if not RunConfig.model_validate(values.get("settings")).is_same_run(config):
        raise ValueError(f"{checkpoint} was written by another run.")
    policy = load_policy(config.model.path, torch.device("cpu"), format_name=config.model.chat_format)
    if config.model.lora_rank:
        check_fingerprint("base", values.get("base"), compute_fingerprint(policy.folder))
        base = make_frozen_base(policy.model, config.model, torch.device("cpu"))
        model = make_adapted_policy(base, config.model, make_rng(config.seed, "adapters", 0))
        policy = Policy(model, policy.tokenizer, policy.folder, policy.chat_format)
    weights = select_below(POLICY_NAME, tensors)
    check_shapes(POLICY_NAME, compute_flat_shapes(policy.model), {name: value.shape for name, value in weights.items()})
    load_flat_state(policy.model, weights)
    return policy


@torch.no_grad()
def write_weights(policy: Policy, folder: Path, dtype: str) -> None:
    """Write config and weights, which transformers can load, to an existing folder.

    Adapters are merged into the weights. Weights of more than 5 GB are split, as on the hub. dtype: one of `DTYPES`;
    `auto` for the base model's.
    """
    model_config = json.loads((policy.folder / "config.json").read_text(encoding="utf-8"))
    # The key is dtype from transformers 5 on, and torch_dtype in older models.
    key = "torch_dtype" if "torch_dtype" in model_config else "dtype"
    name = (model_config.get(key) or "float32") if dtype == "auto" else dtype
    weights: dict[str, Tensor] = {
        key: weight.detach().to(getattr(torch, name)).contiguous() for key, weight in iter_hub_weights(policy.model)
    }
    if model_config.get("tie_word_embeddings"):  # the loader ties the head to the embedding itself
        weights.pop("lm_head.weight", None)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    config_text = json.dumps({**model_config, key: name}, indent=2) + "\n"
    (folder / "config.json").write_text(config_text, encoding="utf-8")


def write_tokenizer(policy: Policy, folder: Path, style: PromptStyle) -> None:
    """Write the base model's tokenizer with the chat template of the training, and its other files but the weights."""
    for path in sorted({path for pattern in _COPIED_FILES for path in policy.folder.glob(pattern)}):
        shutil.copyfile(path, folder / path.name)
    # A file of its own would be read instead by newer versions of transformers, and by older ones not at all.
    path = folder / "tokenizer_config.json"
    tokenizer_config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    tokenizer_config["chat_template"] = format_chat_template(policy.chat_format, get_reply_start(style))
    path.write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")


_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message.content | trim if strips_content and message.role != "assistant" else message.content -%}
{%- if loop.first -%}{{ system_prefix }}{%- endif -%}
{%- if message.role == "system" -%}{{ content }}
{%- elif message.role == "user" -%}{{ first_user_prefix if loop.index0 < 2 else next_user_prefix }}{{ content }}
{%- else -%}{{ reply_prefix }}{{ "" if content.startswith(thought) else thought }}{{ content }}{{ end_marker }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ reply_prefix ~ thought }}{%- endif -%}
"""
"""A Jinja template that renders a conversation as it was trained on. Replies follow `thought`, and may repeat it."""


def format_chat_template(chat: ChatFormat, thought: str) -> str:
    """Fill the texts of a chat format into `_CHAT_TEMPLATE`. thought: the forced start of replies."""
    values = {**asdict(chat), "thought": thought}
    return (
        "".join(f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}" for name, value in values.items())
        + _CHAT_TEMPLATE
    )
