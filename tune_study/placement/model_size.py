"""Count the parameters of a run's networks from the model's config.json, without torch and without its weights."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from trainable.config.constants import QWEN2_ARCHITECTURE, SHIPPED_MODELS, TEACHERS
from trainable.config.model_limits import is_plain_qwen2
from trainable.config.run_config import RunConfig
from trainable.config.sections import ModelConfig
from trainable.files.json_values import parse_json
from tune_study.placement.model_files import find_hub_cache
from tune_study.placement.published_sizes import find_published_sizes


class ModelShape(BaseModel):
    """The fields of a Qwen2 model's config.json that determine its parameters; other fields are ignored.

    The fields from `trunk` to `head_size` are for models of other architectures, whose parameters are counted on the
    model itself.

    Attributes:
        trunk: number of elements of every parameter tensor, without those of an untied head; empty for Qwen2.
        linear: number of elements of all linear layers together.
        matrices: (inputs, outputs) of each linear layer of the trunk; empty for Qwen2.
        head_size: channels of one attention head; None for Qwen2, where they follow from the hidden size.
        is_plain_qwen2: whether our own implementation runs the model (see `trainable.config.model_limits`).
        max_position_embeddings: tokens of the context; None where only the number of parameters is known.
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
    linear: int = 0
    matrices: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    head_size: PositiveInt | None = None
    is_plain_qwen2: bool = False
    max_position_embeddings: PositiveInt | None = None

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def is_counted(self) -> bool:
        """Whether the architecture is not Qwen2, so that parameters were counted on the model."""
        return bool(self.trunk)


def read_model_shape(path: str, environ: Mapping[str, str]) -> ModelShape | None:
    """The shape of the model at `path`: the shipped model, a folder, or a hub id.

    Nothing is downloaded. A hub id is looked up in the hub cache, and for Qwen2.5 models also in `published_sizes`.
    Returns None if neither has the model, or if its config.json does not describe a model that can be trained.
    `check_model` then says why. environ: the environment variables, which determine the hub cache.
    """
    config_path = _find_config_file(path, environ)
    if config_path is None:  # not downloaded
        sizes = find_published_sizes(path)
        return None if sizes is None else ModelShape.model_validate({**sizes, "is_plain_qwen2": True})
    try:
        # Files of the hub cache are links, and a model may lie anywhere: they are not read like files of a study.
        config = parse_json(config_path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not config.get("architectures"):
        return None
    try:
        # transformers takes seconds to import, so a Qwen2 is counted by formulas instead of on the model.
        is_qwen2 = config["architectures"] == [QWEN2_ARCHITECTURE]
        if not is_qwen2:
            return _count_shape(config_path.parent)
        return ModelShape.model_validate({**config, "is_plain_qwen2": is_plain_qwen2(config)})
    except ValidationError:
        return None


def _count_shape(folder: Path) -> ModelShape | None:
    """The shape of a model of another architecture, built without weights and counted; None if it is refused."""
    from trainable.models.hub_config import read_sizes

    try:
        return ModelShape.model_validate(read_sizes(folder))
    except ValueError:
        return None


def _find_config_file(path: str, environ: Mapping[str, str]) -> Path | None:
    """Path of a model's config.json; None if the model is not on this machine.

    The hub cache may have several snapshots of a model. The last one by name is taken, as in `check_model`.
    """
    if path in SHIPPED_MODELS or path in TEACHERS:  # a teacher has the shape of its policy
        return SHIPPED_MODELS[TEACHERS.get(path, path)].folder / "config.json"
    folder = os.path.expanduser(path)
    if os.path.isdir(folder):
        return Path(folder) / "config.json"
    cache_folder = glob.escape(f"{find_hub_cache(environ)}/models--{path.replace('/', '--')}")
    snapshot_configs = sorted(glob.glob(f"{cache_folder}/snapshots/*/config.json"))
    return Path(snapshot_configs[-1]) if snapshot_configs else None


def list_policy_tensor_sizes(shape: ModelShape) -> list[int]:
    """Elements of every parameter tensor of the policy. A tied head is the embedding and is counted once."""
    return _list_trunk_tensor_sizes(shape) + (
        [] if shape.tie_word_embeddings else [shape.vocab_size * shape.hidden_size]
    )


def list_critic_tensor_sizes(shape: ModelShape) -> list[int]:
    """Elements of every parameter tensor of a critic with a separate trunk: the trunk and a value head."""
    return _list_trunk_tensor_sizes(shape) + list_head_tensor_sizes(shape)


def list_head_tensor_sizes(shape: ModelShape) -> list[int]:
    """Elements of the value head's tensors: weight and bias."""
    return [shape.hidden_size, 1]


def list_linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Numbers of inputs and outputs of each linear layer of a block, by the name of the layer."""
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
    """(inputs, outputs) of each linear layer of the trunk: of all blocks, and without the head."""
    if shape.is_counted:
        return list(shape.matrices)
    return list(list_linear_layers(shape).values()) * shape.num_hidden_layers


def list_adapted_layers(shape: ModelShape, model: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the layers of a block that have an adapter; empty without LoRA."""
    target_modules = (
        list_linear_layers(shape) if model.lora_target_modules == "all-linear" else model.lora_target_modules
    )
    return [sizes for name, sizes in list_linear_layers(shape).items() if model.lora_rank and name in target_modules]


def list_adapter_tensor_sizes(shape: ModelShape, model: ModelConfig) -> list[int]:
    """Elements of A and B of every adapter of one network."""
    block_sizes = [model.lora_rank * size for sizes in list_adapted_layers(shape, model) for size in sizes]
    return block_sizes * shape.num_hidden_layers


def list_trained_tensor_sizes(shape: ModelShape, config: RunConfig) -> dict[str, list[int]]:
    """The number of elements of each trained tensor, by network: `policy` and, if there is one, `critic`.

    With LoRA only the adapters and the value head are trained. With `critic.shared_trunk` the value head belongs to the
    policy, and there is no `critic`. An advantage estimator without values needs no critic either.
    """
    has_adapters = config.model.lora_rank > 0
    adapter_sizes, head_sizes = list_adapter_tensor_sizes(shape, config.model), list_head_tensor_sizes(shape)
    policy_sizes = adapter_sizes if has_adapters else list_policy_tensor_sizes(shape)
    if not config.algorithm.estimator.needs_critic:
        return {"policy": policy_sizes}
    if config.critic.shared_trunk:
        return {"policy": policy_sizes + head_sizes}
    return {
        "policy": policy_sizes,
        "critic": adapter_sizes + head_sizes if has_adapters else list_critic_tensor_sizes(shape),
    }


def _list_trunk_tensor_sizes(shape: ModelShape) -> list[int]:
    """Embedding, blocks and final norm. In Qwen2 only the projections of queries, keys and values have a bias."""
    if shape.is_counted:
        return list(shape.trunk)
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    kv = shape.num_key_value_heads * shape.head_dim
    attention_sizes = [hidden * hidden, hidden, hidden * kv, kv, hidden * kv, kv, hidden * hidden]
    block_sizes = [*attention_sizes, *[hidden * intermediate] * 3, hidden, hidden]
    return [shape.vocab_size * hidden, *block_sizes * shape.num_hidden_layers, hidden]


def count_linear_parameters(shape: ModelShape) -> int:
    """Elements of all linear layers of the policy. A tied head is the embedding and does not count."""
    if shape.is_counted:
        return shape.linear
    # Everything that is neither the embedding nor a norm (two per block and the final one) belongs to a linear layer,
    # including the biases.
    norm_parameters = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    return count_policy_parameters(shape) - shape.vocab_size * shape.hidden_size - norm_parameters


def count_policy_parameters(shape: ModelShape) -> int:
    """Number of parameters of the policy."""
    return sum(list_policy_tensor_sizes(shape))


def count_critic_parameters(shape: ModelShape) -> int:
    """Number of parameters of a critic with a separate trunk."""
    return sum(list_critic_tensor_sizes(shape))


def count_head_parameters(shape: ModelShape) -> int:
    """Number of parameters of a value head on the policy's trunk (critic.shared_trunk)."""
    return sum(list_head_tensor_sizes(shape))
