"""Measure what a sweep costs its driver with 18, 68, 164 and 500 short runs. Prints a JSON object.

Each sweep is `run kl` with two coefficients and half as many seeds, one step per run, and few levels. The driver is the
process of the command: it plans, starts Ray, collects rows and writes tables and report. Its CPU seconds and the peak
of its memory are its own, without those of Ray's processes and of the trials (Linux only). 500 runs take ten minutes.
Run: python benchmarks/sweep_growth.py [--runs 18 68 164 500]
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe
from options import make_parser, parse_count

import analysis

RUN_COMMAND = """
import json, runpy, sys, time
from pathlib import Path

result_path, exit_code = sys.argv.pop(1), 0
try:
    runpy.run_module("tune_study", run_name="__main__", alter_sys=True)
except SystemExit as end:
    exit_code = end.code
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))
Path(result_path).write_text(json.dumps({"driver_cpu_seconds": time.process_time(), "driver_peak_megabytes": peak}))
sys.exit(exit_code)
"""
"""The program of the driver: the command in its arguments, and then what the process has taken."""

SETTINGS = ("env.env_groups=1", "env.val_env_groups=4", "env.test_env_groups=0", "trainer.val_before_train=false")


def measure_sweep(num_runs: int) -> dict[str, object]:
    """Run one sweep. Its number of runs is rounded up to an even one."""
    seeds = (num_runs + 1) // 2
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "driver.json"
        options = ["--preset", "laptop", "--kl-values", "0,0.1", "--seeds", str(seeds), "--steps", "1"]
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        command = ["run", "kl", *options, *settings, "--wandb", "off", "--output", folder]
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", RUN_COMMAND, str(result_path), *command], check=True, stdout=subprocess.DEVNULL
        )
        wall_seconds = time.perf_counter() - start
        result = json.loads(result_path.read_text(encoding="utf-8"))
        frames = analysis.load(folder)
    return {
        "runs": len(frames.trials),
        "wall_seconds": round(wall_seconds, 1),
        **{name: round(value, 1) for name, value in result.items()},
        "statuses": frames.trials["status"].value_counts().to_dict(),
    }


def main() -> None:
    """Measure one sweep after another."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=parse_count, nargs="+", default=[18, 68, 164, 500], help="runs of each sweep")
    sweeps = [measure_sweep(num_runs) for num_runs in parser.parse_args().runs]
    print(json.dumps({"benchmark": "sweep_growth", "sweeps": sweeps, **describe()}, indent=1))


if __name__ == "__main__":
    main()
