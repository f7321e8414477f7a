"""The tables of docs/metrics.md, made from the columns of the records.

python -m tests.metrics_page        # writes the tables again, after a change of a column
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandboxes.distillation import family as distillation
from sandboxes.pedagogy import study as pedagogy
from sandboxes.update_rules import family as update_rules
from sandboxes.vector_rewards import study as vector_rewards
from trainable.runs.records import (
    GRADIENT_COLUMNS,
    GRADIENT_GROUP_COLUMNS,
    IMPORTED_COLUMNS,
    ROW_COLUMNS,
    STEP_COLUMNS,
    STOP_COLUMNS,
    TRIAL_COLUMNS,
    Column,
)

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = "| column | unit | meaning | published key |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)+")

TWINS = re.compile(r"collapse_trajectory_|scheduled_(?!actor_lr$)|base_val_(?!success$)|total_(?!optimizer_steps$)")
"""Beginnings of the names of columns that the page describes by their twin alone."""

COLUMNS: Sequence[Column] = (
    *ROW_COLUMNS,
    *(column for column in STEP_COLUMNS if not TWINS.match(column.name)),
    *(*IMPORTED_COLUMNS, *STOP_COLUMNS, *TRIAL_COLUMNS),
    *(*GRADIENT_COLUMNS, *GRADIENT_GROUP_COLUMNS),
    *(*update_rules.STEP_COLUMNS, *update_rules.TRIAL_COLUMNS),
    *(*distillation.STEP_COLUMNS, *distillation.TRIAL_COLUMNS),
    *(*vector_rewards.STEP_COLUMNS, *vector_rewards.TRIAL_COLUMNS),
    *(*pedagogy.STEP_COLUMNS, *pedagogy.TRIAL_COLUMNS),
)
"""The columns in the order of the page. A table goes on until the column with which the next one begins."""


def format_table(columns: Iterable[Column]) -> str:
    """Return the table of these columns."""
    rows = [
        (f"`{column.name}`", column.unit, column.meaning, column.published_key and f"`{column.published_key}`")
        for column in columns
    ]
    lines = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    return HEAD + "".join(f"| {line} |\n" for line in lines)


def render_page(page: str) -> str:
    """Return the text of the page with its tables made again."""
    first_names = [table.removeprefix(HEAD).split("`")[1] for table in TABLE.findall(page)]
    starts: list[int] = []
    for name in first_names:
        start = starts[-1] + 1 if starts else 0
        starts.append(next(index for index in range(start, len(COLUMNS)) if COLUMNS[index].name == name))
    tables = [COLUMNS[start:end] for start, end in zip(starts, [*starts[1:], len(COLUMNS)], strict=True)]
    texts = iter(map(format_table, tables))
    return TABLE.sub(lambda _: next(texts), page)


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
