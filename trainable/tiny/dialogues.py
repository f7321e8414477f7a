"""Dialogues for supervised training: a demonstrator plays a game in the compact style, with habits that RL can fix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainable.envs.environment import Environment, State, TurnLimits
from trainable.envs.prompts import END_OF_MESSAGE, Observation, PromptTemplate, format_reply


@dataclass(frozen=True)
class Habits:
    """The bad habits of a demonstrator, as fractions of turns. They are drawn independently.

    detour: the plan is legal but bad: it wastes a move or a guess.
    careless: the thought is right, but the actions of the answer are random.
    unfinished: the reply ends after its thought and is malformed.
    """

    detour: float = 0.0
    careless: float = 0.0
    unfinished: float = 0.0


class Plan(NamedTuple):
    """A demonstrator's thought and the resulting actions."""

    thought: str
    actions: Sequence[str]


MakePlan = Callable[[Sequence[State], bool, np.random.Generator], Plan]
"""Plans a turn from all states so far, the current one last. The second argument asks for a detour."""


@dataclass(frozen=True)
class Demonstrator:
    """Demonstrates one game."""

    start: Callable[[State], MakePlan]
    """Returns the `MakePlan` of an episode from its start state. Here a level can be solved once for all turns."""
    turn: Callable[[State, np.random.Generator], State]
    """Returns a random symmetric twin of a start state, for variety."""
    actions: tuple[str, ...]
    """Actions for careless replies."""


def turn_board(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rotate and mirror a board at random."""
    turned_cells = np.rot90(cells, int(rng.integers(4)))
    return np.ascontiguousarray(turned_cells.T if rng.integers(2) else turned_cells)


@dataclass(frozen=True)
class Segment:
    """A part of a dialogue: its text, and whether the model is trained on it."""

    text: str
    is_trained: bool


def make_dialogue(
    environment: Environment[Any],
    state: State,
    template: PromptTemplate,
    demonstrator: Demonstrator,
    habits: Habits,
    limits: TurnLimits,
    rng: np.random.Generator,
    luck_rng: np.random.Generator,
) -> list[Segment]:
    """Play one episode until the level ends or a limit is reached; return prompts and replies in turn."""
    states, make_plan = [state], demonstrator.start(state)
    segments = [
        Segment(template.format_first_turn(Observation(turn=1, state=state, actions_left=limits.actions)), False)
    ]
    actions_left = limits.actions
    for turn in range(1, limits.turns + 1):
        text, actions = _make_reply(states, make_plan, demonstrator, habits, rng, limits.actions_per_turn)
        segments.append(Segment(text + END_OF_MESSAGE, is_trained=True))
        luck = luck_rng.random((1, limits.actions_per_turn))
        outcome = environment.step(states[-1:], [actions[:actions_left]], luck)
        actions_left -= int(outcome.action_counts[0])
        if outcome.done[0] or actions_left == 0 or turn == limits.turns:
            return segments
        states.append(outcome.states[0])
        observation = Observation(turn + 1, states[-1], actions_left, float(outcome.rewards[0]))
        segments.append(Segment(template.format_next_turn(observation), is_trained=False))
    return segments


def _make_reply(
    states: Sequence[State],
    make_plan: MakePlan,
    demonstrator: Demonstrator,
    habits: Habits,
    rng: np.random.Generator,
    max_actions: int,
) -> tuple[str, Sequence[str]]:
    """Make the text of a reply and its actions."""
    # The shipped weights depend on the order of these draws.
    plan = make_plan(states, bool(rng.random() < habits.detour), rng)
    if rng.random() < habits.unfinished:
        return plan.thought, ()
    actions = plan.actions[:max_actions]
    if rng.random() < habits.careless:
        numbers = rng.integers(len(demonstrator.actions), size=max_actions)
        actions = [demonstrator.actions[number] for number in numbers]
    return format_reply(plan.thought, actions), actions
