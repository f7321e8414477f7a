"""A run folder from somebody else: no command runs code that it names, or writes where its links lead."""

import json
import sys
from pathlib import Path

import pytest

from tests.tune_study.commands.test_cli import held_study, type_in
from tune_study.folder.study_file import plan_from_folder
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.trials import make_trial_config


@pytest.fixture
def held(here: Path) -> StudyPlan:
    return held_study(here / "out")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's own folder, with a file and a folder in it."""
    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    (home / "letter.txt").write_text("dear")
    (home / "photos" / "cat.jpg").write_text("cat")
    return home


def contents(home: Path) -> dict[str, str]:
    return {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["evil:Evil", "out.results.kl_sweep_sokoban-tiny.evil:Evil", "antigravity:X"])
def test_a_folder_chooses_no_code(held: StudyPlan, here: Path, name: str) -> None:
    for folder in (held.folder, here):
        (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(here / 'ran')!r}).touch()\n")
        (folder / "__init__.py").write_text((folder / "evil.py").read_text())
    for path in (held.folder / "study.json", held.get_run_dir(held.runs[0].run_id) / "run.json"):
        claims = dict.fromkeys(("trainable", "trainer", "family", "module", "class"), name)
        path.write_text(json.dumps({**json.loads(path.read_text()), **claims}))
    before = set(sys.modules)
    for command in (
        f"resume {held.folder} --dry-run",
        f"probe {held.folder}",
        f"status {held.folder}",
        "run kl --preset laptop --steps 3 --kl-values 0,0.1 --output out --dry-run",
    ):
        type_in(command)
    plan = plan_from_folder(held.folder)
    assert make_trial_config(plan, plan.runs[:1], is_finished=False)["family"] == "trainable.families:LANGUAGE_MODEL"
    assert not (here / "ran").exists()
    assert not {module for module in set(sys.modules) - before if "evil" in module or "antigravity" in module}


LINKED = [
    "results/kl_sweep_sokoban-tiny/runs/{run}/state",
    "results/kl_sweep_sokoban-tiny/runs/{run}/metrics.jsonl",
    "results/kl_sweep_sokoban-tiny/.lock",
    "results/kl_sweep_sokoban-tiny/.study.json.part",
    "results/kl_sweep_sokoban-tiny/figures",
    "results/kl_sweep_sokoban-tiny/report.html.tmp",
    "results/kl_sweep_sokoban-tiny/{run}/result.json",
    "logs/kl_sweep_sokoban-tiny.log",
    "model_saving/kl_sweep_sokoban-tiny",
]


@pytest.mark.parametrize("place", LINKED)
def test_resume_refuses_links(held: StudyPlan, home: Path, place: str) -> None:
    link = held.output / place.format(run=held.runs[0].run_id)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home if "." not in link.name else home / "letter.txt")
    before = contents(home)
    for command in (f"resume {held.folder}", "run kl --preset laptop --steps 3 --kl-values 0,0.1 --output out"):
        answer = type_in(command)
        assert answer.code == 2, answer.out
        assert f"{link} is a symbolic link" in " ".join(answer.err.split())
    assert contents(home) == before
    assert not (held.folder / ".lock").exists() or link.name == ".lock"


@pytest.mark.parametrize("command", ["report", "probe", "plot-gradients"])
@pytest.mark.parametrize("name", ["figures", "report.html.tmp", "trials.parquet", "figures/gradients"])
def test_what_writes_into_a_folder_refuses_links_in_it(held: StudyPlan, home: Path, command: str, name: str) -> None:
    link = held.folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    before = contents(home)
    answer = type_in(f"{command} {held.folder}")
    assert answer.code == 2, answer.out
    assert f"{name} is a symbolic link" in " ".join(answer.err.split())
    assert contents(home) == before


def test_a_folder_may_be_reached_by_a_link(held: StudyPlan, here: Path) -> None:
    (here / "elsewhere").symlink_to(held.output)
    answer = type_in(f"report {here / 'elsewhere' / 'results' / held.run}")
    assert answer.code == 0, answer.err
    assert (held.folder / "report.html").is_file()
