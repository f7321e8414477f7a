"""Tests of the command `findings`: pages by name, by words, and a word that no page has."""

import io
import re
from itertools import pairwise

import pytest

from tune_study.commands.reading.findings import print_findings, read_pages
from tune_study.host.console import make_console
from tune_study.plan.errors import PlanError


def ask(*words: str) -> str:
    file = io.StringIO()
    print_findings(make_console(file, width=100), words)
    return file.getvalue()


def test_without_words_all_pages_are_listed_with_symptoms_and_verdict() -> None:
    text = ask()
    for page in read_pages():
        assert page.name in text
        assert page.verdict in text
        assert page.symptoms in text
        assert page.text.startswith(f"# {page.title}\n")
        assert not page.verdict.startswith("*")
    assert "python -m tune_study findings" in text
    assert [page.name for page in read_pages()][:3] == ["remedies", "in-time", "kl-form"], "in the order of the index"


def test_a_name_prints_the_page() -> None:
    (page,) = [page for page in read_pages() if page.name == "remedies"]
    assert ask("remedies").rstrip("\n") == page.text.rstrip("\n")


@pytest.mark.parametrize("name", [page.name for page in read_pages()])
def test_a_terminal_wraps_paragraphs_and_cuts_no_table(name: str) -> None:
    file = io.StringIO()
    console = make_console(file, width=80)
    console._force_terminal = True
    print_findings(console, [name])
    text = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    (page,) = [page for page in read_pages() if page.name == name]
    lines = page.text.splitlines()
    names = {line.split()[1].strip("`") for before, line in pairwise(lines) if before[:2] == line[:2] == "| "}
    assert names - {"---"} <= set(text.split())


def test_words_are_searched_in_symptoms_first_and_then_in_the_text() -> None:
    # Several pages are also about success that falls and entropy that stays.
    assert ask("entropy falls") == ask("Falls", "ENTROPY") == ask("remedies")
    assert ask("ZeroSearch") == ask("remedies")


def test_a_word_that_no_page_has_is_refused() -> None:
    with pytest.raises(PlanError, match=r"No page of the findings contains no such words: .*remedies"):
        ask("no", "such", "words")
