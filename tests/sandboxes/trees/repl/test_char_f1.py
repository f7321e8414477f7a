"""Tests of the reward char_f1 and of what it reads out of an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.trees.repl.char_f1 import compute_char_f1, parse_predictions

PAPERS = {"a": "the bridge is 40 metres long", "b": "the tower is high"}


def score_literally(predictions: list[str], papers: dict[str, str], evidence: list[str]) -> float:
    """The definition on sets of characters."""
    text = "\n\n".join(papers.values())

    def mark(passages: list[str]) -> set[int]:
        return {
            place
            for passage in passages
            if passage and passage in text
            for place in range(text.index(passage), text.index(passage) + len(passage))
        }

    marks, gold = mark(predictions), mark(evidence)
    if not marks or not gold:
        return 0.0
    precision, recall = len(marks & gold) / len(marks), len(marks & gold) / len(gold)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


WORDS = st.text("ab ", max_size=6)


@given(st.lists(WORDS, max_size=6), st.lists(WORDS, min_size=1, max_size=3), st.lists(WORDS, max_size=3))
def test_it_is_the_f1_of_marked_characters(predictions: list[str], texts: list[str], evidence: list[str]) -> None:
    papers = {str(place): text for place, text in enumerate(texts)}
    answer = repr(predictions)
    score = compute_char_f1(answer, papers, evidence)
    # No more than twelve passages, so without a cost.
    assert score == pytest.approx(score_literally(list(parse_predictions(answer)), papers, evidence))


def test_scores_by_hand() -> None:
    # 9 of 28 characters, of which "is 40" are 5; the evidence has 12: "is 40 metres".
    assert compute_char_f1("['bridge is', 'is 40']", PAPERS, ["is 40 metres"]) == pytest.approx(10 / 24)
    assert compute_char_f1("['is 40 metres']", PAPERS, ["is 40 metres"]) == 1
    # What does not occur marks nothing.
    assert compute_char_f1("['is 40 metres', 'is 90 metres']", PAPERS, ["is 40 metres"]) == 1
    assert compute_char_f1("['is']", PAPERS, ["tower is"]) == 0  # only the first occurrence is marked
    assert compute_char_f1("", PAPERS, ["tower"]) == 0


def test_more_than_twelve_passages_cost() -> None:
    papers = {"a": " ".join(f"word{number:03d}" for number in range(300))}
    evidence = [f"word{number:03d}" for number in range(300)]
    for count, cost in ((12, 0.0), (13, 0.05 / 12), (24, 0.05), (100, 0.05 * 88 / 12)):
        f1 = 2 * count / (count + 300)
        assert compute_char_f1(repr(evidence[:count]), papers, evidence) == pytest.approx(max(f1 - cost, 0))
    assert compute_char_f1(repr(evidence[:252]), papers, evidence) == 0
    assert compute_char_f1(repr([str(number) for number in range(200_000)]), papers, evidence) == 0


@pytest.mark.parametrize(
    ("answer", "passages"),
    [
        ('["one", "two"]', ("one", "two")),
        ("['one', 'two']", ("one", "two")),
        ("('one', ['two', {'key': 'three'}], 4)", ("one", "two", "three")),
        ("{'b', 'a'}", ("a", "b")),
        ('"a single text"', ("a single text",)),
        ("<final>['one']</final> and more", ("one",)),
        ("<FINAL>['one']", ("one",)),
        ('Here it is:\n```json\n["one"]\n```', ("one",)),
        ("['Some  Words', 'some words', ' ']", ("Some  Words",)),
        ('It says "long enough" and "short" there.', ("long enough",)),
        ("It says “long enough” there, 'and this too'.", ("long enough", "and this too")),
        ("It's the paper's first passage", ("It's the paper's first passage",)),
        (
            "- a line with enough letters\nshort\n2. another line of letters",
            ("a line with enough letters", "another line of letters"),
        ),
        ("short", ()),
        ("42", ()),
        ("", ()),
        ("null", ()),
    ],
)
def test_passages_are_read_out_of_an_answer(answer: str, passages: tuple[str, ...]) -> None:
    assert parse_predictions(answer) == passages


@pytest.mark.parametrize(
    "answer",
    [
        *(piece * 100_001 for piece in ("[", "(", "“", '"', "<final>", "```\n", "{'a': ", "lambda: ")),
        *(piece * 100_001 + "1" for piece in ("-", "not ")),
        "\x00",
    ],
    ids=lambda text: text[:6].strip(),
)
def test_a_hostile_answer_has_a_score(answer: str) -> None:
    assert 0 <= compute_char_f1(answer, PAPERS, ["tower"]) <= 1
