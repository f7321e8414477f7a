"""Demonstrations and vocabulary of mastermind-tiny: random guesses among the codes that are still possible."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from trainable.envs.games.mastermind import COLORS, NO_GUESS, GuessState, compare_codes, list_codes
from trainable.tiny.dialogues import Demonstrator, MakePlan, Plan
from trainable.tiny.tokenizer import Vocabulary

POSITIONS, NUM_COLORS = 3, 4
CODES = tuple(list_codes(POSITIONS, NUM_COLORS))


def format_answer(exact: int, misplaced: int) -> str:
    """The two counts after a guess, as the compact prompt shows them."""
    return f" {exact}{misplaced}"


def make_vocabulary() -> Vocabulary:
    """Each letter is a piece, and so is each answer; a thought repeats all guesses with their answers, then plans."""
    answers = [
        format_answer(exact, misplaced) for exact in range(POSITIONS + 1) for misplaced in range(POSITIONS + 1 - exact)
    ]
    return Vocabulary(
        rewards=(0.0,),
        state_pieces=(NO_GUESS, *COLORS[:NUM_COLORS], *answers),
        thought_pieces=(" ",),
        action_pieces=(),
    )


@cache
def find_possible_codes(history: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[str, ...]:
    """The codes that fit all answers, in alphabetical order."""
    return tuple(code for code in CODES if all(compare_codes(code, guess) == answer for guess, answer in history))


def start_plans(state: GuessState) -> MakePlan:
    """Plans for one code, which only the answers reveal."""

    def make_plan(states: Sequence[GuessState], has_detour: bool, rng: np.random.Generator) -> Plan:
        history = tuple(
            (guess, compare_codes(state.code, guess)) for guess in (state.last_guess for state in states) if guess
        )
        possible_codes = find_possible_codes(history)
        if has_detour:  # a guess that the answers rule out, if there is one
            possible_codes = tuple(code for code in CODES if code not in possible_codes) or possible_codes
        guess = possible_codes[rng.integers(len(possible_codes))]
        recap = "".join(f"{earlier}{format_answer(*answer)} " for earlier, answer in history)
        return Plan(recap + guess, [guess])

    return make_plan


DEMONSTRATOR = Demonstrator(start_plans, lambda state, rng: state, CODES)
