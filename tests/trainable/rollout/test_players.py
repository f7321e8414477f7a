"""Tests of what a player checks before a run starts."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from trainable.envs.environment import TurnLimits
from trainable.envs.prompts import Observation
from trainable.rollout.episode_loop import TurnPlayer


class EchoGame:
    """An environment, prompt template and codec in one: a level is its prompt, and a character is a token."""

    def start(self, levels: Sequence[str]) -> Sequence[str]:
        return levels

    def format_first_turn(self, observation: Observation[str]) -> str:
        return observation.state

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_longest_first_prompt_has_to_fit_wherever_it_is(place: int) -> None:
    game = cast(Any, EchoGame())
    player = TurnPlayer(game, game, game, TurnLimits(2, 3, 6), 0.0, context_length=20)
    levels = cast(Any, ["short", "short", "short"])
    player.check_first_turns(levels, response_length=15)
    assert player.encode_first_turn(levels[0]) == list(map(ord, "short"))
    levels[place] = "longer"
    with pytest.raises(ValueError, match=r"may need 21 tokens \(6 of the prompt and rollout\.response_length=15\)"):
        player.check_first_turns(levels, response_length=15)
