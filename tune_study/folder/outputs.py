"""The run folder: what a study writes before, while and after its runs train. Every file is whole at any moment."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from trainable.runs.links import LinkError, atomic_write, check_no_links, open_no_link
from trainable.runs.run_files import METRICS_FILE, fsync_path, read_rows
from tune_study.plan.study_plan import PlanError, RunSpec, StudyPlan

if TYPE_CHECKING:
    from analysis.report.pages import Conclusion

ENDED_STATUSES = ("completed", "early_stopped")
"""Statuses of runs that are never run again."""

_PACKAGES = ("tune_study", "torch", "ray", "transformers", "numpy", "pandas", "pydantic", "safetensors", "tokenizers")


@dataclass(frozen=True)
class RunStatus:
    """status.json of a run: `running`, or one of records.STATUSES with its reason."""

    run_id: str
    status: str
    reason: str = ""
    failure_class: str = ""
    stop_rule: str = ""
    stop_value: float | None = None
    stop_threshold: float | None = None
    stop_step: int | None = None
    trial_id: str = ""
    started_at: str | None = None
    ended_at: str | None = None

    @property
    def display_text(self) -> str:
        """The status in words: a failure with its class."""
        return f"{self.status} ({self.failure_class})" if self.failure_class else self.status


_STATUS = TypeAdapter(RunStatus)


def make_timestamp() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it there, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary_path, temporary_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)  # a power cut must not leave the old name with nothing in it


def write_json(path: Path, content: object) -> None:
    """`data` as readable JSON, written whole."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # The last for brackets without end.
        return None
    return content if isinstance(content, dict) else None


def read_status(run_dir: Path) -> RunStatus | None:
    """The status of a run; None before it has one."""
    content = read_json(run_dir / "status.json")
    field_names = set(RunStatus.__dataclass_fields__)
    if content is None or not {"run_id", "status"} <= content.keys():
        return None
    try:
        return _STATUS.validate_python({key: content[key] for key in field_names & content.keys()})
    except ValidationError:  # Of other types than were written.
        return None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """status.json of a run, whole at any moment."""
    write_json(run_dir / "status.json", asdict(status))


def append_line(path: Path, line: str) -> None:
    """One more line of a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_no_link(path, "a") as log:
        log.write(line + "\n")


def make_run_entry(spec: RunSpec) -> dict[str, Any]:
    """run.json without the settings: what names a run and where its files are."""
    return {
        "run_id": spec.run_id,
        "study": spec.study_name,
        "arm": spec.arm,
        "label": spec.label,
        "seed": spec.seed,
        "experiment_name": spec.experiment_name,
        "config_hash": spec.config.compute_hash(),
        "log": spec.log_path.as_posix(),
        "checkpoints": spec.checkpoint_dir.as_posix(),
    }


def make_study_entry(plan: StudyPlan) -> dict[str, Any]:
    """study.json without its starts: what was asked, and of which runs it consists."""
    axis = plan.study.axis
    return {
        "name": plan.study.name,
        "question": plan.study.question.strip(),
        "run": plan.run,
        "preset": plan.preset,
        "preset_reason": plan.preset_reason,
        "axis": {"setting": axis.setting, "option": axis.option, "values": list(plan.values)},
        "baseline": plan.baseline,
        "contrasts": [{"name": name, "pairs": pairs} for name, pairs in plan.study.contrasts.items()],
        "seeds": list(plan.seeds),
        "runs": [make_run_entry(spec) for spec in plan.runs],
        "settings": plan.base_config.model_dump(mode="json"),
        "defaults": type(plan.base_config).model_validate({}).model_dump(mode="json"),
        "stop_rules": list(plan.study.stop_rules),
        "family": plan.study.family.name,
        "model": plan.model or "",
        "storage": plan.storage,
    }


def write_study(plan: StudyPlan) -> list[str]:
    """study.json, every run.json, and a status for every run that has none, before anything starts.

    versions, git, command and created_at are those of the first start; `starts` has those of every start. Returns
    what differs from the last start and could change a number: packages and the commit of the code.
    """
    previous_entry = read_json(plan.folder / "study.json") or {}
    for spec in plan.runs:
        run_dir = plan.get_run_dir(spec.run_id)
        write_json(run_dir / "run.json", {**make_run_entry(spec), "config": spec.config.model_dump(mode="json")})
        if read_status(run_dir) is None:
            write_status(run_dir, RunStatus(spec.run_id, "never_ran", "has not started"))
    start = {
        "at": make_timestamp(),
        "command": format_command_line(),
        "versions": read_versions(),
        "git": read_git_state(Path(__file__).parent),
    }
    starts = [*previous_entry.get("starts", []), start]
    is_same_request = (
        bool(previous_entry)
        and previous_entry["axis"]["values"] == list(plan.values)
        and previous_entry["seeds"] == list(plan.seeds)
    )
    history = {
        "versions": starts[0]["versions"],
        "git": starts[0]["git"],
        "command": previous_entry["command"] if is_same_request else start["command"],
        "created_at": previous_entry.get("created_at") or start["at"],
        "starts": starts,
    }
    write_json(plan.folder / "study.json", {**make_study_entry(plan), **history})
    return find_changed_code(starts[-2], start) if len(starts) > 1 else []


def find_changed_code(previous_start: dict[str, Any], current_start: dict[str, Any]) -> list[str]:
    """`name: old -> new` for each package, and the commit of the code, that differs between two starts."""
    old, new = (
        {**start["versions"], "commit": (start["git"] or {}).get("commit")} for start in (previous_start, current_start)
    )
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in new | old if old.get(name) != new.get(name)]


def read_versions() -> dict[str, str]:
    """Python and the packages that rows depend on; those that are not installed are left out."""
    package_versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            package_versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return package_versions


def read_git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the sources in `folder` and whether they differ from it; None where no repository keeps them."""
    git_commands = (["ls-files", "--error-unmatch", "*.py"], ["rev-parse", "HEAD"], ["status", "--porcelain"])
    try:
        _, commit, changes = (
            subprocess.run(["git", "-C", str(folder), *question], capture_output=True, text=True, check=True).stdout
            for question in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def format_command_line() -> str:
    """The command as it would be typed again."""
    name = Path(sys.argv[0]).name
    program = "python -m tune_study" if name == "__main__.py" else name
    return f"{program} {shlex.join(sys.argv[1:])}".strip()


def check_writable(output: Path) -> None:
    """PlanError unless the output folder, or the folder that it would be made in, can be written."""
    if output.exists() and not output.is_dir():
        raise PlanError(f"--output {output} is a file: type a folder.")
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PlanError(f"--output {output} cannot be written ({nearest} does not allow it): type another folder.")


def check_study_links(plan: StudyPlan) -> None:
    """PlanError where a file or folder that the study would write is a symbolic link, or lies below one."""
    paths = {
        plan.summary_log,
        *(plan.output / place for spec in plan.runs for place in (spec.log_path, spec.checkpoint_dir)),
    }
    _check_links(plan.output, paths, plan.folder)


def check_folder_links(folder: Path) -> None:
    """PlanError where there is a symbolic link anywhere in results/<run>; the way to it may have some."""
    _check_links(folder, (), folder)


def _check_links(root: Path, paths: Iterable[Path], tree: Path) -> None:
    try:
        check_no_links(root, paths, [tree])
    except LinkError as error:
        raise PlanError(f"{error}.") from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the study's folder, or PlanError while another process does; the hold ends with the process."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_no_link(folder / ".lock", "a")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written ({error}): type another --output.") from None
    with lock as handle:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise PlanError(
                        f"Another process is running the study in {folder}: wait for it, or end it."
                    ) from None
                time.sleep(0.02)
        yield


_LOCK_PATIENCE_S = 1.0
"""`status` holds the lock for a moment to see whether it is held; a start must not fail for that."""


def is_running(folder: Path) -> bool:
    """Whether a process holds the study's folder now; nothing is written to find out."""
    import fcntl

    try:
        with (folder / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def close_unfinished(plan: StudyPlan, reason: str) -> None:
    """Give every run without a final status one: interrupted if it had started, never_ran if not."""
    for spec in plan.runs:
        run_dir = plan.get_run_dir(spec.run_id)
        status = read_status(run_dir) or RunStatus(spec.run_id, "never_ran")
        if status.status == "running":
            rows = read_rows(run_dir / METRICS_FILE, first_step=0)
            final_status = "interrupted" if rows else "never_ran"
            full_reason = f"{reason}, after step {rows[-1]['step']}" if rows else f"{reason} before its first step"
            write_status(run_dir, replace(status, status=final_status, reason=full_reason, ended_at=make_timestamp()))
        elif status.status == "never_ran":
            write_status(run_dir, replace(status, reason=f"{reason} before it started"))


def write_tables(folder: Path) -> None:
    """The tables of `analysis.data.frames.FRAMES` as parquet, from the rows."""
    from analysis.data.load import read_study

    read_study(folder).write_parquet(folder)


def write_index(output: Path) -> Path:
    """index.html of all studies in an output folder."""
    from analysis.report.pages import write_index as write

    return write(output)


def write_report(folder: Path) -> "tuple[Path, Conclusion]":
    """Write report.html and its figures from the tables: the report's path, and what it says in words."""
    from analysis.data.load import load
    from analysis.report.pages import conclude, write_frames_report

    frames = load(folder, live=is_running(folder))
    return write_frames_report(frames, folder), conclude(frames)
