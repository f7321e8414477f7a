import io
import threading
import warnings

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from search_spaces.catalog import STUDIES
from trainable.config.run_config import iter_fields
from trainable.config.setting_types import is_common
from trainable.files import step_phase
from trainable.files.json_values import DamageWarning
from tune_study.commands.describe import print_settings, print_status
from tune_study.host.console import make_console, print_error, print_line, print_table, show_phases, show_warnings

COLUMNS = ("setting", "value", "meaning")
ROWS = [["filter.rollout_filter_include_zero", "True", "False: drop groups with score 0 " * 4], ["actor.lr", "1", "x"]]


def print_to_text(width: int, is_terminal: bool, optional: tuple[str, ...] = ()) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, color_system=None, width=width)
    print_table(console, COLUMNS, ROWS, optional)
    return screen.getvalue()


def test_a_terminal_wraps_cells_and_cuts_none() -> None:
    text = print_to_text(70, is_terminal=True)
    assert max(len(line) for line in text.splitlines()) <= 70
    assert "filter.rollout_filter_include_zero" in text
    assert "…" not in text
    assert text.split().count("score") == 4


def test_headings_are_wrapped_before_cells_and_words_are_whole() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=46)
    print_table(console, ("name", "last success", "why"), [["a", "0.1", "reward_variance_collapse in the first step"]])
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == [
        *("      last", "name  success  why", "─" * 46),
        *("a     0.1      reward_variance_collapse in the", "               first step"),
    ]


def test_a_narrow_terminal_leaves_out_what_matters_least() -> None:
    assert "Left out" not in print_to_text(80, is_terminal=True, optional=("meaning",))
    text = print_to_text(60, is_terminal=True, optional=("meaning", "value"))
    assert text.endswith("Left out at this width: meaning. `| cat` shows all columns.\n")
    assert "True" in text
    assert "score" not in text
    assert "meaning" in print_to_text(60, is_terminal=False, optional=("meaning",))


def test_a_table_that_fits_in_no_way_becomes_a_list() -> None:
    text = print_to_text(50, is_terminal=True)
    assert text.split("\n")[0] == "filter.rollout_filter_include_zero"
    assert "    value: 1; meaning: x" in text
    assert text.split().count("score") == 4
    assert max(map(len, text.splitlines())) <= 50


@pytest.mark.parametrize("width", [60, 80])
def test_settings_are_legible_in_every_terminal(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=width)
    print_settings(console, STUDIES["kl"], with_all=False)
    *lines, last = screen.getvalue().splitlines()
    names = {name for name, field in iter_fields(STUDIES["kl"].family.config_class) if is_common(field)}
    assert names <= set(lines)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 5 * len(names)  # 565 and 2293 lines, before there were lists
    assert "more settings are rarely changed" in last


def test_the_status_of_a_stopped_run_is_a_table_of_80_columns() -> None:
    run = {"arm": "0.01", "seed": 0, "step": 60, "steps": 60, "value": 0.25, "collapse_step": None, "run": "r" * 40}
    rule = "reward_variance_collapse"
    done = {"status": "completed", "status_text": "completed", "reason": "trained 60 of 60 steps"}
    stopped = {"status": "early_stopped", "status_text": "early_stopped", "reason": f"{rule} at step 38: 0.04 is low"}
    status = {"study": "kl", "preset": "stress", "state": "finished", "metric": "val_success", "notes": []}
    runs = [{**run, **done}, {**run, **stopped, "collapse_step": 40}]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=80)
    print_status(console, {**status, "runs": runs, "resume_command": None})
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["arm", "seed", "status", "step", "success", "collapsed", "reason"]
    assert lines[4].split() == ["0.01", "0", "completed", "60/60", "0.250"]
    assert lines[5].split() == ["0.01", "0", "early_stopped", "60/60", "0.250", "step", "40", rule]


def test_a_pipe_gets_one_line_per_row() -> None:
    header, first, second = print_to_text(70, is_terminal=False).splitlines()
    assert header.split() == list(COLUMNS)
    assert first.endswith("False: drop groups with score 0")
    assert second.split() == ROWS[1]


HOSTILE_TEXTS = (
    "\x1b]0;title\x07x",
    "\x1b]52;c;AAAA\x1b\\x",
    "a\rb",
    "\x9b2Jx",
    "\u202egnp.exe",
    "a\u2028b",
    "a\x00b",
)


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_shown_and_never_sent(text: str, is_terminal: bool) -> None:
    screen = io.StringIO()
    console = make_console(screen, width=100)
    console._force_terminal = is_terminal
    print_line(console, text)
    print_table(console, ("name", "value"), [[text, text]])
    table = Table(title="title")
    table.add_column(text)
    table.add_row(Text(text))
    console.print(table)
    output = screen.getvalue()
    assert text[-1] in output
    styles_removed = output.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[3m", "").replace("\x1b[2m", "")
    assert all(character.isprintable() or character == "\n" for character in styles_removed), repr(output)


def test_an_error_shows_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("a \x1b[2J folder\nsecond line ü")
    assert capsys.readouterr().err == "a \\x1b[2J folder\nsecond line ü\n"


def test_a_damaged_file_is_named_without_a_line_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show_warnings()
        warnings.warn("x/\x1b[2J.json is damaged.", DamageWarning, stacklevel=1)
        warnings.warn("Glyph \x1b is missing", stacklevel=1)
    first_line, *other_lines = capsys.readouterr().err.splitlines()
    assert first_line == "tune_study: x/\\x1b[2J.json is damaged."
    assert "UserWarning: Glyph \\x1b is missing" in other_lines[0]
    assert "\x1b" not in "".join(other_lines)


def test_a_line_break_in_a_cell_makes_no_row_and_shifts_no_column() -> None:
    screen = io.StringIO()
    print_table(make_console(screen, width=100), ("arm", "status"), [["x\nfake", "completed"], ["y", "failed"]])
    lines = screen.getvalue().splitlines()
    assert lines[1:] == ["x\\nfake  completed", "y        failed"]


def test_a_link_of_a_style_is_not_sent() -> None:
    screen = io.StringIO()
    console = make_console(screen, width=100)
    console._force_terminal = True
    console.print("[link=a\x1bcb]text[/link]")
    assert "text" in screen.getvalue()
    assert "\x1bc" not in screen.getvalue()


def test_a_long_task_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_phase, "QUIET_SECONDS", 0.0)
    screen = io.StringIO()
    with show_phases(Console(file=screen, width=80), "gradients"):
        step_phase.STEP_PHASE.enter("bucket 1")  # not ten seconds after the start
    assert screen.getvalue() == ""
    monkeypatch.setattr("tune_study.host.console.SECONDS_PER_PHASE_LINE", 0.0)
    with show_phases(Console(file=screen, width=80), "gradients"):
        step_phase.STEP_PHASE.enter("bucket 1")
    assert screen.getvalue() == "gradients: bucket 1\n"
    num_threads = threading.active_count()
    with show_phases(Console(file=screen, force_terminal=True, width=80), "gradients"):
        step_phase.STEP_PHASE.enter("bucket [/x] \x1b]0;title")  # neither markup nor controls
        assert threading.active_count() == num_threads  # the figures of a report are drawn by a fork
    assert r"gradients: bucket [/x] \x1b]0;title" in screen.getvalue()
