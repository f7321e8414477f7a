"""Files of a study's folder: written before, during and after training, and complete at any moment."""

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

# Packages whose version may change a number; study.json stores them.
_PACKAGES = ("tune_study", "torch", "ray", "transformers", "numpy", "pandas", "pydantic", "safetensors", "tokenizers")


@dataclass(frozen=True)
class RunStatus:
    """status.json of a run: `running`, or one of records.STATUSES with its reason. Its fields are the keys on disk."""

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
        """The status for display; a failure with its class."""
        return f"{self.status} ({self.failure_class})" if self.failure_class else self.status


_STATUS = TypeAdapter(RunStatus)


def make_timestamp() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_text(path: Path, text: str) -> None:
    """Write a temporary file next to `path` and rename it, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary_path, temporary_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)  # A power cut must not leave an empty file under this name.


def write_json(path: Path, content: object) -> None:
    """Write `content` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file, or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # RecursionError: deeply nested brackets.
        return None
    return content if isinstance(content, dict) else None


def read_status(run_dir: Path) -> RunStatus | None:
    """The status of a run; None before it has one."""
    content = read_json(run_dir / "status.json")
    # Keys that this version does not know are ignored.
    field_names = set(RunStatus.__dataclass_fields__)
    if content is None or not {"run_id", "status"} <= content.keys():
        return None
    try:
        return _STATUS.validate_python({key: content[key] for key in field_names & content.keys()})
    except ValidationError:  # A value has another type than was written.
        return None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Write status.json of a run atomically."""
    write_json(run_dir / "status.json", asdict(status))


def append_line(path: Path, line: str) -> None:
    """Append a line to a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_no_link(path, "a") as log:
        log.write(line + "\n")


def make_run_entry(spec: RunSpec) -> dict[str, Any]:
    """The content of run.json without the settings: names of a run and paths of its files."""
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
    """The content of study.json without its starts: the request, and the runs."""
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
    """Write study.json, every run.json, and a status for every run that has none, before anything starts.

    versions, git and created_at are those of the first start, command is that of the first start with the same values
    and seeds; `starts` lists every start. Returns the differences from the previous start that could change a number:
    packages, and the commit of the code.
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
    # --extend changes the values or seeds; then the stored command must be the new one.
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
    """`name: old -> new` for each package, and for the commit of the code, that differs between two starts."""
    old, new = (
        {**start["versions"], "commit": (start["git"] or {}).get("commit")} for start in (previous_start, current_start)
    )
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in new | old if old.get(name) != new.get(name)]


def read_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on; without packages that are not installed."""
    package_versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            package_versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return package_versions


def read_git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the sources in `folder`, and whether they differ from it; None if git does not track them."""
    # The first command fails if the folder only happens to lie inside another repository.
    git_commands = (["ls-files", "--error-unmatch", "*.py"], ["rev-parse", "HEAD"], ["status", "--porcelain"])
    try:
        _, commit, changes = (
            subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def format_command_line() -> str:
    """The current command as it can be typed again."""
    name = Path(sys.argv[0]).name
    program = "python -m tune_study" if name == "__main__.py" else name
    return f"{program} {shlex.join(sys.argv[1:])}".strip()


def check_writable(output: Path) -> None:
    """Raise PlanError unless the output folder, or the one in which it would be created, is writable."""
    if output.exists() and not output.is_dir():
        raise PlanError(f"--output {output} is a file: type the name of a folder.")
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PlanError(f"--output {output} cannot be written ({nearest} does not allow it): type another folder.")


def check_study_links(plan: StudyPlan) -> None:
    """Raise PlanError if a file or folder that the study would write is a symbolic link, or is below one."""
    paths = {
        plan.summary_log,
        *(plan.output / path for spec in plan.runs for path in (spec.log_path, spec.checkpoint_dir)),
    }
    _check_links(plan.output, paths, plan.folder)


def check_folder_links(folder: Path) -> None:
    """Raise PlanError if results/<run> contains a symbolic link. The path to it may contain some."""
    _check_links(folder, (), folder)


def _check_links(root: Path, paths: Iterable[Path], tree: Path) -> None:
    try:
        check_no_links(root, paths, [tree])
    except LinkError as error:
        raise PlanError(f"{error}.") from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the study's folder. Raise PlanError if another process holds the lock, which ends with its process."""
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
"""Seconds to wait for the lock: `status` takes it for a moment, and a start must not fail because of that."""


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of the study's folder. Writes nothing."""
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
    """Give every run without a final status one: interrupted if it has a row, else never_ran."""
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
    """Write the tables of `analysis.data.frames.FRAMES` as parquet, from the rows."""
    from analysis.data.load import read_study

    read_study(folder).write_parquet(folder)


def write_index(output: Path) -> Path:
    """Write index.html of all studies in an output folder."""
    from analysis.report.pages import write_index as write

    return write(output)


def write_report(folder: Path) -> "tuple[Path, Conclusion]":
    """Write report.html and its figures from the tables. Returns the report's path, and its conclusion in words."""
    from analysis.data.load import load
    from analysis.report.pages import conclude, write_frames_report

    frames = load(folder, live=is_running(folder))
    return write_frames_report(frames, folder), conclude(frames)
