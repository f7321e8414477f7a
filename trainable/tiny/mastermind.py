"""Demonstrations and vocabulary of mastermind-tiny: the first code of a fixed order that is still possible."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from trainable.envs.games.mastermind import COLORS, NO_GUESS, GuessState, compare_codes, list_codes
from trainable.tiny.dialogues import Demonstrator, MakePlan, Plan
from trainable.tiny.tokenizer import Vocabulary

POSITIONS, NUM_COLORS = 3, 4
_CODES = list_codes(POSITIONS, NUM_COLORS)
CODES = tuple(_CODES[number] for number in np.random.Generator(np.random.PCG64(0)).permutation(len(_CODES)))
"""All codes, in the order in which they are guessed. It finds 94 % of the codes within four guesses, and all in five.

A random guess among the possible codes would do as well, but a tiny policy does not learn it: what it would have to
imitate is mostly noise.
"""


def format_answer(exact: int, misplaced: int) -> str:
    """The two counts after a guess, as the compact prompt shows them."""
    return f" {exact}{misplaced}"


def make_vocabulary() -> Vocabulary:
    """Each code is a piece, and so is each answer: a policy of two layers can then add up what the answers exclude.

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
    """The codes that fit all answers, in the order of CODES."""
    return tuple(code for code in CODES if all(compare_codes(code, guess) == answer for guess, answer in history))


def start_plans(state: GuessState) -> MakePlan:
    """Plans for one code, which only the answers reveal."""

    def make_plan(states: Sequence[GuessState], has_detour: bool, rng: np.random.Generator) -> Plan:
        history = tuple(
            (guess, compare_codes(state.code, guess)) for guess in (state.last_guess for state in states) if guess
        )
        possible_codes = find_possible_codes(history)
        guess = possible_codes[0]
        if has_detour and history:  # the last guess again, as if there had been no answer
            guess = history[-1][0]
        recap = "".join(f"{earlier}{format_answer(*answer)} " for earlier, answer in history)
        return Plan(recap + guess, [guess])

    return make_plan


DEMONSTRATOR = Demonstrator(start_plans, lambda state, rng: state, CODES)
