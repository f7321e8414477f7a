"""Count the parameters of a run's networks from the model's config.json, without torch and without its weights."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from trainable.config.constants import QWEN2_ARCHITECTURE, SHIPPED_MODELS, TEACHERS
from trainable.config.run_config import RunConfig
from trainable.files.json_values import parse_json
from trainable.models.qwen2_shape import is_plain_qwen2
from tune_study.placement.model_files import find_downloaded_config

_HUB_ID = re.compile(r"Qwen/Qwen2\.5-(?:Math-|Coder-)?([\d.]+)B(?:-Instruct)?")
"""Models of the shape of their base model. Quantized models are left out, since they cannot be trained here."""
_SIZES: Mapping[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5": (151_936, 896, 4864, 24, 14, 2, True),
    "1.5": (151_936, 1536, 8960, 28, 12, 2, True),
    "3": (151_936, 2048, 11_008, 36, 16, 2, True),
    "7": (152_064, 3584, 18_944, 28, 28, 4, False),
    "14": (152_064, 5120, 13_824, 48, 40, 8, False),
    "32": (152_064, 5120, 27_648, 64, 40, 8, False),
    "72": (152_064, 8192, 29_568, 80, 64, 8, False),
}
"""The first seven fields of `ModelShape`, by the billions of parameters in the name. Source: config.json on the hub."""


class ModelShape(BaseModel):
    """The fields of a Qwen2 model's config.json that determine its parameters; other fields are ignored.

    Those from `trunk` to `head_size` are for other architectures, whose parameters are counted on the model.
    """

    # strict: a config.json with "36" or 36.0 blocks is refused instead of being converted.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    tie_word_embeddings: bool = False
    trunk: tuple[PositiveInt, ...] = ()
    """Number of elements of every parameter tensor except an untied head; empty for Qwen2."""
    linear: int = 0
    """Number of elements of all linear layers together, without a tied head."""
    matrices: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """(inputs, outputs) of each linear layer of the trunk; empty for Qwen2."""
    head_size: PositiveInt | None = None
    """Channels of one attention head; None for Qwen2, where they follow from the hidden size."""
    is_plain_qwen2: bool = False
    """Whether our own implementation runs the model (see `trainable.models.qwen2_shape`)."""
    max_position_embeddings: PositiveInt | None = None
    """Tokens of the context; None if only the number of parameters is known."""

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a block, by name, for other architectures as in Qwen2."""
        h, f, kv = self.hidden_size, self.intermediate_size, self.num_key_value_heads * self.head_dim
        attention = {"q_proj": (h, h), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (h, h)}
        return attention | {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    @property
    def all_matrices(self) -> Sequence[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of all blocks, without the head."""
        return self.matrices if self.trunk else [*self.layers.values()] * self.num_hidden_layers

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers of all blocks, including biases: without embedding, norms and head."""
        biases = self.hidden_size + 2 * self.num_key_value_heads * self.head_dim  # of queries, keys and values
        block = sum(inputs * outputs for inputs, outputs in self.layers.values()) + biases
        return self.linear - self.own_head if self.trunk else self.num_hidden_layers * block

    @property
    def trunk_parameters(self) -> int:
        """Parameters of embedding, blocks and final norm."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        return sum(self.trunk) or self.embedding + self.linear_parameters + norms

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""
        return self.trunk_parameters + self.own_head

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def own_head(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return 0 if self.tie_word_embeddings else self.embedding

    @property
    def block_weights(self) -> tuple[int, int]:
        """Parameters per block, all counted before the attention, since plans pass every token through every block."""
        return (self.trunk_parameters - self.embedding) // self.num_hidden_layers, 0


def find_published_sizes(path: str) -> dict[str, int | bool]:
    """Find the fields of `_SIZES` for a hub id; empty unless it is a model of Qwen2.5."""
    match = _HUB_ID.fullmatch(path)
    return dict(zip(ModelShape.model_fields, _SIZES.get(match[1], ()) if match else (), strict=False))


def read_model_shape(path: str, environ: Mapping[str, str]) -> ModelShape | None:
    """Read the shape of the model at `path`: a shipped model, a teacher, a folder, or a hub id in the hub cache.

    Nothing is downloaded. Qwen2.5 models that are not in the cache have published shapes. Returns None if the model is
    not on this machine or its config.json does not describe a trainable model; `check_model` then says why.
    """
    folder = os.path.expanduser(path)
    if path in SHIPPED_MODELS or path in TEACHERS:  # a teacher has the shape of its policy
        config_path: Path | None = SHIPPED_MODELS[TEACHERS.get(path, path)].folder / "config.json"
    elif os.path.isdir(folder):
        config_path = Path(folder) / "config.json"
    else:
        config_path = find_downloaded_config(path, environ)
    try:
        if config_path is None:
            return ModelShape.model_validate({**find_published_sizes(path), "is_plain_qwen2": True})
        # Links are followed, unlike in a study's files: the hub cache consists of links, and a model may lie anywhere.
        config = parse_json(config_path.read_bytes())
        if not isinstance(config, dict) or not config.get("architectures"):
            return None
        # A Qwen2 is counted by formulas, since transformers takes seconds to import. A model of another architecture is
        # built without weights and counted.
        if config["architectures"] == [QWEN2_ARCHITECTURE]:
            return ModelShape.model_validate({**config, "is_plain_qwen2": is_plain_qwen2(config)})
        from trainable.models.hub_config import read_sizes

        return ModelShape.model_validate(read_sizes(config_path.parent))
    except (OSError, ValueError):
        return None


def list_adapted_layers(shape: ModelShape, config: RunConfig) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of the layers of a block that have an adapter; empty without LoRA."""
    names = config.model.lora_target_modules if config.model.lora_rank else ()
    return [layer for name, layer in shape.layers.items() if names == "all-linear" or name in names]


def count_trained_parameters(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Count the trained parameters by network: `policy` and, if there is one, `critic`.

    With LoRA only the adapters and the value head are trained. The value head belongs to the policy with
    `critic.shared_trunk`, and an advantage estimator without values has none.
    """
    policy, critic, value_head = shape.parameters, shape.trunk_parameters, shape.hidden_size + 1
    if config.model.lora_rank:  # A and B of every adapter
        adapters = config.model.lora_rank * sum(map(sum, list_adapted_layers(shape, config)))
        policy = critic = adapters * shape.num_hidden_layers
    if not config.algorithm.estimator.needs_critic:
        return {"policy": policy}
    if config.critic.shared_trunk:
        return {"policy": policy + value_head}
    return {"policy": policy, "critic": critic + value_head}


def count_trained_tensors(shape: ModelShape, config: RunConfig) -> int:
    """Count the trained tensors of all networks."""
    trunk = len(shape.trunk) or 12 * shape.num_hidden_layers + 2  # 7 matrices, 3 biases and 2 norms per block
    policy, value_head = trunk + (not shape.tie_word_embeddings), 2
    if config.model.lora_rank:
        policy = trunk = 2 * len(list_adapted_layers(shape, config)) * shape.num_hidden_layers
    if not config.algorithm.estimator.needs_critic:
        return policy
    return policy + value_head + (0 if config.critic.shared_trunk else trunk)
