"""Count the parameters of a run's networks from the model's config.json, without torch and without its weights."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from trainable.config.constants import QWEN2_ARCHITECTURE, SHIPPED_MODELS, TEACHERS
from trainable.config.run_config import RunConfig
from trainable.config.sections import ModelConfig
from trainable.files.json_values import parse_json
from trainable.models.qwen2_shape import is_plain_qwen2
from tune_study.placement.model_files import find_downloaded_config

_HUB_ID = re.compile(r"Qwen/Qwen2\.5-(?:Math-|Coder-)?([\d.]+)B(?:-Instruct)?")
"""Models of the shape of their base model. Quantized models are left out, since they cannot be trained here."""
_SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
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

    The fields from `trunk` to `head_size` are for other architectures, whose parameters are counted on the model.
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
    def block_weights(self) -> tuple[int, int]:
        """Parameters per block, all counted before the attention, since plans pass every token through every block."""
        return (sum(list_trunk_sizes(self)) - self.embedding) // self.num_hidden_layers, 0

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def own_head(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return 0 if self.tie_word_embeddings else self.embedding

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""
        return sum(list_trunk_sizes(self)) + self.own_head


def find_published_sizes(path: str) -> dict[str, int | bool] | None:
    """Look up the fields of `_SIZES` for a hub id; None unless it is a model of Qwen2.5."""
    match = _HUB_ID.fullmatch(path)
    sizes = _SIZES.get(match[1]) if match else None
    return None if sizes is None else dict(zip(ModelShape.model_fields, sizes, strict=False))


def read_model_shape(path: str, environ: Mapping[str, str]) -> ModelShape | None:
    """Read the shape of the model at `path`: a shipped model, a teacher, a folder, or a hub id.

    Nothing is downloaded: a hub id is looked up in the hub cache, and Qwen2.5 models also in `_SIZES`. Returns None if
    the model is not on this machine or its config.json does not describe a trainable model; `check_model` then says
    why. environ: the environment variables, which determine the hub cache.
    """
    folder = os.path.expanduser(path)
    if path in SHIPPED_MODELS or path in TEACHERS:  # a teacher has the shape of its policy
        config_path: Path | None = SHIPPED_MODELS[TEACHERS.get(path, path)].folder / "config.json"
    elif os.path.isdir(folder):
        config_path = Path(folder) / "config.json"
    else:
        config_path = find_downloaded_config(path, environ)
    if config_path is None:
        sizes = find_published_sizes(path)
        return None if sizes is None else ModelShape.model_validate({**sizes, "is_plain_qwen2": True})
    try:
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


def list_linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """List the (inputs, outputs) of each linear layer of a block, by name."""
    hidden, intermediate, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    attention = {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (hidden, hidden)}
    gated = {"gate_proj": (hidden, intermediate), "up_proj": (hidden, intermediate)}
    return {**attention, **gated, "down_proj": (intermediate, hidden)}


def list_trunk_matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of each linear layer of the trunk: of all blocks, without the head."""
    return list(shape.matrices) if shape.trunk else [*list_linear_layers(shape).values()] * shape.num_hidden_layers


def list_adapted_layers(shape: ModelShape, model: ModelConfig) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of the layers of a block that have an adapter; empty without LoRA."""
    layers, names = list_linear_layers(shape), model.lora_target_modules
    return [layers[name] for name in layers if model.lora_rank and (names == "all-linear" or name in names)]


def list_trunk_sizes(shape: ModelShape) -> list[int]:
    """List the elements of the tensors of embedding, blocks and final norm."""
    if shape.trunk:
        return list(shape.trunk)
    block_sizes = []
    for name, (inputs, outputs) in list_linear_layers(shape).items():
        block_sizes += [inputs * outputs, outputs] if name in ("q_proj", "k_proj", "v_proj") else [inputs * outputs]
    block_sizes += [shape.hidden_size] * 2  # the gains of two norms
    return [shape.embedding, *block_sizes * shape.num_hidden_layers, shape.hidden_size]


def list_trained_sizes(shape: ModelShape, config: RunConfig) -> dict[str, list[int]]:
    """List the number of elements of each trained tensor, by network: `policy` and, if there is one, `critic`.

    With LoRA only the adapters and the value head are trained. With `critic.shared_trunk` the value head belongs to the
    policy. There is then no `critic`, as with an advantage estimator without values.
    """
    value_head = [shape.hidden_size, 1]  # weight and bias
    trunk = list_trunk_sizes(shape)
    policy = trunk if shape.tie_word_embeddings else [*trunk, shape.embedding]
    if config.model.lora_rank:  # A and B of every adapter
        layers = list_adapted_layers(shape, config.model)
        trunk = policy = [config.model.lora_rank * size for layer in layers for size in layer] * shape.num_hidden_layers
    if not config.algorithm.estimator.needs_critic:
        return {"policy": policy}
    if config.critic.shared_trunk:
        return {"policy": policy + value_head}
    return {"policy": policy, "critic": trunk + value_head}


def count_block_parameters(shape: ModelShape) -> int:
    """Count the parameters of the linear layers of all blocks, including biases: without embedding, norms and head."""
    if shape.trunk:
        return shape.linear - shape.own_head
    norm_parameters = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    return sum(list_trunk_sizes(shape)) - shape.embedding - norm_parameters
