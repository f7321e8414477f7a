from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.layouts import LAYOUTS, make_layout
from tests.strategies.examples import draw_examples
from trainable.backend.world import World
from trainable.diagnostics import cross_scores
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.qwen2 import Qwen2

Tokens = list[list[int]]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def model(request: pytest.FixtureRequest) -> Qwen2:
    return make_layout(*request.param)


@pytest.fixture(scope="module")
def grouped_model() -> Qwen2:
    return make_layout(*LAYOUTS[1])


def draw_sequences(rng: np.random.Generator, count: int, max_length: int, vocab_size: int = 23) -> Tokens:
    """Draw sequences of 1 to `max_length` tokens."""
    return [rng.integers(0, vocab_size, int(rng.integers(1, max_length + 1))).tolist() for _ in range(count)]


def draw_similar_sequences(rng: np.random.Generator, count: int, max_length: int) -> Tokens:
    """Draw sequences of two tokens: some share a beginning, some are the beginning of another, some are equal."""
    return draw_sequences(rng, count, max_length, vocab_size=2)


def score_naively(model: Qwen2, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]) -> Tensor:
    """Score every pair by itself, as one full sequence."""
    scores = torch.zeros(len(thoughts), len(prompts), dtype=torch.float64)
    with torch.no_grad():
        for row, thought in enumerate(thoughts):
            for column, prompt in enumerate(prompts):
                sequence = torch.tensor([[*prompt, *thought]])
                positions = torch.arange(len(prompt) - 1, sequence.shape[1] - 1)
                logs = model.lm_head(model.model.compute_hidden_states(sequence, positions)).log_softmax(-1)
                scores[row, column] = logs.gather(-1, torch.tensor(thought)[:, None]).double().sum()
    return scores


def assert_scores_close(scores: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- scores


@draw_examples(40)
@given(st.integers(0, 2**32 - 1))
def test_any_lengths_beginnings_repeats_and_limits_give_the_same_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_layout(*LAYOUTS[int(rng.integers(len(LAYOUTS)))])
    prompts = draw_sequences(rng, int(rng.integers(1, 5)), 20)
    thoughts = draw_similar_sequences(rng, int(rng.integers(1, 7)), 7)
    prompts += [prompts[0], [*prompts[0], 3]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_scores, "PASS_TOKENS", int(rng.integers(1, 60)))
        scores = compute_cross_scores(model, prompts, thoughts)
    assert_scores_close(scores, score_naively(model, prompts, thoughts))


# ---------------------------------------------------------------------------- passes


def record_pass_sizes(model: Qwen2, prompts: Tokens, thoughts: Tokens, max_tokens: int = 2048) -> list[int]:
    """Return the number of rows times the length of every pass through the layers."""
    sizes: list[int] = []
    norm = model.model.blocks[0].input_layernorm
    hook = norm.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[0] * inputs[0].shape[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_scores, "PASS_TOKENS", max_tokens)
        compute_cross_scores(model, prompts, thoughts)
    hook.remove()
    return sizes


def test_each_prompt_and_each_beginning_runs_once_and_no_last_token_does(grouped_model: Qwen2) -> None:
    prompts, thoughts = [[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [7, 8, 1], [7, 2], [3]]
    # The beginnings 7 and 7 8 are run after each of the two prompts.
    assert record_pass_sizes(grouped_model, prompts, thoughts) == [2 * 3, 2 * 2]
    assert record_pass_sizes(grouped_model, prompts * 3, thoughts * 5) == [2 * 3, 2 * 2]
    assert record_pass_sizes(grouped_model, prompts, [[3], [4]]) == [2 * 3]


@pytest.mark.parametrize("max_tokens", [1, 7, 30, 100])
def test_a_pass_stays_below_the_limit_or_has_one_row(grouped_model: Qwen2, max_tokens: int) -> None:
    rng = np.random.default_rng(2)
    prompts, thoughts = draw_sequences(rng, 12, 25), draw_sequences(rng, 12, 9)
    longest = max(len(tokens) for tokens in [*prompts, *thoughts])
    sizes = record_pass_sizes(grouped_model, prompts, thoughts, max_tokens)
    assert max(sizes) <= max(max_tokens, longest)
    assert len(sizes) > len(record_pass_sizes(grouped_model, prompts, thoughts))


@pytest.mark.parametrize(("elements", "max_rows"), [(1, 1), (23 * 3, 3), (23 * 11, 11), (10**9, 100)])
def test_long_vocabularies_are_scored_piece_by_piece(
    grouped_model: Qwen2, elements: int, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    prompts, thoughts = draw_sequences(rng, 4, 9), [*draw_sequences(rng, 5, 6), *draw_similar_sequences(rng, 4, 5)]
    expected = compute_cross_scores(grouped_model, prompts, thoughts)
    monkeypatch.setattr("trainable.diagnostics.cross_scores.CHUNK_ELEMENTS", elements)
    row_counts: list[int] = []
    hook = grouped_model.lm_head.register_forward_hook(lambda _, inputs, out: row_counts.append(out.numel() // 23))
    scores = compute_cross_scores(grouped_model, prompts, thoughts)
    hook.remove()
    num_states = sum(row_counts)
    assert max_rows >= max(row_counts) > max_rows // 3
    assert num_states % 4 == 0  # each state of the tree is scored once after each of the four prompts
    assert_scores_close(scores, expected)
    assert_scores_close(scores, score_naively(grouped_model, prompts, thoughts))


def test_all_tensors_are_on_the_device_of_the_model(grouped_model: Qwen2) -> None:
    """A test without a GPU: tensors made without a device are on `meta`, where they cannot be mixed with others."""
    prompts, thoughts = [[1, 2, 3], [4]], [[5, 6], [5, 7, 8]]
    expected = score_naively(grouped_model, prompts, thoughts)
    with torch.device("meta"):
        scores = compute_cross_scores(grouped_model, prompts, thoughts)
    assert_scores_close(scores, expected)


# ---------------------------------------------------------------------------- a tree after a cache


# ---------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("size", [2, 3, 9])
def test_scores_of_ranks_sum_to_all_scores(grouped_model: Qwen2, size: int) -> None:
    rng = np.random.default_rng(4)
    # There can be more ranks than prompts.
    prompts, thoughts = draw_sequences(rng, 5, 8), draw_similar_sequences(rng, 6, 5)
    all_scores = compute_cross_scores(grouped_model, prompts, thoughts)
    worlds = [World(rank, size) for rank in range(size)]
    rank_scores = [compute_cross_scores(grouped_model, prompts, thoughts, world=world) for world in worlds]
    num_ranks = torch.stack([scores != 0 for scores in rank_scores]).sum(0)
    assert bool((num_ranks == 1).all())  # each pair is scored by exactly one rank
    torch.testing.assert_close(torch.stack(rank_scores).sum(0), all_scores, rtol=1e-5, atol=1e-5)
