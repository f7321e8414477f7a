"""Load the trained policy of a checkpoint, without critic, optimizer and engine, and export it for the hub."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from trainable.backend.torch_backend import select_below
from trainable.config.run_config import RunConfig
from trainable.config.seeds import make_rng
from trainable.models.load import Policy, check_fingerprint, compute_fingerprint, load_policy
from trainable.models.lora import iter_hub_weights, make_adapted_policy, make_frozen_base, write_adapters
from trainable.runs.checkpoint import read_checkpoint
from trainable.runs.flat_state import check_shapes, compute_flat_shapes, load_flat_state

POLICY_NAME = "actor"
"""Name of the policy in checkpoints (see `trainable.backend.make`)."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
_CONFIG_FILE = "config.json"
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
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
def write_hub_folder(policy: Policy, folder: Path, dtype: str, card: str) -> None:
    """Write config, tokenizer, weights and README.md, as a folder that transformers can load.

    Adapters are merged into the weights. Weights of more than 5 GB are split, as on the hub.

    Args:
        policy: the policy.
        folder: an existing folder.
        dtype: one of `DTYPES`; `auto` for the base model's dtype.
        card: content of README.md.
    """
    model_config = json.loads((policy.folder / _CONFIG_FILE).read_text(encoding="utf-8"))
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
    (folder / _CONFIG_FILE).write_text(config_text, encoding="utf-8")
    for path in sorted({path for pattern in _COPIED_FILES for path in policy.folder.glob(pattern)}):
        shutil.copyfile(path, folder / path.name)
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_adapter_folder(policy: Policy, config: RunConfig, folder: Path, card: str) -> None:
    """Write only the adapters, for `peft.PeftModel.from_pretrained(base, folder)`, and README.md.

    folder: an existing folder. card: content of README.md.
    """
    write_adapters(policy.model, config.model, folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def make_card(fields: Mapping[str, str], base_model: str, text: str) -> str:
    """Format a model card: metadata for the hub, a paragraph, and a table of `fields`.

    base_model: hub id of the base model; empty if it is a local folder.
    """
    base_line = f"base_model: {base_model}\n" if base_model else ""
    rows = "\n".join(f"| {name} | {value} |" for name, value in fields.items())
    return (
        f"---\n{base_line}library_name: transformers\npipeline_tag: text-generation\ntags:\n- reinforcement-learning\n"
        f"- tune_study\n---\n\n{text}\n\n| | |\n|---|---|\n{rows}\n"
    )
