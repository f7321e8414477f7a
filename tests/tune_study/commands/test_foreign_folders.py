"""A study folder from somebody else: no command runs code that it names, or writes through its links."""

import sys
from pathlib import Path

import pytest

from tests.fakes.command_line import assert_refused, get_output, read_files, type_in
from tests.fakes.plans import write_started_study
from trainable.files.json_values import read_object, write_object
from trainable.trial import PPO
from tune_study.folder.study_file import plan_from_folder
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.tuner import get_trainable


@pytest.fixture
def started_study(work_dir: Path) -> StudyPlan:
    return write_started_study(work_dir / "out")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home folder, with a file and a folder in it."""
    home = tmp_path / "home"
    (home / "photos").mkdir(parents=True)
    (home / "letter.txt").write_text("dear")
    (home / "photos" / "cat.jpg").write_text("cat")
    return home


@pytest.mark.parametrize("name", ["evil:Evil", "antigravity:X"])
def test_a_folder_chooses_no_code(started_study: StudyPlan, work_dir: Path, name: str) -> None:
    for folder in (started_study.folder, work_dir):
        (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(work_dir / 'ran')!r}).touch()\n")
        (folder / "__init__.py").write_text((folder / "evil.py").read_text())
    for path in (
        started_study.folder / "study.json",
        started_study.get_run_dir(started_study.runs[0].run_id) / "run.json",
    ):
        claims = dict.fromkeys(("trainable", "trainer", "module", "class"), name)
        write_object(path, {**read_object(path), **claims})
    modules_before = set(sys.modules)
    for command in (
        f"resume {started_study.folder} --dry-run",
        f"probe {started_study.folder}",
        f"status {started_study.folder}",
        "run kl --preset laptop --steps 3 --kl-values 0,0.1 --output out --dry-run",
    ):
        type_in(command)
    plan = plan_from_folder(started_study.folder)
    assert get_trainable(plan.study) is PPO
    assert not (work_dir / "ran").exists()
    assert not {module for module in set(sys.modules) - modules_before if "evil" in module or "antigravity" in module}


@pytest.mark.parametrize("command", ["resume", "status", "report", "probe"])
def test_a_family_that_this_version_does_not_know_is_refused(started_study: StudyPlan, command: str) -> None:
    path = started_study.folder / "study.json"
    write_object(path, {**read_object(path), "family": "evil:Evil"})
    assert_refused(
        f"{command} {started_study.folder}", "study.json names the family evil:Evil, which this version cannot read"
    )


@pytest.mark.parametrize("command", ["resume --dry-run", "status"])
@pytest.mark.parametrize("name", ["runs", "runs/{run}"])
def test_what_reads_a_folder_refuses_links_in_it(started_study: StudyPlan, home: Path, command: str, name: str) -> None:
    path = started_study.folder / name.format(run=started_study.runs[0].run_id)
    path.rename(home / "elsewhere")
    path.symlink_to(home / "elsewhere")
    assert_refused(f"{command} {started_study.folder}", f"{path.name} is a symbolic link")


LINKED_PATHS = [
    "results/kl_sweep_sokoban-tiny/runs/{run}/state",
    "results/kl_sweep_sokoban-tiny/runs/{run}/metrics.jsonl",
    "results/kl_sweep_sokoban-tiny/.lock",
    "results/kl_sweep_sokoban-tiny/figures",
    "results/kl_sweep_sokoban-tiny/{run}/result.json",
    "logs/kl_sweep_sokoban-tiny.log",
    "model_saving/kl_sweep_sokoban-tiny",
]


@pytest.mark.parametrize("link_path", LINKED_PATHS)
def test_resume_refuses_links(started_study: StudyPlan, home: Path, link_path: str) -> None:
    link = started_study.output / link_path.format(run=started_study.runs[0].run_id)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home if "." not in link.name else home / "letter.txt")
    contents_before = read_files(home)
    for command in (
        f"resume {started_study.folder}",
        "run kl --preset laptop --steps 3 --kl-values 0,0.1 --seeds 1 --output out",
    ):
        assert_refused(command, f"{link} is a symbolic link")
    assert read_files(home) == contents_before
    assert not (started_study.folder / ".lock").exists() or link.name == ".lock"


@pytest.mark.parametrize("command", ["report", "probe", "plot-gradients"])
@pytest.mark.parametrize("name", ["figures", "trials.parquet"])
def test_what_writes_into_a_folder_refuses_links_in_it(
    started_study: StudyPlan, home: Path, command: str, name: str
) -> None:
    link = started_study.folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    contents_before = read_files(home)
    assert_refused(f"{command} {started_study.folder}", f"{name} is a symbolic link")
    assert read_files(home) == contents_before


@pytest.mark.long
def test_a_folder_may_be_reached_by_a_link(started_study: StudyPlan, work_dir: Path) -> None:
    (work_dir / "elsewhere").symlink_to(started_study.output)
    get_output(f"report {work_dir / 'elsewhere' / 'results' / started_study.run}")
    assert (started_study.folder / "report.html").is_file()


@pytest.mark.parametrize("name", ["model_saving", "{checkpoint_dir}", "{checkpoint_dir}/global_step_2"])
def test_probe_reads_no_saved_checkpoint_through_a_link(started_study: StudyPlan, home: Path, name: str) -> None:
    spec = started_study.runs[0]
    link = started_study.output / name.format(checkpoint_dir=spec.checkpoint_dir)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home)
    assert_refused(f"probe {started_study.folder} --trial {spec.run_id}", f"{link} is a symbolic link")
