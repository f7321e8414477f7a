"""Every file that a run writes, damaged in every way, and read by every command."""

import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

import analysis
from analysis.data.episodes import read_episodes
from analysis.data.frames import FRAME_NAMES, NONDETERMINISTIC_COLUMNS, StudyFrames
from analysis.data.load import read_study
from tests.attack.children import ChildError, call_in_child
from tests.attack.sample_study import (
    ENDED_ARM,
    INTERRUPTED_ARM,
    PROBE_OPTIONS,
    STEPS,
    STEPS_BEFORE_INTERRUPT,
    EpisodesByRun,
    SampleStudy,
    resume_without_ray,
    run_command,
)
from trainable.config.run_config import ConfigError
from trainable.files.json_values import DamageWarning
from trainable.files.paths import UnsafePathError
from trainable.runs.run_files import LINE_FILES
from tune_study.plan.errors import PlanError


@dataclass(frozen=True)
class FilePattern:
    """A kind of file. name: in the names of cells. pattern: a regular expression of its path below the output folder.

    ARM and STEP in it stand for the arm and the step of the run to which the file belongs, if it belongs to one.
    """

    name: str
    pattern: str
    arm: str = ""
    step: str = ""

    def matches(self, path: str, is_any_run: bool = False) -> bool:
        """Whether a file is of this kind. is_any_run: of any run and step, and not of those of the sample study."""
        arm, step = ("", r"\d+") if is_any_run else (self.arm, self.step)
        return bool(re.fullmatch(self.pattern.replace("ARM", arm).replace("STEP", step), path))


RESULTS = r"results/[^/]+"
CHECKPOINT_FILES = ("state.safetensors", "state.json", "checksums.json")
STUDY_FILES = {
    "study.json": rf"{RESULTS}/study\.json",
    ".lock": rf"{RESULTS}/\.lock",
    **{
        f"{table}.parquet": rf"{RESULTS}/{table}\.parquet"
        for table in ("trials", "steps", "levels", "gradients", "gradient_groups")
    },
    "report.html": rf"{RESULTS}/report\.html",
    "figures": rf"{RESULTS}/figures/.+",
    "summary.log": r"logs/[^/]+\.log",
    "run.log": r"logs/[^/]+/(?!.*probe)[^/]+(/[^/]+)*\.log",
    "probe.log": r"logs/[^/]*probe[^/]*/[^/]+\.log",
    "tune/.validate_storage_marker": rf"{RESULTS}/\.validate_storage_marker",
    "tune/basic-variant-state": rf"{RESULTS}/basic-variant-state-[^/]+\.json",
    "tune/experiment_state": rf"{RESULTS}/experiment_state-[^/]+\.json",
    "tune/searcher-state": rf"{RESULTS}/search(er-state|_gen_state)-[^/]+",
    "tune/tuner.pkl": rf"{RESULTS}/tuner\.pkl",
    "tune/checkpoint": rf"{RESULTS}/(?!runs/)[^/]+/checkpoint_\d+/[^/]+",
    "tune/events": rf"{RESULTS}/(?!runs/)[^/]+/events\.out\.tfevents\.[^/]+",
    **{
        f"tune/{name}": rf"{RESULTS}/(?!runs/)[^/]+/{re.escape(name)}"
        for name in ("params.json", "params.pkl", "progress.csv", "result.json", "error.txt", "error.pkl")
    },
}
RUN_FILES = {
    **{
        name: rf"{RESULTS}/runs/[^/]*ARM[^/]*/{re.escape(name)}"
        for name in (*LINE_FILES, "run.json", "status.json", ".lock")
    },
    **{
        f"rolling-checkpoint/{name}": rf"{RESULTS}/runs/[^/]*ARM[^/]*/state/step_STEP/{re.escape(name)}"
        for name in CHECKPOINT_FILES
    },
    **{
        f"saved-checkpoint/{name}": rf"model_saving/(?=.*ARM).*/global_step_STEP/{re.escape(name)}"
        for name in CHECKPOINT_FILES
    },
}
LAST_STEPS = {ENDED_ARM: str(STEPS), INTERRUPTED_ARM: str(STEPS_BEFORE_INTERRUPT)}
"""The step of the newest checkpoint of each run. Those before it are files of the same kinds."""
FILES = (
    *(FilePattern(name, pattern) for name, pattern in STUDY_FILES.items()),
    *(
        FilePattern(f"{word}/{name}", pattern, arm, LAST_STEPS[arm])
        for word, arm in (("ended", ENDED_ARM), ("interrupted", INTERRUPTED_ARM))
        for name, pattern in RUN_FILES.items()
    ),
    FilePattern("ended/probes.jsonl", rf"{RESULTS}/runs/[^/]*ARM[^/]*/probes\.jsonl", ENDED_ARM),
)
RARE_FILES = ("tune/searcher-state", "tune/error.txt", "tune/error.pkl")
"""Files that only a search or a failed run writes. A file of this name with arbitrary content takes their place."""


def find_file(output: Path, file: FilePattern) -> Path:
    """Find a file of this kind in the output folder; for a rare file, make one."""
    for folder, _, names in sorted(os.walk(output)):
        for name in sorted(names):
            path = Path(folder) / name
            if file.matches(str(path.relative_to(output))):
                return path
    if file.name in RARE_FILES:
        trial_folder = next(output.glob("results/*/runs")).parent
        name = file.name.removeprefix("tune/")
        path = trial_folder / "sokoban-trial" / name if name.startswith("error") else trial_folder / f"{name}-1.pkl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(range(256)) * 4)
        return path
    pytest.skip("the sample study, which was made without Ray, lacks the file")


def find_pattern(path: str) -> FilePattern | None:
    """Find the kind of a file by its path below the output folder; None if the table has none."""
    return next((file for file in FILES if file.matches(path, is_any_run=True)), None)


# Damages: each replaces the file at a path. `outside` is a folder that must not change.

Damage = Callable[[Path, random.Random, Path], None]


def _replace(path: Path, content: bytes) -> None:
    path.unlink()  # never in place: the large files of a copy are links to those of the sample
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random, outside: Path) -> None:
    content = path.read_bytes()
    if not content:
        pytest.skip("an empty file has nothing to cut off")
    _replace(path, content[: rng.randrange(max(1, len(content) - 1))])


def flip(path: Path, rng: random.Random, outside: Path) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    _replace(path, bytes(content))


def zero(path: Path, rng: random.Random, outside: Path) -> None:
    content = path.read_bytes() or b"x" * 64
    start = rng.randrange(len(content))
    end = min(len(content), start + 512)
    _replace(path, content[:start] + bytes(end - start) + content[end:])


def swap_lines(path: Path, rng: random.Random, outside: Path) -> None:
    """Exchange two neighboring lines, or of a file without lines two blocks."""
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        size = max(1, len(content) // 4)
        lines = [content[start : start + size] for start in range(0, len(content), size)]
    if len(lines) < 2:
        pytest.skip("a file of one byte or none has nothing to exchange")
    first = rng.randrange(len(lines) - 1)
    lines[first], lines[first + 1] = lines[first + 1], lines[first]
    _replace(path, b"".join(lines))


def delete(path: Path, rng: random.Random, outside: Path) -> None:
    path.unlink()


def link(path: Path, rng: random.Random, outside: Path) -> None:
    """Put a link to a file outside with the very same content."""
    target = outside / f"linked-{path.name}"
    shutil.copyfile(path, target)
    path.unlink()
    path.symlink_to(target)


DAMAGES: dict[str, Damage] = {
    "truncate": truncate,
    "flip": flip,
    "zero": zero,
    "swap": swap_lines,
    "delete": delete,
    "link": link,
}


# Checks: each runs a command on the damaged folder and returns what is wrong about its answer.


@dataclass(frozen=True)
class DamagedStudy:
    """A damaged copy of the sample study. folder: its results/<run>. home: a folder outside, the user's home."""

    folder: Path
    home: Path
    sample: SampleStudy
    file: FilePattern


Check = Callable[[DamagedStudy], str]


def check_frames(frames: StudyFrames, reference: StudyFrames, messages: list[str], must_be_equal: bool = False) -> str:
    """Return what `frames` show other than `reference` without a word about it.

    Rows that are shown must be the rows that were written. Rows may be missing if a message says so, or if the run is
    not shown as whole. must_be_equal: whether none may be missing.
    """
    whole_runs = set(frames.trials.loc[frames.trials["status"].isin(["completed", "early_stopped"]), "run_id"])
    reference_reasons = dict(zip(reference.trials["run_id"], reference.trials["reason"], strict=True))
    reasons = dict(zip(frames.trials["run_id"], frames.trials["reason"], strict=True))
    for name in FRAME_NAMES:
        shown, written = _list_rows(getattr(frames, name), name), _list_rows(getattr(reference, name), name)
        for run_id in sorted({*shown, *written}):
            shown_rows, written_rows = shown.get(run_id, []), written.get(run_id, [])
            if shown_rows == written_rows:
                continue
            strangers = [row for row in shown_rows if row not in written_rows]
            is_told = bool(messages) or reasons.get(run_id) != reference_reasons.get(run_id)
            if must_be_equal or (strangers and not is_told):
                detail = _describe_difference(strangers[0], written_rows) if strangers else "rows are missing"
                return f"{name} of {run_id[:30]}: {detail}, and nothing says so"
            if run_id in whole_runs and not is_told:
                missing = len(written_rows) - len(shown_rows)
                return f"{name} of {run_id[:30]}: {missing} of {len(written_rows)} rows are missing, shown as completed"
    return ""


STATUS_COLUMNS = {"status", "reason", "failure_class", "started_at", "ended_at", "wall_seconds"}
"""Columns of trials that status.json has, and that may change when it is damaged: they are no measurements."""


def _list_rows(frame: pd.DataFrame, name: str) -> dict[str, list[tuple[tuple[str, str], ...]]]:
    """The rows of each run, as texts, without columns that differ between two executions."""
    columns = sorted(set(frame.columns) - NONDETERMINISTIC_COLUMNS - STATUS_COLUMNS - {"axis_label"})
    rows: dict[str, list[tuple[tuple[str, str], ...]]] = {}
    for values in frame[columns].to_dict("records"):
        row = tuple((column, "" if pd.isna(value) else repr(value)) for column, value in values.items())
        rows.setdefault(str(values["run_id"]), []).append(row)
    # Of the trials, only those of runs that are shown as whole are results: the others have fewer steps.
    if name == "trials":
        whole = {"completed", "early_stopped"}
        statuses = dict(zip(frame["run_id"], frame["status"], strict=True))
        rows = {run_id: run_rows for run_id, run_rows in rows.items() if statuses[run_id] in whole}
    return rows


def _describe_difference(row: tuple[tuple[str, str], ...], written_rows: list[tuple[tuple[str, str], ...]]) -> str:
    """The columns in which a row differs from the most similar written one."""
    if not written_rows:
        return "a row that was never written"
    closest = max(written_rows, key=lambda written: len({*written} & {*row}))
    differences = sorted({*row} - {*closest})
    texts = [f"{name}={value[:40]} (written: {dict(closest).get(name, '')[:40]})" for name, value in differences[:3]]
    return f"{len(differences)} columns differ: {', '.join(texts)}"


def load_frames(folder: Path) -> tuple[StudyFrames, list[str]]:
    """Load a folder; return its frames, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = analysis.load(folder)
    return frames, [str(warning.message) for warning in caught]


def check_load(study: DamagedStudy) -> str:
    try:
        frames, messages = load_frames(study.folder)
    except (ValueError, UnsafePathError) as error:
        # An error is an answer if it says which file is meant.
        return "" if _names_a_file(str(error), study) else f"{type(error).__name__} names no file: {str(error)[:300]}"
    if set(frames.trials["run_id"]) < set(study.sample.frames.trials["run_id"]) and not messages:
        return "a run is missing from the trials, and nothing says so"
    return check_frames(frames, study.sample.frames, messages) or check_episodes(study.folder, study.sample.episodes)


def check_episodes(folder: Path, written_episodes: EpisodesByRun, must_be_equal: bool = False) -> str:
    """Return which recorded episodes are shown that were not written, or are missing without a word about it."""
    for run_id, written in written_episodes.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shown = read_episodes(folder / "runs" / run_id)
        if [episode for episode in shown if episode not in written]:
            return f"an episode of {run_id[:30]} was never written"
        if shown != written and (must_be_equal or not caught):
            return f"{len(written) - len(shown)} episodes of {run_id[:30]} are missing, and nothing says so"
    return ""


def _names_a_file(text: str, study: DamagedStudy) -> bool:
    return str(study.folder) in text or study.file.name.rsplit("/", 1)[-1] in text


def check_status(study: DamagedStudy) -> str:
    contents_before = read_tree(study.folder.parent.parent)
    answer = run_command(["status", str(study.folder)], study.home, study.home)
    if problem := _check_code(answer.code, answer.err, (0, 2)):
        return problem
    if read_tree(study.folder.parent.parent) != contents_before:
        return "`status` changed the folder"
    # By the tables that the rows give: `status` must not show as completed what they do not.
    if answer.code == 0 and study.file.name in {f"ended/{name}" for name in LINE_FILES}:
        with suppress(ValueError, OSError):
            frames = read_study(study.folder)
            ended_run = frames.trials.set_index("run_id").loc[study.sample.run_ids[0]]
            if " completed " in answer.out and ended_run["status"] != "completed":
                return f"shows as completed a run that is {ended_run['status']}: {ended_run['reason']}"
    return ""


def _check_code(code: int, err: str, allowed: tuple[int, ...]) -> str:
    if code not in allowed:
        return f"exit code {code}: {err[:300]}"
    if code == 2 and not err.startswith(("tune_study: ", "Usage")):
        return f"exit code 2 without a paragraph: {err[:300]}"
    return "" if "Traceback" not in err else f"a traceback: {err[-300:]}"


def check_report(study: DamagedStudy) -> str:
    answer = run_command(["report", str(study.folder)], study.home, study.home)
    if problem := _check_code(answer.code, answer.err, (0, 1, 2)):
        return problem
    if answer.code:
        return "" if _names_a_file(answer.err, study) else f"exit {answer.code} names no file: {answer.err[:300]}"
    # What was written must say no more than what was read. What is lost for good is named by the command that finds it.
    frames, messages = load_frames(study.folder)
    messages += [answer.err] if _names_a_file(answer.err, study) else []
    return check_frames(frames, study.sample.frames, messages)


def check_resume(study: DamagedStudy) -> str:
    """Continue to the end, and compare with a study that was never damaged."""
    answer = run_command(["resume", "--dry-run", str(study.folder)], study.home, study.home)
    if problem := _check_code(answer.code, answer.err, (0, 2)):
        return problem
    if answer.code == 2:
        return ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            statuses, problem = resume_without_ray(study.folder)
    except (PlanError, ConfigError, UnsafePathError) as error:
        return "" if _names_a_file(str(error), study) else f"{type(error).__name__} names no file: {str(error)[:300]}"
    failed_runs = [status for status in statuses.values() if status.status == "failed"]
    if failed_runs and failed_runs[0].failure_class == "storage" and _names_a_file(failed_runs[0].reason, study):
        return ""  # a link is in the place of a file, and the user is told to remove it
    if problem:
        return "" if _names_a_file(problem, study) else problem[:600]
    if open_runs := [status for status in statuses.values() if status.status != "completed"]:
        return f"{open_runs[0].run_id[:30]} is {open_runs[0].display_text} after {STEPS} steps: {open_runs[0].reason}"
    frames, messages = load_frames(study.folder)
    if set(frames.trials["status"]) != {"completed"}:
        return f"after the end, statuses are {list(frames.trials['status'])}: {list(frames.trials['reason'])}"
    # Whatever a run writes is written again. What a probe measured is not, and has to be named: by the command, which
    # then writes tables of what is left, or when they are read.
    messages += [str(warning.message) for warning in caught if issubclass(warning.category, DamageWarning)]
    return check_frames(frames, study.sample.completed_frames, messages, must_be_equal=not messages) or check_episodes(
        study.folder, study.sample.completed_episodes, must_be_equal=True
    )


def check_probe(study: DamagedStudy) -> str:
    """Probe the run to which the file belongs. Its lines must be those that an undamaged checkpoint gives."""
    arm = study.file.arm or ENDED_ARM
    answer = run_command(["probe", str(study.folder), "--trial", arm, *PROBE_OPTIONS], study.home, study.home)
    if problem := _check_code(answer.code, answer.err, (0, 2)):
        return problem
    if answer.code == 2 or arm != ENDED_ARM:
        return ""
    frames, messages = load_frames(study.folder)
    return check_frames(frames, study.sample.frames, messages)


CHECKS: dict[str, Check] = {
    "load": check_load,
    "status": check_status,
    "report": check_report,
    "resume": check_resume,
    "probe": check_probe,
}


# Everything outside of the folder is a user's: it must be as it was.


def write_home(home: Path) -> None:
    """Write a home folder with files that are easily noticed when they are gone."""
    (home / "letters").mkdir(parents=True)
    (home / "letters" / "dear.txt").write_text("dear")
    (home / ".bashrc").write_text("umask 022\n")


def read_tree(folder: Path) -> dict[str, bytes | str]:
    """Read the kind and content of everything below a folder, without following links and without the user's cache."""
    return {name: content for name, content in _iter_tree(folder) if not name.startswith(".cache")}


def _iter_tree(folder: Path) -> Iterator[tuple[str, bytes | str]]:
    for current, folder_names, names in os.walk(folder):
        for name in (*folder_names, *names):
            path = Path(current) / name
            relative_path = str(path.relative_to(folder))
            if path.is_symlink():
                yield relative_path, f"link to {os.readlink(path)}"
            elif path.is_file():
                yield relative_path, path.read_bytes()
            else:
                yield relative_path, "folder" if path.is_dir() else "special"


def damage_and_check(
    sample: SampleStudy, folder: Path, rng: random.Random, file: FilePattern, damage: str, command: str
) -> str:
    """Damage a copy of the sample study, run the command in a child process, and check its answer and the home."""
    home = folder / "home"
    write_home(home)
    study = DamagedStudy(sample.copy(folder), home, sample, file)
    DAMAGES[damage](find_file(folder / "out", file), rng, home)
    home_before = read_tree(home)
    try:
        problem = call_in_child(partial(CHECKS[command], study))
    except ChildError as error:
        problem = str(error)
    if read_tree(home) != home_before:
        changed = {path for path, _ in {*read_tree(home).items()} ^ {*home_before.items()}}
        problem += f" Files outside of the folder changed: {sorted(map(str, changed))[:3]}."
    if unexpected := set(os.listdir(folder)) - {"out", "home"}:
        problem += f" Files beside the folder: {unexpected}."
    return problem


@pytest.mark.parametrize("command", CHECKS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_damaged_files(
    sample: SampleStudy, tmp_path: Path, rng: random.Random, file: FilePattern, damage: str, command: str
) -> None:
    if (file.name, damage) == ("ended/probes.jsonl", "delete"):
        pytest.skip("nothing records which probes there were")
    assert damage_and_check(sample, tmp_path, rng, file, damage, command) == ""
