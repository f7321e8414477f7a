"""Tests of what counts as code and as an answer in a reply, and of what a policy reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.trees.repl.session import ReplSession, RolloutAnswer, TreeLimits, TurnObservation
from sandboxes.trees.repl.texts import (
    ReplyContent,
    format_instructions,
    format_observation,
    format_output,
    format_task,
    parse_reply,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("```repl\nprint(1)\n```", ReplyContent(code="print(1)\n")),
        ("I think.\n```repl\nprint(1)```\nDone.", ReplyContent(code="print(1)")),
        ("```repl \nprint(1)\n```", ReplyContent(code="print(1)\n")),
        ("```repl\n```", ReplyContent(code="")),
        ("```python\nno\n```\n```repl\nprint(1)\n```", ReplyContent(code="print(1)\n")),
        ("```repl\nprint(1)\n```\n```", ReplyContent(code="print(1)\n")),
        ("```repl\nFINAL(1)\n```\nFINAL(2)", ReplyContent(code="FINAL(1)\n")),
        ("FINAL(12)", ReplyContent(answer="12")),
        ("So:\n  FINAL( ['a', 'b'] )\nthat is it", ReplyContent(answer="['a', 'b']")),
        ("FINAL('quoted')", ReplyContent(answer="quoted")),
        ('FINAL("with (brackets)")', ReplyContent(answer="with (brackets)")),
        ("FINAL('a', 'b')", ReplyContent(answer="'a', 'b'")),
        ("FINAL()", ReplyContent(answer="")),
        ("FINAL_VAR(hits)", ReplyContent(variable="hits")),
        ("FINAL_VAR('hits')", ReplyContent(variable="hits")),
    ],
)
def test_one_block_is_code_and_a_line_is_an_answer(text: str, content: ReplyContent) -> None:
    assert parse_reply(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((text, "no block") for text in ("", "print(1)", "```\nprint(1)\n```", "```python\nprint(1)\n```")),
        *((text, "no block") for text in ("```repl print(1)```", "```repl\nprint(1)\n", " ```  repl\nprint(1)\n```")),
        *((text, "no block") for text in ("In a sentence: FINAL(12).", "In a sentence: FINAL_VAR(hits).")),
        ("```repl\n1\n```\n```repl\n2\n```", "2 blocks"),
        ("```repl\n1\n```\n```repl\n2\n```\nFINAL(3)", "2 blocks"),
    ],
)
def test_no_block_and_several_are_problems(text: str, number: str) -> None:
    content = parse_reply(text)
    assert number in content.problem
    assert (content.code, content.answer, content.variable) == (None, None, None)


@given(st.text(st.sampled_from("`repl\nFINAL()_VR'\"x ")))
def test_every_reply_is_one_of_four(text: str) -> None:
    assert sum(field is not None for field in parse_reply(text)) == 1


def test_a_session_reads_code_answers_and_variables() -> None:
    with ReplSession({"a": "one two"}, TreeLimits(), is_root=True) as session:
        assert session.read("```repl\nhits = context['a'].split()\n```") == TurnObservation(
            "(no output)", is_valid=True
        )
        assert session.read("```repl\nprint(hits)\n1 / 0\n```") == TurnObservation(
            "['one', 'two']\nError: ZeroDivisionError: division by zero", is_valid=True
        )
        missing = session.read("FINAL_VAR(nothing)")
        assert not missing.is_valid
        assert "there is no variable 'nothing'" in missing.text
        assert session.read("FINAL_VAR(hits)") == RolloutAnswer("['one', 'two']")
        assert session.read("FINAL(hits)") == RolloutAnswer("hits")


def test_outputs_are_cut() -> None:
    assert format_output("", "", 20) == "(no output)"
    assert format_output("a\n", "b\n", 10) == "a\nError: b"
    assert format_output("a" * 10, "", 10) == "a" * 10
    # An error is seen however much was printed before it, and has half of the room at least.
    assert format_output("a" * 50, "b", 20) == "a" * 12 + "\n[38 of 50 characters are left out]\nError: b"
    assert format_output("a" * 50, "b" * 50, 20).startswith("a" * 10 + "\n[40 of 50")
    assert "\nError: bbb\n[47 of 57" in format_output("a" * 50, "b" * 50, 20)
    assert format_output("a", "b" * 50, 20).endswith("Error: " + "b" * 12 + "\n[38 of 57 characters are left out]")
    assert format_output("a" * 11, "", 10) == "a" * 10 + "\n[1 of 11 characters are left out]"


def test_a_policy_reads_sizes_and_no_texts_and_only_a_root_is_told_of_children() -> None:
    papers = {"p1": "secret words", "p2": "other"}
    full = format_task("Who?", papers, "full")
    assert "- p1: 12 characters" in full
    assert "Question: Who?" in full
    assert format_task("Who?", papers, "compact") == "p1 p2\nWho?\n"
    assert "secret" not in full + format_task("Who?", papers, "compact")
    assert format_observation("12", 1, "full") == "12\n\n1 reply is left."
    assert format_observation("12", 3, "full") == "12\n\n3 replies are left."
    assert format_observation("12", 3, "compact") == "12\n"
    root, child = (format_instructions(role, 10, "full") for role in ("root", "child"))
    for name in ("list_papers", "search", "get_paper_abstract", "extract_section", "SHOW_VARS", "FINAL(", "FINAL_VAR"):
        assert name in root
        assert name in child
    for name in ("rlm_query(", "rlm_query_batched("):
        assert name in root
        assert name not in child
    assert {format_instructions(role, 10, "compact") for role in ("root", "child")} == {"Papers", "Paper"}
