"""Tests of VllmSampler with real vLLM, on the CPU or another device, with the shipped model and models of its shape."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.engines.devices import DEVICE
from tests.fakes.scripted import make_random_model
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_training_levels
from trainable.envs.prompts import make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.codec import Codec
from trainable.models.load import Policy, load_policy
from trainable.models.qwen2 import Qwen2
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import LM_HEAD_NAME, VllmSampler
from trainable.tiny.policies import SOKOBAN_TINY

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
    # Imports of vLLM raise warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

CONTEXT, STOP, LENGTH = 512, 2, 24
OPTIONS = {"dtype": "float32", "max_model_len": CONTEXT, "kv_cache_memory_bytes": 64 << 20, "enable_sleep_mode": True}


@pytest.fixture(scope="module")
def shipped_policy() -> Policy:
    torch.set_num_threads(1)
    return load_policy("sokoban-tiny", DEVICE)


@pytest.fixture(scope="module")
def random_model() -> Qwen2:
    """Random weights of the shape of the shipped model, with a tied head."""
    return make_random_model(SOKOBAN_TINY.make_shape(), seed=3, std=0.1)


@pytest.fixture(scope="module")
def engine(shipped_policy: Policy) -> Iterator[VllmSampler]:
    sampler = VllmSampler(shipped_policy.folder, DEVICE, **OPTIONS)
    yield sampler
    sampler.close()


@pytest.fixture
def vllm(engine: VllmSampler, shipped_policy: Policy) -> Iterator[VllmSampler]:
    """The engine with the shipped weights, whatever weights the previous test has pushed."""
    engine.update_weights(shipped_policy.model.state_dict().items())
    return engine


# ---------------------------------------------------------------------------- conversations of both samplers

Turn = dict[int, SampledReply]
PROMPTS = [list(range(5, 45)), [9, 9, 150], list(range(100, 171))]
GIVEN_TOKENS = [[3, 4], [5], [6, 7, 8], [9, 9], [1], [3, 3, 3, 3]]
KEPT_ROWS = [range(6), [0, 2, 3, 5], [2, 5]]  # the rows of each turn after the first


def sample_turns(
    sampler: Sampler,
    temperature: float,
    kept_rows: Sequence[Sequence[int]] = KEPT_ROWS,
    seed: int = 7,
    stop: int = STOP,
) -> list[Turn]:
    """Sample replies by row and turn for two copies of PROMPTS. `kept_rows` are the rows of turns after the first."""
    conversation = sampler.start_conversation(
        PROMPTS, SamplingParams(temperature, LENGTH, stop), np.random.default_rng(seed).spawn(6)
    )
    turns = [dict(enumerate(conversation.sample_replies(range(6), [[]] * 6)))]
    given_tokens = ([GIVEN_TOKENS[row] for row in rows] for rows in kept_rows)
    return turns + [
        dict(zip(rows, conversation.sample_replies(rows, new_tokens), strict=True))
        for rows, new_tokens in zip(kept_rows, given_tokens, strict=True)
    ]


def get_token_ids(turns: Sequence[Turn]) -> list[dict[int, list[int]]]:
    return [{row: reply.token_ids.tolist() for row, reply in turn.items()} for turn in turns]


def join_conversation(turns: Sequence[Turn], row: int) -> tuple[list[int], list[bool], list[float]]:
    """Return the tokens of the conversation of a row, which of them were sampled, and the log-probs of those."""
    tokens, mask, logprobs = list(PROMPTS[row // 2]), [False] * len(PROMPTS[row // 2]), []
    for number, turn in enumerate(turns):
        if row not in turn:
            break
        given_tokens = GIVEN_TOKENS[row] if number else []
        reply = turn[row]
        tokens += [*given_tokens, *reply.token_ids.tolist()]
        mask += [False] * len(given_tokens) + [True] * len(reply.token_ids)
        logprobs += reply.logprobs.tolist()
    return tokens, mask, logprobs


@torch.no_grad()
def compute_trainer_logprobs(model: Qwen2, tokens: Sequence[int], mask: Sequence[bool], temperature: float) -> Tensor:
    """Compute the trainer's log-probs (N,) of the N tokens where `mask` is True."""
    sequence = torch.tensor(tokens)
    positions = torch.tensor(mask).nonzero().squeeze(-1)
    logits = model.lm_head(model.model.compute_hidden_states(sequence[None], positions - 1)) / temperature
    return logits.log_softmax(-1).gather(-1, sequence[positions][:, None]).squeeze(-1)


def roll_out(sampler: Sampler, policy: Policy, temperature: float) -> list[Episode]:
    template = make_prompt_template(Sokoban(), "compact", 10)
    player = TurnPlayer(Sokoban(), template, Codec(policy.tokenizer), TurnLimits(5, 2, 10), -0.1, CONTEXT)
    params = SamplingParams(temperature, LENGTH, policy.stop_token)
    rng, luck_rng = np.random.default_rng(0), np.random.default_rng(0)
    return player.roll_out(
        RolloutRequest(make_training_levels(Sokoban(), range(10_000, 10_004)), 6, sampler, params, rng, luck_rng)
    )


def compute_logprob_pairs(model: Qwen2, episodes: Sequence[Episode], temperature: float) -> tuple[Tensor, Tensor]:
    """Return the trainer's and the sampler's log-probs (N,) of all sampled tokens."""
    trainer_logprobs = [
        compute_trainer_logprobs(model, episode.tokens.tolist(), episode.mask.tolist(), temperature)
        for episode in episodes
    ]
    sampler_logprobs = [torch.from_numpy(episode.logprobs[episode.mask]) for episode in episodes]
    return torch.cat(trainer_logprobs), torch.cat(sampler_logprobs)


# ---------------------------------------------------------------------------- tokens


def test_greedy_episodes_equal_those_of_the_torch_sampler(vllm: VllmSampler, shipped_policy: Policy) -> None:
    torch_episodes, vllm_episodes = (
        roll_out(TorchSampler(shipped_policy.model), shipped_policy, 0.0),
        roll_out(vllm, shipped_policy, 0.0),
    )
    assert any(episode.success for episode in torch_episodes)
    for torch_episode, vllm_episode in zip(torch_episodes, vllm_episodes, strict=True):
        assert torch_episode.tokens.tolist() == vllm_episode.tokens.tolist()
        assert (torch_episode.mask.tolist(), torch_episode.stop_reason, torch_episode.turn_rewards) == (
            vllm_episode.mask.tolist(),
            vllm_episode.stop_reason,
            vllm_episode.turn_rewards,
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_first_tokens_follow_the_tempered_distribution(
    vllm: VllmSampler, random_model: Qwen2, temperature: float
) -> None:
    vllm.update_weights(random_model.state_dict().items())
    rows = 3000
    conversation = vllm.start_conversation(
        PROMPTS[:1], SamplingParams(temperature, 1, STOP), np.random.default_rng(0).spawn(rows)
    )
    token_ids = [int(reply.token_ids[0]) for reply in conversation.sample_replies(range(rows), [[]] * rows)]
    with torch.no_grad():
        hidden = random_model.model.compute_hidden_states(
            torch.tensor(PROMPTS[:1]), torch.tensor([len(PROMPTS[0]) - 1])
        )
        probs = (random_model.lm_head(hidden)[0].double() / temperature).softmax(-1).numpy()
    bins = np.searchsorted(np.linspace(0, 1, 13)[1:-1], np.cumsum(probs))  # of at least one token each
    expected_counts = rows * np.bincount(bins, probs, 12)
    counts = np.bincount(bins[token_ids], minlength=12)
    assert expected_counts[expected_counts > 0].min() > 5
    assert stats.chisquare(counts[expected_counts > 0], expected_counts[expected_counts > 0]).pvalue > 0.01


def test_draws_belong_to_the_generator_and_the_row(vllm: VllmSampler, random_model: Qwen2) -> None:
    vllm.update_weights(random_model.state_dict().items())
    all_replies = get_token_ids(sample_turns(vllm, 1.0, kept_rows=[range(6), range(6), range(6)]))
    assert get_token_ids(sample_turns(vllm, 1.0, kept_rows=[range(6), range(6), range(6)])) == all_replies
    assert get_token_ids(sample_turns(vllm, 1.0, kept_rows=[], seed=8))[0] != all_replies[0]
    for turn, full_turn in zip(get_token_ids(sample_turns(vllm, 1.0)), all_replies, strict=True):
        for row, reply in turn.items():
            assert reply == full_turn[row]
    replies = [tuple(reply) for turn in all_replies for reply in turn.values()]
    assert len(set(replies)) == len(replies)  # copies of a prompt differ, and so do the turns of a row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_end_with_the_stop_token_or_at_their_length(
    vllm: VllmSampler, shipped_policy: Policy, temperature: float
) -> None:
    replies = [reply for turn in sample_turns(vllm, temperature) for reply in turn.values()]
    for reply in replies:
        assert STOP not in reply.token_ids[:-1]
        assert reply.finished == (reply.token_ids[-1] == STOP)
        assert reply.finished or len(reply.token_ids) == LENGTH
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.entropies)
        assert (reply.token_ids.dtype, reply.logprobs.dtype, reply.entropies.dtype) == (
            np.int64,
            np.float32,
            np.float32,
        )
    assert any(reply.finished for reply in replies)


def test_only_the_given_token_stops_a_reply(vllm: VllmSampler, shipped_policy: Policy) -> None:
    """The end token of the model does not: base models declare another token than the one that ends a message."""
    assert shipped_policy.model.shape.eos_token_id == STOP
    unused = 4
    replies = [reply for turn in sample_turns(vllm, 1.0, stop=unused) for reply in turn.values()]
    assert any(STOP in reply.token_ids[:-1] for reply in replies)
    assert all(len(reply.token_ids) == LENGTH or reply.token_ids[-1] == unused for reply in replies)


def test_a_conversation_may_fill_the_context(vllm: VllmSampler) -> None:
    params = SamplingParams(1.0, LENGTH, stop_token=4)
    longest = [5 + number % 150 for number in range(CONTEXT - LENGTH)]
    (reply,) = vllm.start_conversation([longest], params, np.random.default_rng(0).spawn(1)).sample_replies([0], [[]])
    assert len(reply.token_ids) == LENGTH


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_changes_are_refused(vllm: VllmSampler, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"give 0 or one from 0.01 to 2"):
        vllm.start_conversation(PROMPTS, SamplingParams(temperature, 1, STOP), np.random.default_rng(0).spawn(3))


# ---------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_equal_those_of_the_trainer(
    vllm: VllmSampler, shipped_policy: Policy, random_model: Qwen2, temperature: float
) -> None:
    trainer_logprobs, sampler_logprobs = compute_logprob_pairs(
        shipped_policy.model, roll_out(vllm, shipped_policy, temperature), temperature or 1.0
    )
    torch.testing.assert_close(sampler_logprobs, trainer_logprobs, rtol=0, atol=1e-4)
    vllm.update_weights(random_model.state_dict().items())
    turns = sample_turns(vllm, temperature)
    for row in range(6):
        tokens, mask, logprobs = join_conversation(turns, row)
        expected = compute_trainer_logprobs(random_model, tokens, mask, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)


def test_logprobs_of_given_tokens_equal_those_of_the_trainer(vllm: VllmSampler, shipped_policy: Policy) -> None:
    rows = [*PROMPTS, [5 + number % 150 for number in range(CONTEXT - 1)]]
    for row, logprobs in zip(rows, vllm.compute_logprobs(rows), strict=True):
        expected = compute_trainer_logprobs(shipped_policy.model, row, [False] + [True] * (len(row) - 1), 1.0)
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------------------- weights


def test_a_push_forgets_the_keys_of_the_old_weights(vllm: VllmSampler, random_model: Qwen2) -> None:
    """The same long prompt before and after a push: the engine could take its keys from the prefix cache."""
    prompt = [5 + number % 150 for number in range(400)]
    params = SamplingParams(0.0, 4, STOP)

    def sample_reply() -> SampledReply:
        return vllm.start_conversation([prompt], params, np.random.default_rng(0).spawn(1)).sample_replies([0], [[]])[0]

    sample_reply()
    vllm.update_weights(random_model.state_dict().items())
    new_reply = sample_reply()
    tokens, mask = [*prompt, *new_reply.token_ids.tolist()], [False] * len(prompt) + [True] * len(new_reply.token_ids)
    torch.testing.assert_close(
        torch.from_numpy(new_reply.logprobs),
        compute_trainer_logprobs(random_model, tokens, mask, 1.0),
        rtol=0,
        atol=1e-4,
    )


def test_a_push_takes_any_order_and_precision(vllm: VllmSampler, shipped_policy: Policy, random_model: Qwen2) -> None:
    weights = [(name, weight.double()) for name, weight in reversed(random_model.state_dict().items())]
    vllm.update_weights(iter(weights))
    (logprobs,) = vllm.compute_logprobs(PROMPTS[:1])
    expected = compute_trainer_logprobs(random_model, PROMPTS[0], [False] + [True] * (len(PROMPTS[0]) - 1), 1.0)
    torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=1e-5, atol=1e-4)


Weights = list[tuple[str, Tensor]]
BIAS = "model.layers.1.self_attn.k_proj.bias"
SPOILED_WEIGHTS: dict[str, Callable[[Weights], Weights]] = {
    f"{LM_HEAD_NAME} was left out": lambda weights: [pair for pair in weights if pair[0] != LM_HEAD_NAME],
    f"{BIAS} was left out": lambda weights: [pair for pair in weights if pair[0] != BIAS],
    f"{BIAS} has shape (31,), not (32,)": lambda weights: [(n, w[:31] if n == BIAS else w) for n, w in weights],
    "model.embed_tokens.weight came twice": lambda weights: [*weights, weights[0]],
    "actor.lm_head.weight is not of this model": lambda weights: [*weights, ("actor.lm_head.weight", weights[0][1])],
}


@pytest.mark.parametrize("fault", SPOILED_WEIGHTS)
def test_an_incomplete_push_is_refused_and_the_next_one_repairs_it(
    vllm: VllmSampler, random_model: Qwen2, fault: str
) -> None:
    """vLLM itself accepts a push with a missing tensor, such as a tied head, and samples from a mixture."""
    expected = compute_trainer_logprobs(random_model, PROMPTS[0], [False] + [True] * (len(PROMPTS[0]) - 1), 1.0)
    weights = [*random_model.state_dict().items()]
    with pytest.raises(ValueError, match=rf"old values of 1 tensors \({re.escape(fault)}\)"):
        vllm.update_weights(SPOILED_WEIGHTS[fault](weights))
    if "left out" in fault:
        (mixed_logprobs,) = vllm.compute_logprobs(PROMPTS[:1])
        assert np.abs(mixed_logprobs - expected.numpy()).max() > 1e-2
    vllm.update_weights(weights)
    (logprobs,) = vllm.compute_logprobs(PROMPTS[:1])
    torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="vLLM sleeps on a GPU only")
def test_sleeping_changes_no_token(vllm: VllmSampler, shipped_policy: Policy) -> None:
    token_ids = get_token_ids(sample_turns(vllm, 1.0))
    vllm.sleep()
    assert vllm.is_sleeping
    vllm.update_weights(shipped_policy.model.state_dict().items())  # a sleeping engine has none
    assert not vllm.is_sleeping
    assert get_token_ids(sample_turns(vllm, 1.0)) == token_ids


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, a real neighbor would have to grow at that moment")
def test_an_engine_whose_neighbor_grows_while_it_falls_asleep_sleeps(
    vllm: VllmSampler, shipped_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real engine and executor, whose worker asserts as it does on a GPU, after it has freed its memory.
    token_ids = get_token_ids(sample_turns(vllm, 1.0))
    executor = vllm.llm.llm_engine.engine_core.engine_core.model_executor
    asked: list[str] = []

    def call_worker(method: str, *arguments: Any, **options: Any) -> Any:
        asked.append(method)
        if method == "sleep":
            raise AssertionError("Memory usage increased after sleeping.")
        return None if method == "wake_up" else call(method, *arguments, **options)

    call = executor.collective_rpc
    monkeypatch.setattr(executor, "collective_rpc", call_worker)
    monkeypatch.setattr(vllm, "can_sleep", True)
    monkeypatch.setattr("trainable.rollout.vllm_sampler._lock_gpu_memory", lambda device: nullcontext())
    vllm.sleep()
    assert (vllm.is_sleeping, executor.is_sleeping) == (True, True)
    vllm.update_weights(shipped_policy.model.state_dict().items())
    assert (vllm.is_sleeping, executor.is_sleeping) == (False, False)
    assert asked.count("wake_up") == 2  # without its tags, vLLM would have skipped both
    assert get_token_ids(sample_turns(vllm, 1.0)) == token_ids


def test_the_build_for_processors_is_refused_on_a_gpu(shipped_policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"does not sample on cuda. Install .*pip install vllm==0.32.0"):
        VllmSampler(shipped_policy.folder, torch.device("cuda"))
