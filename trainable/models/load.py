"""Load a policy (model, tokenizer, chat format) from disk or the hub cache, and make a critic or reference from it."""

import hashlib
import json
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn

from trainable.config.command_lines import quote_argument
from trainable.config.constants import SHIPPED_MODEL, SHIPPED_MODELS, TEACHERS
from trainable.config.model_limits import is_plain_qwen2
from trainable.config.sections import ModelConfig
from trainable.envs.prompts import CHATML, ChatFormat
from trainable.models.chat_template import read_chat_format
from trainable.models.codec import Codec
from trainable.models.interface import LanguageModel, PassSettings, Trunk, ValueModel
from trainable.models.qwen2 import Qwen2
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.models.teachers import explain_missing_teacher, find_teacher_folder, is_made

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
        """The token that ends a reply: the end marker of the chat format, or the end-of-text token.

        The second one is used if the tokenizer has no token for the marker. Base models have the marker, but do not
        name it as their end-of-text token. Without it, nothing would end a turn, which would fill up with noise.
        """
        marker: int | None = self.tokenizer.token_to_id(self.chat_format.end_marker)
        return self.model.shape.eos_token_id if marker is None else marker

    @property
    def other_stop_tokens(self) -> tuple[int, ...]:
        """Further tokens that end a reply: the end-of-text tokens that the model's files name.

        A base model ends many replies with its end-of-text token, and would go on with noise up to the maximum length.
        """
        return tuple(sorted(read_end_tokens(self.folder) - {self.stop_token}))


def read_end_tokens(folder: Path) -> set[int]:
    """The tokens at which a model ends a text: those of config.json and of generation_config.json."""
    end_tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        end_tokens |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return end_tokens


def find_model(path: str) -> Path:
    """The local folder of a model: a shipped one or its teacher, a folder, or a hub id in the local cache.

    Nothing is downloaded or made. The ValueError for a model that does not exist names the command that fetches it.
    """
    if path in SHIPPED_MODELS:
        return SHIPPED_MODELS[path].folder
    if path in TEACHERS:
        folder = find_teacher_folder(path)
        if not is_made(folder):
            raise ValueError(explain_missing_teacher(path, folder))
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
        raise ValueError(
            f"{path} is neither a folder nor in the local hub cache. Fetch it with `hf download "
            f"{quote_argument(path)}`, or type --model {SHIPPED_MODEL}."
        ) from None


def load_policy(
    path: str, device: torch.device, pass_settings: PassSettings = DEFAULT_PASS_SETTINGS, format_name: str = "auto"
) -> Policy:
    """Load the model at `path` on `device`, with float32 weights, and its tokenizer.

    pass_settings: how passes of the model are computed. format_name: see `model.chat_format`. Our own implementation
    runs Qwen2 models without scaled rotary positions; transformers runs all others. ValueError if the model cannot be
    used.
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
    with torch.device("meta"):  # takes no memory and no time for random weights that would be replaced at once
        model = Qwen2(Qwen2Shape.read(folder))
    weights = read_weights(folder)
    if model.shape.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    # `assign` has replaced the shared parameter by two separate ones, so head and embedding are tied again.
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


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, in float32.

    The tensors are copied, because a memory-mapped file could change during a run.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in _find_weight_files(folder):
        with safe_open(os.fspath(file), framework="pt") as tensors:
            weights.update({name: tensors.get_tensor(name).to(torch.float32, copy=True) for name in tensors.keys()})  # noqa: SIM118
    return weights


def compute_fingerprint(folder: Path) -> str:
    """SHA-256 of the weight files of the model in `folder`.

    A checkpoint contains it where frozen weights are no part of it: those under adapters, and those of a teacher.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_base(checkpoint_base: str | None, run_base: str | None) -> None:
    """ValueError if the adapters of a checkpoint were trained over another base than that of this run.

    checkpoint_base, run_base: fingerprints of the base; None without adapters.
    """
    _check_equal(checkpoint_base, run_base, "adapters of the base", "no adapters", "type the same model.")


def check_reference(checkpoint_reference: str | None, run_reference: str | None) -> None:
    """ValueError if a checkpoint was trained with another model at model.reference_path than this run loads.

    checkpoint_reference, run_reference: fingerprints of that model; None without one.
    """
    _check_equal(
        checkpoint_reference,
        run_reference,
        "the reference",
        "no reference of its own",
        "put back the model that model.reference_path named, or start the run again.",
    )


def _check_equal(checkpoint: str | None, run: str | None, name: str, none_name: str, advice: str) -> None:
    """ValueError that ends with `advice` if two fingerprints differ; none_name: what a run without one has."""
    if checkpoint != run:
        checkpoint_text, run_text = (
            none_name if fingerprint is None else f"{name} {fingerprint[:12]}" for fingerprint in (checkpoint, run)
        )
        raise ValueError(f"it has {checkpoint_text}, and this run has {run_text} (SHA-256 of its weights); {advice}")


def make_critic(policy: Policy, rng: np.random.Generator, device: torch.device) -> ValueModel:
    """A critic on `device`: a copy of the policy's trunk with its pass settings, and a new value head."""
    return make_value_model(deepcopy(policy.model.model), rng, device).to(device)


def make_value_model(trunk: Trunk, rng: np.random.Generator, device: torch.device) -> ValueModel:
    """A critic with `trunk`, and a head on `device`: weights from a normal distribution with std 0.02, and bias 0."""
    with torch.device("meta"):  # the weights of the head are replaced below
        critic = ValueModel(trunk)
    weight = torch.from_numpy(rng.normal(0.0, 0.02, critic.score.weight.shape))
    critic.score.weight = nn.Parameter(weight.to(device, torch.float32))
    critic.score.bias = nn.Parameter(torch.zeros(1, device=device))
    return critic


def make_codec(tokenizer: Tokenizer) -> Codec:
    """Batched encoding without added special tokens, and decoding without and with special tokens.

    The chat format writes special tokens itself, as text.
    """

    def encode(texts: Sequence[str]) -> list[list[int]]:
        # The fast variant leaves out the places of the tokens in the text.
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(ids: Sequence[Sequence[int] | np.ndarray], skip_special_tokens: bool) -> list[str]:
        rows = [row.tolist() if isinstance(row, np.ndarray) else list(row) for row in ids]
        return tokenizer.decode_batch(rows, skip_special_tokens)

    return Codec(
        encode, partial(decode, skip_special_tokens=True), decode_all=partial(decode, skip_special_tokens=False)
    )


def make_pass_settings(settings: ModelConfig) -> PassSettings:
    """The pass settings of a run's networks: precision and recomputation."""
    return PassSettings(
        getattr(torch, settings.dtype),
        settings.enable_gradient_checkpointing,
        settings.compiled_passes,
        settings.head_dtype == "float32",
    )


def make_frozen_copy(model: M) -> M:
    """A frozen copy of `model` on the same device: the reference."""
    return freeze(deepcopy(model))


def freeze(model: M) -> M:
    """Freeze `model` in place and return it.

    The linear layers of the model are cast to the type that passes compute in, unless they are in 4 bits. Results stay
    the same to the last bit, since every pass would cast them. The embedding and the norms stay in float32, because
    forward passes read them in float32.
    """
    model.requires_grad_(False)
    for layer in model.modules():
        is_cast = isinstance(layer, nn.Linear) and layer.weight.is_floating_point()
        if is_cast and layer.weight is not model.model.embed_tokens.weight:
            layer.to(model.model.pass_settings.dtype)
    return model


def pick_device(device_name: str, gpus: float) -> torch.device:
    """The device of a run: `auto` is the GPU if the run reserves one, else the CPU.

    Raises ValueError if the run reserves a GPU that torch cannot use. A torch for a newer CUDA than that of the driver
    sees none, and would train on one CPU core what was planned for a GPU.
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
    """Set up torch in this process for a run on a GPU; on a CPU nothing is done.

    gpus: the GPUs that the run reserves; below 1 it shares one.

    cuDNN's attention builds a plan for every new shape of a call, which takes longer than the call itself, and the
    lengths of passes here are ever new. A run that shares a GPU gets no more of it than its share: to run over it then
    ends this run, and not its neighbor.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)


def allow_for_engine(device: torch.device, gpus: float, engine_bytes: int) -> None:
    """Add the memory of an engine that sleeps to what a run that shares a GPU may allocate.

    torch counts the blocks of the engine's own allocator until they are released, and an engine that goes to sleep only
    unmaps them: without this, a run would reach its share as soon as it trains. While the engine is awake, its memory
    and the trainer's fit into the share by the plan, and nothing enforces it.
    """
    if device.type == "cuda" and gpus < 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gpus + engine_bytes / total_bytes, 1.0))
