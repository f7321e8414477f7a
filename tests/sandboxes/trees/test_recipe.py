"""Tests of the demonstrations and of the policy papers-tiny."""

from collections.abc import Mapping
from itertools import chain

import numpy as np
import pytest

from sandboxes.trees.recipe import MAX_TURNS, PAPERS_TINY, make_dialogue, write_exact, write_loose, write_query
from sandboxes.trees.repl.char_f1 import compute_char_f1
from sandboxes.trees.repl.session import ReplSession, RolloutAnswer, TreeLimits, TurnObservation
from sandboxes.trees.repl.texts import format_observation
from tests.sandboxes.trees.test_runs import make_trainer
from trainable.algo.filters import compute_group_scores
from trainable.envs.level_sets import make_demonstration_levels
from trainable.envs.prompts import END_OF_MESSAGE
from trainable.rollout.episode import reshape_by_group
from trainable.tiny.dialogues import Habits, Segment
from trainable.tiny.tokenizer import UNKNOWN

HABITS = Habits(detour=0.6, careless=0.2, unfinished=0.3)


def make_dialogues(count: int) -> list[tuple[Mapping[str, str], list[Segment]]]:
    rng = np.random.default_rng(0)
    levels = make_demonstration_levels(PAPERS_TINY.source, count)
    return [(level.question.papers, make_dialogue(level, HABITS, rng)) for level in levels]


@pytest.mark.long
def test_every_text_of_a_dialogue_is_made_of_known_pieces() -> None:
    tokenizer = PAPERS_TINY.build_tokenizer()
    unknown = PAPERS_TINY.pieces.index(UNKNOWN)
    for _, segments in make_dialogues(100):
        for segment in segments:
            ids = tokenizer.encode(segment.text).ids
            assert unknown not in ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == segment.text
            if segment.is_trained:
                assert len(ids) <= PAPERS_TINY.response_length


@pytest.mark.long
def test_observations_are_those_of_a_real_repl() -> None:
    num_later_turns = 0
    for papers, segments in make_dialogues(40):
        replies = [segment.text.removesuffix(END_OF_MESSAGE) for segment in segments if segment.is_trained]
        prompts = [segment.text for segment in segments if not segment.is_trained]
        is_root = "Papers" in prompts[0]
        if not is_root:
            papers = {"context": next(text for text in papers.values())}
        with ReplSession(papers, TreeLimits(), is_root) as session:
            for turn, (reply, prompt) in enumerate(zip(replies, prompts[1:], strict=False), start=1):
                outcome = session.read(reply)
                assert isinstance(outcome, TurnObservation)
                if is_root:  # a child of the test may have been shown another paper
                    assert format_observation(outcome.text, MAX_TURNS - turn, "compact") in prompt
                    num_later_turns += 1
            assert "FINAL(" in replies[-1]
    assert num_later_turns > 3


def test_the_programs_of_a_root_score_as_they_should() -> None:
    for level in PAPERS_TINY.source.make_levels(range(20)):
        question = level.question
        thing = question.text.removesuffix(".").rpartition(" ")[2]
        scores = []
        for code in (write_exact(thing), write_loose(thing)):
            with ReplSession(question.papers, TreeLimits(), is_root=True) as session:
                outcome = session.read(f"```repl\nFINAL({code})\n```")
                assert isinstance(outcome, RolloutAnswer)
                scores.append(compute_char_f1(outcome.text, question.papers, question.evidence))
        assert scores[0] == 1
        assert 0.3 < scores[1] <= 1
        with ReplSession(question.papers, TreeLimits(), is_root=True) as session:
            query = session.read(f"```repl\nFINAL({write_query(thing)})\n```")
            assert query == ((thing,) * 3, tuple(question.papers.values()))
            lines = [[line for line in text.split("\n") if line.startswith(f"The {thing}")] for text in query[1]]
            joined = RolloutAnswer(repr(list(chain(*lines))))
            assert session.give_answers(list(map(repr, lines))) == joined


@pytest.mark.long
def test_the_shipped_policy_writes_blocks_and_its_rewards_vary() -> None:
    trainer = make_trainer(env__max_turn=MAX_TURNS, env__group_size=16)
    episodes = trainer.roll_out(trainer.val_levels[:8], 16, "sampling")
    assert [episode.group for episode in episodes] == [group for group in range(8) for _ in range(16)]
    validity = [valid for episode in episodes for valid in episode.turn_validity]
    assert np.mean(validity) > 0.8
    stds = compute_group_scores("reward_std", reshape_by_group([episode.score for episode in episodes], 16))
    assert (stds > 0.05).all()
    assert 0.3 < np.mean([episode.score for episode in episodes]) < 0.7
    assert any(episode.children for episode in episodes)
