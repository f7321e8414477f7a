"""Write and read the files of a study's folder. Files are replaced as a whole, so they are always complete."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from search_spaces.declaration.study import make_value_label
from trainable.config.command_lines import PROGRAM, format_command
from trainable.config.own_parts import PartFile
from trainable.files.paths import check_tree, lock_file, open_regular, read_bytes, write_text
from trainable.runs.run_files import is_locked
from trainable.runs.study_record import (
    ENDED_STATUSES,
    SCHEMA,
    AxisRecord,
    DeclaredContrast,
    Git,
    Look,
    RunEntry,
    RunRecord,
    SourceFile,
    Start,
    StatusRecord,
    StudyRecord,
    find_record,
    write_record,
)
from trainable.versions import read_versions
from tune_study.folder.origin import remember_origin
from tune_study.folder.statuses import make_timestamp, read_statuses
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import RunSpec, StudyPlan, make_base_config

if TYPE_CHECKING:
    from analysis.data.frames import StudyFrames

_LOCK_PATIENCE_S = 1.0
"""Seconds to wait for the lock, since `status` takes it for a moment and a start must not fail because of that."""


def make_run_entry(plan: StudyPlan, spec: RunSpec) -> RunEntry:
    """Make a run's entry in study.json."""
    config_hash, parent = spec.config.compute_hash(), plan.find_parent(spec)
    if parent is not None and config_hash != parent.entry.config_hash:
        # The rows of a fork depend on both configurations, and on the step at which one follows the other.
        text = f"{parent.entry.config_hash} to step {parent.step}, then {config_hash}"
        config_hash = hashlib.sha256(text.encode()).hexdigest()[:12]
    return RunEntry(
        run_id=spec.run_id,
        arm=spec.arm,
        seed=spec.seed,
        study=plan.study.name,
        label=make_value_label(spec.arm),
        experiment_name=spec.experiment_name,
        config_hash=config_hash,
        log=spec.log_path.as_posix(),
        checkpoints=spec.checkpoint_dir.as_posix(),
    )


def make_study_record(plan: StudyPlan) -> StudyRecord:
    """Make study.json as it is before the first start: the request and the runs. Raises ValidationError."""
    study, axis = plan.study, plan.study.axis
    # Without pairs of arms that only other presets have.
    arms = {*plan.values, *study.get_grid(plan.preset)}
    pairs_by_name = {name: [pair for pair in pairs if {*pair} <= arms] for name, pairs in study.contrasts.items()}
    contrasts = [DeclaredContrast(name, tuple(pairs)) for name, pairs in pairs_by_name.items() if pairs]
    interactions = [
        DeclaredContrast(name, tuple(pairs), needs_all_pairs=True) for name, pairs in study.interactions.items()
    ]
    return StudyRecord(
        schema=SCHEMA,
        name=study.name,
        question=study.question.strip(),
        run=plan.run,
        preset=plan.preset,
        preset_reason=plan.preset_reason,
        preset_steps=make_base_config(study, plan.preset).trainer.total_training_steps,
        axis=AxisRecord(axis.setting, axis.option, tuple(plan.values), axis.dose, tuple(axis.factors)),
        baseline=plan.baseline or "",
        outcomes=tuple(outcome.column for outcome in study.family.outcomes if outcome.is_compared),
        margins={**study.family.margins, **study.margins},
        contrasts=(*contrasts, *interactions),
        seeds=tuple(plan.seeds),
        extra_seeds={value: tuple(seeds) for value, seeds in plan.extra_seeds.items()},
        planned_seeds=len(plan.seeds),
        planned_baseline_seeds=None if plan.baseline is None else plan.num_baseline_seeds,
        max_seeds=plan.max_seeds,
        earlier_steps=plan.earlier_steps,
        runs=tuple(make_run_entry(plan, spec) for spec in plan.runs),
        settings=plan.base_config.model_dump(mode="json"),
        defaults=type(plan.base_config).model_validate({}).model_dump(mode="json"),
        stop_rules=tuple(study.stop_rules),
        family=study.family.name,
        model=plan.model or "",
        storage=plan.storage,
        confirms=plan.confirms,
        forks=plan.forks,
        search=plan.search,
        points={arm: {name: str(text) for name, text in settings.items()} for arm, settings in plan.points.items()},
        declaration=None if plan.source is None else _make_source_file(plan.source),
        code=tuple(map(_make_source_file, plan.code)),
    )


def _make_source_file(file: PartFile) -> SourceFile:
    return SourceFile(file.path, file.sha256, file.text)


def write_study(plan: StudyPlan) -> list[str]:
    """Write study.json, every run.json, and a status for every run that has none, before anything starts.

    study.json keeps versions, git, created_at, margins, contrasts, planned seeds and preset steps from the first start,
    and the command from the first start with the same values and seeds. `starts` lists every start, and
    earlier_declarations the texts that the study's file had before.

    Returns the differences from the previous start that could change a number, as `name: old -> new`: versions of
    packages, the commit of the code, and the declaration.
    """
    previous = find_record(StudyRecord, plan.folder)
    # A continued or extended study keeps the statuses of its runs, unless their rows contradict them.
    for spec, status in zip(plan.runs, read_statuses(plan).values(), strict=True):
        run_dir = plan.get_run_dir(spec.run_id)
        write_record(
            run_dir, RunRecord(**asdict(make_run_entry(plan, spec)), config=spec.config.model_dump(mode="json"))
        )
        write_record(run_dir, status)
    program = Path(sys.argv[0]).name
    start = Start(
        at=make_timestamp(),
        command=format_command(*sys.argv[1:], program=PROGRAM if program == "__main__.py" else program),
        versions=read_versions(),
        git=read_git_state(Path(__file__).parent),
        declaration=None if plan.source is None else plan.source.sha256,
        wandb=plan.wandb,
    )
    record = replace(
        make_study_record(plan),
        command=start.command,
        created_at=start.at,
        versions=start.versions,
        git=start.git,
        starts=(start,),
    )
    if previous is not None:
        record = _keep_history(plan, previous, record)
    remember_origin(plan)
    # Written last, so that study.json exists only together with every run.json and status.json.
    write_record(plan.folder, record)
    old, new = (
        {
            **state.versions,
            "commit": None if state.git is None else state.git.commit,
            "declaration": str(state.declaration)[:12],
        }
        for state in (record.starts[-2:][0], start)
    )
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in new | old if old.get(name) != new.get(name)]


def _keep_history(plan: StudyPlan, previous: StudyRecord, record: StudyRecord) -> StudyRecord:
    """Return `record` with what study.json keeps from the first start and from all starts."""
    # The stored command must produce all runs of the study. After --extend, only the new command does.
    is_same_request = (
        # A search adds its arms itself when its command is typed.
        (plan.search is not None or previous.axis.values == record.axis.values)
        and previous.seeds == record.seeds
        # A study with a maximum adds these seeds itself when its command is typed.
        and (plan.max_seeds is not None or previous.extra_seeds == record.extra_seeds)
        and previous.search == record.search
    )
    earlier = previous.earlier_declarations
    if previous.declaration and plan.source and previous.declaration.sha256 != plan.source.sha256:
        earlier = (*earlier, previous.declaration)
    return replace(
        record,
        command=previous.command if is_same_request else record.command,
        created_at=previous.created_at or record.created_at,
        versions=previous.versions,
        git=previous.git,
        starts=(*previous.starts, *record.starts),
        margins=previous.margins or record.margins,
        # A study of the package changes its contrasts only with the recorded version, and new arms may add pairs.
        # Those of a fork follow from its arms.
        contrasts=record.contrasts if plan.source is None or plan.forks is not None else previous.contrasts,
        earlier_declarations=earlier,
        planned_seeds=previous.planned_seeds or len(previous.seeds),
        # Folders of earlier versions do not have it.
        preset_steps=previous.preset_steps,
        # The groups of a grid may be started one by one, and only one of them contains the baseline.
        planned_baseline_seeds=previous.planned_baseline_seeds or record.planned_baseline_seeds,
        looks=previous.looks,
    )


def record_look(plan: StudyPlan, statuses: Iterable[StatusRecord]) -> None:
    """Add a look at the results to study.json before the report is written, if a run has ended since the last one."""
    ended = {status.run_id for status in statuses if status.status in ENDED_STATUSES}
    by_arm = Counter(spec.arm for spec in plan.runs if spec.run_id in ended)
    # The baseline may have had more seeds than all other arms from the start.
    num_seeds = max((count for arm, count in by_arm.items() if arm != plan.baseline), default=len(ended))
    study, steps = find_record(StudyRecord, plan.folder), plan.base_config.trainer.total_training_steps
    if not ended or study is None:  # a damaged study.json is written again by the next start
        return
    if study.looks and (study.looks[-1].runs, study.looks[-1].steps or steps) == (len(ended), steps):
        return
    look = Look(make_timestamp(), len(ended), num_seeds, steps)
    write_record(plan.folder, replace(study, looks=(*study.looks, look)))


def read_git_state(folder: Path) -> Git | None:
    """Read the commit of the sources in `folder` and whether they differ from it; None if git does not track them.

    New files do not count, since the results of studies may be in the folder of the checkout.
    """
    # The first command fails if git does not track the folder, such as a package installed inside another repository.
    git_commands = (
        ["ls-files", "--error-unmatch", "*.py"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )
    try:
        _, commit, changes = (
            subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Git(commit.strip(), bool(changes.strip()))


def check_writable(output: Path, option: str = "--output", advice: str = "type another folder") -> None:
    """Raise PlanError unless a file can be written in the output folder or its nearest existing parent.

    option: the option or argument that names the folder. advice: what to do if the folder cannot be written.
    """
    if output.exists() and not output.is_dir():
        raise PlanError(f"{option} {output} is a file: type the name of a folder.")
    # May be a file or a dangling link.
    nearest = next(path for path in (output.absolute(), *output.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:  # without a name where the system can
            file.write(os.urandom(2**16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PlanError(f"{option} {output} cannot be written ({nearest}: {error.strerror}): {advice}.") from None


def check_study_links(plan: StudyPlan) -> None:
    """Raise UnsafePathError if a file or folder that the study would write is a symbolic link or below one."""
    paths = {
        plan.summary_log,
        plan.output / "wandb",
        *(plan.output / path for spec in plan.runs for path in (spec.log_path, spec.checkpoint_dir)),
    }
    check_tree(plan.output, paths, [plan.folder])


class FolderLockedError(PlanError):
    """Another process writes the results in a folder."""


@contextmanager
def lock_folder(folder: Path, task: str = "the study") -> Iterator[None]:
    """Lock the folder of a study or suite during the body. Raises FolderLockedError if another process holds the lock.

    task: what that process runs, for the message.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_regular(folder / ".lock", "a")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written ({error}): type another --output.") from None
    with lock as handle:
        try:
            lock_file(handle, _LOCK_PATIENCE_S)
        except OSError:
            end = f"type `{format_command('stop', folder)}`" if task == "the study" else "end it"
            raise FolderLockedError(f"Another process is running {task} in {folder}: wait for it, or {end}.") from None
        yield


def write_tables(folder: Path) -> "StudyFrames":
    """Read the rows of a study, write them as parquet tables for other programs, and return them."""
    from analysis.data.load import read_study

    frames = read_study(folder, live=is_locked(folder))
    frames.write_parquet(folder)
    return frames


def write_search_store(plan: StudyPlan) -> Path:
    """Write the points of a search that have ended as an Optuna study for optuna-dashboard, and return its path."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from analysis.data.load import load  # imports pandas
    from analysis.search.points import make_points
    from analysis.search.trials import make_optuna_study

    assert plan.search is not None
    frames = load(plan.folder)
    (family,) = frames.families
    path = plan.folder / "optuna.journal"  # Optuna's journal format: lines of JSON
    # Optuna puts a lock beside the file, so it writes to a temporary folder.
    with tempfile.TemporaryDirectory() as temp_dir:
        temp_path = Path(temp_dir) / path.name
        storage = JournalStorage(JournalFileBackend(str(temp_path)))
        make_optuna_study(plan.search, make_points(frames), family.is_higher_better, storage=storage, name=plan.run)
        write_text(path, read_bytes(temp_path).decode())
    return path
