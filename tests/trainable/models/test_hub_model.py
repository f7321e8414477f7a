"""Models of transformers behind our interface: every route gives the numbers of the model's own forward pass."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.hub_models import ARCHITECTURES, VOCAB_SIZE, make_model, make_tokens, make_wrapped_model, write_model
from tests.fakes.layouts import Rows
from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model
from tests.strategies.examples import thin_out
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.hub_config import make_shape
from trainable.models.hub_model import HubModel, load_hub_model
from trainable.models.interface import PassSettings
from trainable.models.load import load_policy
from trainable.models.lora import iter_hub_weights
from trainable.models.qwen2 import Qwen2
from trainable.rollout.vllm_sampler import read_weight_shapes
from trainable.runs.flat_state import flatten_state, load_flat_state

CPU = torch.device("cpu")


def make_wrapped_twin(model: Qwen2) -> HubModel:
    twin = make_hub_twin(model)
    return HubModel(twin, make_shape(twin, Path()))


def assert_close(actual: Tensor, expected: Tensor, limit: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * float(expected.abs().max()))


@pytest.fixture(scope="module", params=thin_out(ARCHITECTURES))
def model_pair(request: pytest.FixtureRequest) -> tuple[Any, HubModel]:
    """A model and its wrapper. CI takes Llama, joined projections, GPT-2 and a mixture of experts."""
    return make_wrapped_model(request.param)


def test_logits_are_those_of_the_models_own_forward(model_pair: tuple[Any, HubModel]) -> None:
    causal, model = model_pair
    tokens, positions = make_tokens(3, 17), torch.tensor([50, 0, 5, 5, 33])
    with torch.no_grad():
        expected = causal(input_ids=tokens).logits.flatten(0, 1)[positions]
        assert_close(model.lm_head(model.model.compute_hidden_states(tokens, positions)), expected)


def test_gradients_are_those_of_the_models_own_forward(model_pair: tuple[Any, HubModel]) -> None:
    causal, model = deepcopy(model_pair)
    twin = make_model(causal.config.model_type)  # the same numbers, other tensors
    tokens, positions = make_tokens(2, 9), torch.tensor([2, 7, 12, 15])
    slopes = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    (model.lm_head(model.model.compute_hidden_states(tokens, positions)) * slopes).sum().backward()
    (twin(input_ids=tokens).logits.flatten(0, 1)[positions] * slopes).sum().backward()
    prefix = f"{twin.base_model_prefix}."
    expected_weights = {name.replace(prefix, "", 1): weight for name, weight in twin.named_parameters()}
    actual_weights = {name.removeprefix("model.base."): weight for name, weight in model.named_parameters()}
    assert actual_weights.keys() == expected_weights.keys()
    for name, weight in actual_weights.items():
        assert (weight.grad is None) == (expected_weights[name].grad is None)
        if weight.grad is not None:
            assert_close(weight.grad, expected_weights[name].grad)


def test_recomputing_blocks_changes_no_gradient(model_pair: tuple[Any, HubModel]) -> None:
    tokens, positions = make_tokens(2, 9), torch.tensor([2, 7, 12, 15])
    runs = []
    for recompute in (False, True):
        model = deepcopy(model_pair[1])
        model.model.pass_settings = PassSettings(recompute=recompute)
        calls: list[int] = []
        block = model.model.blocks[0]
        layer = block.input_layernorm if hasattr(block, "input_layernorm") else next(block.children())
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.model.compute_hidden_states(tokens, positions).square().sum().backward()
        runs.append((model, len(calls)))
        assert not any(module.training for module in model.model.base.modules())
    (plain_model, plain_calls), (recomputed_model, recomputed_calls) = runs
    assert (plain_calls, recomputed_calls) == (1, 2)
    for parameter, recomputed_parameter in zip(plain_model.parameters(), recomputed_model.parameters(), strict=True):
        assert (parameter.grad is None) == (recomputed_parameter.grad is None)
        if parameter.grad is not None and recomputed_parameter.grad is not None:
            assert_close(recomputed_parameter.grad, parameter.grad, 1e-5)


def test_a_cache_gives_what_whole_sequences_give(model_pair: tuple[Any, HubModel]) -> None:
    with torch.inference_mode():
        rows = Rows(model_pair[1], 3, 4, limit=1e-4)
        rows.extend([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
        rows.extend([[4], [5], [6]])
        rows.select([2, 0, 2])
        rows.extend([[5, 6], [4], [1, 1, 1]])
        rows.extend([[9], [8]])  # only the first two rows continue
        rows.cache.pack()
        rows.extend([[1], [], [4, 5]])
        rows.extend([[7], [8], [9]])


def test_a_tree_after_a_cache_gives_what_its_paths_give(model_pair: tuple[Any, HubModel]) -> None:
    _, model = model_pair
    prompts, thoughts = [[5, 6, 7, 8], [9, 10], [5]], [[20, 21, 22], [20, 21, 30], [40], [40, 41]]
    sums = compute_cross_scores(model, prompts, thoughts)
    for row, thought in enumerate(thoughts):
        for column, prompt in enumerate(prompts):
            tokens = torch.tensor([prompt + thought])
            with torch.no_grad():
                hidden = model.model.compute_hidden_states(tokens, torch.arange(tokens.shape[1]))
                logprobs = model.lm_head(hidden).log_softmax(-1)
            thought_logprobs = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(thought)[:, None])
            assert float(sums[row, column]) == pytest.approx(float(thought_logprobs.sum()), rel=1e-4)


def test_passes_in_bfloat16_are_near_those_in_float32(model_pair: tuple[Any, HubModel]) -> None:
    model = deepcopy(model_pair[1])
    tokens, positions = make_tokens(2, 9), torch.arange(18)
    with torch.no_grad():
        exact = model.model.compute_hidden_states(tokens, positions)
        model.model.pass_settings = PassSettings(torch.bfloat16)
        rounded = model.model.compute_hidden_states(tokens, positions)
        cache = model.model.make_cache(2, 9)
        cached = model.model.extend(tokens, torch.arange(9).expand(2, 9), torch.ones(2, 9, dtype=torch.bool), cache)
    assert rounded.dtype == cached.dtype == cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
    assert float((rounded - exact).norm() / exact.norm()) < 0.1
    assert float((cached - exact[[8, 17]]).norm() / exact[[8, 17]].norm()) < 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen2_through_transformers_is_our_own(tied: bool) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference_model = make_random_model(make_qwen2_shape(tie_word_embeddings=tied, **sizes))
    wrapped_model = make_wrapped_twin(reference_model)
    tokens, positions = make_tokens(3, 11, 23), torch.tensor([32, 0, 5, 20])
    slopes = torch.randn(4, 23, generator=torch.Generator().manual_seed(1))
    for model in (reference_model, wrapped_model):
        (model.lm_head(model.model.compute_hidden_states(tokens, positions)) * slopes).sum().backward()
    hub_names = wrapped_model._hub_names
    wrapped_gradients = {hub_names[name]: weight.grad for name, weight in wrapped_model.named_parameters()}
    expected_gradients = {name: weight.grad for name, weight in reference_model.named_parameters()}
    assert wrapped_gradients.keys() == expected_gradients.keys()
    for name, gradient in wrapped_gradients.items():
        assert gradient is not None
        assert_close(gradient, expected_gradients[name])  # type: ignore[arg-type]
    assert dict(iter_hub_weights(wrapped_model)).keys() == dict(iter_hub_weights(reference_model)).keys()
    prompts, thoughts = [[5, 6, 7, 8], [9, 10]], [[20, 21, 22], [20, 21], [11]]
    scores, expected = (compute_cross_scores(each, prompts, thoughts) for each in (wrapped_model, reference_model))
    assert_close(scores, expected)
    assert wrapped_model.shape.num_attention_heads == reference_model.shape.num_attention_heads
    assert sum(wrapped_model.shape.block_weights) == sum(reference_model.shape.block_weights)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id"):
        assert getattr(wrapped_model.shape, name) == getattr(reference_model.shape, name)


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    causal = make_model("llama")
    policy = load_policy(str(write_model(causal.to(torch.bfloat16), tmp_path)), CPU)
    weights = dict(iter_hub_weights(policy.model))
    assert weights.keys() == causal.state_dict().keys()
    for name, weight in causal.state_dict().items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], weight.float())


def test_a_state_is_put_back_and_a_tied_head_stored_once() -> None:
    _, model = make_wrapped_model("gemma")
    second_model = HubModel(make_model("gemma", seed=5), model.shape)
    assert "lm_head.weight" in model.state_dict()
    flat_state = {name: value.clone() for name, value in flatten_state(model).items()}
    assert "lm_head.weight" not in flat_state
    load_flat_state(second_model, flat_state)
    assert second_model.lm_head.weight is second_model.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(second_model.state_dict()[name], value)


def test_a_qwen2_is_our_own_unless_its_positions_are_scaled(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 320}
    for number, (changes, model_class) in enumerate([({}, Qwen2), ({"rope_parameters": yarn}, HubModel)]):
        folder = write_model(make_model("qwen2", ARCHITECTURES["llama"] | changes), tmp_path / str(number))
        assert type(load_policy(str(folder), CPU).model) is model_class


def test_every_weight_has_its_name_in_the_files(tmp_path: Path) -> None:
    for model_type in ("llama", "gpt_neox"):  # GPT-NeoX's head is embed_out in files, lm_head in transformers
        folder = write_model(make_model(model_type), tmp_path / model_type)
        assert set(dict(iter_hub_weights(load_policy(str(folder), CPU).model))) == set(read_weight_shapes(folder))


def test_names_without_the_trunks_prefix_are_kept_as_the_files_have_them() -> None:
    causal = make_model("gpt2")
    model = HubModel(causal, make_shape(causal, Path()), ["wte.weight", "h.0.ln_1.weight"])
    names = set(dict(iter_hub_weights(model)))
    assert {"wte.weight", "h.0.ln_1.weight", "lm_head.weight", "transformer.ln_f.weight"} <= names


def test_a_tensor_that_the_files_lack_is_named(tmp_path: Path) -> None:
    causal = make_model("llama")
    weights = causal.state_dict()
    weights.pop("model.norm.weight")
    causal.save_pretrained(tmp_path, state_dict=weights)
    message = r"is incomplete: 1 of its tensors .* \(model\.norm\.weight\)\. Download it again"
    with pytest.raises(ValueError, match=message):
        load_hub_model(tmp_path, [])
