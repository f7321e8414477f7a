import json

import numpy as np
import pytest

from tests.fakes.scripted import make_episode
from trainable.models.codec import Codec
from trainable.ppo.evaluation import make_evaluation, number_classes, record_episode
from trainable.rollout.episode import Episode, StopReason
from trainable.runs.episode_lines import RecordedEpisode, RecordedTurn
from trainable.tiny.policies import SOKOBAN_TINY


def make_evaluation_episode(group: int, success: bool, score: float, turns: int, invalid: int) -> Episode:
    turn_parts = [(2, 1, score if turn == 0 else 0.0) for turn in range(turns)]
    return make_episode(turn_parts, group)._replace(
        stop_reason=StopReason.SUCCESS if success else StopReason.OUT_OF_TURNS,
        turn_validity=(False,) * invalid + (True,) * (turns - invalid),
    )


EPISODES = [
    make_evaluation_episode(0, True, 10.9, 1, 0),
    make_evaluation_episode(0, False, -1.0, 5, 1),
    make_evaluation_episode(1, False, -0.5, 4, 2),
]


def test_an_evaluation_counts_episodes_and_turns() -> None:
    evaluation = make_evaluation(EPISODES, 5, "val", "sampled", [7, 3])
    assert evaluation.success == pytest.approx(1 / 3)
    assert evaluation.score == pytest.approx(9.4 / 3)
    assert evaluation.invalid_turns == pytest.approx(3 / 10)
    assert evaluation.levels == (100, 100, 101)
    assert evaluation.clusters == (7, 7, 3)
    assert evaluation.successes == (True, False, False)
    evaluation = make_evaluation(EPISODES, 5, "val", "sampled", [0, 1])
    assert evaluation.compute_success_where([True, False, False]) == 1.0
    assert evaluation.compute_success_where([True, False, True]) == 0.5
    assert evaluation.compute_success_where([False, True, True]) == 0.0
    assert evaluation.compute_success_where([False] * 3) is None
    assert number_classes([b"x", b"y", b"x", b"a", b"y"]) == [0, 1, 0, 2, 1]
    assert number_classes([]) == []


def test_the_line_has_the_documented_fields() -> None:
    line = json.loads(json.dumps(make_evaluation(EPISODES, 0, "test", "greedy", [4, 0]).to_line()))
    episodes = {"levels": [100, 100, 101], "clusters": [4, 4, 0], "success": "100"}
    assert line == {"step": 0, "split": "test", "mode": "greedy", **episodes}


def test_a_recorded_episode_has_the_texts_of_its_very_tokens() -> None:
    tokenizer = SOKOBAN_TINY.build_tokenizer()
    messages = ["<|im_start|>user\nTurn 1:\nState:\n", "UL</think><answer>Up || Left</answer><|im_end|>", "O", "D"]
    tokens = [tokenizer.encode(message).ids for message in messages]
    rewards = (1.5, -0.125)
    episode = make_episode([(len(tokens[0]), len(tokens[1]), 1.5), (len(tokens[2]), len(tokens[3]), -0.125)])._replace(
        level_seed=17,
        tokens=np.concatenate(tokens),
        turn_actions=(("Up", "Left"), ()),
        turn_validity=(True, False),
        stop_reason=StopReason.OUT_OF_CONTEXT,
    )
    assert record_episode(episode, 5, Codec(tokenizer)) == RecordedEpisode(
        step=5,
        level=17,
        turns=(
            RecordedTurn(messages[0], messages[1], ("Up", "Left"), rewards[0], True),
            RecordedTurn(messages[2], messages[3], (), rewards[1], False),
        ),
        success=False,
        stop_reason="out of context",
        score=1.375,
    )
