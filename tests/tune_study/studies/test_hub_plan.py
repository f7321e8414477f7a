"""Planning for a model of another architecture than Qwen2, from its config.json alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.hub_models import (
    ARCHITECTURES,
    DROPS_THOUGHTS_TEMPLATE,
    make_byte_tokenizer,
    make_config,
    make_model,
    write_model,
    write_tokenizer_config,
)
from tests.fakes.plans import read_shape
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.models.hub_model import HubModel
from trainable.models.load import Policy, load_policy, make_critic, make_frozen_copy
from trainable.rollout.kv_cache_size import compute_token_kv_bytes
from tune_study.placement import memory
from tune_study.placement.memory import count_trained_parameters
from tune_study.placement.model_files import check_model, read_model_shape
from tune_study.plan.errors import PlanError

CPU = torch.device("cpu")


def write_config_only(model_type: str, folder: Path) -> Path:
    make_config(model_type, ARCHITECTURES[model_type]).save_pretrained(folder)
    config_path = folder / "config.json"
    text = config_path.read_text(encoding="utf-8")
    if '"architectures"' not in text:
        name = type(make_model(model_type)).__name__
        config_path.write_text(text.replace("{", f'{{"architectures": ["{name}"],', 1), encoding="utf-8")
    return folder


@pytest.mark.parametrize("model_type", list(ARCHITECTURES))
def test_parameters_are_counted_from_the_config_alone(model_type: str, tmp_path: Path) -> None:
    shape = read_shape(str(write_config_only(model_type, tmp_path / "config")))
    model = load_policy(str(write_model(make_model(model_type), tmp_path / "whole")), CPU).model
    assert isinstance(model, HubModel)
    critic = make_critic(Policy(model, None, Path()), make_rng(0, "critic"), CPU)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert count_trained_parameters(shape, RunConfig())["critic"] == sum(
        weight.numel() for weight in critic.parameters()
    )
    assert (shape.hidden_size, shape.vocab_size) == (model.shape.hidden_size, model.shape.vocab_size)
    assert (shape.num_attention_heads, shape.head_dim) == (model.shape.num_attention_heads, model.shape.head_dim)


@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_has_the_bytes_of_the_frozen_copy(model_type: str, dtype: str, tmp_path: Path) -> None:
    shape = read_shape(str(write_config_only(model_type, tmp_path / "config")))
    policy = load_policy(str(write_model(make_model(model_type), tmp_path / "whole")), CPU)
    policy.model.model.pass_settings = policy.model.model.pass_settings._replace(dtype=getattr(torch, dtype))
    copy_bytes = sum(weight.numel() * weight.element_size() for weight in make_frozen_copy(policy.model).parameters())
    config = apply_overrides(RunConfig(), {"model.dtype": dtype, "actor.use_kl_loss": True})
    assert memory.compute_frozen_bytes(shape, config) == copy_bytes


def test_a_cache_has_the_bytes_of_the_samplers(tmp_path: Path) -> None:
    shape = read_shape(str(write_config_only("qwen3", tmp_path)))
    hub_model = make_model("qwen3")
    model = load_policy(str(write_model(hub_model, tmp_path / "whole")), CPU).model
    cache = model.model.make_cache(1, 5)
    with torch.no_grad():
        model.model.extend(
            torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None], torch.ones(1, 5, dtype=torch.bool), cache
        )
    cache_bytes = sum(tensor.numel() * 4 for tensor in (*cache.keys, *cache.values))
    assert 5 * compute_token_kv_bytes(shape, apply_overrides(RunConfig(), {"model.dtype": "float32"})) == cache_bytes


def test_a_model_that_is_not_run_has_no_shape_and_is_refused_before_a_start(tmp_path: Path) -> None:
    fields = {"vocab_size": 311, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = make_config("t5", fields)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert read_model_shape(str(tmp_path), {}) is None
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PlanError, match=r"is a T5ForConditionalGeneration, and has an encoder.*--model"):
        check_model(str(tmp_path), {})


def test_a_model_of_another_architecture_is_accepted_and_its_template_tried(tmp_path: Path) -> None:
    write_model(make_model("llama"), tmp_path)
    check_model(str(tmp_path), {}, "auto")
    make_byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_tokenizer_config(tmp_path, DROPS_THOUGHTS_TEMPLATE)
    check_model(str(tmp_path), {}, "chatml")
    with pytest.raises(PlanError, match=r"The chat template .*--set model\.chat_format=chatml"):
        check_model(str(tmp_path), {}, "auto")
