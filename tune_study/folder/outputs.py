"""Write and read the files of a study's folder. A file is replaced as a whole, so it is complete at any moment."""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable.config.command_lines import PROGRAM, format_command
from trainable.files.json_values import DamageWarning, find_object, write_object
from trainable.files.paths import UnsafePathError, check_tree, open_regular
from trainable.files.schema import SCHEMA
from trainable.runs.run_ends import ENDED_STATUSES
from tune_study.folder.origin import remember_origin
from tune_study.folder.statuses import RunStatus, make_timestamp, resolve_status, write_status
from tune_study.folder.study_file import find_content_problem
from tune_study.plan.errors import PlanError
from tune_study.plan.own_parts import make_code_entry
from tune_study.plan.run_spec import RunSpec
from tune_study.plan.search import Search, parse_search
from tune_study.plan.study_plan import StudyPlan, make_base_config

if TYPE_CHECKING:
    from analysis.data.frames import StudyFrames
    from analysis.report.pages import Conclusion

_LOCK_PATIENCE_S = 1.0
"""Seconds to wait for the lock: `status` takes it for a moment, and a start must not fail because of that."""

# Packages whose version may change a number of a row; study.json stores their versions.
_PACKAGES = (
    "tune_study",
    "torch",
    "ray",
    "transformers",
    "numpy",
    "numba",
    "llvmlite",
    "pandas",
    "pydantic",
    "safetensors",
    "tokenizers",
)


def append_line(path: Path, line: str) -> None:
    """Append a line to a log. Raises OSError on a full disk, and if `path` is a symbolic link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(path, "a") as log:
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
        "schema": SCHEMA,
        "name": plan.study.name,
        "question": plan.study.question.strip(),
        "run": plan.run,
        "preset": plan.preset,
        "preset_reason": plan.preset_reason,
        "axis": {
            "setting": axis.setting,
            "option": axis.option,
            "values": list(plan.values),
            "dose": axis.dose,
            "factors": list(axis.factors),
        },
        "baseline": plan.baseline,
        "outcomes": list(plan.study.family.outcomes),
        "margins": {**plan.study.family.margins, **plan.study.margins},
        "seeds": list(plan.seeds),
        "extra_seeds": _list_extra_seeds(plan),
        "max_seeds": plan.max_seeds,
        "earlier_steps": list(plan.earlier_steps),
        "runs": [make_run_entry(spec) for spec in plan.runs],
        "settings": plan.base_config.model_dump(mode="json"),
        "defaults": type(plan.base_config).model_validate({}).model_dump(mode="json"),
        "stop_rules": list(plan.study.stop_rules),
        "family": plan.study.family.name,
        "model": plan.model or "",
        "storage": plan.storage,
        "confirms": None if plan.confirms is None else {"run": plan.confirms.run, "seeds": list(plan.confirms.seeds)},
        "search": None if plan.search is None else plan.search.make_entry(),
        "points": {arm: dict(settings) for arm, settings in plan.points.items()},
        "declaration": None if plan.source is None else plan.source.make_entry(),
        "code": make_code_entry(plan.code),
    }


def _list_contrasts(plan: StudyPlan) -> list[dict[str, Any]]:
    """The contrasts that the study declares, without pairs of arms that only other presets have."""
    arms = {*plan.values, *plan.study.get_grid(plan.preset)}
    pairs_by_name = {name: [pair for pair in pairs if {*pair} <= arms] for name, pairs in plan.study.contrasts.items()}
    return [
        *({"name": name, "pairs": pairs} for name, pairs in pairs_by_name.items() if pairs),
        *({"name": name, "pairs": pairs, "needs_all_pairs": True} for name, pairs in plan.study.interactions.items()),
    ]


def check_recordable(plan: StudyPlan) -> None:
    """Raise PlanError if study.json would have something that could not be read again, as a file may declare it.

    The runs are left out: their names were checked with the plan.
    """
    entry = {**make_study_entry(replace(plan, runs=())), "contrasts": _list_contrasts(plan), "command": ""}
    if problem := find_content_problem(json.loads(json.dumps(entry))):
        raise PlanError(
            f"Study {plan.study.name} cannot be recorded in study.json: {problem} Correct its declaration, or the "
            "settings that were typed."
        )


def _list_earlier_declarations(plan: StudyPlan, previous_entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The declarations of earlier starts that differ from that of this one, the first one first."""
    earlier = list(previous_entry.get("earlier_declarations") or [])
    previous = previous_entry.get("declaration")
    is_changed = previous is not None and plan.source is not None and previous["sha256"] != plan.source.sha256
    return [*earlier, previous] if is_changed and previous is not None else earlier


def _list_extra_seeds(plan: StudyPlan) -> dict[str, list[int]]:
    return {value: list(seeds) for value, seeds in plan.extra_seeds.items()}


def write_study(plan: StudyPlan) -> list[str]:
    """Write study.json, every run.json, and a status for every run that has none, before anything starts.

    In study.json, versions, git, created_at, margins, contrasts, planned seeds and the steps of the preset are those of
    the first start. command is that of the first start with the same values and seeds. `starts` lists every start,
    and earlier_declarations the texts that the file of the study had before.

    Returns the differences from the previous start that could change a number, as `name: old -> new`: versions of
    packages, and the commit of the code.
    """
    previous_entry = find_object(plan.folder / "study.json") or {}
    for spec in plan.runs:
        run_dir = plan.get_run_dir(spec.run_id)
        write_object(run_dir / "run.json", {**make_run_entry(spec), "config": spec.config.model_dump(mode="json")})
        # A study that is continued or extended keeps the statuses of its runs, unless their rows contradict them.
        write_status(run_dir, resolve_status(run_dir, spec.run_id, spec.steps))
    start = {
        "at": make_timestamp(),
        "command": format_command_line(),
        "versions": read_versions(),
        "git": read_git_state(Path(__file__).parent),
        "declaration": None if plan.source is None else plan.source.sha256,
        "wandb": plan.wandb._asdict(),
    }
    starts = [*previous_entry.get("starts", []), start]
    # The stored command must produce all runs of the study. After --extend, only the new command does.
    is_same_request = (
        bool(previous_entry)
        # A search adds its arms itself, whenever its command is typed.
        and (plan.search is not None or previous_entry["axis"]["values"] == list(plan.values))
        and previous_entry["seeds"] == list(plan.seeds)
        # A study with a maximum adds these seeds itself, whenever its command is typed.
        and (plan.max_seeds is not None or previous_entry.get("extra_seeds", {}) == _list_extra_seeds(plan))
        and _find_search(previous_entry) == plan.search
    )
    is_declared_before = plan.source is not None and "contrasts" in previous_entry
    entry = make_study_entry(plan)
    history = {
        "versions": starts[0]["versions"],
        "git": starts[0]["git"],
        "command": previous_entry["command"] if is_same_request else start["command"],
        "created_at": previous_entry.get("created_at") or start["at"],
        "starts": starts,
        # Declared before the first run: what is changed after a look at results would not be a test of them.
        "margins": previous_entry.get("margins") or entry["margins"],
        # Those of the package change with its version only, which is recorded; new arms may have further pairs.
        "contrasts": previous_entry["contrasts"] if is_declared_before else _list_contrasts(plan),
        "earlier_declarations": _list_earlier_declarations(plan, previous_entry),
        "planned_seeds": previous_entry.get("planned_seeds") or len(previous_entry.get("seeds") or plan.seeds),
        # Of the preset as it was then; a folder of an earlier version does not have it.
        "preset_steps": previous_entry.get("preset_steps")
        if previous_entry
        else make_base_config(plan.study, plan.preset).trainer.total_training_steps,
        # The groups of a grid may be started one by one, and the baseline is in one of them.
        "planned_baseline_seeds": previous_entry.get("planned_baseline_seeds")
        or (None if plan.baseline is None else plan.num_baseline_seeds),
        "looks": previous_entry.get("looks", []),
    }
    remember_origin(plan)
    # Last, so that a study.json exists only together with every run.json and status.json.
    write_object(plan.folder / "study.json", {**entry, **history})
    return find_changed_code(starts[-2], start) if len(starts) > 1 else []


def _find_search(entry: Mapping[str, Any]) -> Search | None:
    """The search of study.json; None for another study."""
    return parse_search(entry["search"]) if entry.get("search") else None


def record_look(plan: StudyPlan, statuses: Iterable[RunStatus]) -> None:
    """Add a look at the results to study.json, before the report is written: its time, and what there is to see.

    runs: number of runs that have ended. seeds: the most seeds of an arm with which runs have ended. steps: of the
    study. It is no look if no run has ended since the previous one.
    """
    ended = {status.run_id for status in statuses if status.status in ENDED_STATUSES}
    by_arm = Counter(spec.arm for spec in plan.runs if spec.run_id in ended)
    # The baseline may have had more seeds than all other arms from the start.
    num_seeds = max((count for arm, count in by_arm.items() if arm != plan.baseline), default=len(ended))
    path = plan.folder / "study.json"
    content = find_object(path)
    if not ended or content is None:  # a damaged study.json is written again by the next start
        return
    looks, steps = content.get("looks", []), plan.base_config.trainer.total_training_steps
    if looks and (looks[-1]["runs"], looks[-1].get("steps", steps)) == (len(ended), steps):
        return
    look = {"at": make_timestamp(), "runs": len(ended), "seeds": num_seeds, "steps": steps}
    write_object(path, {**content, "looks": [*looks, look]})


def find_changed_code(previous_start: dict[str, Any], current_start: dict[str, Any]) -> list[str]:
    """`name: old -> new` for what differs between two starts: packages, commit of the code, declaration in a file."""
    old, new = (
        {
            **start["versions"],
            "commit": (start["git"] or {}).get("commit"),
            "declaration": str(start.get("declaration"))[:12],
        }
        for start in (previous_start, current_start)
    )
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in new | old if old.get(name) != new.get(name)]


def read_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on. Packages that are not installed are left out."""
    package_versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            package_versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return package_versions


_SOURCE_FOLDERS = ("tune_study", "trainable", "search_spaces", "analysis")
"""The folders of a checkout in which a new file may be code that a run imports."""


def read_git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the sources in `folder`, and whether they differ from it; None if git does not track them.

    New files count inside the packages alone: results of studies in the folder of the checkout change no code.
    """
    # The first command fails if git does not track the folder, for example that of an installed package which happens
    # to be inside another repository.
    git_commands = (
        ["ls-files", "--error-unmatch", "*.py"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
        ["ls-files", "--others", "--exclude-standard", "--", *(f":/{name}" for name in _SOURCE_FOLDERS)],
    )
    try:
        _, commit, *changes = (
            subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": any(text.strip() for text in changes)}


def format_command_line() -> str:
    """The current command as it can be typed again, quoted for a shell."""
    name = Path(sys.argv[0]).name
    return format_command(*sys.argv[1:], program=PROGRAM if name == "__main__.py" else name)


def check_writable(output: Path, option: str = "--output", advice: str = "type another folder") -> None:
    """Raise PlanError unless the output folder is writable, or can be created in its nearest existing parent.

    option: the option or argument that names the folder. advice: what to do about a folder that cannot be written.
    """
    if output.exists() and not output.is_dir():
        raise PlanError(f"{option} {output} is a file: type the name of a folder.")
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PlanError(f"{option} {output} cannot be written ({nearest} does not allow it): {advice}.")


def check_study_links(plan: StudyPlan) -> None:
    """Raise PlanError if a file or folder that the study would write is a symbolic link, or is below one."""
    paths = {
        plan.summary_log,
        plan.output / "wandb",
        *(plan.output / path for spec in plan.runs for path in (spec.log_path, spec.checkpoint_dir)),
    }
    _check_links(plan.output, paths, plan.folder)


def check_folder_links(folder: Path) -> None:
    """Raise PlanError if results/<run> contains a symbolic link. The path to it may contain some."""
    _check_links(folder, (), folder)


def check_run_folders(folder: Path, run_ids: Iterable[str]) -> None:
    """Raise PlanError if runs/ or the folder of a run is a symbolic link. Reading a file checks the file itself."""
    _check_links(folder, [folder / "runs" / run_id for run_id in run_ids])


def _check_links(root: Path, paths: Iterable[Path], *trees: Path) -> None:
    try:
        check_tree(root, paths, trees)
    except UnsafePathError as error:
        raise PlanError(f"{error}.") from None


class FolderLockedError(PlanError):
    """Another process writes the results in a folder."""


@contextmanager
def lock_folder(folder: Path, task: str = "the study") -> Iterator[None]:
    """Lock the folder of a study or of a suite during the body. Raise FolderLockedError if another process holds it.

    task: what that process runs, for the message.
    The system releases the lock when its process ends, however it ends, so a killed driver leaves no lock behind.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_regular(folder / ".lock", "a")
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
                    raise FolderLockedError(
                        f"Another process is running {task} in {folder}: wait for it, or end it."
                    ) from None
                time.sleep(0.02)  # much shorter than _LOCK_PATIENCE_S; flock itself has no timeout
        yield


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of the study's folder. Writes nothing."""
    import fcntl

    try:
        with open_regular(folder / ".lock", "r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file: the study has never been started in this folder
        return False
    return False


def write_tables(folder: Path) -> None:
    """Make the tables of `analysis.data.frames.FRAMES` from the rows, and write them as parquet files.

    Warns of files that are damaged; the tables remember the warnings.
    """
    from analysis.data.load import read_study

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = read_study(folder, live=is_running(folder))
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    damage = [str(warning.message) for warning in caught if issubclass(warning.category, DamageWarning)]
    for message in _find_lost_probes(folder, frames):
        warnings.warn(message, DamageWarning, stacklevel=2)
        damage.append(message)
    frames.write_parquet(folder, damage)


def _find_lost_probes(folder: Path, frames: "StudyFrames") -> list[str]:
    """A sentence per run whose probes are in the table of the previous start and in no file any more.

    No row says that a run was probed, so this table is the only trace of a file that was deleted.
    """
    from analysis.data.tables import get_damage, read_table

    try:
        table = read_table(folder / "gradients.parquet")
        previous = table.loc[table["source"] == "probe", ["run_id", "step"]]
    except (ValueError, KeyError):  # there is none, or it cannot be read
        return []
    current = frames.gradients.loc[frames.gradients["source"] == "probe", ["run_id", "step"]]
    steps_by_run: dict[str, list[str]] = {}
    lost_probes = {*previous.itertuples(index=False, name=None)} - {*current.itertuples(index=False, name=None)}
    for run_id, step in sorted(lost_probes):
        steps_by_run.setdefault(run_id, []).append(str(step))
    # The table without them remembers it, as long as there are none.
    known_runs = set(frames.trials["run_id"])
    probed_runs = set(current["run_id"])
    remembered = [
        message
        for message in get_damage(table)
        for run_id in known_runs - probed_runs
        if message.startswith(f"runs/{run_id}/probes.jsonl has no probe")
    ]
    return remembered + [
        f"runs/{run_id}/probes.jsonl has no probe of step {', '.join(steps)} any more, and gradients.parquet had it."
        for run_id, steps in steps_by_run.items()
        if run_id in known_runs
    ]


def write_index(output: Path) -> Path:
    """Write index.html of all studies in an output folder."""
    from analysis.report.pages import write_index as write

    return write(output)


def write_report(folder: Path, *, with_pictures: bool = True) -> "tuple[Path, Conclusion]":
    """Make report.html and its figures from the tables. Returns the report's path, and its conclusion in words.

    with_pictures: whether the figures are also written as PNG files.
    """
    from analysis.data.load import load
    from analysis.report.pages import conclude, write_frames_report

    frames = load(folder, live=is_running(folder))
    return write_frames_report(frames, folder, with_pictures=with_pictures), conclude(frames)
