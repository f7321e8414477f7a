"""Count the parameters of a run's networks from the model's config.json, without torch and without its weights."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from trainable.config.constants import QWEN2_ARCHITECTURE, SHIPPED_MODELS, TEACHERS
from trainable.config.model_limits import is_plain_qwen2
from trainable.config.run_config import RunConfig
from trainable.config.sections import ModelConfig
from trainable.files.json_values import parse_json
from tune_study.placement.model_files import find_downloaded_config

# The values of _FIELDS, by the billions of parameters in the name. Source: config.json of each model on the hub.
_SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5": (1536, 8960, 28, 12, 2, 151_936, True),
    "3": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72": (8192, 29_568, 80, 64, 8, 152_064, False),
}
# The released sizes, by the variant in the name.
_RELEASED_SIZES = {
    "": ("0.5", "1.5", "3", "7", "14", "32", "72"),
    "Math-": ("1.5", "7", "72"),
    "Coder-": ("0.5", "1.5", "3", "7", "14", "32"),
}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_HUB_ID = re.compile(r"Qwen/Qwen2\.5-(|Math-|Coder-)(0\.5|1\.5|3|7|14|32|72)B(?:-Instruct)?")


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
    """Number of elements of all linear layers together."""
    matrices: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """(inputs, outputs) of each linear layer of the trunk; empty for Qwen2."""
    head_size: PositiveInt | None = None
    """Channels of one attention head; None for Qwen2, where they follow from the hidden size."""
    is_plain_qwen2: bool = False
    """Whether our own implementation runs the model (see `trainable.config.model_limits`)."""
    max_position_embeddings: PositiveInt | None = None
    """Tokens of the context; None if only the number of parameters is known."""

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def is_counted(self) -> bool:
        """Whether parameters were counted on the model, because its architecture is not Qwen2."""
        return bool(self.trunk)


def find_published_sizes(path: str) -> dict[str, int | bool] | None:
    """Look up the config.json fields that determine a model's shape; None unless `path` is a Qwen2.5 hub id.

    Math, Coder and Instruct models have the shape of the base model of the same size. Quantized models are not listed,
    because they cannot be trained here.
    """
    match = _HUB_ID.fullmatch(path)
    if match is None or match[2] not in _RELEASED_SIZES[match[1]]:
        return None
    return dict(zip(_FIELDS, _SIZES[match[2]], strict=True))


def read_model_shape(path: str, environ: Mapping[str, str]) -> ModelShape | None:
    """Read the shape of the model at `path`: a shipped model, a teacher, a folder, or a hub id.

    Nothing is downloaded. A hub id is looked up in the hub cache, and Qwen2.5 models also in `find_published_sizes`.
    Returns None if neither has the model, or if its config.json does not describe a trainable model; `check_model` then
    says why. environ: the environment variables, which determine the hub cache.
    """
    folder = os.path.expanduser(path)
    if path in SHIPPED_MODELS or path in TEACHERS:  # a teacher has the shape of its policy
        config_path: Path | None = SHIPPED_MODELS[TEACHERS.get(path, path)].folder / "config.json"
    elif os.path.isdir(folder):
        config_path = Path(folder) / "config.json"
    else:
        config_path = find_downloaded_config(path, environ)
    if config_path is None:  # not downloaded
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


def list_policy_tensor_sizes(shape: ModelShape) -> list[int]:
    """List the elements of every parameter tensor of the policy. A tied head is the embedding, counted once."""
    head_sizes = [] if shape.tie_word_embeddings else [shape.vocab_size * shape.hidden_size]
    return _list_trunk_tensor_sizes(shape) + head_sizes


def list_linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """List the (inputs, outputs) of each linear layer of a block, by name."""
    hidden, intermediate, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }


def list_trunk_matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of each linear layer of the trunk: of all blocks, without the head."""
    if shape.is_counted:
        return list(shape.matrices)
    return list(list_linear_layers(shape).values()) * shape.num_hidden_layers


def list_adapted_layers(shape: ModelShape, model: ModelConfig) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of the layers of a block that have an adapter; empty without LoRA."""
    layers, names = list_linear_layers(shape), model.lora_target_modules
    return [layers[name] for name in layers if model.lora_rank and (names == "all-linear" or name in names)]


def list_trained_tensor_sizes(shape: ModelShape, config: RunConfig) -> dict[str, list[int]]:
    """List the number of elements of each trained tensor, by network: `policy` and, if there is one, `critic`.

    With LoRA only the adapters and the value head are trained. With `critic.shared_trunk` the value head belongs to the
    policy. There is then no `critic`, as with an advantage estimator without values.
    """
    head_sizes = [shape.hidden_size, 1]  # weight and bias of the value head
    if config.model.lora_rank:  # A and B of every adapter
        layers = list_adapted_layers(shape, config.model)
        trunk_sizes = [config.model.lora_rank * size for layer in layers for size in layer] * shape.num_hidden_layers
        policy_sizes = trunk_sizes
    else:
        trunk_sizes, policy_sizes = _list_trunk_tensor_sizes(shape), list_policy_tensor_sizes(shape)
    if not config.algorithm.estimator.needs_critic:
        return {"policy": policy_sizes}
    if config.critic.shared_trunk:
        return {"policy": policy_sizes + head_sizes}
    return {"policy": policy_sizes, "critic": trunk_sizes + head_sizes}


def _list_trunk_tensor_sizes(shape: ModelShape) -> list[int]:
    """List the elements of embedding, blocks and final norm. In Qwen2 only query, key and value layers have a bias."""
    if shape.is_counted:
        return list(shape.trunk)
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    kv = shape.num_key_value_heads * shape.head_dim
    attention_sizes = [hidden * hidden, hidden, hidden * kv, kv, hidden * kv, kv, hidden * hidden]
    block_sizes = [*attention_sizes, *[hidden * intermediate] * 3, hidden, hidden]
    return [shape.vocab_size * hidden, *block_sizes * shape.num_hidden_layers, hidden]


def count_linear_parameters(shape: ModelShape) -> int:
    """Count the elements of all linear layers of the policy, without a tied head, which is the embedding."""
    if shape.is_counted:
        return shape.linear
    # Everything but the embedding and the norms (two per block and the final one) belongs to a linear layer, including
    # the biases.
    norm_parameters = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    return count_policy_parameters(shape) - shape.vocab_size * shape.hidden_size - norm_parameters


def count_policy_parameters(shape: ModelShape) -> int:
    """Count the parameters of the policy."""
    return sum(list_policy_tensor_sizes(shape))
