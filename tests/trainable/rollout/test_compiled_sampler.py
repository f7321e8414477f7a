"""The compiled sampler against torch: its kernels, whole conversations of many shapes, and the shipped policies."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from search_spaces.language_model.family import PPO
from tests.fakes.scripted import make_qwen2_shape, make_random_model
from tests.strategies.examples import thin_out
from trainable.config.constants import SHIPPED_MODELS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.sections import ModelConfig
from trainable.kernels import compiled as kernels
from trainable.models.lora import make_adapted_policy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.compiled_sampler import CompiledSampler, make_scratch
from trainable.rollout.episode import Episode
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler, sample_tokens

Floats = npt.NDArray[np.float32]


def draw_floats(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------------------- kernels


@given(rows=st.integers(1, 13), inputs=st.integers(1, 9), outputs=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_product_is_that_of_numpy_in_the_rows_that_count(rows: int, inputs: int, outputs: int, seed: int) -> None:
    x, weight = draw_floats(16, 4 * inputs, seed=seed), draw_floats(4 * inputs, outputs, seed=seed + 1)
    y = np.full((16, outputs), np.nan, dtype=np.float32)
    kernels.multiply(x, weight, y, rows)
    np.testing.assert_allclose(y[:rows], x[:rows] @ weight, rtol=1e-5, atol=1e-5)
    assert np.isnan(y[-(-rows // kernels.TILE_ROWS) * kernels.TILE_ROWS :]).all()


@pytest.mark.parametrize(
    ("rows", "vectors", "chains"), [(8, 2, 1), (4, 1, 1), (2, 2, 2), (2, 1, 2)], ids=["wide", "narrow", "pair", "slim"]
)
def test_a_tile_is_the_product_of_its_inputs_and_nothing_else(rows: int, vectors: int, chains: int) -> None:
    # The tiles of processors with and without wide registers; `x` may be transposed.
    multiply_tile, columns = kernels.make_tile_product(rows, vectors, chains), vectors * kernels.VECTOR

    @njit
    def multiply(x: Floats, weight: Floats, y: Floats, start: int, end: int) -> None:
        multiply_tile(x, weight, y, 1, 3, start, end)

    weight = draw_floats(12, columns + 5)
    for x in (draw_floats(rows + 2, 12, seed=1), draw_floats(12, rows + 2, seed=2).T):
        for start, end in ((0, 12), (2, 6), (4, 4)):
            y = np.full((rows + 2, columns + 5), np.nan, dtype=np.float32)
            multiply(x, weight, y, start, end)
            expected = np.full_like(y, np.nan)
            expected[1:-1, 3:-2] = x[1:-1, start:end] @ weight[start:end, 3:-2]
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_the_exponential_is_that_of_numpy_to_the_last_bits() -> None:
    x = draw_floats(37)
    expected = np.exp(x[:35].astype(np.float64) - 1.5)
    total = kernels.exponentiate(x, 35, np.float32(1.5))
    np.testing.assert_allclose(x[:35], expected, rtol=2e-6)
    assert total == pytest.approx(expected.sum(), rel=1e-6)
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    kernels.exponentiate(x, len(x), np.float32(0))
    np.testing.assert_allclose(x, expected, rtol=2e-7)
    x = np.array([0, -87.5, -1e30, -np.inf, np.nan, 7], dtype=np.float32)
    kernels.exponentiate(x, 5, np.float32(0))
    np.testing.assert_array_equal(x, np.array([1, 0, 0, 0, np.nan, 7], dtype=np.float32))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=40), st.data())
def test_the_maximum_is_that_of_numpy(numbers: list[float], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(numbers)))
    x = np.array(numbers, dtype=np.float32)
    assert kernels.find_maximum(x, length) == x[:length].max()


def draw_compiled(logits: Sequence[float], temperature: float, uniform: float) -> tuple[int, float, float]:
    scratch = make_scratch(make_qwen2_shape(vocab_size=len(logits)), 4)
    row = np.array(logits, dtype=np.float32)
    return kernels.draw_token(row, np.float32(temperature), np.float32(uniform), scratch.scores[0])


BELOW_ONE = 1 - 2**-24


@given(
    logits=st.lists(st.one_of(st.just(-np.inf), st.floats(-90, 90, width=32)), min_size=1, max_size=30).filter(
        lambda logits: max(logits) > -np.inf
    ),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    uniform=st.one_of(st.sampled_from([0.0, 0.5, BELOW_ONE]), st.floats(0, BELOW_ONE, width=32)),
)
def test_a_draw_is_that_of_the_torch_sampler(logits: list[float], temperature: float, uniform: float) -> None:
    rows, uniforms = torch.tensor([logits], dtype=torch.float32), torch.tensor([uniform], dtype=torch.float32)
    columns = sample_tokens(rows, temperature, uniforms)
    expected_token, expected_logprob, expected_entropy = (column.item() for column in columns)
    token, logprob, entropy = draw_compiled(logits, temperature, uniform)
    if token != expected_token and temperature == 0:  # equal log-probs in torch, which takes the first one
        assert logits[token] == pytest.approx(logits[int(expected_token)], rel=1e-6, abs=1e-6)
    elif token != expected_token:  # the draw is at the boundary of two tokens, up to rounding
        cumulative = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0).cumsum(0).numpy()
        first, last = sorted((token, int(expected_token)))
        assert np.abs(cumulative[first:last] - uniform).max() < 1e-6
    else:
        assert logprob == pytest.approx(expected_logprob, rel=1e-5, abs=1e-5)
    assert entropy == pytest.approx(expected_entropy, rel=1e-5, abs=1e-5)


# ---------------------------------------------------------------------------- conversations of many shapes


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [9], [10, 11, 3]]
REPLY_TOKENS = 7


def plan_turns(turns: int, num_rows: int) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Rows of each turn and their observations: observations of unequal lengths, and fewer rows in each turn."""
    rows = list(range(num_rows))
    observations: list[list[int]] = [[] for _ in rows]
    for turn in range(turns):
        yield rows, observations
        rows = rows[turn % 2 :] or rows
        observations = [[3 + (row + turn) % 9] * (1 + (row * 7 + turn) % 5) for row in rows]


def play_turns(sampler: Sampler, temperature: float, turns: int, copies: int = 3) -> list[list[SampledReply]]:
    """Replies of each turn of `plan_turns`, to prompts of unequal lengths."""
    params = SamplingParams(temperature, REPLY_TOKENS, 2)
    num_rows = len(PROMPTS) * copies
    conversation = sampler.start_conversation(PROMPTS, params, np.random.default_rng(3).spawn(num_rows))
    return [conversation.sample_replies(*turn) for turn in plan_turns(turns, num_rows)]


def compute_distance_to_boundary(
    model: Qwen2, context: Sequence[int], temperature: float, uniform: float, tokens: tuple[int, int]
) -> float:
    """How far a draw is from the boundaries between two tokens, of which two samplers chose one each."""
    with torch.no_grad():
        hidden = model.model.compute_hidden_states(torch.tensor([context]), torch.tensor([len(context) - 1]))
        logits = model.lm_head(hidden)[0].double()
    cumulative = logits.div(temperature).softmax(0).cumsum(0).numpy()
    first, last = sorted(tokens)
    return float(np.abs(cumulative[first:last] - uniform).max())


SHAPES = [
    {},
    {"num_key_value_heads": 2},
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},  # groups of three heads
    {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 3},
    {"hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 4, "vocab_size": 97},
    {"tie_word_embeddings": False, "num_hidden_layers": 1},
]


def check_conversations(model: Qwen2, temperature: float, turns: int, copies: int) -> None:
    """Check that the compiled sampler plays as the torch sampler does, up to draws at the boundary of two tokens."""
    prompts = [prompt for prompt in PROMPTS for _ in range(copies)]
    contexts, row_rngs = [list(prompt) for prompt in prompts], np.random.default_rng(3).spawn(len(prompts))
    differing_rows: set[int] = set()
    for (rows, observations), expected, actual in zip(
        plan_turns(turns, len(prompts)),
        play_turns(TorchSampler(model), temperature, turns, copies),
        play_turns(CompiledSampler(model), temperature, turns, copies),
        strict=True,
    ):
        for row, observation, expected_reply, reply in zip(rows, observations, expected, actual, strict=True):
            uniforms = row_rngs[row].random(REPLY_TOKENS, dtype=np.float32)
            if row in differing_rows:
                continue
            contexts[row] += observation
            tokens, expected_tokens = reply.token_ids.tolist(), expected_reply.token_ids.tolist()
            length = len(tokens)
            if tokens != expected_tokens:  # a draw at the boundary of two tokens, up to rounding
                length = next(
                    i for i, pair in enumerate(zip(tokens, expected_tokens, strict=False)) if pair[0] != pair[1]
                )
                context, pair = contexts[row] + tokens[:length], (tokens[length], expected_tokens[length])
                assert compute_distance_to_boundary(model, context, temperature, uniforms[length], pair) < 1e-5
                differing_rows.add(row)
            else:
                assert reply.finished == expected_reply.finished
            contexts[row] += tokens
            for name in ("logprobs", "entropies"):
                numbers, expected_numbers = getattr(reply, name)[:length], getattr(expected_reply, name)[:length]
                np.testing.assert_allclose(numbers, expected_numbers, rtol=1e-5, atol=2e-5)
    assert len(differing_rows) <= 1


@pytest.mark.parametrize("temperature", thin_out([1.0, 0.5, 0.0], 2))
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_conversations_are_those_of_the_torch_sampler(sizes: dict[str, object], temperature: float) -> None:
    model = make_random_model(make_qwen2_shape(**sizes), seed=5, std=0.25)
    check_conversations(model, temperature, turns=14, copies=3)  # enough turns for the cache to grow


@pytest.mark.parametrize("sampler_class", [TorchSampler, CompiledSampler])
def test_a_reply_ends_at_each_of_the_stop_tokens(sampler_class: type[TorchSampler] | type[CompiledSampler]) -> None:
    model = make_random_model(make_qwen2_shape(), seed=5, std=0.25)

    def sample(*other_stop_tokens: int) -> list[SampledReply]:
        params = SamplingParams(1.0, REPLY_TOKENS, 2, other_stop_tokens)
        rngs = np.random.default_rng(3).spawn(8 * len(PROMPTS))
        conversation = sampler_class(model).start_conversation(PROMPTS, params, rngs)
        return conversation.sample_replies(range(len(rngs)), [[]] * len(rngs))

    whole = sample()
    # The two tokens that occur in most replies before their end.
    counts = np.bincount(np.concatenate([np.unique(reply.token_ids[:-1]) for reply in whole]))
    counts[2] = 0
    others = {int(token) for token in np.argsort(-counts)[:2]}
    num_cut = 0
    for reply, expected in zip(sample(*others), whole, strict=True):
        tokens = expected.token_ids.tolist()
        length = next((place for place, token in enumerate(tokens, 1) if token in others), len(tokens))
        num_cut += length < len(tokens)
        assert reply.token_ids.tolist() == tokens[:length]
        np.testing.assert_allclose(reply.logprobs, expected.logprobs[:length], atol=1e-6)
        # After another token than the end marker, the next message has to begin with the marker.
        assert reply.finished == (tokens[length - 1] == 2)
    assert num_cut > 8


def test_more_rows_than_are_sampled_together() -> None:
    assert kernels.BLOCK_TOKENS * len(PROMPTS) > 2 * kernels.BLOCK_TOKENS
    model = make_random_model(make_qwen2_shape(), seed=5, std=0.25)
    check_conversations(model, 1.0, turns=3, copies=kernels.BLOCK_TOKENS)


def test_a_conversation_has_the_weights_of_its_start() -> None:
    model = make_random_model(make_qwen2_shape(), seed=5, std=0.25)
    params = SamplingParams(0.0, 7, 2)
    first, second = (
        CompiledSampler(model).start_conversation([[5, 6]], params, np.random.default_rng(0).spawn(1)) for _ in range(2)
    )
    expected = first.sample_replies([0], [[]])[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1)
    assert second.sample_replies([0], [[]])[0].token_ids.tolist() == expected.token_ids.tolist()
    changed = CompiledSampler(model).start_conversation([[5, 6]], params, np.random.default_rng(0).spawn(1))
    assert changed.sample_replies([0], [[]])[0].token_ids.tolist() != expected.token_ids.tolist()


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    sampler = CompiledSampler(make_random_model(make_qwen2_shape()))
    for token in (-1, 23):
        with pytest.raises(IndexError, match="the model has 23 embeddings"):
            sampler.start_conversation([[5, token]], SamplingParams(0.0, 7, 2), np.random.default_rng(0).spawn(1))


def test_adapters_are_refused() -> None:
    settings = ModelConfig(lora_rank=2, lora_target_modules=("up_proj",))
    adapted = make_adapted_policy(make_random_model(make_qwen2_shape()), settings, np.random.default_rng(0))
    with pytest.raises(ValueError, match="does not support LoRA adapters"):
        CompiledSampler(adapted)


def test_the_stored_machine_code_names_no_class_of_ours() -> None:
    # numba could not read its files after such a class was renamed or moved.
    play_turns(CompiledSampler(make_random_model(make_qwen2_shape())), 1.0, 2)
    for kernel in (kernels.extend, kernels.sample_turn):
        assert kernel.signatures  # type: ignore[attr-defined]
        assert "NamedTuple" not in str(kernel.signatures)  # type: ignore[attr-defined]


def test_a_model_of_other_sizes_is_refused() -> None:
    message = "its largest matrix has 4,800,000 elements, .* Sample in torch with --set rollout.name=torch"
    with pytest.raises(ValueError, match=message):
        CompiledSampler(Qwen2(make_qwen2_shape(vocab_size=300_000)))


# ---------------------------------------------------------------------------- the shipped policies


def roll_out_first_step(model: str, game: str, sampler: str) -> list[Episode]:
    settings = {**PPO.presets["laptop"].settings, **PPO.make_game_settings(game, "laptop"), "rollout.name": sampler}
    trainer = PPOTrainer(apply_overrides(RunConfig(), {**settings, "trainer.total_training_steps": 1}))
    assert trainer.config.model.path == model
    return trainer.roll_out(trainer.levels[0], trainer.config.env.group_size, "sampling")


@pytest.mark.long
@pytest.mark.parametrize("model", thin_out(SHIPPED_MODELS, 4))
def test_first_rollouts_of_shipped_policies_have_the_tokens_of_the_torch_sampler(model: str) -> None:
    game = model.removesuffix("-tiny")
    expected, actual = (roll_out_first_step(model, game, sampler) for sampler in ("torch", "compiled"))
    pairs = list(zip(expected, actual, strict=True))
    equal_pairs = [pair for pair in pairs if np.array_equal(pair[0].tokens, pair[1].tokens)]
    assert len(pairs) == 128
    assert len(equal_pairs) >= 127
    for torch_episode, episode in equal_pairs:
        np.testing.assert_allclose(episode.logprobs, torch_episode.logprobs, rtol=0, atol=5e-5)
        np.testing.assert_allclose(episode.entropies, torch_episode.entropies, rtol=0, atol=5e-5)
