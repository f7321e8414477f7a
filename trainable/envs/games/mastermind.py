"""Mastermind: find a secret code by guesses, each answered with two counts.

A prompt shows only the answer to the last guess. Earlier ones are in the conversation.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle
from trainable.envs.environment import FIRST_TEST_SEED, Measure, TurnLimits, TurnOutcome

COLORS = "ABCDEFGH"
"""The letters of the colors. A game uses the first ones."""

MAX_ENUMERATED_CODES = 128
"""Largest number of codes for which `compute_best` searches the best decision tree."""

NO_GUESS = "no guess"
"""Shown in the prompt of the first turn."""


@dataclass(frozen=True, eq=False)
class Secret:
    """A level: its seed, and its code, such as ABA."""

    seed: int
    code: str

    @property
    def key(self) -> bytes:
        """The code itself, since codes have no symmetries."""
        return self.code.encode()


class GuessState(NamedTuple):
    """The code of an episode and its last guess, which is empty at first."""

    code: str
    last_guess: str = ""


def compare_codes(code: str, guess: str) -> tuple[int, int]:
    """Count the letters of a guess at the right place, and the others that the code has at another place.

    Example:
        >>> compare_codes("AAB", "ABA")
        (1, 2)
    """
    exact = sum(left == right for left, right in zip(code, guess, strict=True))
    return exact, (Counter(code) & Counter(guess)).total() - exact


def compute_consistent_share(level: Secret, guesses: Sequence[str]) -> float:
    """Compute the share of guesses, from the second on, that are consistent with all earlier answers; NaN without any.

    The share is small for a policy that ignores the answers, and 1 for one that uses them all.
    """
    answers = [(guess, compare_codes(level.code, guess)) for guess in guesses]
    is_consistent = [
        all(compare_codes(guess, earlier) == answer for earlier, answer in answers[:number])
        for number, guess in enumerate(guesses)
    ]
    return float(np.mean(is_consistent[1:])) if len(guesses) > 1 else math.nan


@dataclass(frozen=True)
class Mastermind:
    """Mastermind with `positions` letters out of `colors` letters.

    The reward is 1 for the code and 0 for any other guess. Training and test share the codes, since there are so few.
    """

    positions: int = 3
    colors: int = 4
    name = "mastermind"
    title = "Mastermind"
    has_held_out_levels = False
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({"consistent_guesses": compute_consistent_share})

    def make_levels(self, seeds: Sequence[int]) -> list[Secret]:
        """Draw a uniformly random code for each seed."""
        return [Secret(int(seed), self._draw_code(int(seed))) for seed in seeds]

    def make_test_levels(self, count: int) -> list[Secret]:
        """Make the codes of the first `count` test seeds."""
        return self.make_levels(range(FIRST_TEST_SEED, FIRST_TEST_SEED + count))

    def start(self, levels: Sequence[Secret]) -> list[GuessState]:
        """Return a state without a guess for each code."""
        return [GuessState(level.code) for level in levels]

    def step(
        self, states: Sequence[GuessState], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Make the guesses of each turn until one is the code."""
        counts = [
            names.index(state.code) + 1 if state.code in names else len(names)
            for state, names in zip(states, actions, strict=True)
        ]
        next_states = [
            state._replace(last_guess=names[count - 1]) if count else state
            for state, names, count in zip(states, actions, counts, strict=True)
        ]
        success = np.array([state.last_guess == state.code for state in next_states], dtype=bool)
        return TurnOutcome(next_states, success.astype(np.float64), np.array(counts, dtype=np.int64), success, success)

    def read_action(self, word: str) -> str | None:
        """Parse a guess: as many letters as the code has, in any case, with or without blanks between them."""
        guess = "".join(word.upper().split())
        return guess if len(guess) == self.positions and set(guess) <= set(COLORS[: self.colors]) else None

    def format_instructions(self, max_actions: int) -> str:
        """Write the rules and an example of an answer."""
        letters = COLORS[: self.colors]
        example = "".join(itertools.islice(itertools.cycle(letters), self.positions))
        return (
            f"You are a helpful assistant. You are solving Mastermind: find a secret code of {self.positions} letters. "
            f"Each letter is one of {', '.join(letters)}, and may occur several times. After each guess you are told "
            "how many of its letters are at the right place (exact), and how many others are in the code at another "
            "place (misplaced). You see the answer to your last guess only, so remember the earlier ones. Your answer "
            f"is a guess, for example <answer>{example}</answer>.\n"
            f"You may make up to {max_actions} guesses."
        )

    def format_state(self, state: GuessState, style: PromptStyle) -> str:
        """Format the last guess and its two counts, as bare numbers in the compact style."""
        if not state.last_guess:
            return NO_GUESS
        exact, misplaced = compare_codes(state.code, state.last_guess)
        if style == "compact":
            return f"{state.last_guess} {exact}{misplaced}"
        return f"{state.last_guess}: {exact} exact, {misplaced} misplaced"

    def compute_chance(self, levels: Sequence[Secret], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Compute the probability that one of the random guesses is the code: 1 - (1 - 1 / codes) ^ guesses."""
        miss = 1 - 1 / self.colors**self.positions
        return np.full(len(levels), 1 - miss**limits.reachable_actions)

    def compute_best(self, levels: Sequence[Secret], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """Compute the share of all codes that the best decision tree finds. It is the same for every level.

        Return None for more than 128 codes, or if a turn may have several guesses, which get no answers in between.
        """
        if self.colors**self.positions > MAX_ENUMERATED_CODES or limits.actions_per_turn > 1:
            return None
        codes = frozenset(list_codes(self.positions, self.colors))
        best = _count_found(codes, self.positions, self.colors, limits.reachable_actions)
        return np.full(len(levels), best / len(codes))

    def _draw_code(self, seed: int) -> str:
        rng = np.random.Generator(np.random.PCG64(seed))
        return "".join(COLORS[number] for number in rng.integers(self.colors, size=self.positions))


def list_codes(positions: int, colors: int) -> list[str]:
    """List all codes in alphabetical order."""
    return ["".join(letters) for letters in itertools.product(COLORS[:colors], repeat=positions)]


@cache
def _count_found(candidates: frozenset[str], positions: int, colors: int, guesses: int) -> int:
    """Count the candidates that the best strategy finds with that many guesses, which may be any codes."""
    if guesses == 0 or not candidates:
        return 0
    if guesses == 1:
        return 1
    if len(candidates) <= 2:
        return len(candidates)
    best = 0
    # Candidates come first, being the best guesses more often: the search ends at the first guess that finds all.
    for guess in sorted(list_codes(positions, colors), key=lambda code: (code not in candidates, code)):
        classes: dict[tuple[int, int], set[str]] = {}
        for code in candidates:
            classes.setdefault(compare_codes(code, guess), set()).add(code)
        found_count = int(guess in candidates)
        for answer, members in classes.items():
            if answer[0] < positions:
                found_count += _count_found(frozenset(members), positions, colors, guesses - 1)
        best = max(best, found_count)
        if best == len(candidates):
            break
    return best
