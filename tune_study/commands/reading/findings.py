"""The command `findings`: search the pages of the gallery, and print one."""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markdown import Markdown

from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError

PAGE_FOLDERS = (
    Path(__file__).parents[3] / "docs" / "findings",
    Path(sys.prefix) / "share" / "tune_study" / "findings",
)
"""Where the pages are in a checkout, and where an installed package has them."""


class Page(NamedTuple):
    """A page of the gallery."""

    name: str
    title: str
    verdict: str
    symptoms: str
    text: str


def read_pages() -> list[Page]:
    """Read all pages in the order of the index. They begin with title, verdict and symptoms."""
    folder = next(folder for folder in PAGE_FOLDERS if folder.is_dir())
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = []
    for path in sorted(folder.glob("*.md")):
        if path.stem != "index":
            text = path.read_text(encoding="utf-8")
            title, verdict, symptoms, _ = text.split("\n\n", 3)
            words = (title.removeprefix("# "), verdict.strip("*"), symptoms.removeprefix("When you see: ").rstrip("."))
            pages.append(Page(path.stem, *words, text))
    return sorted(pages, key=lambda page: index.index(f"]({page.name}.md) |"))


def print_findings(console: Console, words: Sequence[str]) -> None:
    """Print the page of this name, or a table of the pages that contain all words; without words, of all pages.

    Words are searched in name, title, symptoms and verdict, and where no page has them there, in the whole text. Raises
    PlanError if no page contains them.
    """
    pages = read_pages()
    heads = {page.name: " ".join((page.name, page.title, page.symptoms, page.verdict)).lower() for page in pages}
    texts = {page.name: page.text.lower() for page in pages}
    by_words = (
        [page for page in pages if all(word.lower() in contents[page.name] for word in words)]
        for contents in (heads, texts)
    )
    named = [page for page in pages if [page.name] == [*words]]
    matches = named or next(filter(None, by_words), [])
    if not matches:
        names = ", ".join(page.name for page in pages)
        typed = format_value(" ".join(words))
        raise PlanError(f"No page of the findings contains {typed}: type other words, or one of {names}.")
    if len(matches) == 1:
        _print_page(console, matches[0].text)
        return
    rows = [(page.name, page.symptoms, page.verdict) for page in matches]
    print_table(console, ("page", "when you see", "verdict"), rows)
    print_line(console, f"To read a page, type its name: {format_command('findings', matches[0].name)}")


def _print_page(console: Console, text: str) -> None:
    """Print a page: in a terminal wrapped to its width, elsewhere as it is."""
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
        return
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("| ")):
        if is_table:  # rich's Markdown would cut the cells
            headings, _, *rows = [line.replace("`", "")[2:-2].split(" | ") for line in lines]
            print_table(console, headings, rows)
        else:
            console.print(Markdown("\n".join(lines)))
