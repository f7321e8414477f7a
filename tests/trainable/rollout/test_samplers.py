from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from tests.fakes.scripted import make_hub_twin, make_qwen2_shape, make_random_model
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_training_levels
from trainable.envs.prompts import make_prompt_template
from trainable.envs.sokoban.game import Sokoban
from trainable.models.codec import Codec
from trainable.models.interface import LanguageModel
from trainable.models.load import Policy, load_policy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from trainable.rollout.compiled_sampler import CompiledSampler
from trainable.rollout.episode import Episode, collate
from trainable.rollout.episode_loop import RolloutRequest, TurnPlayer
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler, sample_tokens
from trainable.runs.failures import NonFiniteError

BELOW_ONE = 1 - 2**-24  # the largest float32 that a generator draws


# ---------------------------------------------------------------------------- one draw


def sample_ids(logits: Sequence[float], uniforms: Sequence[float], temperature: float = 1.0) -> list[int]:
    rows = torch.tensor([list(logits)] * len(uniforms))
    return sample_tokens(rows, temperature, torch.tensor(uniforms))[0].tolist()


def test_a_draw_inverts_the_distribution_function() -> None:
    logits = np.log([0.5, 0.25, 0.25]).tolist()
    uniforms = [0.0, 0.25, 0.4999, 0.5001, 0.7499, 0.7501, 0.9999, BELOW_ONE]
    assert sample_ids(logits, uniforms) == [0, 0, 0, 1, 1, 2, 2, 2]
    # A token without probability is never drawn.
    impossible = -float("inf")
    logits = [impossible, 0.0, impossible, 0.0, impossible]
    assert sample_ids(logits, [0.0, 0.499, 0.501, BELOW_ONE]) == [1, 1, 3, 3]
    # A probability that is 0 in float32 counts as no probability.
    assert sample_ids([-200.0, 0.0, -200.0], [0.0, BELOW_ONE]) == [1, 1]
    # A draw near one stays inside the vocabulary.
    logits = 3 * torch.randn(500, 60, generator=torch.Generator().manual_seed(0))
    assert (logits.softmax(-1).double().sum(-1) < BELOW_ONE).sum() > 50  # rounding leaves a difference to 1
    tokens, logprobs, _ = sample_tokens(logits, 1.0, torch.full((500,), BELOW_ONE))
    assert (tokens < 60).all()
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -3.0, 1.0])
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000, dtype=np.float32))
    tokens, logprobs, entropies = sample_tokens(logits.expand(20_000, 6), temperature, uniforms)
    probs = np.exp(logits.double().numpy() / temperature)
    probs /= probs.sum()
    assert stats.chisquare(np.bincount(tokens, minlength=6), 20_000 * probs).pvalue > 0.01
    np.testing.assert_allclose(logprobs, np.log(probs)[tokens], rtol=1e-5)
    np.testing.assert_allclose(entropies, -(probs * np.log(probs)).sum(), rtol=1e-5)


def test_temperature_0_takes_the_likeliest_and_reports_temperature_1() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    tokens, logprobs, entropies = sample_tokens(logits, 0.0, torch.tensor([0.999, 0.999]))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=logits).entropy())


# ---------------------------------------------------------------------------- conversations

STOP = 2

MakeSampler = Callable[[LanguageModel], Sampler]


@pytest.fixture(scope="module")
def model() -> Qwen2:
    """A small random model that samples the stop token every few tokens."""
    return make_random_model(make_qwen2_shape(num_hidden_layers=2), seed=4, std=0.25)


@pytest.fixture
def sampler(model: Qwen2) -> Sampler:
    """The sampler of which test_compiled_sampler shows that compiled code draws the same."""
    return TorchSampler(model)


Turn = dict[int, SampledReply]
Script = Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]


Prompts = Sequence[Sequence[int]]


def run_conversation(
    sampler: Sampler, prompts: Prompts, copies: int, script: Script, temperature: float = 1.0, length: int = 9
) -> list[Turn]:
    """Replies by row, one dict per turn; `script` has the live rows and their new tokens for each later turn."""
    params = SamplingParams(temperature, length, STOP)
    all_rows = list(range(len(prompts) * copies))
    conversation = sampler.start_conversation(prompts, params, np.random.default_rng(7).spawn(len(all_rows)))
    turns = [(all_rows, [[]] * len(all_rows)), *script]
    return [dict(zip(turn[0], conversation.sample_replies(*turn), strict=True)) for turn in turns]


PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
OBSERVATIONS = [[3, 4], [5], [6, 7, 8], [9, 9], [1], [3, 3, 3, 3]]


def make_full_script(rows: Sequence[int]) -> Script:
    return [(rows, [OBSERVATIONS[row % 6] for row in rows]), (rows, [OBSERVATIONS[(row + 1) % 6] for row in rows])]


def list_contexts(turns: list[Turn], copies: int, script: Script, row: int) -> list[tuple[list[int], SampledReply]]:
    """Each reply of a row with the tokens that came before it."""
    context, contexts = list(PROMPTS[row // copies]), []
    for index, turn in enumerate(turns):
        if index:
            rows, observations = script[index - 1]
            if row not in rows:
                break
            context = [*context, *observations[list(rows).index(row)]]
        contexts.append((context, turn[row]))
        context = [*context, *turn[row].token_ids.tolist()]
    return contexts


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_numbers_of_every_turn_are_those_of_a_full_forward(model: Qwen2, sampler: Sampler, temperature: float) -> None:
    script = [
        (range(6), OBSERVATIONS),
        ([1, 2, 4], [OBSERVATIONS[1], OBSERVATIONS[2], OBSERVATIONS[4]]),
        ([1, 4], [[8, 8], [1]]),
    ]
    turns = run_conversation(sampler, PROMPTS, 2, script, temperature)
    twin, replies = make_hub_twin(model), 0
    for row in range(6):
        for context, reply in list_contexts(turns, 2, script, row):
            replies += 1
            tokens = torch.tensor([[*context, *reply.token_ids.tolist()]])
            with torch.no_grad():
                logits = twin(input_ids=tokens).logits[0, len(context) - 1 : -1] / (temperature or 1.0)
            expected = torch.distributions.Categorical(logits=logits)
            expected_logprobs = expected.log_prob(tokens[0, len(context) :])
            np.testing.assert_allclose(reply.logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(reply.entropies, expected.entropy(), rtol=1e-5, atol=1e-5)
            if temperature == 0:
                assert reply.token_ids.tolist() == logits.argmax(-1).tolist()
    assert replies == 6 + 6 + 3 + 2


def test_replies_end_with_the_stop_token_or_at_their_length(sampler: Sampler) -> None:
    turns = run_conversation(sampler, PROMPTS, 10, make_full_script(range(30)))
    replies = [reply for turn in turns for reply in turn.values()]
    for reply in replies:
        assert 1 <= len(reply.token_ids) <= 9
        assert STOP not in reply.token_ids[:-1]
        assert reply.finished == (reply.token_ids[-1] == STOP)
        assert reply.finished or len(reply.token_ids) == 9
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.entropies)
        assert reply.token_ids.dtype == np.int64
        assert reply.logprobs.dtype == reply.entropies.dtype == np.float32
    assert 10 < sum(reply.finished for reply in replies) < len(replies)


def assert_same_reply(actual: SampledReply, expected: SampledReply) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_dropping_and_adding_rows_changes_no_other_row(sampler: Sampler) -> None:
    rows = range(12)
    all_turns = run_conversation(sampler, PROMPTS, 4, make_full_script(rows))
    live_rows = [2, 3, 7, 11]
    (_, second_observations), (_, third_observations) = make_full_script(rows)
    script = [
        (live_rows, [second_observations[row] for row in live_rows]),
        (live_rows[1:], [third_observations[row] for row in live_rows[1:]]),
    ]
    partial_turns = run_conversation(sampler, PROMPTS, 4, script)
    for turn, remaining_rows in enumerate((rows, live_rows, live_rows[1:])):
        for row in remaining_rows:
            assert_same_reply(partial_turns[turn][row], all_turns[turn][row])
    fewer_turns = run_conversation(sampler, PROMPTS[:2], 4, make_full_script(range(8)))
    for turn in range(3):
        for row in range(8):
            assert_same_reply(fewer_turns[turn][row], all_turns[turn][row])


def test_copies_of_a_prompt_differ_and_equal_generators_agree(sampler: Sampler) -> None:
    turns = [run_conversation(sampler, PROMPTS[:1], 16, [])[0] for _ in range(2)]
    first, repeated = ([tuple(reply.token_ids.tolist()) for reply in turn.values()] for turn in turns)
    assert first == repeated
    assert len(set(first)) > 8


# ---------------------------------------------------------------------------- the shipped model at play


@pytest.fixture(scope="module")
def shipped_policy() -> Policy:
    return load_policy("sokoban-tiny", torch.device("cpu"))


def play_episodes(policy: Policy, temperature: float) -> list[Episode]:
    template = make_prompt_template(Sokoban(), "compact", 10)
    player = TurnPlayer(Sokoban(), template, Codec(policy.tokenizer), TurnLimits(5, 2, 10), -0.1, 512)
    params = SamplingParams(temperature, 24, policy.model.shape.eos_token_id)
    levels, sampler = make_training_levels(Sokoban(), range(10_000, 10_004)), TorchSampler(policy.model)
    rng, luck_rng = np.random.default_rng(0), np.random.default_rng(0)
    return player.roll_out(RolloutRequest(levels, 6, sampler, params, rng, luck_rng))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_and_the_trainer_agree(shipped_policy: Policy, temperature: float) -> None:
    episodes = play_episodes(shipped_policy, temperature)
    assert len({episode.stop_reason for episode in episodes}) > 1
    batch = collate(episodes)
    logprobs = compute_at_trained_tokens(batch, 5, TokenFunction.for_logprobs(shipped_policy.model, temperature))
    torch.testing.assert_close(batch.logprobs, logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make_sampler", [TorchSampler, CompiledSampler])
@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e38])
def test_logits_that_are_not_finite_end_a_rollout(make_sampler: MakeSampler, scale: float) -> None:
    broken = make_random_model(make_qwen2_shape(), seed=1)
    with torch.no_grad():
        broken.model.norm.weight.mul_(scale)
    with pytest.raises(NonFiniteError, match="divided by the temperature 1, were not finite"):
        run_conversation(make_sampler(broken), PROMPTS, 2, [])
