"""The episode loop: a model plays G episodes on each of P levels, and each continues when its reply is finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainable.envs.environment import Environment, Level, PlayedTurn, RewardFunction, State
from trainable.envs.prompts import Observation, ParsedReply, PromptTemplate, parse_reply
from trainable.files.step_phase import STEP_PHASE
from trainable.models.codec import Codec
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams
from trainable.rollout.transcript import Transcript


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    max_turn, max_actions_per_turn, format_penalty: as in `EnvConfig`. max_actions: `EnvConfig.max_actions_per_traj`.
    context_length: maximum tokens per conversation.
    """

    max_turn: int
    max_actions_per_turn: int
    max_actions: int
    format_penalty: float
    context_length: int


@dataclass
class _EpisodeState:
    """An episode in progress.

    rewards, turn_actions, turn_validity: one entry per turn. Rewards are the game's, without the format penalty, which
    the model does not see.
    """

    level: Level
    group: int
    state: State
    transcript: Transcript = field(default_factory=Transcript)
    rewards: list[float] = field(default_factory=list)
    turn_actions: list[tuple[str, ...]] = field(default_factory=list)
    turn_validity: list[bool] = field(default_factory=list)
    done: bool = False
    success: bool = False
    out_of_context: bool = False

    @property
    def actions(self) -> int:
        return sum(map(len, self.turn_actions))


def roll_out_episodes(
    environment: Environment[Any],
    levels: Sequence[Level],
    group_size: int,
    sampler: Sampler,
    template: PromptTemplate,
    codec: Codec,
    limits: EpisodeLimits,
    params: SamplingParams,
    rng: np.random.Generator,
    luck: np.ndarray,
    compute_rewards: RewardFunction | None = None,
) -> list[Episode]:
    """Play every level `group_size` times. The episodes of a level are consecutive.

    An episode's next turn begins when its reply is finished, without waiting for other episodes. (Samplers that compute
    all rows together finish all replies at the same time.) This does not change any draw, since each episode has its
    own random numbers.

    The reward of a turn is the environment's, plus the format penalty if the turn is invalid. An episode ends when its
    level ends, when it has no actions or turns left, or when its next turn, with a reply of full length, could exceed
    the context. The sampler's random numbers come from `rng`, the environment's are `luck` (see `draw_luck`).
    `compute_rewards` replaces the game's rewards when an episode is finished; prompts still show the game's.
    """
    starts = environment.start(levels)
    states = [
        _EpisodeState(level, group, starts[group]) for group, level in enumerate(levels) for _ in range(group_size)
    ]
    prompts = codec.encode(
        [
            template.format_first_turn(Observation(turn=1, state=start, actions_left=limits.max_actions))
            for start in starts
        ]
    )
    for state in states:
        state.transcript.append_prompt(prompts[state.group])
    conversation = sampler.start_conversation(prompts, group_size, params, rng)
    turns, num_waiting = conversation.take_turns(), len(states)
    # Without new tokens, since the conversation already has the prompts.
    turns.submit(range(len(states)), [[] for _ in states])
    turn = 1
    while num_waiting:
        STEP_PHASE.show_share(f"turn {turn} of {limits.max_turn}, {num_waiting} episodes")
        finished = turns.collect()
        rows, replies = [row for row, _ in finished], [reply for _, reply in finished]
        row_turns = [states[row].transcript.num_turns for row in rows]
        turn = max(turn, min(max(row_turns) + 2, limits.max_turn))  # the next turn of the furthest episode
        _apply_replies(environment, [states[row] for row in rows], replies, codec, limits, luck[rows, row_turns])
        # There is no observation after the last turn.
        live_rows = [row for row in rows if _is_live(states[row], limits)]
        next_rows, new_tokens = _append_observations(states, live_rows, template, codec, limits, params)
        if next_rows:
            turns.submit(next_rows, new_tokens)
        num_waiting += len(next_rows) - len(rows)
    return [_make_episode(state, limits, compute_rewards) for state in states]


def draw_luck(rng: np.random.Generator, num_episodes: int, limits: EpisodeLimits) -> np.ndarray:
    """Draw the environment's random numbers for all episodes: float64 (episodes, turns, actions per turn), in [0, 1).

    An episode's numbers depend only on its index, not on the number of episodes. Limits far above what an episode can
    reach are reduced: each turn has at least one token, and a turn has at most as many actions as an episode.
    """
    turns = min(limits.max_turn, limits.context_length)
    return rng.random((num_episodes, turns, min(limits.max_actions_per_turn, limits.max_actions)))


def _apply_replies(
    environment: Environment[Any],
    states: Sequence[_EpisodeState],
    replies: Sequence[SampledReply],
    codec: Codec,
    limits: EpisodeLimits,
    luck: np.ndarray,
) -> None:
    """Parse replies, execute their valid actions (also of invalid replies), and record the outcomes in `states`."""
    texts = codec.decode([reply.token_ids for reply in replies])
    parsed_replies = [parse_reply(text, limits.max_actions_per_turn, environment.read_action) for text in texts]
    rewards = _play_turn(environment, states, parsed_replies, limits, luck)
    for state, reply, text, parsed_reply, reward in zip(states, replies, texts, parsed_replies, rewards, strict=True):
        state.transcript.append_reply(reply, text)
        state.turn_validity.append(not parsed_reply.invalid)
        state.rewards.append(reward)


def _play_turn(
    environment: Environment[Any],
    states: Sequence[_EpisodeState],
    replies: Sequence[ParsedReply],
    limits: EpisodeLimits,
    luck: np.ndarray,
) -> np.ndarray:
    """Execute the replies' actions in all episodes at once; return the reward (B,) of each episode's turn."""
    # A reply may have more actions than the episode has left.
    actions = [
        reply.actions[: limits.max_actions - state.actions] for state, reply in zip(states, replies, strict=True)
    ]
    outcome = environment.step([state.state for state in states], actions, luck)
    for row, state in enumerate(states):
        state.state = outcome.states[row]
        state.done, state.success = bool(outcome.done[row]), bool(outcome.success[row])
        # Unexecuted actions come last, after the end of the level.
        state.turn_actions.append(actions[row][: int(outcome.action_counts[row])])
    return outcome.rewards


def _is_live(state: _EpisodeState, limits: EpisodeLimits) -> bool:
    return not state.done and state.actions < limits.max_actions and state.transcript.num_turns < limits.max_turn


def _append_observations(
    states: Sequence[_EpisodeState],
    live_rows: Sequence[int],
    template: PromptTemplate,
    codec: Codec,
    limits: EpisodeLimits,
    params: SamplingParams,
) -> tuple[list[int], list[list[int]]]:
    """Append the observations of the next turn; return the continuing rows and their new tokens.

    A row ends if its next turn, with a reply of full length, could exceed the context.
    """
    texts = []
    for row in live_rows:
        state = states[row]
        actions_left, last_reward = limits.max_actions - state.actions, float(state.rewards[-1])
        is_invalid = not state.turn_validity[-1]
        text = template.format_next_turn(
            # Observations count turns from 1.
            Observation(state.transcript.num_turns + 1, state.state, actions_left, last_reward, is_invalid)
        )
        texts.append(text if state.transcript.is_closed else template.end_marker + text)
    next_rows, new_tokens = [], []
    for row, ids in zip(live_rows, codec.encode(texts), strict=True):
        state = states[row]
        if state.transcript.append_prompt_if_it_fits(ids, params.max_new_tokens, limits.context_length):
            next_rows.append(row)
            new_tokens.append(ids)
        else:
            state.out_of_context = True
    return next_rows, new_tokens


def _find_stop_reason(state: _EpisodeState, limits: EpisodeLimits) -> StopReason:
    if state.done:  # checked first, since the last allowed action may end the level
        return StopReason.SUCCESS if state.success else StopReason.FAILURE
    if state.out_of_context:
        return StopReason.OUT_OF_CONTEXT
    if state.actions >= limits.max_actions:
        return StopReason.OUT_OF_ACTIONS
    return StopReason.OUT_OF_TURNS if state.actions else StopReason.MALFORMED


def _compute_turn_rewards(
    state: _EpisodeState, limits: EpisodeLimits, compute_rewards: RewardFunction | None
) -> tuple[float, ...]:
    """Compute all turn rewards, with format penalties. ValueError unless `compute_rewards` gives one per turn."""
    rewards: Sequence[float] = state.rewards
    if compute_rewards is not None:
        columns = (state.transcript.texts, state.turn_actions, map(float, state.rewards), state.turn_validity)
        turns = [PlayedTurn(*turn) for turn in zip(*columns, strict=True)]
        rewards = [float(reward) for reward in compute_rewards(state.level, turns)]
        if len(rewards) != len(turns):
            raise ValueError(f"env.reward returned {len(rewards)} rewards for an episode of {len(turns)} turns.")
    return tuple(
        reward + limits.format_penalty * (not is_valid)
        for reward, is_valid in zip(rewards, state.turn_validity, strict=True)
    )


def _make_episode(
    state: _EpisodeState, limits: EpisodeLimits, compute_rewards: RewardFunction | None = None
) -> Episode:
    """Make the record of a finished episode."""
    return Episode(
        level_seed=state.level.seed,
        group=state.group,
        **state.transcript.make_arrays()._asdict(),
        turn_rewards=_compute_turn_rewards(state, limits, compute_rewards),
        turn_actions=tuple(state.turn_actions),
        turn_validity=tuple(state.turn_validity),
        stop_reason=_find_stop_reason(state, limits),
        texts=tuple(state.transcript.texts),
    )
