"""VllmSampler on real vLLM, on the processor, with the shipped model and models of its shape."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.fakes.scripted import make_random_model
from trainable.envs.sokoban.level_sets import make_training_levels
from trainable.envs.sokoban.prompt import make_prompt_template
from trainable.models.load import Policy, load_policy, make_codec
from trainable.models.qwen2 import Qwen2
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.episode_loop import EpisodeLimits, roll_out_episodes
from trainable.rollout.logprob_mismatch import EngineMismatchError, check_mismatch, measure_mismatch
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.rollout.vllm_sampler import LM_HEAD_NAME, EngineSettings, VllmSampler
from trainable.tiny.recipe import make_shape

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
    # vLLM's own imports warn.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

CPU = torch.device("cpu")
CONTEXT, STOP, LENGTH = 512, 2, 24
SETTINGS = EngineSettings(CPU, "float32", CONTEXT, kv_cache_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def shipped() -> Policy:
    torch.set_num_threads(1)
    return load_policy("sokoban-tiny", CPU)


@pytest.fixture(scope="module")
def other() -> Qwen2:
    """Random weights of the shipped model's shape, tied head."""
    return make_random_model(make_shape(), seed=3, std=0.1)


@pytest.fixture(scope="module")
def engine(shipped: Policy) -> Iterator[VllmSampler]:
    sampler = VllmSampler(shipped.folder, SETTINGS)
    yield sampler
    sampler.close()


@pytest.fixture
def vllm(engine: VllmSampler, shipped: Policy) -> Iterator[VllmSampler]:
    """The engine with the shipped weights, whatever the test before pushed."""
    engine.update_weights(shipped.model.state_dict().items())
    return engine


# ---------------------------------------------------------------------------- what both samplers are asked

Turn = dict[int, SampledReply]
PROMPTS = [list(range(5, 45)), [9, 9, 150], list(range(100, 171))]
GIVEN = [[3, 4], [5], [6, 7, 8], [9, 9], [1], [3, 3, 3, 3]]
KEPT = [range(6), [0, 2, 3, 5], [2, 5]]  # rows of each turn after the first


def talk(
    sampler: Sampler, temperature: float, kept: Sequence[Sequence[int]] = KEPT, seed: int = 7, stop: int = STOP
) -> list[Turn]:
    """Replies by row, a turn each, of two copies of PROMPTS; `kept` are the rows of the turns after the first."""
    conversation = sampler.start_conversation(
        PROMPTS, 2, SamplingParams(temperature, LENGTH, stop), np.random.default_rng(seed)
    )
    turns = [dict(enumerate(conversation.sample_replies(range(6), [[]] * 6)))]
    given = ([GIVEN[row] for row in rows] for rows in kept)
    return turns + [
        dict(zip(rows, conversation.sample_replies(rows, new), strict=True))
        for rows, new in zip(kept, given, strict=True)
    ]


def ids(turns: Sequence[Turn]) -> list[dict[int, list[int]]]:
    return [{row: reply.token_ids.tolist() for row, reply in turn.items()} for turn in turns]


def seen(turns: Sequence[Turn], row: int) -> tuple[list[int], list[bool], list[float]]:
    """The row's whole conversation: tokens, which were sampled, and the log-probs of those."""
    tokens, mask, logprobs = list(PROMPTS[row // 2]), [False] * len(PROMPTS[row // 2]), []
    for number, turn in enumerate(turns):
        if row not in turn:
            break
        new = GIVEN[row] if number else []
        reply = turn[row]
        tokens += [*new, *reply.token_ids.tolist()]
        mask += [False] * len(new) + [True] * len(reply.token_ids)
        logprobs += reply.logprobs.tolist()
    return tokens, mask, logprobs


@torch.no_grad()
def trainers(model: Qwen2, tokens: Sequence[int], mask: Sequence[bool], temperature: float) -> Tensor:
    """The trainer's log-probs (N,) of the N tokens where `mask` is True."""
    sequence = torch.tensor(tokens)
    where = torch.tensor(mask).nonzero().squeeze(-1)
    logits = model.lm_head(model.model.compute_hidden_states(sequence[None], where - 1)) / temperature
    return logits.log_softmax(-1).gather(-1, sequence[where][:, None]).squeeze(-1)


def episodes(sampler: Sampler, policy: Policy, temperature: float) -> list[Episode]:
    return roll_out_episodes(
        make_training_levels(0, 1, 4),
        6,
        sampler,
        make_prompt_template("compact", "grid", 10),
        make_codec(policy.tokenizer),
        EpisodeLimits(5, 2, 10, -0.1, CONTEXT),
        SamplingParams(temperature, LENGTH, policy.stop_token),
        np.random.default_rng(0),
    )


def played(model: Qwen2, found: Sequence[Episode], temperature: float) -> tuple[Tensor, Tensor]:
    """The trainer's and the sampler's log-probs (N,) of all sampled tokens."""
    ours = [trainers(model, episode.tokens.tolist(), episode.mask.tolist(), temperature) for episode in found]
    theirs = [torch.from_numpy(episode.logprobs[episode.mask]) for episode in found]
    return torch.cat(ours), torch.cat(theirs)


# ---------------------------------------------------------------------------- tokens


def test_greedy_tokens_are_the_torch_samplers(vllm: VllmSampler, shipped: Policy, other: Qwen2) -> None:
    assert ids(talk(vllm, 0.0)) == ids(talk(TorchSampler(shipped.model), 0.0))
    vllm.update_weights(other.state_dict().items())
    found = ids(talk(vllm, 0.0))
    assert found == ids(talk(TorchSampler(other), 0.0))
    assert len({token for turn in found for reply in turn.values() for token in reply}) > 5


def test_greedy_episodes_are_the_torch_samplers(vllm: VllmSampler, shipped: Policy) -> None:
    ours, theirs = episodes(TorchSampler(shipped.model), shipped, 0.0), episodes(vllm, shipped, 0.0)
    assert any(episode.solved for episode in ours)
    for one, two in zip(ours, theirs, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert (one.mask.tolist(), one.stop_reason, one.turn_rewards) == (
            two.mask.tolist(),
            two.stop_reason,
            two.turn_rewards,
        )


def test_sampled_episodes_are_whole(vllm: VllmSampler, shipped: Policy) -> None:
    found = episodes(vllm, shipped, 1.0)
    assert len({episode.stop_reason for episode in found}) > 1
    assert StopReason.SOLVED in {episode.stop_reason for episode in found}
    assert len({episode.texts for episode in found}) > 12
    for episode in found:
        assert np.isnan(episode.entropies[episode.mask]).all()
        assert not episode.entropies[~episode.mask].any()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_first_tokens_follow_the_tempered_distribution(vllm: VllmSampler, other: Qwen2, temperature: float) -> None:
    vllm.update_weights(other.state_dict().items())
    rows = 3000
    talker = vllm.start_conversation(PROMPTS[:1], rows, SamplingParams(temperature, 1, STOP), np.random.default_rng(0))
    drawn = [int(reply.token_ids[0]) for reply in talker.sample_replies(range(rows), [[]] * rows)]
    with torch.no_grad():
        hidden = other.model.compute_hidden_states(torch.tensor(PROMPTS[:1]), torch.tensor([len(PROMPTS[0]) - 1]))
        probs = (other.lm_head(hidden)[0].double() / temperature).softmax(-1).numpy()
    bins = np.searchsorted(np.linspace(0, 1, 13)[1:-1], np.cumsum(probs))  # of at least one token each
    wanted = rows * np.bincount(bins, probs, 12)
    counts = np.bincount(bins[drawn], minlength=12)
    assert wanted[wanted > 0].min() > 5
    assert stats.chisquare(counts[wanted > 0], wanted[wanted > 0]).pvalue > 0.01


def test_draws_belong_to_the_generator_and_the_row(vllm: VllmSampler, other: Qwen2) -> None:
    vllm.update_weights(other.state_dict().items())
    everyone = ids(talk(vllm, 1.0, kept=[range(6), range(6), range(6)]))
    assert ids(talk(vllm, 1.0, kept=[range(6), range(6), range(6)])) == everyone
    assert ids(talk(vllm, 1.0, kept=[], seed=8))[0] != everyone[0]
    for turn, full in zip(ids(talk(vllm, 1.0)), everyone, strict=True):
        for row, reply in turn.items():
            assert reply == full[row]
    replies = [tuple(reply) for turn in everyone for reply in turn.values()]
    assert len(set(replies)) == len(replies)  # copies of a prompt differ, and a row's turns


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_end_with_the_stop_token_or_at_their_length(
    vllm: VllmSampler, shipped: Policy, temperature: float
) -> None:
    replies = [reply for turn in talk(vllm, temperature) for reply in turn.values()]
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


def test_only_the_given_token_stops_a_reply(vllm: VllmSampler, shipped: Policy) -> None:
    """The model's own end does not: base models name another than the one that ends a message."""
    assert shipped.model.shape.eos_token_id == STOP
    unused = 4
    replies = [reply for turn in talk(vllm, 1.0, stop=unused) for reply in turn.values()]
    assert any(STOP in reply.token_ids[:-1] for reply in replies)
    assert all(len(reply.token_ids) == LENGTH or reply.token_ids[-1] == unused for reply in replies)


def test_a_conversation_may_fill_the_context_and_no_more(vllm: VllmSampler, shipped: Policy) -> None:
    params = SamplingParams(1.0, LENGTH, stop_token=4)
    longest = [5 + number % 150 for number in range(CONTEXT - LENGTH)]
    (reply,) = vllm.start_conversation([longest], 1, params, np.random.default_rng(0)).sample_replies([0], [[]])
    assert len(reply.token_ids) == LENGTH
    talker = vllm.start_conversation([longest], 1, params, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"take 513, and vLLM was started for 512.*rollout.max_model_len=513"):
        talker.sample_replies([0], [[7]])


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_changes_are_refused(vllm: VllmSampler, temperature: float) -> None:
    with pytest.raises(ValueError, match=r"give 0 or one from 0.01 to 2"):
        vllm.start_conversation(PROMPTS, 1, SamplingParams(temperature, 1, STOP), np.random.default_rng(0))


# ---------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_are_the_trainers(vllm: VllmSampler, shipped: Policy, other: Qwen2, temperature: float) -> None:
    ours, theirs = played(shipped.model, episodes(vllm, shipped, temperature), temperature or 1.0)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    vllm.update_weights(other.state_dict().items())
    turns = talk(vllm, temperature)
    for row in range(6):
        tokens, mask, logprobs = seen(turns, row)
        wanted = trainers(other, tokens, mask, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=1e-4)


def test_logprobs_of_given_tokens_are_the_trainers(vllm: VllmSampler, shipped: Policy) -> None:
    rows = [*PROMPTS, [5 + number % 150 for number in range(CONTEXT - 1)]]
    for row, found in zip(rows, vllm.compute_logprobs(rows), strict=True):
        wanted = trainers(shipped.model, row, [False] + [True] * (len(row) - 1), 1.0)
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------------------- weights


def moved(model: Qwen2) -> Qwen2:
    """A copy one small step away."""
    copy = Qwen2(model.shape)
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in copy.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return copy


def test_logprobs_follow_a_push_and_nothing_else(vllm: VllmSampler, shipped: Policy) -> None:
    trained = moved(shipped.model)
    before = measure_mismatch(*played(trained, episodes(vllm, shipped, 1.0), 1.0))
    with pytest.raises(EngineMismatchError, match="samples from other weights"):
        check_mismatch(before.mean_abs, 0.05, step=3)
    vllm.update_weights(trained.state_dict().items())
    after = measure_mismatch(*played(trained, episodes(vllm, shipped, 1.0), 1.0))
    check_mismatch(after.mean_abs, 1e-4, step=3)
    assert after.ess_fraction > 0.999 > before.ess_fraction


def test_a_push_forgets_the_keys_of_the_old_weights(vllm: VllmSampler, other: Qwen2) -> None:
    """One long prompt, before and after: the engine would take its keys from the prefix cache."""
    prompt = [5 + number % 150 for number in range(400)]
    params = SamplingParams(0.0, 4, STOP)

    def reply() -> SampledReply:
        return vllm.start_conversation([prompt], 1, params, np.random.default_rng(0)).sample_replies([0], [[]])[0]

    reply()
    vllm.update_weights(other.state_dict().items())
    found = reply()
    tokens, mask = [*prompt, *found.token_ids.tolist()], [False] * len(prompt) + [True] * len(found.token_ids)
    torch.testing.assert_close(torch.from_numpy(found.logprobs), trainers(other, tokens, mask, 1.0), rtol=0, atol=1e-4)


def test_a_push_takes_any_order_and_precision(vllm: VllmSampler, shipped: Policy, other: Qwen2) -> None:
    weights = [(name, weight.double()) for name, weight in reversed(other.state_dict().items())]
    vllm.update_weights(iter(weights))
    (found,) = vllm.compute_logprobs(PROMPTS[:1])
    wanted = trainers(other, PROMPTS[0], [False] + [True] * (len(PROMPTS[0]) - 1), 1.0)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-4)


Weights = list[tuple[str, Tensor]]
BIAS = "model.layers.1.self_attn.k_proj.bias"
SPOILED: dict[str, Callable[[Weights], Weights]] = {
    f"{LM_HEAD_NAME} was left out": lambda weights: [pair for pair in weights if pair[0] != LM_HEAD_NAME],
    f"{BIAS} was left out": lambda weights: [pair for pair in weights if pair[0] != BIAS],
    f"{BIAS} has shape (31,), not (32,)": lambda weights: [(n, w[:31] if n == BIAS else w) for n, w in weights],
    "model.embed_tokens.weight came twice": lambda weights: [*weights, weights[0]],
    "actor.lm_head.weight is not of this model": lambda weights: [*weights, ("actor.lm_head.weight", weights[0][1])],
}


@pytest.mark.parametrize("amiss", SPOILED)
def test_a_push_that_is_not_whole_is_refused_and_the_next_one_mends_it(
    vllm: VllmSampler, other: Qwen2, amiss: str
) -> None:
    """vLLM alone accepts a tensor too few, a tied head above all, and samples from a mixture."""
    wanted = trainers(other, PROMPTS[0], [False] + [True] * (len(PROMPTS[0]) - 1), 1.0)
    weights = [*other.state_dict().items()]
    with pytest.raises(ValueError, match=rf"old values of 1 tensors \({re.escape(amiss)}\)"):
        vllm.update_weights(SPOILED[amiss](weights))
    if "left out" in amiss:
        (mixed,) = vllm.compute_logprobs(PROMPTS[:1])
        assert np.abs(mixed - wanted.numpy()).max() > 1e-2
    vllm.update_weights(weights)
    (found,) = vllm.compute_logprobs(PROMPTS[:1])
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-4)


def test_sleeping_changes_no_token(vllm: VllmSampler) -> None:
    before = ids(talk(vllm, 1.0))
    vllm.sleep()
    vllm.wake_up()
    assert ids(talk(vllm, 1.0)) == before


def test_the_build_for_processors_is_refused_on_a_gpu(shipped: Policy) -> None:
    with pytest.raises(ValueError, match=r"does not sample on cuda. Install .*pip install vllm==0.32.0"):
        VllmSampler(shipped.folder, EngineSettings(torch.device("cuda"), "bfloat16", CONTEXT))
