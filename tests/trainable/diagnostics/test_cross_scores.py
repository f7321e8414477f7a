from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from trainable.backend.world import SingleProcess
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.load import load_policy
from trainable.models.qwen2 import Qwen2

# heads, key-value heads, tied head, layers, rotary base
LAYOUTS = [(4, 4, True, 2, 10_000.0), (4, 2, False, 3, 1_000_000.0), (4, 1, True, 1, 500.0), (2, 1, False, 2, 10_000.0)]
Tokens = list[list[int]]


def layout(heads: int, kv_heads: int, tied: bool, layers: int, theta: float) -> Qwen2:
    sizes = make_qwen2_shape(
        hidden_size=32,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        num_hidden_layers=layers,
        rope_theta=theta,
    )
    return make_random_model(sizes, seed=heads + kv_heads, std=0.3)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def model(request: pytest.FixtureRequest) -> Qwen2:
    return layout(*request.param)


@pytest.fixture(scope="module")
def grouped() -> Qwen2:
    return layout(*LAYOUTS[1])


def drawn(rng: np.random.Generator, count: int, most: int, vocab: int = 23) -> Tokens:
    """Sequences of 1 to `most` tokens."""
    return [rng.integers(0, vocab, int(rng.integers(1, most + 1))).tolist() for _ in range(count)]


def alike(rng: np.random.Generator, count: int, most: int) -> Tokens:
    """Sequences over two tokens: some begin alike, some are the beginning of another, some are equal."""
    return drawn(rng, count, most, vocab=2)


def naive(model: Qwen2, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]) -> Tensor:
    """Every pair by itself, as one whole sequence."""
    found = torch.zeros(len(thoughts), len(prompts), dtype=torch.float64)
    with torch.no_grad():
        for row, thought in enumerate(thoughts):
            for column, prompt in enumerate(prompts):
                whole = torch.tensor([[*prompt, *thought]])
                where = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
                logs = model.lm_head(model.model.compute_hidden_states(whole, where)).log_softmax(-1)
                found[row, column] = logs.gather(-1, torch.tensor(thought)[:, None]).double().sum()
    return found


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- the numbers


def test_scores_are_those_of_the_whole_sequences(model: Qwen2) -> None:
    rng = np.random.default_rng(0)
    prompts, thoughts = drawn(rng, 5, 40), [*drawn(rng, 6, 12), *alike(rng, 6, 6)]
    found = compute_cross_scores(model, prompts, thoughts)
    close(found.logprob_sums, naive(model, prompts, thoughts))
    assert found.lengths.tolist() == [len(thought) for thought in thoughts]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_any_lengths_beginnings_repeats_and_limits_give_the_same_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = layout(*LAYOUTS[int(rng.integers(len(LAYOUTS)))])
    prompts, thoughts = drawn(rng, int(rng.integers(1, 5)), 20), alike(rng, int(rng.integers(1, 7)), 7)
    prompts += [prompts[0], [*prompts[0], 3]]
    found = compute_cross_scores(model, prompts, thoughts, max_tokens=int(rng.integers(1, 60)))
    close(found.logprob_sums, naive(model, prompts, thoughts))


def test_a_prompt_and_a_thought_of_one_token_each(grouped: Qwen2) -> None:
    found = compute_cross_scores(grouped, [[4], [9]], [[7]])
    close(found.logprob_sums, naive(grouped, [[4], [9]], [[7]]))
    total = compute_cross_scores(grouped, [[4]], [[token] for token in range(23)]).logprob_sums.exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-5)


def test_thoughts_of_two_tokens_sum_to_the_likelihood_of_the_first(grouped: Qwen2) -> None:
    first = compute_cross_scores(grouped, [[1, 2, 3]], [[5]]).logprob_sums
    pairs = compute_cross_scores(grouped, [[1, 2, 3]], [[5, token] for token in range(23)]).logprob_sums
    close(pairs.logsumexp(0), first[0])


def test_arrays_are_taken_as_lists_are(grouped: Qwen2) -> None:
    prompts, thoughts = [[1, 2], [3]], [[4, 5], [6]]
    arrays = [[np.array(tokens) for tokens in given_] for given_ in (prompts, thoughts)]
    assert torch.equal(
        compute_cross_scores(grouped, *arrays).logprob_sums,
        compute_cross_scores(grouped, prompts, thoughts).logprob_sums,
    )


# ---------------------------------------------------------------------------- what is run


def passes(model: Qwen2, prompts: Tokens, thoughts: Tokens, max_tokens: int = 2048) -> list[int]:
    """Rows times length of every pass through the layers."""
    sizes: list[int] = []
    norm = model.model.blocks[0].input_layernorm
    hook = norm.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[0] * inputs[0].shape[1]))
    compute_cross_scores(model, prompts, thoughts, max_tokens)
    hook.remove()
    return sizes


def test_each_prompt_and_each_beginning_runs_once_and_no_last_token_does(grouped: Qwen2) -> None:
    prompts, thoughts = [[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [7, 8, 1], [7, 2], [3]]
    # Run: 7 and 7 8, after two prompts.
    assert passes(grouped, prompts, thoughts) == [2 * 3, 2 * 2]
    assert passes(grouped, prompts * 3, thoughts * 5) == [2 * 3, 2 * 2]
    assert passes(grouped, prompts, [[3], [4]]) == [2 * 3]


def test_repeated_prompts_and_thoughts_repeat_their_scores(grouped: Qwen2) -> None:
    rng = np.random.default_rng(1)
    prompts, thoughts = drawn(rng, 3, 9), drawn(rng, 4, 6)
    once = compute_cross_scores(grouped, prompts, thoughts).logprob_sums
    again = compute_cross_scores(
        grouped, [prompts[n] for n in (2, 0, 0, 1)], [thoughts[n] for n in (3, 3, 0, 2, 1)]
    ).logprob_sums
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[:, 1], again[:, 2])
    close(again, once[[3, 3, 0, 2, 1]][:, [2, 0, 0, 1]])


@pytest.mark.parametrize("max_tokens", [1, 7, 30, 100])
def test_a_pass_stays_below_the_limit_or_has_one_row(grouped: Qwen2, max_tokens: int) -> None:
    rng = np.random.default_rng(2)
    prompts, thoughts = drawn(rng, 12, 25), drawn(rng, 12, 9)
    single = max(len(tokens) for tokens in [*prompts, *thoughts])
    sizes = passes(grouped, prompts, thoughts, max_tokens)
    assert max(sizes) <= max(max_tokens, single)
    assert len(sizes) > len(passes(grouped, prompts, thoughts))


@pytest.mark.parametrize(("elements", "most"), [(1, 1), (23 * 3, 3), (23 * 11, 11), (10**9, 100)])
def test_long_vocabularies_are_scored_piece_by_piece(
    grouped: Qwen2, elements: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    prompts, thoughts = drawn(rng, 4, 9), [*drawn(rng, 5, 6), *alike(rng, 4, 5)]
    wanted = compute_cross_scores(grouped, prompts, thoughts).logprob_sums
    monkeypatch.setattr("trainable.diagnostics.cross_scores.CHUNK_ELEMENTS", elements)
    held: list[int] = []
    hook = grouped.lm_head.register_forward_hook(lambda _, inputs, out: held.append(out.numel() // 23))
    found = compute_cross_scores(grouped, prompts, thoughts)
    hook.remove()
    states = sum(held)
    assert most >= max(held) > most // 3
    assert states % 4 == 0  # each state of the tree, after each prompt, once
    close(found.logprob_sums, wanted)
    close(found.logprob_sums, naive(grouped, prompts, thoughts))


def test_the_model_is_left_alone_and_no_gradient_is_kept(grouped: Qwen2) -> None:
    before = {name: weight.clone() for name, weight in grouped.named_parameters()}
    for training in (True, False):
        grouped.train(training)
        found = compute_cross_scores(grouped, [[1, 2], [3]], [[4, 5], [6]])
        assert grouped.training == training
        assert not found.logprob_sums.requires_grad
        assert not found.logprob_sums.is_inference()
    for name, weight in grouped.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


def test_nothing_is_made_on_another_device_than_the_model(grouped: Qwen2) -> None:
    """Stands in for a GPU: what is made without naming a device lands on `meta`, where it cannot mix with numbers."""
    prompts, thoughts = [[1, 2, 3], [4]], [[5, 6], [5, 7, 8]]
    wanted = naive(grouped, prompts, thoughts)
    with torch.device("meta"):
        found = compute_cross_scores(grouped, prompts, thoughts).logprob_sums
    close(found, wanted)


# ---------------------------------------------------------------------------- a tree after a cache


def test_a_tree_sees_its_row_and_its_ancestors_and_leaves_the_cache_alone(model: Qwen2) -> None:
    prompts, branches = [[1, 2, 3, 4], [5], [6, 7]], [[8], [8, 9], [8, 9, 1], [8, 2], [3]]
    cache = model.model.make_cache(3, 6)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    steps = torch.arange(4) - (4 - lengths[:, None])
    padded = torch.tensor([[0] * (4 - len(prompt)) + prompt for prompt in prompts])
    sees = torch.tensor([[branch[: len(other)] == other for other in branches] for branch in branches])
    depths = torch.tensor([len(branch) - 1 for branch in branches])
    with torch.inference_mode():
        model.model.extend(padded, steps.clamp_min(0), steps >= 0, cache)
        parts = [*cache.keys, *cache.values, cache.bias]
        before = [part.clone() for part in parts]
        found = model.model.forward_tree(
            torch.tensor([branch[-1] for branch in branches]), depths, sees, lengths, cache
        )
        assert cache.used_slots == 4
        assert all(torch.equal(part, kept) for part, kept in zip(parts, before, strict=True))
        for row, prompt in enumerate(prompts):
            for node, branch in enumerate(branches):
                whole = torch.tensor([prompt + branch])
                close(found[row, node], model.model.compute_hidden_states(whole, torch.tensor([whole.shape[1] - 1]))[0])


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompts", "thoughts", "message"),
    [
        ([[1], []], [[1]], "prompt 1 is empty.*Leave empty ones out"),
        ([[1]], [[2], [3], []], "thought 2 is empty.*Leave empty ones out"),
        ([], [[1]], "there is no prompt"),
        ([[1]], [], "there is no thought"),
    ],
)
def test_what_is_empty_is_refused(grouped: Qwen2, prompts: Tokens, thoughts: Tokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_cross_scores(grouped, prompts, thoughts)


def test_pairs_beyond_the_context_are_refused_by_name(grouped: Qwen2) -> None:
    prompts, thoughts = [[1], [1] * 120], [[2], [2] * 3, [2] * 8]
    assert compute_cross_scores(grouped, prompts, thoughts).logprob_sums.shape == (3, 2)
    with pytest.raises(ValueError, match=r"prompt 1 has 120 tokens and thought 2 has 9, 129 together; .*128"):
        compute_cross_scores(grouped, prompts, [*thoughts[:2], [2] * 9])


def test_a_limit_below_one_is_refused(grouped: Qwen2) -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        compute_cross_scores(grouped, [[1]], [[2]], max_tokens=0)


# ---------------------------------------------------------------------------- the shipped policy


def test_the_shipped_policy_is_scored_as_its_whole_sequences_are() -> None:
    model = load_policy("sokoban-tiny", torch.device("cpu")).model
    rng = np.random.default_rng(4)
    prompts, thoughts = drawn(rng, 4, 120, vocab=193), drawn(rng, 8, 15, vocab=193)
    found = compute_cross_scores(model, prompts, thoughts).logprob_sums
    close(found, naive(model, prompts, thoughts))
    assert (found < 0).all()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_what_ranks_score_sums_to_all_of_it(grouped: Qwen2, size: int) -> None:
    rng = np.random.default_rng(4)
    prompts, thoughts = drawn(rng, 5, 8), alike(rng, 6, 5)  # more ranks than prompts too
    whole = compute_cross_scores(grouped, prompts, thoughts)
    parts = [compute_cross_scores(grouped, prompts, thoughts, world=SingleProcess(rank, size)) for rank in range(size)]
    held = torch.stack([part.logprob_sums != 0 for part in parts]).sum(0)
    assert bool((held == 1).all())  # each by one rank
    torch.testing.assert_close(
        torch.stack([part.logprob_sums for part in parts]).sum(0), whole.logprob_sums, rtol=1e-5, atol=1e-5
    )
    assert all(torch.equal(part.lengths, whole.lengths) for part in parts)
