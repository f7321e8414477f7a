"""The command `findings`: search the pages of the gallery, and print one."""

import sys
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
    """Read all pages, by name. They begin with title, verdict and symptoms, as `analysis.gallery.pages` writes them."""
    folder = next(folder for folder in PAGE_FOLDERS if folder.is_dir())
    pages = []
    for path in sorted(folder.glob("*.md")):
        if path.stem != "index":
            text = path.read_text(encoding="utf-8")
            title, verdict, symptoms, _ = text.split("\n\n", 3)
            words = (title.removeprefix("# "), verdict.strip("*"), symptoms.removeprefix("When you see: ").rstrip("."))
            pages.append(Page(path.stem, *words, text))
    return pages


def print_findings(console: Console, word: str | None) -> None:
    """Print the page named `word`, or a table of the pages that contain it; None: of all pages.

    Raises PlanError if there is none.
    """
    pages = read_pages()
    named = [page for page in pages if page.name == word]
    matches = named or [page for page in pages if word is None or word.lower() in page.text.lower()]
    if not matches:
        names = ", ".join(page.name for page in pages)
        raise PlanError(f"No page of the findings contains {format_value(word)}: type another word, or one of {names}.")
    if len(matches) == 1:
        console.print(
            Markdown(matches[0].text) if console.is_terminal else matches[0].text, markup=False, soft_wrap=True
        )
        return
    rows = [(page.name, page.symptoms, page.verdict) for page in matches]
    print_table(console, ("page", "when you see", "verdict"), rows)
    print_line(console, f"To read a page, type its name: {format_command('findings', matches[0].name)}")
