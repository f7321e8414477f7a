"""Demonstrations and vocabulary of mastermind-tiny: guess the first code, in a fixed order, that is still possible."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from trainable.envs.games.mastermind import COLORS, NO_GUESS, GuessState, compare_codes, list_codes
from trainable.tiny.dialogues import Demonstrator, MakePlan, Plan
from trainable.tiny.tokenizer import Vocabulary

POSITIONS, NUM_COLORS = 3, 4
_CODES = list_codes(POSITIONS, NUM_COLORS)
CODES = tuple(_CODES[number] for number in np.random.Generator(np.random.PCG64(0)).permutation(len(_CODES)))
"""All codes in guessing order. It finds 94 % of the codes within four guesses, and all within five.

Random guesses among the possible codes would do as well, but a tiny policy would not learn them: they are mostly noise.
"""


def format_answer(exact: int, misplaced: int) -> str:
    """Format the two counts after a guess as in the compact prompt."""
    return f" {exact}{misplaced}"


def make_vocabulary() -> Vocabulary:
    """Make the pieces. Codes and answers are single pieces, so that two layers suffice to combine the answers.

    A thought repeats all guesses with their answers, then plans the next guess.
    """
    answers = [
        format_answer(exact, misplaced) for exact in range(POSITIONS + 1) for misplaced in range(POSITIONS + 1 - exact)
    ]
    return Vocabulary(
        rewards=(0.0,),
        state_pieces=(NO_GUESS, *COLORS[:NUM_COLORS], *answers),
        thought_pieces=(" ",),
        action_pieces=CODES,
    )


@cache
def find_possible_codes(history: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[str, ...]:
    """Find the codes that fit all answers, in the order of CODES."""
    return tuple(code for code in CODES if all(compare_codes(code, guess) == answer for guess, answer in history))


def start_plans(state: GuessState) -> MakePlan:
    """Prepare plans for one code, which use only the answers."""

    def make_plan(states: Sequence[GuessState], has_detour: bool, rng: np.random.Generator) -> Plan:
        history = tuple(
            (guess, compare_codes(state.code, guess)) for guess in (state.last_guess for state in states) if guess
        )
        possible_codes = find_possible_codes(history)
        guess = possible_codes[0]
        if has_detour and history:  # repeat the last guess, ignoring its answer
            guess = history[-1][0]
        recap = "".join(f"{earlier}{format_answer(*answer)} " for earlier, answer in history)
        return Plan(recap + guess, [guess])

    return make_plan


DEMONSTRATOR = Demonstrator(start_plans, lambda state, rng: state, CODES)
