import io

from rich.console import Console

from tune_study.host.console import print_table

COLUMNS = ("setting", "value", "meaning")
ROWS = [["filter.rollout_filter_include_zero", "True", "False: drop groups with score 0 " * 4], ["actor.lr", "1", "x"]]


def print_to_text(width: int, is_terminal: bool) -> str:
    screen = io.StringIO()
    print_table(Console(file=screen, force_terminal=is_terminal, color_system=None, width=width), COLUMNS, ROWS)
    return screen.getvalue()


def test_a_terminal_wraps_cells_and_cuts_none() -> None:
    text = print_to_text(70, is_terminal=True)
    assert max(len(line) for line in text.splitlines()) <= 70
    assert "filter.rollout_filter_include_zero" in text
    assert "…" not in text
    assert text.split().count("score") == 4


def test_a_pipe_gets_one_line_per_row() -> None:
    header, first, second = print_to_text(70, is_terminal=False).splitlines()
    assert header.split() == list(COLUMNS)
    assert first.endswith("False: drop groups with score 0")
    assert second.split() == ROWS[1]
