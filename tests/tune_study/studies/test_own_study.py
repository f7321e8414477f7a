"""A study of a file from its first run to a probe: what is recorded, and what a folder may choose (nothing)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
from tests.fakes.command_line import Answer, assert_refused, get_output
from tests.fakes.forked_python import run_python
from tune_study.commands.probe import restore

SMALL = {
    "env.val_env_groups": 4,
    "env.test_env_groups": 4,
    "env.env_groups": 2,
    "env.group_size": 2,
    "actor.ppo_mini_batch_size": 4,
    "critic.ppo_mini_batch_size": 4,
    "trainer.total_training_steps": 1,
}
RUN = Path("results/my_lr_sokoban-tiny")
SECTIONS = """
from analysis.report.section import Section, Table, name, number

def list_steps(results):
    rows = results.frames.trials.groupby("arm")["steps_done"].mean().reset_index()
    yield Table([name("arm"), number("steps", "steps_done", str)], rows.to_dict("records"))

STUDY = Study(
    sections=[
        Section(
            "effort",
            "Steps of <each> arm",
            sentences=lambda results: [f"{len(results.frames.trials)} run of `{results.study.name}`"],
            tables=list_steps,
            files=lambda results: {"effort": results.frames.trials[["run_id", "steps_done"]]},
        )
    ],
"""
"""Sections of the report, and the beginning of the declaration."""


def train(folder: Path, *words: str) -> Answer:
    """Type `run` in a new interpreter, since it starts Ray."""
    command = [sys.executable, "-m", "tune_study", "run", *words, "--preset", "laptop", "--seeds", "1"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    return Answer(process.returncode, process.stdout, process.stderr)


def type_command(folder: Path, *words: str) -> Answer:
    process = run_python(["-m", "tune_study", *words], folder)
    return Answer(process.returncode, process.stdout, process.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lr.py and its study, which has run."""
    path: Path = tmp_path_factory.mktemp("own")
    assert type_command(path, "new", "my-lr", "--vary", "actor.lr=1e-4,3e-4", "--to", "lr.py")[0] == 0
    text = (path / "lr.py").read_text()
    (path / "lr.py").write_text(text.replace("\nSTUDY = Study(\n", SECTIONS))
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    output = get_output(train(path, "lr.py", "--values", "1e-4", *settings))
    assert "report.html" in output
    (path / "first_report.html").write_bytes((path / RUN / "report.html").read_bytes())
    return path


def test_the_folder_records_the_text_of_the_file(folder: Path) -> None:
    declaration = json.loads((folder / RUN / "study.json").read_text())["declaration"]
    assert declaration["text"] == (folder / "lr.py").read_text()
    assert declaration["path"] == "lr.py"
    assert len(declaration["sha256"]) == 64


def test_reading_needs_no_file(folder: Path) -> None:
    # Also from another folder, and with a file of that name that must not be opened.
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lr.py").write_text("raise SystemExit('opened')\n")
    run = str(folder / RUN)
    output = get_output(type_command(elsewhere, "status", run))
    assert "completed" in output
    assert type_command(elsewhere, "report", run)[0] == 0
    trials = analysis.load(folder).trials
    assert dict(trials.set_index("arm")["status"]) == {"1e-4": "completed"}


def find_own_section(page: Path) -> str:
    """Return the words of the last section of a report, if it is the one of the file; otherwise an empty text."""
    section = page.read_text(encoding="utf-8").rpartition('<section id="effort">')[2].partition("</main>")[0]
    return " ".join(re.sub("<[^>]+>", " ", section).split()) if section.count("</section>") == 1 else ""


def test_sections_of_the_file_are_the_last_of_the_report(folder: Path) -> None:
    words = find_own_section(folder / "first_report.html")
    assert words.startswith("Steps of &lt;each&gt; arm 1 run of my-lr ")
    assert words.endswith(" arm steps learning rate 1e-4 1.0")
    report, table = folder / RUN / "report.html", folder / RUN / "figures" / "effort.csv"
    assert table.read_text().startswith("run_id,steps_done\n")
    # A results folder never chooses code: without the file, the report has the sections of the package alone.
    table.unlink()
    assert type_command(folder, "report", str(RUN))[0] == 0
    assert find_own_section(report) == ""
    assert not table.exists()
    output = get_output(type_command(folder, "report", str(RUN), "--study", "lr.py"))
    assert "effort" not in output
    assert find_own_section(report) == words
    assert table.exists()
    assert_refused(type_command(folder, "report", str(RUN), "--study", "nowhere.py"), "There is no file nowhere.py")


def test_continuing_needs_the_file_that_declared_it(folder: Path) -> None:
    for command in ("resume", "probe"):
        assert_refused(
            type_command(folder, command, str(RUN)),
            "For safety, no file that a folder names is executed",
            "name it yourself with --study lr.py",
        )
    get_output(type_command(folder, "resume", str(RUN), "--study", "lr.py"))
    trainer = restore(folder / RUN, "1e-4", study=str(folder / "lr.py"))
    assert trainer.step_index == 1
    trainer.close()


def test_a_changed_file_may_change_all_but_the_settings_of_runs(folder: Path) -> None:
    text = (folder / "lr.py").read_text()
    (folder / "changed.py").write_text(text.replace("Does actor.lr change", "How does actor.lr change"))
    get_output(type_command(folder, "resume", str(RUN), "--study", "changed.py", "--dry-run"))
    (folder / "changed.py").write_text(
        text.replace("=PLAIN_SETTINGS", '={**PLAIN_SETTINGS, "actor.entropy_coeff": 0.5}')
    )
    assert_refused(type_command(folder, "run", "changed.py", "--preset", "laptop"), "entropy_coeff: 0.0 -> 0.5")


def test_the_commands_that_are_printed_name_the_file(folder: Path) -> None:
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    assert_refused(
        type_command(folder, "run", "lr.py", "--preset", "laptop", "--seeds", "2", *settings),
        "resume",
        "my_lr_sokoban-tiny --study lr.py` to continue the existing runs",
    )


def test_another_study_is_not_taken_for_it(folder: Path) -> None:
    assert type_command(folder, "new", "other", "--vary", "actor.lr=1e-4,3e-4")[0] == 0
    assert_refused(
        type_command(folder, "resume", str(RUN), "--study", "other.py"),
        "contains the study my-lr, and other.py declares other",
    )
