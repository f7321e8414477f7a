"""Check that another version of this project computes the same numbers: both run small studies, which are compared.

    python -m tests.same_numbers run OUTPUT [--checkout DIR]     # DIR has its own .venv; default: this one
    python -m tests.same_numbers compare OLD NEW                 # exit 1 where a shared column differs in one bit

Run both versions on the same machine. Times are not compared. Columns and tables that have another name in the new
version are listed in NEW_NAMES.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd

from trainable.runs.records import EXTRA_COLLAPSE_COLUMNS, TIME_COLUMNS

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "run kl --seeds 1 --steps 6 --kl-values 0,0.1": "sweeps",
    "run entropy --seeds 1 --steps 6 --entropy-values 0,0.03": "sweeps",
    "run top-p --seeds 1 --steps 6 --rollout_filter_value 0.9,nofilter": "sweeps",
    "run gradient-analysis --seeds 1 --steps 2 --set trainer.gradient_analysis_every=1": "sweeps",
    "run smoke --groups 3 --steps 5": "sweeps",
    "run grpo-entropy-sokoban --seeds 1 --steps 5 --arms std-clip0.2,tpo": "sweeps",
    "run mismatch --seeds 1 --steps 3": "sweeps",
    "run distill --seeds 1 --steps 3": "sweeps",
    "run tree-grpo --seeds 1 --steps 3": "sweeps",
    "run kl --seeds 1 --steps 4 --kl-values 0,0.1 --set rollout.name=torch": "torch",
    "run kl --seeds 1 --steps 4 --kl-values 0,0.1 --set model.lora_rank=4": "adapters",
    "run sandbox-all --smoke": "sandbox",
    "run sandbox-companions --smoke": "companions",
    "run opd --smoke": "companions",
}
"""What is run, after one another, on the laptop preset -> the folder that it goes to: every family, both engines."""

TABLES = {
    "trials": ("run_id",),
    "steps": ("run_id", "step"),
    "levels": ("run_id", "step", "split", "mode", "level"),
    "gradients": ("run_id", "source", "step", "prefilter", "component", "bucket"),
    "gradient_groups": ("run_id", "source", "step", "prefilter", "group"),
}
"""Table of the new version -> the columns that name its rows."""

OPTIONAL_COLUMNS = {column.name for column in EXTRA_COLLAPSE_COLUMNS}
NEW_NAMES = {
    "rooms": "levels",
    "room": "level",
    "empty_steps_in_a_row": "consecutive_empty_steps",
    "engine_gap_mean": "engine_mismatch_mean",
    "engine_gap_max": "engine_mismatch_max",
    "engine_effective_share": "engine_ess_fraction",
    "padding_share": "padding_fraction",
    "stand_in_data": "synthetic_data",
}
"""Name of a column or a table in the old version -> its name in the new one."""

UNCOMPARED_COLUMNS = (*TIME_COLUMNS, "trial_id", "started_at", "ended_at", "config_hash")


def is_compared(name: str) -> bool:
    """Return whether a column of the old version must be equal: not a time, a name, or a column now on request."""
    return not (
        name.startswith(("seconds", "config/", "utilisation_", "matrix_rate"))
        or name in UNCOMPARED_COLUMNS
        or name in OPTIONAL_COLUMNS
    )


def run_all(output: Path, checkout: Path) -> int:
    """Run every command with the version in `checkout`; return the first exit code that is not 0."""
    for command, folder in COMMANDS.items():
        words = [str(checkout / ".venv/bin/python"), "-m", "tune_study", *command.split(), "--preset", "laptop"]
        print(command, flush=True)
        process = subprocess.run(
            [*words, "--output", str(output / folder)], cwd=checkout, stdout=subprocess.DEVNULL, check=False
        )
        if process.returncode:
            return process.returncode
    return 0


def compare(old: Path, new: Path) -> list[str]:
    """Return sentences about what differs; empty if every shared column is equal to the last bit."""
    differences: list[str] = []
    for path in sorted(old.glob("*/results/*/*.parquet")):
        name = path.stem
        new_path = new / path.parent.relative_to(old) / f"{NEW_NAMES.get(name, name)}.parquet"
        label = f"{path.parent.name}/{name}"
        if not new_path.exists():
            differences.append(f"{label}: no {new_path.name} in the new version")
            continue
        differences += [
            f"{label}: {difference}" for difference in compare_tables(name, *map(pd.read_parquet, (path, new_path)))
        ]
    return differences


def compare_tables(name: str, old: pd.DataFrame, new: pd.DataFrame) -> list[str]:
    """Return sentences about what differs between two versions of one table."""
    old = old.rename(columns=NEW_NAMES)
    keys = [key for key in TABLES[NEW_NAMES.get(name, name)] if key in old]
    old, new = (frame.sort_values(keys, ignore_index=True) for frame in (old, new))
    if len(old) != len(new):
        return [f"{len(old)} rows against {len(new)}"]
    shared_columns = [column for column in old if column in new and is_compared(column)]
    missing_columns = sorted(column for column in old if column not in new and is_compared(column))
    differences = [f"{column} is missing in the new version" for column in missing_columns]
    differences += [
        f"{column} differs in {int((~equal).sum())} of {len(old)} rows"
        for column in shared_columns
        if not (equal := (old[column] == new[column]) | (old[column].isna() & new[column].isna())).all()
    ]
    print(f"{name}: {len(shared_columns)} columns of {len(old)} rows compared")
    return differences


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("output", type=Path)
    run_parser.add_argument("--checkout", type=Path, default=ROOT)
    compare_parser = commands.add_parser("compare")
    compare_parser.add_argument("old", type=Path)
    compare_parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        sys.exit(run_all(arguments.output.absolute(), arguments.checkout.absolute()))
    differences = compare(arguments.old, arguments.new)
    print("\n".join(differences) or "Every shared column is equal to the last bit.")
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
