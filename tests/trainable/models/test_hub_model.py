"""Models of transformers under our interface: the numbers are those of their own forward, whatever the route."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fakes.hub_models import ARCHITECTURES, VOCAB_SIZE, make_model, make_tokens, make_wrapped_model, write_model
from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.hub_config import make_shape
from trainable.models.hub_model import HubModel, load_hub_model
from trainable.models.load import Policy, load_policy, make_critic, make_frozen_copy
from trainable.models.lora import iter_hub_weights
from trainable.models.qwen2 import PassSettings, Qwen2
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import read_weight_shapes
from trainable.runs.flat_state import flatten_state, load_flat_state

CPU = torch.device("cpu")


def wrapped_twin(model: Qwen2) -> HubModel:
    twin = make_hub_twin(model)
    return HubModel(twin, make_shape(twin, Path()))


def close(found: Tensor, wanted: Tensor, limit: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit * float(wanted.abs().max()))


def left_padded(chunks: list[list[int]], first: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and validity of chunks (B, q) that follow `first` tokens of each row."""
    widest = max(len(chunk) for chunk in chunks)
    short = torch.tensor([widest - len(chunk) for chunk in chunks])[:, None]
    tokens = torch.tensor([[0] * (widest - len(chunk)) + chunk for chunk in chunks])
    steps = torch.arange(widest) - short
    return tokens, (torch.tensor(first)[:, None] + steps).clamp_min(0), steps >= 0


# ---------------------------------------------------------------------------- every architecture


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def pair(request: pytest.FixtureRequest) -> tuple[Any, HubModel]:
    return make_wrapped_model(request.param)


def test_logits_are_those_of_the_models_own_forward(pair: tuple[Any, HubModel]) -> None:
    causal, model = pair
    tokens, where = make_tokens(3, 17), torch.tensor([50, 0, 5, 5, 33])
    with torch.no_grad():
        wanted = causal(input_ids=tokens).logits.flatten(0, 1)[where]
        close(model.lm_head(model.model.compute_hidden_states(tokens, where)), wanted)


def test_padding_on_the_right_changes_nothing(pair: tuple[Any, HubModel]) -> None:
    _, model = pair
    tokens = make_tokens(2, 12)
    padded = tokens.clone()
    padded[0, 7:] = 3
    with torch.no_grad():
        close(
            model.model.compute_hidden_states(padded, torch.arange(7)),
            model.model.compute_hidden_states(tokens[:1, :7], torch.arange(7)),
        )


def test_gradients_are_those_of_the_models_own_forward(pair: tuple[Any, HubModel]) -> None:
    causal, model = deepcopy(pair)
    twin = make_model(causal.config.model_type)  # the same numbers, other tensors
    tokens, where = make_tokens(2, 9), torch.tensor([2, 7, 12, 15])
    slopes = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    (model.lm_head(model.model.compute_hidden_states(tokens, where)) * slopes).sum().backward()
    (twin(input_ids=tokens).logits.flatten(0, 1)[where] * slopes).sum().backward()
    wanted = {id_.replace(f"{twin.base_model_prefix}.", "", 1): weight for id_, weight in twin.named_parameters()}
    found = {name.removeprefix("model.base."): weight for name, weight in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert (weight.grad is None) == (wanted[name].grad is None)
        if weight.grad is not None:
            close(weight.grad, wanted[name].grad)


def test_recomputing_blocks_changes_no_gradient(pair: tuple[Any, HubModel]) -> None:
    tokens, where = make_tokens(2, 9), torch.tensor([2, 7, 12, 15])
    found = []
    for recompute in (False, True):
        model = deepcopy(pair[1])
        model.model.pass_settings = PassSettings(recompute=recompute)
        calls: list[int] = []
        block = model.model.blocks[0]
        forward = block.input_layernorm if hasattr(block, "input_layernorm") else next(block.children())
        forward.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.model.compute_hidden_states(tokens, where).square().sum().backward()
        found.append((model, len(calls)))
        assert not any(part.training for part in model.model.base.modules())
    (kept, once), (again, twice) = found
    assert (once, twice) == (1, 2)
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            close(other.grad, one.grad, 1e-5)


def test_a_cache_gives_what_whole_sequences_give(pair: tuple[Any, HubModel]) -> None:
    _, model = pair
    rows: list[list[int]] = [[], [], []]

    def extend(chunks: list[list[int]]) -> None:
        tokens, positions, valid = left_padded(chunks, [len(row) for row in rows[: len(chunks)]])
        found = model.model.extend(tokens, positions, valid, cache)
        for row, chunk in enumerate(chunks):
            rows[row] = rows[row] + chunk
            if chunk:
                whole = model.model.compute_hidden_states(torch.tensor([rows[row]]), torch.tensor([len(rows[row]) - 1]))
                close(found[row], whole[0])

    with torch.inference_mode():
        cache = model.model.make_cache(3, 4)
        extend([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
        extend([[4], [5], [6]])
        cache.select_rows(torch.tensor([2, 0, 2]))
        rows[:] = [rows[2], rows[0], rows[2]]
        extend([[5, 6], [4], [1, 1, 1]])
        extend([[9], [8]])  # only the first two go on
        cache.pack()
        extend([[1], [], [4, 5]])
        extend([[7], [8], [9]])


def test_a_tree_after_a_cache_gives_what_its_paths_give(pair: tuple[Any, HubModel]) -> None:
    _, model = pair
    prompts, thoughts = [[5, 6, 7, 8], [9, 10], [5]], [[20, 21, 22], [20, 21, 30], [40], [40, 41]]
    found = compute_cross_scores(model, prompts, thoughts).logprob_sums
    for row, thought in enumerate(thoughts):
        for column, prompt in enumerate(prompts):
            tokens = torch.tensor([prompt + thought])
            with torch.no_grad():
                logs = model.lm_head(
                    model.model.compute_hidden_states(tokens, torch.arange(tokens.shape[1]))
                ).log_softmax(-1)
            told = logs[len(prompt) - 1 : -1].gather(1, torch.tensor(thought)[:, None])
            assert float(found[row, column]) == pytest.approx(float(told.sum()), rel=1e-4)


def test_greedy_replies_are_those_of_generate(pair: tuple[Any, HubModel]) -> None:
    causal, model = pair
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    conversation = TorchSampler(model).start_conversation(
        prompts, 1, SamplingParams(0.0, 12, 2), np.random.default_rng(0)
    )
    replies = conversation.sample_replies([0, 1], [[], []])
    more = conversation.sample_replies([0, 1], [[50, 51], [52]])
    for prompt, reply, given, next_reply in zip(prompts, replies, [[50, 51], [52]], more, strict=True):
        for told, wanted in (
            (prompt, reply.token_ids.tolist()),
            ([*prompt, *reply.token_ids.tolist(), *given], next_reply.token_ids.tolist()),
        ):
            made = causal.generate(
                torch.tensor([told]),
                attention_mask=torch.ones(1, len(told), dtype=torch.long),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=2,
                pad_token_id=0,
            )
            assert made[0, len(told) :].tolist() == wanted


def test_passes_in_bfloat16_are_near_those_in_float32(pair: tuple[Any, HubModel]) -> None:
    model = deepcopy(pair[1])
    tokens, where = make_tokens(2, 9), torch.arange(18)
    with torch.no_grad():
        exact = model.model.compute_hidden_states(tokens, where)
        model.model.pass_settings = PassSettings(torch.bfloat16)
        rounded = model.model.compute_hidden_states(tokens, where)
        cache = model.model.make_cache(2, 9)
        last = model.model.extend(tokens, torch.arange(9).expand(2, 9), torch.ones(2, 9, dtype=torch.bool), cache)
    assert rounded.dtype == last.dtype == cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
    assert float((rounded - exact).norm() / exact.norm()) < 0.1
    assert float((last - exact[[8, 17]]).norm() / exact[[8, 17]].norm()) < 0.1


# ---------------------------------------------------------------------------- our own Qwen2 is the oracle


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen2_through_transformers_is_our_own(tied: bool) -> None:
    ours = make_random_model(
        make_qwen2_shape(tie_word_embeddings=tied, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    )
    theirs = wrapped_twin(ours)
    tokens, where = make_tokens(3, 11, 23), torch.tensor([32, 0, 5, 20])
    slopes = torch.randn(4, 23, generator=torch.Generator().manual_seed(1))
    for model in (ours, theirs):
        (model.lm_head(model.model.compute_hidden_states(tokens, where)) * slopes).sum().backward()
    found = {theirs._hub_names[name]: weight.grad for name, weight in theirs.named_parameters()}
    wanted = {name: weight.grad for name, weight in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient is not None
        close(gradient, wanted[name])  # type: ignore[arg-type]
    assert dict(iter_hub_weights(theirs)).keys() == dict(iter_hub_weights(ours)).keys()
    prompts, thoughts = [[5, 6, 7, 8], [9, 10]], [[20, 21, 22], [20, 21], [11]]
    close(
        compute_cross_scores(theirs, prompts, thoughts).logprob_sums,
        compute_cross_scores(ours, prompts, thoughts).logprob_sums,
    )
    assert replace(theirs.shape, block_weights=()).attention_size == ours.shape.attention_size
    assert sum(theirs.shape.block_weights) == sum(ours.shape.block_weights)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id"):
        assert getattr(theirs.shape, name) == getattr(ours.shape, name)


def test_draws_are_those_of_our_own_qwen2() -> None:
    ours = make_random_model(make_qwen2_shape())
    told = [
        TorchSampler(model)
        .start_conversation([[5, 6], [7]], 3, SamplingParams(1.0, 8, 2), np.random.default_rng(4))
        .sample_replies(range(6), [[]] * 6)
        for model in (ours, wrapped_twin(ours))
    ]
    for one, other in zip(*told, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- files


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    causal = make_model("llama")
    policy = load_policy(str(write_model(causal.to(torch.bfloat16), tmp_path)), CPU)
    found = dict(iter_hub_weights(policy.model))
    assert found.keys() == causal.state_dict().keys()
    for name, weight in causal.state_dict().items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight.float())


def test_a_state_is_put_back_and_a_tied_head_stored_once() -> None:
    _, model = make_wrapped_model("gemma")
    other = HubModel(make_model("gemma", seed=5), model.shape)
    assert "lm_head.weight" in model.state_dict()
    saved = {name: value.clone() for name, value in flatten_state(model).items()}
    assert "lm_head.weight" not in saved
    load_flat_state(other, saved)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_a_qwen2_is_our_own_unless_its_positions_are_scaled(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 320}
    for number, (changes, kind) in enumerate([({}, Qwen2), ({"rope_parameters": yarn}, HubModel)]):
        folder = write_model(make_model("qwen2", ARCHITECTURES["llama"] | changes), tmp_path / str(number))
        assert type(load_policy(str(folder), CPU).model) is kind


def test_every_weight_has_its_name_in_the_files(tmp_path: Path) -> None:
    for kind in ("llama", "gpt_neox"):  # GPT-NeoX's head is embed_out in files, lm_head in transformers
        folder = write_model(make_model(kind), tmp_path / kind)
        assert set(dict(iter_hub_weights(load_policy(str(folder), CPU).model))) == set(read_weight_shapes(folder))


def test_names_without_the_trunks_prefix_are_kept_as_the_files_have_them() -> None:
    causal = make_model("gpt2")
    model = HubModel(causal, make_shape(causal, Path()), ["wte.weight", "h.0.ln_1.weight"])
    names = set(dict(iter_hub_weights(model)))
    assert {"wte.weight", "h.0.ln_1.weight", "lm_head.weight", "transformer.ln_f.weight"} <= names


def test_a_critic_and_a_reference_are_copies_of_their_own() -> None:
    _, model = make_wrapped_model("llama")
    model.model.pass_settings = PassSettings(torch.bfloat16)
    critic = make_critic(Policy(model, None, Path()), np.random.default_rng(0), CPU)  # type: ignore[arg-type]
    reference = make_frozen_copy(model)
    tokens, where = make_tokens(2, 6), torch.tensor([3, 8])
    with torch.no_grad():
        hidden = model.model.compute_hidden_states(tokens, where)
        close(critic.compute_values(tokens, where), hidden.float() @ critic.score.weight[0], 1e-5)
        assert torch.equal(reference.model.compute_hidden_states(tokens, where), hidden)
        assert torch.equal(reference.lm_head(hidden), model.lm_head(hidden))
        next(model.parameters()).zero_()
    assert all(weight.abs().sum() > 0 for weight in (next(critic.parameters()), next(reference.parameters())))
    assert reference.lm_head.weight.dtype == torch.bfloat16
    assert not any(weight.requires_grad for weight in reference.parameters())
    assert all(weight.requires_grad for weight in critic.parameters())


def test_a_tensor_that_the_files_lack_is_named(tmp_path: Path) -> None:
    causal = make_model("llama")
    weights = causal.state_dict()
    weights.pop("model.norm.weight")
    causal.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(
        ValueError, match=r"is incomplete: 1 of its tensors .* \(model\.norm\.weight\)\. Download it again"
    ):
        load_hub_model(tmp_path, [])
