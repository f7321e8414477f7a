"""Check that another version of this project computes the same numbers: both run small studies, which are compared.

    python -m tests.same_numbers run OUTPUT [CHECKOUT]     # CHECKOUT has its own .venv; default: this one
    python -m tests.same_numbers compare OLD NEW           # exit 1 where a shared column differs in one bit

Run both versions on the same machine. Times are not compared.
"""

import subprocess
import sys
from pathlib import Path

import pandas as pd

from analysis.data.frames import diff_frames

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


def run_all(output: Path, checkout: Path) -> int:
    """Run every command with the version in `checkout`; return the first exit code that is not 0."""
    for command, folder in COMMANDS.items():
        words = [str(checkout / ".venv/bin/python"), "-m", "tune_study", *command.split(), "--preset", "laptop"]
        print(command, flush=True)
        process = subprocess.run([*words, "--output", str(output / folder)], cwd=checkout, stdout=subprocess.DEVNULL)
        if process.returncode:
            return process.returncode
    return 0


def compare(old: Path, new: Path) -> int:
    """Print what differs between the tables of two versions; return 1 if anything does."""
    differences: list[str] = []
    for path in sorted(old.glob("*/results/*/*.parquet")):
        name = path.relative_to(old)
        old_table, new_table = pd.read_parquet(path), pd.read_parquet(new / name)
        shared_columns = [column for column in old_table if column in new_table]
        if missing_columns := sorted({*old_table} - {*shared_columns}):
            differences.append(f"{name}: the new version has no {', '.join(missing_columns)}")
        names = [column for column in shared_columns if column.startswith(("config/", "config_hash"))]
        differences += [
            f"{name}: {line}" for line in diff_frames(old_table[shared_columns], new_table[shared_columns], names)
        ]
        print(f"{name}: {len(shared_columns)} columns of {len(old_table)} rows")
    print("\n".join(differences) or "Every shared column is equal to the last bit.")
    return int(bool(differences))


if __name__ == "__main__":
    first, *others = (Path(word).absolute() for word in sys.argv[2:])
    sys.exit(run_all(first, *others or [ROOT]) if sys.argv[1] == "run" else compare(first, *others))
