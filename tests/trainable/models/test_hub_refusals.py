"""Models of transformers that cannot be run exactly or completely are refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.hub_models import ARCHITECTURES, VOCAB_SIZE, make_model, make_tokens, make_wrapped_model, write_model
from trainable.models.hub_config import make_shape, read_config
from trainable.models.hub_model import check_exact, load_hub_model
from trainable.models.interface import PassSettings
from trainable.models.load import load_policy

CPU = torch.device("cpu")
SMALL = ARCHITECTURES["llama"]
ROPE = {"factor": 2.0, "rope_theta": 1e4}
LINEAR_HEADS = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
LINEAR_HEADS |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "capped logits": (
        "gemma2",
        SMALL | {"head_dim": 8},
        "is a Gemma2ForCausalLM, and its logits differ from the output of its head",
    ),
    "scaled logits": ("granite", SMALL | {"logits_scaling": 4.0}, r"logits differ from the output of its head"),
    "a head's bias": ("phi", SMALL, r"is a PhiForCausalLM, and its head has a bias"),
    "positions from the mask": (
        "bloom",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        r"BloomForCausalLM, and",
    ),
    "recurrent state": ("mamba", SMALL | {"state_size": 4}, r"MambaForCausalLM, and"),
    "looking ahead": ("bert", SMALL | {"is_decoder": False}, r"BertLMHeadModel, and"),
    "layers of two kinds": (
        "qwen3_next",
        SMALL | LINEAR_HEADS | EXPERTS | {"num_hidden_layers": 4, "head_dim": 8},
        r"Qwen3NextForCausalLM, and",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_model_that_cannot_be_run_exactly_is_refused_by_name(case: str, tmp_path: Path) -> None:
    model_type, fields, reason = REFUSED[case]
    write_model(make_model(model_type, fields), tmp_path)
    with pytest.raises(ValueError, match=reason + r".*The torch engine runs decoder-only causal LMs .*--model"):
        load_policy(str(tmp_path), CPU)


ROUTES = {
    "reading into a cache": "extend",
    "scoring a tree after a cache": "forward_tree",
    "appending to a cache": "extend",
}


@pytest.mark.parametrize("name", list(ROUTES))
def test_a_route_with_wrong_results_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    causal, model = make_wrapped_model("llama")
    original_route, calls = getattr(model.model, ROUTES[name]), []

    def scaled_route(*arguments: Tensor) -> Tensor:
        calls.append(1)
        is_faulty_call = name != "appending to a cache" or len(calls) == 2
        return original_route(*arguments) * (1.01 if is_faulty_call else 1.0)

    monkeypatch.setattr(model.model, ROUTES[name], scaled_route)
    with pytest.raises(ValueError, match=f"is a LlamaForCausalLM, and {name} does not give the hidden states"):
        check_exact(causal, model, Path())


def test_a_full_memory_is_not_taken_for_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    causal, model = make_wrapped_model("llama")

    def raise_out_of_memory(*_: Tensor) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(model.model, "extend", raise_out_of_memory)
    with pytest.raises(RuntimeError, match="allocate memory"):
        check_exact(causal, model, Path())


def test_what_transformers_cannot_run_here_is_refused_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    with pytest.raises(ValueError, match="T5ForConditionalGeneration, and has an encoder in addition to its decoder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "of_my_own", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.Config"}}'
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ValueError, match="of a kind unknown to transformers, and code from its folder is not run"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "context"),
    [
        ("llama", {}, 640),
        ("mistral", {"sliding_window": 64}, 64),
        ("phi3", {"sliding_window": 100}, 100),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "original_max_position_embeddings": 128}}, 128),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear"}}, 640),
    ],
)
def test_the_context_is_the_longest_that_every_layer_sees_completely(
    model_type: str, changes: dict[str, Any], context: int
) -> None:
    model = make_model(model_type, ARCHITECTURES[model_type] | changes)
    assert make_shape(model, Path()).max_position_embeddings == context


def test_the_end_of_a_text_may_be_named_beside_the_config(tmp_path: Path) -> None:
    causal = make_model("llama", SMALL | {"eos_token_id": None})
    with pytest.raises(ValueError, match="names no eos_token_id"):
        make_shape(causal, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert make_shape(causal, tmp_path).eos_token_id == 7


def test_no_pass_applies_dropout(tmp_path: Path) -> None:
    write_model(make_model("gpt2"), tmp_path)
    model = load_hub_model(tmp_path, [])
    model.train()
    tokens, positions = make_tokens(2, 6), torch.arange(12)
    expected = model.model.compute_hidden_states(tokens, positions)
    model.model.pass_settings = PassSettings(recompute=True)
    assert torch.equal(model.model.compute_hidden_states(tokens, positions), expected)
