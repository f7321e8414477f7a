"""The players of a run's game, and the episode loop of turn-based games.

A model plays G episodes on each of P levels, and each continues when its reply is finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainable.algo.advantages import compute_overlong_penalty
from trainable.config.run_config import RunConfig
from trainable.envs.environment import Environment, Level, PlayedTurn, RewardFunction, State, TurnLimits
from trainable.envs.games.make import get_turn_limits, make_environment, make_reward_function
from trainable.envs.prompts import Observation, PromptTemplate, make_prompt_template
from trainable.files.step_phase import STEP_PHASE
from trainable.models.codec import Codec
from trainable.models.load import Policy
from trainable.rollout.episode import Episode, StopReason, Transcript
from trainable.rollout.sampler import SampledReply, Sampler, SamplingParams


class Branching(NamedTuple):
    """How episodes branch into prefix trees (see `TurnPlayer.roll_out`).

    branches: N, the new episodes per tree and round. rounds: L. rng: generates the numbers that draw nodes.
    """

    branches: int
    rounds: int
    rng: np.random.Generator


@dataclass(frozen=True)
class RolloutRequest:
    """What to play, and with which random numbers."""

    levels: Sequence[Any]
    """At least one."""
    group_size: int
    """Episodes per level."""
    sampler: Sampler
    params: SamplingParams
    rng: np.random.Generator
    """Spawns one generator per episode for the sampler."""
    luck_rng: np.random.Generator
    """Generates the environment's random numbers."""
    first_episode: int = 0
    """Index of the first of these episodes among the episodes of all ranks."""
    num_episodes: int | None = None
    """Number of episodes of all ranks; None if these are all."""
    branching: Branching | None = None
    """None: every episode begins at the start of its level. Otherwise, `group_size` is a multiple of 1 + L · N."""


@dataclass
class _EpisodeState:
    """An episode in progress.

    states: before each turn, and after the last one so far. rewards, turn_actions, turn_validity: one entry per turn.
    Rewards are the game's, without the format penalty, which the model does not see. prefix_turns: see `Episode`.
    """

    level: Level
    group: int
    states: list[State]
    transcript: Transcript = field(default_factory=Transcript)
    rewards: list[float] = field(default_factory=list)
    turn_actions: list[tuple[str, ...]] = field(default_factory=list)
    turn_validity: list[bool] = field(default_factory=list)
    done: bool = False
    success: bool = False
    out_of_context: bool = False
    prefix_turns: int = 0

    @property
    def actions(self) -> int:
        return sum(map(len, self.turn_actions))

    def branch(self, turn: int) -> "_EpisodeState":
        """Make an episode with the same turns before `turn`, whose next reply is that of `turn`."""
        return _EpisodeState(
            self.level,
            self.group,
            self.states[: turn + 1],
            self.transcript.copy_prefix(turn),
            self.rewards[:turn],
            self.turn_actions[:turn],
            self.turn_validity[:turn],
            prefix_turns=turn,
        )


def _draw_branch(tree: Sequence[_EpisodeState], number: float) -> _EpisodeState:
    """Make a branch from the node of a tree that a uniform `number` from [0, 1) draws."""
    nodes = [
        (episode, turn)
        for place, episode in enumerate(tree)
        # A branch starts at a node of its parent, so that its first new one is the next.
        for turn in range(episode.prefix_turns + (place > 0), episode.transcript.num_turns)
    ]
    episode, turn = nodes[int(number * len(nodes))]
    return episode.branch(turn)


def check_length(prompt_tokens: int, response_length: int, context_length: int) -> None:
    """Raise ValueError if a prompt and a reply of full length do not fit into the context."""
    needed_tokens = prompt_tokens + response_length
    if needed_tokens > context_length:
        raise ValueError(
            f"The first turn may need {needed_tokens} tokens ({prompt_tokens} of the prompt and "
            f"rollout.response_length={response_length}), but the context has only {context_length}: shorten replies "
            f"with --set rollout.response_length=N, raise rollout.max_model_len if it is set, or leave out the longest "
            f"prompts of a data set."
        )


def draw_luck(rng: np.random.Generator, num_episodes: int, limits: TurnLimits, context_length: int) -> np.ndarray:
    """Draw the environment's random numbers for all episodes: float64 (episodes, turns, actions per turn), in [0, 1).

    An episode's numbers depend only on its index, not on the number of episodes. Limits far above what an episode can
    reach are reduced: each turn has at least one token, and a turn has at most as many actions as an episode.
    """
    turns = min(limits.turns, context_length)
    return rng.random((num_episodes, turns, min(limits.actions_per_turn, limits.actions)))


@dataclass(frozen=True)
class TurnPlayer:
    """Plays a turn-based game (see `Player`).

    format_penalty: added to the reward of an invalid turn. context_length: maximum tokens per conversation.
    compute_rewards: if not None, replaces the game's rewards when an episode is finished; prompts still show the
    game's. overlong_buffer, overlong_factor: see `compute_overlong_penalty`; a buffer of 0 turns it off.
    """

    environment: Environment[Any]
    template: PromptTemplate
    codec: Codec
    limits: TurnLimits
    format_penalty: float
    context_length: int
    compute_rewards: RewardFunction | None = None
    overlong_buffer: int = 0
    overlong_factor: float = 1.0

    def encode_first_turn(self, level: Level) -> list[int]:
        """See `Player.encode_first_turn`."""
        return self._encode_first_turns(self.environment.start([level]))[0]

    def check_first_turns(self, levels: Sequence[Level], response_length: int) -> None:
        """See `Player.check_first_turns`."""
        prompts = self._encode_first_turns(self.environment.start(levels))
        check_length(max(map(len, prompts)), response_length, self.context_length)

    def _encode_first_turns(self, states: Sequence[State]) -> list[list[int]]:
        texts = [
            self.template.format_first_turn(Observation(turn=1, state=state, actions_left=self.limits.actions))
            for state in states
        ]
        # Many levels of a small game look the same, so each text is encoded once.
        distinct_texts = list(dict.fromkeys(texts))
        tokens_by_text = dict(zip(distinct_texts, self.codec.encode(distinct_texts), strict=True))
        return [tokens_by_text[text] for text in texts]

    def roll_out(self, request: RolloutRequest) -> list[Episode]:
        """Play every level `group_size` times. The episodes of a level are consecutive.

        An episode's next turn begins when its reply is finished, without waiting for other episodes. (Samplers that
        compute all rows together finish all replies at the same time.) This does not change any draw, since each
        episode has its own random numbers.

        The reward of a turn is the environment's, plus the format penalty if the turn is invalid. An episode ends when
        its level ends, when it has no actions or turns left, or when its next turn, with a reply of full length, could
        exceed the context.

        With `request.branching`, a group consists of prefix trees, each of which begins as one episode. In each of L
        rounds, N nodes of each tree are drawn with replacement: its root, or the start of a later turn of one of its
        episodes. From each of them, a new episode is played to its end, after a copy of the turns before the node. The
        episodes of a tree are consecutive, in the order in which they began.

        Source: Ji et al. 2025, arXiv:2509.21240 (Tree-GRPO). Its code then draws some episodes of each tree for
        training; here, all are trained.
        """
        levels, params, branching = request.levels, request.params, request.branching
        tree_size = 1 + branching.rounds * branching.branches if branching else 1
        trees_per_group = request.group_size // tree_size
        # All random numbers of an episode depend on its index alone. Each row has those of a tree.
        indices = np.arange(len(levels) * request.group_size).reshape(-1, tree_size)
        num_episodes, first = request.num_episodes or indices.size, request.first_episode
        luck = draw_luck(request.luck_rng, num_episodes, self.limits, self.context_length)[first:]
        streams = request.rng.spawn(indices.size)
        starts = self.environment.start(levels)
        prompts = self._encode_first_turns(starts)
        trees = [
            [_EpisodeState(level, group, [starts[group]])]
            for group, level in enumerate(levels)
            for _ in range(trees_per_group)
        ]
        for (state,) in trees:
            state.transcript.append_prompt(prompts[state.group])
        self._play(request, [state for (state,) in trees], prompts, streams[::tree_size], luck[::tree_size])
        if branching:
            numbers = branching.rng.random(num_episodes)[first:]
            for index in np.split(indices[:, 1:], branching.rounds, axis=1):
                states = [
                    _draw_branch(tree, number)
                    for tree, row in zip(trees, index, strict=True)
                    for number in numbers[row].tolist()
                ]
                prefixes = [np.concatenate(state.transcript.tokens).tolist() for state in states]
                rows = index.flatten()
                self._play(request, states, prefixes, [streams[row] for row in rows], luck[rows])
                # Only now, since all nodes of a round are drawn from the same tree.
                for number, state in enumerate(states):
                    trees[number // branching.branches].append(state)
        return [
            self._make_episode(state, number % trees_per_group, params.max_new_tokens)
            for number, tree in enumerate(trees)
            for state in tree
        ]

    def _play(
        self,
        request: RolloutRequest,
        states: Sequence[_EpisodeState],
        prompts: Sequence[Sequence[int]],
        streams: Sequence[np.random.Generator],
        luck: npt.NDArray[np.float64],
    ) -> None:
        """Play episodes to their ends in one conversation, each with its random numbers.

        prompts: the tokens of the transcripts so far, once for neighbors that share them, all equally many.
        """
        response_length = request.params.max_new_tokens
        conversation = request.sampler.start_conversation(prompts, request.params, streams)
        num_waiting = len(states)
        # Without new tokens, since the conversation already has the prompts.
        conversation.submit(range(len(states)), [[] for _ in states])
        turn = 1
        while num_waiting:
            STEP_PHASE.show_share(f"turn {turn} of {self.limits.turns}, {num_waiting} episodes")
            finished = conversation.collect()
            rows, replies = [row for row, _ in finished], [reply for _, reply in finished]
            row_turns = [states[row].transcript.num_turns for row in rows]
            turn = max(turn, min(max(row_turns) + 2, self.limits.turns))  # the next turn of the furthest episode
            self._apply_replies([states[row] for row in rows], replies, luck[rows, row_turns])
            next_rows, new_tokens = self._append_observations(states, rows, response_length)
            if next_rows:
                conversation.submit(next_rows, new_tokens)
            num_waiting += len(next_rows) - len(rows)

    def _apply_replies(
        self, states: Sequence[_EpisodeState], replies: Sequence[SampledReply], luck: np.ndarray
    ) -> None:
        """Parse replies, execute their valid actions (also of invalid replies), and record the outcomes in `states`."""
        limits, environment = self.limits, self.environment
        texts = self.codec.decode([reply.token_ids for reply in replies])
        parse = self.template.parse
        parsed_replies = [parse(text, limits.actions_per_turn, environment.read_action) for text in texts]
        # A reply may have more actions than the episode has left.
        actions = [
            parsed.actions[: limits.actions - state.actions]
            for state, parsed in zip(states, parsed_replies, strict=True)
        ]
        outcome = environment.step([state.states[-1] for state in states], actions, luck)
        for row, state in enumerate(states):
            state.states.append(outcome.states[row])
            state.done, state.success = bool(outcome.done[row]), bool(outcome.success[row])
            # Unexecuted actions come last, after the end of the level.
            state.turn_actions.append(actions[row][: int(outcome.action_counts[row])])
            state.transcript.append_reply(replies[row], texts[row])
            state.turn_validity.append(not parsed_replies[row].invalid)
            state.rewards.append(outcome.rewards[row])

    def _append_observations(
        self, states: Sequence[_EpisodeState], rows: Sequence[int], response_length: int
    ) -> tuple[list[int], list[list[int]]]:
        """Append the observations of the next turn; return those of `rows` that continue, and their new tokens.

        A row ends if its next turn, with a reply of full length, could exceed the context.
        """
        live_rows, texts = [], []
        for row in rows:
            state = states[row]
            actions_left, num_turns = self.limits.actions - state.actions, state.transcript.num_turns
            # There is no observation after the last turn.
            if state.done or actions_left <= 0 or num_turns >= self.limits.turns:
                continue
            last_reward, is_invalid = float(state.rewards[-1]), not state.turn_validity[-1]
            # Observations count turns from 1.
            observation = Observation(num_turns + 1, state.states[-1], actions_left, last_reward, is_invalid)
            text = self.template.format_next_turn(observation)
            live_rows.append(row)
            texts.append(text if state.transcript.is_closed else self.template.end_marker + text)
        next_rows, new_tokens = [], []
        for row, ids in zip(live_rows, self.codec.encode(texts), strict=True):
            state = states[row]
            if state.transcript.append_prompt_if_it_fits(ids, response_length, self.context_length):
                next_rows.append(row)
                new_tokens.append(ids)
            else:
                state.out_of_context = True
        return next_rows, new_tokens

    def _make_episode(self, state: _EpisodeState, prefix_tree: int, max_reply_tokens: int) -> Episode:
        """Make the record of a finished episode."""
        return Episode(
            level_seed=state.level.seed,
            group=state.group,
            **state.transcript.make_arrays(),
            turn_rewards=self._compute_turn_rewards(state, max_reply_tokens),
            turn_actions=tuple(state.turn_actions),
            turn_validity=tuple(state.turn_validity),
            stop_reason=self._find_stop_reason(state),
            texts=tuple(state.transcript.texts),
            is_truncated=state.out_of_context or state.transcript.has_cut_reply(max_reply_tokens),
            prefix_turns=state.prefix_turns,
            prefix_tree=prefix_tree,
        )

    def _compute_turn_rewards(self, state: _EpisodeState, max_reply_tokens: int) -> tuple[float, ...]:
        """Compute all turn rewards, with penalties. ValueError unless `compute_rewards` gives one per turn."""
        rewards: Sequence[float] = state.rewards
        if self.compute_rewards is not None:
            columns = (state.transcript.texts, state.turn_actions, map(float, state.rewards), state.turn_validity)
            turns = [PlayedTurn(*turn) for turn in zip(*columns, strict=True)]
            rewards = [float(reward) for reward in self.compute_rewards(state.level, turns)]
            if len(rewards) != len(turns):
                raise ValueError(f"env.reward returned {len(rewards)} rewards for an episode of {len(turns)} turns.")
        rewards = [
            reward + self.format_penalty * (not is_valid)
            for reward, is_valid in zip(rewards, state.turn_validity, strict=True)
        ]
        if self.overlong_buffer:
            lengths = [len(reply.token_ids) for reply in state.transcript.replies if reply is not None]
            rewards = [
                reward + compute_overlong_penalty(length, max_reply_tokens, self.overlong_buffer, self.overlong_factor)
                for reward, length in zip(rewards, lengths, strict=True)
            ]
        return tuple(rewards)

    def _find_stop_reason(self, state: _EpisodeState) -> StopReason:
        if state.done:  # checked first, since the last allowed action may end the level
            return StopReason.SUCCESS if state.success else StopReason.FAILURE
        if state.out_of_context:
            return StopReason.OUT_OF_CONTEXT
        if state.actions >= self.limits.actions:
            return StopReason.OUT_OF_ACTIONS
        return StopReason.OUT_OF_TURNS if state.actions else StopReason.MALFORMED


class Player(Protocol):
    """Plays levels with a sampler."""

    def encode_first_turn(self, level: Any) -> list[int]:
        """Encode the conversation up to the first reply."""

    def check_first_turns(self, levels: Sequence[Any], response_length: int) -> None:
        """Raise ValueError if the first prompt of a level and a reply of full length do not fit into the context.

        Later turns need no check: an episode ends if its next turn might not fit.
        """

    def roll_out(self, request: RolloutRequest) -> list[Episode]:
        """Play the requested episodes. The episodes of a level are consecutive, and groups are numbered from 0."""


def make_player(config: RunConfig, policy: Policy, codec: Codec, context_length: int) -> Player:
    """Make the player of the game that env.name selects. context_length: maximum tokens of a conversation."""
    env, style = config.env, config.model.prompt_style
    if env.kind.player:
        player: Player = resolve_name(env.kind.player)(config, policy, codec, context_length)
        return player
    environment = make_environment(env)
    template = make_prompt_template(environment, style, env.max_actions_per_traj, policy.chat_format)
    limits, compute_rewards = get_turn_limits(env), make_reward_function(env)
    return TurnPlayer(
        environment,
        template,
        codec,
        limits,
        env.format_penalty,
        context_length,
        compute_rewards,
        env.overlong_buffer_len,
        env.overlong_penalty_factor,
    )
