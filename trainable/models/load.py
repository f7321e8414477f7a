"""Load a policy (model, tokenizer, chat format) from disk or the hub cache, and make a critic or reference from it."""

import hashlib
import json
import os
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn

from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODEL, SHIPPED_MODELS, TEACHERS
from trainable.config.sections import ModelConfig
from trainable.envs.prompts import CHATML, ChatFormat
from trainable.models.chat_template import read_chat_format
from trainable.models.interface import LanguageModel, PassSettings, Trunk, ValueModel
from trainable.models.qwen2 import Qwen2
from trainable.models.qwen2_shape import Qwen2Shape, is_plain_qwen2
from trainable.models.teachers import explain_missing_teacher, find_teacher_folder, is_made
from trainable.runs.failures import MissingModelError

M = TypeVar("M", bound=LanguageModel)
DEFAULT_PASS_SETTINGS = PassSettings()


@dataclass(frozen=True)
class Policy:
    """A language model with its tokenizer, the folder of its files and its chat format."""

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path
    chat_format: ChatFormat = CHATML

    @property
    def stop_token(self) -> int:
        """The token that ends a reply: the chat format's end marker if it is a token, otherwise the end-of-text token.

        Base models have the marker, but do not declare it as their end-of-text token.
        """
        marker: int | None = self.tokenizer.token_to_id(self.chat_format.end_marker)
        return self.model.shape.eos_token_id if marker is None else marker

    @property
    def other_stop_tokens(self) -> tuple[int, ...]:
        """The end-of-text tokens in the model's files, with which base models end many replies."""
        return tuple(sorted(read_end_tokens(self.folder) - {self.stop_token}))


def read_end_tokens(folder: Path) -> set[int]:
    """Read the end-of-text tokens of a model from config.json and generation_config.json."""
    end_tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        end_tokens |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return end_tokens


def find_model(path: str) -> Path:
    """Find the local folder of a model: a shipped one or its teacher, a folder, or a hub id in the local cache.

    Nothing is downloaded or made. If the model does not exist, the ValueError names the command that fetches it.
    """
    if path in SHIPPED_MODELS:
        return SHIPPED_MODELS[path].folder
    if path in TEACHERS:
        folder = find_teacher_folder(path)
        if not is_made(folder):
            raise MissingModelError(explain_missing_teacher(path, folder))
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{path} is not a model: it has no config.json. Type the folder of a model, or {SHIPPED_MODEL}."
            )
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise MissingModelError(
            f"{path} is neither a folder nor in the local hub cache. Fetch it with `hf download "
            f"{quote_argument(path)}`, or type --model {SHIPPED_MODEL}."
        ) from None


def load_policy(
    path: str, device: torch.device, pass_settings: PassSettings = DEFAULT_PASS_SETTINGS, format_name: str = "auto"
) -> Policy:
    """Load the model at `path` on `device`, with float32 weights, and its tokenizer.

    pass_settings: how passes are computed. format_name: see `model.chat_format`. Our own implementation runs Qwen2
    models without scaled rotary positions; transformers runs all others. ValueError if the model is unusable.
    """
    folder = find_model(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = _load_qwen2(folder) if is_plain_qwen2(config) else _load_hub_model(folder)
    model.model.pass_settings = pass_settings
    model.lm_head.float32_logits = pass_settings.float32_logits
    chat = read_chat_format(folder, tokenizer, model.shape.eos_token_id, format_name)
    return Policy(model.to(device), tokenizer, folder, chat)


def _load_qwen2(folder: Path) -> Qwen2:
    """Load the model in `folder` with float32 weights."""
    with torch.device("meta"):  # spends no memory or time on random weights
        model = Qwen2(Qwen2Shape.read(folder))
    weights: dict[str, torch.Tensor] = {}
    for file in _find_weight_files(folder):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            # Copied, because a memory-mapped file could change during a run.
            weights |= {name: tensors.get_tensor(name).to(torch.float32, copy=True) for name in tensors.keys()}  # noqa: SIM118
    if model.shape.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    # `assign` has replaced the shared parameter by two separate ones: tie head and embedding again.
    if model.shape.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _load_hub_model(folder: Path) -> LanguageModel:
    from trainable.models.hub_model import load_hub_model

    names: list[str] = []
    for file in _find_weight_files(folder):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            names += tensors.keys()
    return load_hub_model(folder, names)


def _find_weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file; other weight formats are not supported.")
    return files


def compute_fingerprint(folder: Path) -> str:
    """Compute the SHA-256 of the weight files of the model in `folder`.

    Checkpoints store it to identify frozen weights that they do not contain: of a base under adapters, or of a teacher.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_fingerprint(kind: Literal["base", "reference"], checkpoint: str | None, run: str | None) -> None:
    """Raise ValueError unless checkpoint and run have equal fingerprints of a model.

    base: the model under adapters; None without adapters. reference: the model at model.reference_path; None without.
    """
    name, none_name = ("adapters of the base", "no adapters") if kind == "base" else ("the reference", "no reference")
    if checkpoint != run:
        checkpoint_text, run_text = (
            none_name if fingerprint is None else f"{name} {fingerprint[:12]}" for fingerprint in (checkpoint, run)
        )
        raise ValueError(
            f"it has {checkpoint_text}, and this run has {run_text} (SHA-256 of its weights); type the same model."
        )


def make_critic(policy: Policy, rng: np.random.Generator, device: torch.device) -> ValueModel:
    """Make a critic on `device` from a copy of the policy's trunk, with its pass settings, and a new value head."""
    return make_value_model(deepcopy(policy.model.model), rng, device).to(device)


def make_value_model(trunk: Trunk, rng: np.random.Generator, device: torch.device) -> ValueModel:
    """Make a critic from `trunk` and a head on `device`, with weights drawn from N(0, 0.02²) and bias 0."""
    with torch.device("meta"):  # the weights of the head are replaced below
        critic = ValueModel(trunk)
    weight = torch.from_numpy(rng.normal(0.0, 0.02, critic.score.weight.shape))
    critic.score.weight = nn.Parameter(weight.to(device, torch.float32))
    critic.score.bias = nn.Parameter(torch.zeros(1, device=device))
    return critic


def make_pass_settings(settings: ModelConfig) -> PassSettings:
    """Make the pass settings of a run's networks."""
    return PassSettings(
        getattr(torch, settings.dtype),
        settings.enable_gradient_checkpointing,
        settings.compiled_passes,
        settings.head_dtype == "float32",
    )


def make_frozen_copy(model: M) -> M:
    """Make a frozen copy of `model` on the same device, for the reference."""
    return freeze(deepcopy(model))


def freeze(model: M) -> M:
    """Freeze `model` in place and return it.

    Linear layers, unless in 4 bits, are cast to the dtype of passes. Results stay the same to the last bit, since every
    pass would cast them anyway. Embedding and norms stay in float32, because forward passes read them in float32.
    """
    model.requires_grad_(False)
    for layer in model.modules():
        is_cast = isinstance(layer, nn.Linear) and layer.weight.is_floating_point()
        if is_cast and layer.weight is not model.model.embed_tokens.weight:
            layer.to(model.model.pass_settings.dtype)
    return model


def pick_device(device_name: str, gpus: float) -> torch.device:
    """Pick the device of a run: `auto` is the GPU if the run reserves one, else the CPU.

    Raises ValueError if the run reserves a GPU that torch cannot use. For example, a torch built for a newer CUDA than
    the driver supports sees none, and a run planned for a GPU would train on one CPU core.
    """
    name = device_name if device_name != "auto" else "cuda" if gpus > 0 else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda
        raise ValueError(
            f"This run reserves {gpus:g} GPUs, and torch {torch.__version__} sees none: "
            + (f"it is built for CUDA {build}, so check the driver with nvidia-smi, and " if build else "")
            + "install a build of torch for the CUDA of the driver, or type --gpus-per-exp 0 --set trainer.device=cpu."
        )
    return torch.device(name)


def prepare_device(device: torch.device, gpus: float) -> None:
    """Set up torch in this process for a run on a GPU; do nothing on a CPU.

    gpus: number of GPUs that the run reserves; below 1 it shares one.

    cuDNN's attention is disabled: it builds a plan for every new shape, which takes longer than the call itself, and
    passes have ever new lengths. A run that shares a GPU is limited to its share of the memory, so that exceeding it
    ends this run and not its neighbor.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)


def allow_for_engine(device: torch.device, gpus: float, engine_bytes: int) -> None:
    """Raise the memory limit of a run that shares a GPU by the memory of its sleeping engine.

    torch counts the blocks of the engine's allocator until they are released, but a sleeping engine only unmaps them:
    without this, a run would reach its limit as soon as it trains. While the engine is awake, engine and trainer
    together are planned to fit into the share, but nothing enforces it.
    """
    if device.type == "cuda" and gpus < 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gpus + engine_bytes / total_bytes, 1.0))
