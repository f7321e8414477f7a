"""Measure the fraction of a sweep's wall time that is not spent in training steps. Prints a JSON object.

Runs the laptop KL sweep with its command, which takes minutes, and reads its rows. With n concurrent trials, the lower
bound of the wall time is the sum of the seconds of all steps, divided by n. The rest of the wall time goes into
starting and stopping Ray and trials, imports, waiting for the last trials, tables and report.
Run: python benchmarks/sweep_overhead.py [--arms 6] [--seeds 3] [--steps 60] [--levels 512]
"""

import json
import os
import subprocess
import sys
import tempfile
import time

from machine import describe
from options import make_parser, parse_count

import analysis
from search_spaces.language_model.kl import STUDY

PRESET = "laptop"
COEFFICIENTS = STUDY.axis.grids[PRESET]


def make_command(arms: int, seeds: int, steps: int, levels: int, folder: str) -> list[str]:
    """The sweep's command line, with its first `arms` coefficients, and `levels` levels for validation and for test."""
    return [
        *(sys.executable, "-m", "tune_study", "run", STUDY.name),
        *("--preset", PRESET),
        *("--output", folder),
        *("--kl-values", ",".join(COEFFICIENTS[:arms])),
        *("--seeds", str(seeds)),
        *("--steps", str(steps)),
        *("--set", f"env.val_env_groups={levels}"),
        *("--set", f"env.test_env_groups={levels}"),
    ]


def main() -> None:
    """Run the sweep once, and compare its wall time with the time of its steps."""
    parser = make_parser(__doc__)
    max_arms = len(COEFFICIENTS)
    parser.add_argument(
        "--arms", type=parse_count, default=max_arms, help="number of coefficients, counted from the first"
    )
    parser.add_argument("--seeds", type=parse_count, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=parse_count, default=60, help="training steps of each arm")
    parser.add_argument("--levels", type=parse_count, default=512, help="validation and test levels, at most 512 each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = make_command(args.arms, args.seeds, args.steps, args.levels, folder)
        start_time = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_seconds = time.perf_counter() - start_time
        frames = analysis.load(folder)
    # Trials of this preset use one core each.
    concurrent_trials = min(os.cpu_count() or 1, len(frames.trials))
    step_seconds = float(frames.steps["seconds_step"].sum()) / concurrent_trials
    report = {
        "benchmark": "sweep_overhead",
        "arms": args.arms,
        "seeds": args.seeds,
        "steps": len(frames.steps),
        "concurrent_trials": concurrent_trials,
        "wall_seconds": round(wall_seconds, 1),
        "wall_seconds_in_steps": round(step_seconds, 1),
        "cpu_seconds_in_steps": round(float(frames.steps["cpu_seconds_step"].sum()), 1),
        "fraction_not_in_steps": round(1 - step_seconds / wall_seconds, 3),
        "levels": args.levels,
        "statuses": frames.trials["status"].value_counts().to_dict(),
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
