"""A small study with every kind of file that a run writes, of which one run has ended and one was interrupted."""

import importlib
import io
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import analysis
from analysis.data.episodes import read_episodes
from analysis.data.frames import StudyFrames
from search_spaces.catalog import STUDIES
from tests.attack.children import call_in_child
from tests.fakes.command_line import Answer, type_words
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.failures import RunFailedError
from trainable.runs.history import RunHistory, make_final_status
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import ENDED_STATUSES, StatusRecord, write_record
from trainable.trial import PPO
from tune_study.folder import outputs
from tune_study.folder.statuses import make_timestamp, read_statuses
from tune_study.folder.study_file import check_unchanged, merge_with_folder, plan_from_folder
from tune_study.host.console import show_warnings
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.session import write_results
from tune_study.tune.trials import make_trial_config

STUDY = "gradient-analysis"
RUN = "results/gradient_analysis_sokoban_sokoban-tiny"
STEPS = 3
STEPS_BEFORE_INTERRUPT = 2
ENDED_ARM, INTERRUPTED_ARM = "PPO", "GRPO"
SETTINGS = {
    "env.env_groups": "2",
    "env.group_size": "4",
    "env.val_env_groups": "4",
    "env.test_env_groups": "2",
    "actor.ppo_mini_batch_size": "4",
    "critic.ppo_mini_batch_size": "4",
    "trainer.total_training_steps": str(STEPS),
    "trainer.save_freq": "1",
    "trainer.test_freq": "2",
    "trainer.gradient_analysis_env_groups": "4",
    "trainer.gradient_analysis_group_size": "4",
    "trainer.gradient_analysis_every": "2",
}
PROBE_OPTIONS = ("--set", "trainer.gradient_analysis_env_groups=3", "--set", "env.val_env_groups=2")


EpisodesByRun = Mapping[str, Sequence[RecordedEpisode]]
"""The recorded episodes of the runs of a study, by run_id."""


def run_command(words: Sequence[str], folder: Path, home: Path) -> Answer:
    """Run a command line in this process, in `folder`, with another home folder."""
    with chdir(folder), warnings.catch_warnings():
        show_warnings()  # as the command does
        return type_words(*words, CUDA_VISIBLE_DEVICES="", HOME=str(home), COLUMNS="200", HF_HUB_OFFLINE="1")


def train_without_ray(plan: StudyPlan, max_steps: int = 1_000) -> dict[str, StatusRecord]:
    """Train the runs that are not over for up to `max_steps` steps in this process, and write their statuses.

    Trials, locks and statuses are those of a study; only Ray, which would give each trial a process, is missing.
    """
    finished_statuses = {key: status for key, status in read_statuses(plan).items() if status.status in ENDED_STATUSES}
    outputs.write_study(plan)
    statuses = dict(finished_statuses)
    for spec in plan.runs:
        if spec.run_id in finished_statuses:
            continue
        run_dir = plan.get_run_dir(spec.run_id)
        status = StatusRecord(spec.run_id, "running", started_at=make_timestamp())
        write_record(run_dir, status)
        trial = PPO(make_trial_config(plan, [spec]))
        try:
            for _ in range(max_steps):
                result = trial.step()
                if result["done"]:
                    break
            status = make_final_status(status, read_rows(run_dir / METRICS_FILE), spec.steps)
            if kind := result["failure_class"]:
                status = replace(status, status="failed", failure_class=kind, reason=result["failure"])
        except RunFailedError as error:
            failure = error.failure
            status = replace(status, status="failed", failure_class=failure.kind, reason=failure.message)
        finally:
            trial.cleanup()
        statuses[spec.run_id] = replace(status, ended_at=make_timestamp())
        write_record(run_dir, statuses[spec.run_id])
    return statuses


def resume_without_ray(folder: Path) -> tuple[dict[str, StatusRecord], str]:
    """Do what `resume` does, without Ray: plan from the folder, check it, train what remains, write the tables.

    Returns the statuses by run_id, and what the command would print as an error.
    """
    plan = plan_from_folder(folder)
    check_unchanged(plan)
    outputs.check_study_links(plan)
    with outputs.lock_folder(plan.folder):
        statuses = train_without_ray(plan)
        return statuses, write_results(plan.folder, Console(file=io.StringIO()))


@dataclass(frozen=True)
class SampleStudy:
    """The folder of the study, and its tables and episodes: as they are, and when both runs are trained to the end."""

    output: Path
    frames: StudyFrames
    completed_frames: StudyFrames
    episodes: EpisodesByRun
    completed_episodes: EpisodesByRun
    run_ids: tuple[str, str]

    @property
    def folder(self) -> Path:
        """The folder results/<run>."""
        return self.output / RUN

    def copy(self, target: Path) -> Path:
        """Copy the study, with the times of its files, to target/out; return its folder results/<run> there.

        The large files, which are never changed in place, are links to the same bytes.
        """
        shutil.copytree(self.output, target / "out", symlinks=True, copy_function=_copy_or_link)
        return target / "out" / RUN


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def read_study_episodes(folder: Path) -> EpisodesByRun:
    """Read the recorded episodes of all runs of a results/<run> folder."""
    return {path.name: read_episodes(path) for path in sorted((folder / "runs").iterdir())}


def make_study_plan(output: Path, arms: Sequence[str]) -> StudyPlan:
    """Make the plan of the study with some of its arms."""
    return make_plan(STUDIES[STUDY], "laptop", "set by --preset", SETTINGS, arms, 1, output)


def write_sample_study(root: Path, with_ray: bool, with_reports: bool = True) -> SampleStudy:
    """Run the study: its first arm to the end, by the real command if `with_ray`, and its second arm for two steps.

    with_reports: whether it also gets a probe, tables and a report, and is trained to the end for `completed_frames`.
    """
    output = root / "sample" / "out"
    output.mkdir(parents=True)
    if with_ray:
        assignments = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        options = ["--preset", "laptop", "--output", str(output), "--algo", ENDED_ARM, "--seeds", "1"]
        words = ["run", STUDY, *options, *assignments]
        process = subprocess.run([sys.executable, "-m", "tune_study", *words], capture_output=True, text=True)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return call_in_child(lambda: _complete_sample_study(output, with_reports), seconds=600)


def _complete_sample_study(output: Path, with_reports: bool) -> SampleStudy:
    train_without_ray(merge_with_folder(make_study_plan(output, [ENDED_ARM]), extend=False))
    plan = merge_with_folder(make_study_plan(output, [ENDED_ARM, INTERRUPTED_ARM]), extend=True)
    train_without_ray(plan, STEPS_BEFORE_INTERRUPT)
    assert [RunHistory.read(plan.get_run_dir(spec.run_id), STEPS).status.status for spec in plan.runs] == [
        "completed",
        "interrupted",
    ]
    run_ids = plan.runs[0].run_id, plan.runs[1].run_id
    if not with_reports:
        frames = analysis.load(plan.folder)
        episodes = read_study_episodes(plan.folder)
        return SampleStudy(output, frames, frames, episodes, episodes, run_ids)
    answer = run_command(["probe", str(plan.folder), "--trial", ENDED_ARM, *PROBE_OPTIONS], output, output.parent)
    assert answer.code == 0, answer
    assert not write_results(plan.folder, Console(file=io.StringIO()))
    frames = analysis.load(plan.folder)
    with ExitStack() as stack:
        copy = output.parent / "completed"
        stack.callback(shutil.rmtree, copy)
        shutil.copytree(output, copy / "out")
        resume_without_ray(copy / "out" / RUN)
        completed_frames = analysis.load(copy / "out" / RUN)
        completed_episodes = read_study_episodes(copy / "out" / RUN)
    assert set(completed_frames.trials["status"]) == {"completed"}
    return SampleStudy(output, frames, completed_frames, read_study_episodes(plan.folder), completed_episodes, run_ids)


def list_files(output: Path) -> list[str]:
    """The relative paths of all files below a folder, links included."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), output) for folder, _, names in os.walk(output) for name in names
    )


def preload_modules(sample: SampleStudy) -> None:
    """Import here what the commands import, so that not every child process does it again."""

    def list_modules() -> list[str]:
        with TemporaryDirectory() as name:
            folder = sample.copy(Path(name))
            home = Path(name)
            for words in (["status"], ["report"], ["probe", "--trial", ENDED_ARM, *PROBE_OPTIONS], ["replay-stoppers"]):
                run_command([words[0], str(folder), *words[1:]], home, home)
            resume_without_ray(folder)
        return sorted(sys.modules)

    for name in call_in_child(list_modules, seconds=600):
        with suppress(Exception):  # some modules are made by others, and exist only after them
            importlib.import_module(name)
