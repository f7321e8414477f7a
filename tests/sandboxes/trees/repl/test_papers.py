"""Tests of the questions of the game `papers`: generated ones, and those of a file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.trees.repl.char_f1 import compute_char_f1
from sandboxes.trees.repl.papers import FilePapers, GeneratedPapers, make_papers, make_question
from sandboxes.trees.repl.questions import Question
from tests.strategies.algo import examples
from trainable.config.games import PapersConfig
from trainable.envs.data_rows import DataFileError
from trainable.envs.level_sets import collect_level_keys, make_training_levels, make_validation_levels


@examples
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(2, 8))
def test_the_evidence_of_a_generated_question_is_known(seed: int, num_papers: int, num_sentences: int) -> None:
    question = make_question(seed, num_papers, num_sentences)
    assert question == make_question(seed, num_papers, num_sentences)
    thing = question.text.removeprefix("Quote every sentence about the ").removesuffix(".")
    lines = [line for text in question.papers.values() for line in text.split("\n")]
    assert len(lines) == num_papers * num_sentences
    assert 1 <= len(question.evidence) <= num_papers
    assert sorted(question.evidence) == sorted(line for line in lines if line.startswith(f"The {thing} "))
    assert len(set(question.evidence)) == len(question.evidence)
    # The evidence alone is worth 1; every sentence that has the word is worth no more.
    assert compute_char_f1(repr(list(question.evidence)), question.papers, question.evidence) == 1
    loose = [line for line in lines if thing in line]
    score = compute_char_f1(repr(loose), question.papers, question.evidence)
    assert (score < 1) == (len(loose) > len(question.evidence))


@pytest.mark.long
def test_generated_sets_share_no_question() -> None:
    source = GeneratedPapers(3, 4)
    test_levels = source.make_test_levels(16)
    validation, training = make_validation_levels(source, 32), make_training_levels(source, range(10_000, 10_016))
    sets = [collect_level_keys(levels) for levels in (test_levels, validation, training)]
    assert [len(keys) for keys in sets] == [16, 32, 16]
    assert len(frozenset().union(*sets)) == 64


def make_questions(count: int) -> tuple[Question, ...]:
    texts = [f"text {number}" for number in range(count)]
    return tuple(Question(f"Question {number}?", {"a": text}, (text,)) for number, text in enumerate(texts))


@pytest.mark.long
def test_the_test_questions_of_a_file_are_in_no_other_set() -> None:
    source = FilePapers(make_questions(40))
    test_keys = collect_level_keys(source.make_test_levels(512))
    assert len(test_keys) == 4
    assert len(source.make_test_levels(2)) == 2
    other_keys = collect_level_keys(source.make_levels(range(10_000)))
    assert len(other_keys) == 36
    assert not test_keys & other_keys
    assert [level.question for level in source.make_levels([5, 7])] == [
        level.question for seed in (5, 7) for level in source.make_levels([seed])
    ]
    with pytest.raises(ValueError, match="the file has 19 different questions, and 20 are the minimum"):
        FilePapers(make_questions(19))
    # A row that is repeated counts once, and is either a test question or none.
    with pytest.raises(ValueError, match="the file has 1 different questions"):
        FilePapers(make_questions(1) * 20)
    repeated = FilePapers(make_questions(40) * 3)
    assert len(repeated.make_test_levels(512)) == 4
    assert not collect_level_keys(repeated.make_test_levels(512)) & collect_level_keys(
        repeated.make_levels(range(5_000))
    )


def test_the_setting_selects_a_file_and_children_are_counted_by_their_action(tmp_path: Path) -> None:
    row = {"question": "Who?", "context": {"a": "Ada."}, "evidence": [{"selections": [{"text": "Ada."}]}]}
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({**row, "question": f"Who {number}?"}) + "\n" for number in range(20)))
    source = make_papers(PapersConfig(file=str(path)))
    assert {level.question.text for level in source.make_levels(range(500))} <= {
        f"Who {number}?" for number in range(20)
    }
    assert make_papers(PapersConfig(num_papers=2)).make_levels([0])[0].question == make_question(0, 2, 4)
    with pytest.raises(DataFileError, match="cannot be read"):
        make_papers(PapersConfig(file=str(tmp_path / "nothing.jsonl")))
    source = GeneratedPapers(3, 4)
    (level,) = source.make_levels([0])
    assert source.measures["children"](level, ["run", "ask", "ask", "run"]) == 2
    assert source.measures["children"](level, []) == 0
