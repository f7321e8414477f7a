"""Mastermind against counting by hand: answers, consistency, chance, and the best strategy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.envs.environment import TurnLimits
from trainable.envs.games.mastermind import (
    GuessState,
    Mastermind,
    Secret,
    compare_codes,
    compute_consistent_share,
    list_codes,
)

CODES = list_codes(3, 4)
codes = st.sampled_from(CODES)
NO_LUCK = np.zeros((4, 4))


def compare_by_hand(code: str, guess: str) -> tuple[int, int]:
    """Cross out the letters at the right place, then each letter of the guess that is still in the code."""
    exact = [place for place in range(len(code)) if code[place] == guess[place]]
    rest = [letter for place, letter in enumerate(code) if place not in exact]
    misplaced = 0
    for place, letter in enumerate(guess):
        if place not in exact and letter in rest:
            rest.remove(letter)
            misplaced += 1
    return len(exact), misplaced


@given(codes, codes)
def test_answers_are_those_of_the_rules(code: str, guess: str) -> None:
    assert compare_codes(code, guess) == compare_codes(guess, code) == compare_by_hand(code, guess)


def test_a_turn_ends_with_the_code() -> None:
    game = Mastermind()
    states = game.start([Secret(0, "ABA")] * 4)
    outcome = game.step(states, [("AAB",), ("ABA",), (), ("AAA", "ABA", "BBB")], NO_LUCK)
    assert outcome.success.tolist() == outcome.done.tolist() == [False, True, False, True]
    assert outcome.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert outcome.action_counts.tolist() == [1, 1, 0, 2]
    assert [state.last_guess for state in outcome.states] == ["AAB", "ABA", "", "ABA"]
    # A later turn without a guess does not succeed by the memory of an earlier one.
    assert game.step([outcome.states[0]], [()], NO_LUCK).success.tolist() == [False]


def test_texts() -> None:
    game = Mastermind()
    assert game.format_state(GuessState("ABA"), "full") == game.format_state(GuessState("ABA"), "compact") == "no guess"
    assert game.format_state(GuessState("ABA", "AAB"), "compact") == "AAB 12"
    assert game.format_state(GuessState("ABA", "AAB"), "full") == "AAB: 1 exact, 2 misplaced"
    assert [game.read_action(word) for word in ("abd", " A B D ")] == ["ABD", "ABD"]
    assert [game.read_action(word) for word in ("ABE", "AB", "ABCD", "")] == [None] * 4
    assert "<answer>ABCD</answer>" in Mastermind(4, 6).format_instructions(8)
    assert "up to 8 guesses" in Mastermind(4, 6).format_instructions(8)


def test_codes_are_uniform() -> None:
    counts = np.bincount([CODES.index(level.code) for level in Mastermind().make_levels(range(6400))], minlength=64)
    assert ((counts - 100) ** 2 / 100).sum() < 63 + 4 * math.sqrt(2 * 63)  # chi squared of 63 degrees of freedom


@given(codes, st.lists(codes, min_size=1, max_size=5))
def test_consistent_guesses_are_those_that_are_still_possible(code: str, guesses: list[str]) -> None:
    share = compute_consistent_share(Secret(0, code), guesses)
    if len(guesses) == 1:
        assert math.isnan(share)
        return
    possible_counts = 0
    for number in range(1, len(guesses)):
        answers = {guess: compare_by_hand(code, guess) for guess in guesses[:number]}
        possible = [other for other in CODES if {guess: compare_by_hand(other, guess) for guess in answers} == answers]
        assert code in possible
        possible_counts += guesses[number] in possible
    assert share == pytest.approx(possible_counts / (len(guesses) - 1))


@pytest.mark.parametrize("guesses", [1, 2, 5])
def test_chance_is_the_success_of_random_guesses(guesses: int) -> None:
    game = Mastermind(2, 2)
    sequences = list(itertools.product(list_codes(2, 2), repeat=guesses))
    expected = sum("AB" in sequence for sequence in sequences) / len(sequences)
    chance = game.compute_chance(game.make_levels([0, 1]), TurnLimits(guesses, 1, guesses))
    assert chance == pytest.approx([expected, expected])


def count_best_by_hand(positions: int, colors: int, guesses: int) -> int:
    """Try every strategy: a guess, then for each answer every strategy for the codes that are left."""
    all_codes = list_codes(positions, colors)

    def count(candidates: tuple[str, ...], left: int) -> int:
        if left == 0 or not candidates:
            return 0
        best = 0
        for guess in all_codes:
            answers = {compare_by_hand(code, guess) for code in candidates} - {(positions, 0)}
            total = int(guess in candidates)
            for answer in answers:
                total += count(tuple(code for code in candidates if compare_by_hand(code, guess) == answer), left - 1)
            best = max(best, total)
        return best

    return count(tuple(all_codes), guesses)


@pytest.mark.parametrize(("positions", "colors"), [(2, 2), (2, 3), (1, 4), (3, 2)])
@pytest.mark.parametrize("guesses", [1, 2, 3])
def test_the_best_is_that_of_all_strategies(positions: int, colors: int, guesses: int) -> None:
    game = Mastermind(positions, colors)
    best = game.compute_best(game.make_levels([0]), TurnLimits(guesses, 1, guesses))
    assert best[0] * colors**positions == pytest.approx(count_best_by_hand(positions, colors, guesses))


@pytest.mark.slow
def test_the_best_of_the_default_game() -> None:
    game = Mastermind()
    levels = game.make_levels([0, 1])
    shares = [game.compute_best(levels, TurnLimits(guesses, 1, guesses))[0] for guesses in (1, 2, 3, 4, 5)]
    assert shares == sorted(shares)
    assert shares[0] == 1 / 64
    assert shares[-1] == 1.0
    assert game.compute_best(levels, TurnLimits(5, 2, 10)) is None
    assert Mastermind(4, 6).compute_best(levels, TurnLimits(5, 1, 5)) is None
