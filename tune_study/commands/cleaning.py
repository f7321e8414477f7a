"""The command `clean`: free the disk space that ended runs no longer need."""

import shutil
from itertools import chain
from pathlib import Path

import typer
from rich.console import Console
from rich.filesize import decimal

from search_spaces.catalog import FAMILIES
from trainable.config.command_lines import format_command
from trainable.config.setting_types import flatten_settings
from trainable.files.paths import check_path, check_tree
from trainable.runs.run_files import METRICS_FILE, STATE_FOLDER, find_best_step, read_rows
from trainable.runs.study_record import ENDED_STATUSES, StatusRecord, find_record
from tune_study.folder import outputs
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_line, print_table
from tune_study.placement.disk import count_folder_bytes


def clean(console: Console, run: str, is_confirmed: bool) -> None:
    """Print what can be removed, and remove it if --yes was typed or the user agrees.

    Those are the rolling checkpoints of runs that are completed or were stopped by a rule: any other run, such as a
    failed one, needs its checkpoint to continue. Under --keep-best, the best checkpoint stays. Raises PlanError if RUN
    is not a local study folder, or if another process runs the study, and UnsafePathError if it has links for folders.
    """
    folder = Path(run)
    study = read_study(folder)  # before the lock, which creates a folder
    with outputs.lock_folder(folder):
        check_tree(folder, [folder / "runs" / entry.run_id for entry in study.runs])
        states: dict[str, list[Path]] = {}
        for entry in study.runs:
            run_dir = folder / "runs" / entry.run_id
            status, path = find_record(StatusRecord, run_dir), run_dir / STATE_FOLDER
            if status is None or status.status not in ENDED_STATUSES or not path.exists():
                continue
            check_path(folder, path)
            paths = [path]
            if flatten_settings(study.settings).get("trainer.keep_best"):
                from trainable.runs.checkpoint import iter_checkpoints  # imports torch

                best_step = find_best_step(read_rows(run_dir / METRICS_FILE), FAMILIES[study.family].primary_metric)
                paths = [checkpoint for step, checkpoint in iter_checkpoints(path) if step != best_step]
            states |= {entry.run_id: paths} if paths else {}
        if not states:
            print_line(console, "Nothing to remove: no run that has ended keeps a rolling checkpoint.")
            return
        sizes = {run_id: sum(map(count_folder_bytes, paths)) for run_id, paths in states.items()}
        print_table(console, ["run", "size"], [[run_id, decimal(size)] for run_id, size in sizes.items()])
        total, count = decimal(sum(sizes.values())), len(states)
        print_line(
            console,
            f"The rolling checkpoints of {f'these {count} runs' if count > 1 else 'this run'} take {total}. Without "
            "them, `probe` and `export` need saved checkpoints (--save-freq). Rows, tables and reports stay.",
        )
        if not is_confirmed and not (console.is_terminal and typer.confirm(f"Remove {total}?")):
            print_line(console, f"Nothing was removed. To remove it: {format_command('clean', folder, '--yes')}")
            return
        for path in chain.from_iterable(states.values()):
            if path.exists():  # if a checkpoint was being replaced, only a hidden folder may be left
                shutil.rmtree(path)
        print_line(console, f"Removed {total}.")
