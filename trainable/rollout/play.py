"""Where game meets model: P levels, G episodes each, turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trainable.envs.sokoban.board import Action, step
from trainable.envs.sokoban.generate import Level
from trainable.envs.sokoban.prompt import Observation, Protocol, Reply, parse
from trainable.models.codec import Codec
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.sampler import Sampled, Sampler, SamplingParams


@dataclass(frozen=True)
class Rules:
    """The protocol's limits (see `EnvConfig`); context is the most tokens a conversation may have."""

    max_turn: int
    max_actions_per_turn: int
    max_actions: int
    format_penalty: float
    context: int


def check_first_turn(
    opening: Observation, protocol: Protocol, codec: Codec, context: int, response_length: int
) -> None:
    """ValueError for a reply length that leaves the model's context no room for the first turn."""
    needed = len(codec.encode([protocol.opening(opening)])[0]) + response_length
    if needed > context:
        raise ValueError(
            f"A first turn takes {needed} tokens (the prompt, and rollout.response_length={response_length}), "
            f"and the model's context has {context}: lower it with --set rollout.response_length=N."
        )


@dataclass
class _Seat:
    """An episode while it is played."""

    level: Level
    group: int
    cells: np.ndarray
    tokens: list[np.ndarray] = field(default_factory=list)
    sampled: list[Sampled | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    actions: int = 0
    invalid_turns: int = 0
    length: int = 0
    solved: bool = False
    out_of_context: bool = False
    last_reward: float = 0.0  # of the environment, in the last turn: the penalty is not shown to the model
    last_invalid: bool = False

    def add(self, ids: Sequence[int] | np.ndarray, sampled: Sampled | None, turn: int) -> None:
        self.tokens.append(np.asarray(ids, dtype=np.int64))
        self.sampled.append(sampled)
        self.turns.append(turn)
        self.length += len(ids)


def play(
    levels: Sequence[Level], copies: int, sampler: Sampler, protocol: Protocol, codec: Codec, rules: Rules,
    params: SamplingParams, rng: np.random.Generator,
) -> list[Episode]:  # fmt: skip
    """Play every level `copies` times, all episodes in lock-step; episodes of a level stand together.

    Rewards: the environment's, plus the format penalty once for each invalid turn. Randomness comes from `rng` only.
    """
    seats = [_Seat(level, group, level.cells) for group, level in enumerate(levels) for _ in range(copies)]
    prompts = codec.encode([protocol.opening(Observation(1, level.cells, rules.max_actions)) for level in levels])
    for seat in seats:
        seat.add(prompts[seat.group], None, 0)
    conversation = sampler.converse(prompts, copies, params, rng)
    live = list(range(len(seats)))
    given: list[list[int]] = [[] for _ in live]
    for turn in range(rules.max_turn):
        replies = conversation.reply(live, given)
        _act([seats[row] for row in live], replies, turn, codec, rules)
        live = [row for row in live if _goes_on(seats[row], rules)]
        if turn + 1 == rules.max_turn or not live:
            break
        live, given = _tell(seats, live, protocol, codec, rules, params)
        if not live:
            break
    return [_episode(seat, rules) for seat in seats]


def _act(seats: Sequence[_Seat], replies: Sequence[Sampled], turn: int, codec: Codec, rules: Rules) -> None:
    """Read each reply, play its actions, and note in its seat what came of it."""
    texts = codec.decode([reply.ids for reply in replies])
    read = [parse(text, rules.max_actions_per_turn) for text in texts]
    earned = _execute(seats, read, rules)
    for seat, reply, text, parsed, reward in zip(seats, replies, texts, read, earned, strict=True):
        seat.add(reply.ids, reply, turn)
        seat.texts.append(text)
        seat.invalid_turns += parsed.invalid
        seat.rewards.append(reward + rules.format_penalty * parsed.invalid)
        seat.last_reward, seat.last_invalid = float(reward), parsed.invalid


def _execute(seats: Sequence[_Seat], replies: Sequence[Reply], rules: Rules) -> np.ndarray:
    """Play the replies' actions on all boards at once; summed rewards (B,)."""
    planned = np.zeros((len(seats), rules.max_actions_per_turn), dtype=np.int64)
    for row, (seat, reply) in enumerate(zip(seats, replies, strict=True)):
        allowed = reply.actions[: rules.max_actions - seat.actions]
        planned[row, : len(allowed)] = allowed
    cells = np.stack([seat.cells for seat in seats])
    solved = np.zeros(len(seats), dtype=bool)
    earned = np.zeros(len(seats))
    played = np.zeros(len(seats), dtype=np.int64)
    for column in planned.T:
        actions = np.where(solved, Action.NONE, column)
        outcome = step(cells, actions)
        cells = outcome.cells
        earned += outcome.rewards
        played += actions != Action.NONE
        solved |= outcome.solved & (actions != Action.NONE)
    for row, seat in enumerate(seats):
        seat.cells, seat.solved = cells[row], bool(solved[row])
        seat.actions += int(played[row])
    return earned


def _goes_on(seat: _Seat, rules: Rules) -> bool:
    return not seat.solved and seat.actions < rules.max_actions


def _tell(
    seats: Sequence[_Seat], live: Sequence[int], protocol: Protocol, codec: Codec, rules: Rules,
    params: SamplingParams,
) -> tuple[list[int], list[list[int]]]:  # fmt: skip
    """The next turn's given tokens; rows whose conversation would outgrow the context leave."""
    texts = []
    for row in live:
        seat = seats[row]
        left = rules.max_actions - seat.actions
        text = protocol.following(
            Observation(len(seat.texts) + 1, seat.cells, left, seat.last_reward, seat.last_invalid)
        )
        last = seat.sampled[-1]
        texts.append(text if last is not None and last.finished else protocol.end + text)
    stay, given = [], []
    for row, ids in zip(live, codec.encode(texts), strict=True):
        seat = seats[row]
        if seat.length + len(ids) + params.max_new_tokens > rules.context:
            seat.out_of_context = True
            continue
        seat.add(ids, None, len(seat.texts))
        stay.append(row)
        given.append(ids)
    return stay, given


def _stop_reason(seat: _Seat, rules: Rules) -> StopReason:
    if seat.solved:
        return StopReason.SOLVED
    if seat.out_of_context:
        return StopReason.OUT_OF_CONTEXT
    if seat.actions >= rules.max_actions:
        return StopReason.OUT_OF_ACTIONS
    return StopReason.OUT_OF_TURNS if seat.actions else StopReason.MALFORMED


def _episode(seat: _Seat, rules: Rules) -> Episode:
    """The finished record; positions of given tokens hold False and 0."""
    sizes = [len(part) for part in seat.tokens]
    nothing = [np.zeros(size, dtype=np.float32) for size in sizes]
    pairs = list(zip(seat.sampled, nothing, strict=True))
    return Episode(
        level_seed=seat.level.seed,
        group=seat.group,
        tokens=np.concatenate(seat.tokens),
        mask=np.repeat([sampled is not None for sampled in seat.sampled], sizes),
        logprobs=np.concatenate([zeros if sampled is None else sampled.logprobs for sampled, zeros in pairs]),
        entropies=np.concatenate([zeros if sampled is None else sampled.entropies for sampled, zeros in pairs]),
        turns=np.repeat(seat.turns, sizes),
        turn_rewards=tuple(seat.rewards),
        actions=seat.actions,
        invalid_turns=seat.invalid_turns,
        stop=_stop_reason(seat, rules),
        texts=tuple(seat.texts),
    )
