"""Time the reports of grids with 18, 68, 164 and 500 runs of 50 steps and 512 levels. Prints a JSON object.

Rows are synthetic (tests/fakes/grid_folders.py), and tables are read from parquet files, as after a run. Each report is
written by a process of its own. CPU and wall seconds are those of one call of `analysis.report.pages.write_report`;
memory is the peak of the process so far, before and after that call (Linux only).
Run: python benchmarks/grid_report.py [--runs 18 68 164 500] [--steps 50] [--levels 512]
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe
from options import make_parser, parse_count

from analysis.data.load import load

# The tests are not installed with the project.
sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.fakes.grid_folders import ALL_TYPES, ONE_TYPE, list_smoke_arms, make_runs, make_study
from tests.fakes.run_folders import write_study

WRITE_REPORT = """
import json, sys, time
from pathlib import Path
from analysis.report.pages import write_report

def read_peak():
    # Not getrusage: its peak includes that of the parent before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1000) for line in lines if line.startswith("VmHWM"))

start_memory, cpu, wall = read_peak(), time.process_time(), time.perf_counter()
page = write_report(Path(sys.argv[1]))
print(json.dumps({
    "cpu_seconds": round(time.process_time() - cpu, 1),
    "wall_seconds": round(time.perf_counter() - wall, 1),
    "start_megabytes": start_memory,
    "peak_megabytes": read_peak(),
    "page_megabytes": round(page.stat().st_size / 1e6, 1),
}))
"""
"""The program of the process that writes a report."""


def measure_report(num_runs: int, steps: int, levels: int) -> dict[str, float]:
    """Measure the report of one grid.

    Up to 68 runs are those of the grid with one KL loss, up to 164 those of the one with three; more are more seeds.
    """
    kl_types = ONE_TYPE if num_runs <= len(list_smoke_arms(ONE_TYPE)) else ALL_TYPES
    seeds = math.ceil(num_runs / len(list_smoke_arms(kl_types)))
    with tempfile.TemporaryDirectory() as output:
        runs = make_runs(kl_types, steps=steps, seeds=seeds)[:num_runs]
        folder = write_study(Path(output), runs, make_study(levels=levels, steps=steps))
        load(folder).write_parquet(folder)
        command = [sys.executable, "-c", WRITE_REPORT, str(folder)]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
    return {"runs": num_runs, **json.loads(process.stdout.splitlines()[-1])}


def main() -> None:
    """Measure one report after another."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=parse_count, nargs="+", default=[18, 68, 164, 500], help="runs of each grid")
    parser.add_argument("--steps", type=parse_count, default=50, help="training steps of each run")
    parser.add_argument("--levels", type=parse_count, default=512, help="validation levels of each run")
    args = parser.parse_args()
    grids = [measure_report(num_runs, args.steps, args.levels) for num_runs in args.runs]
    results = {"steps": args.steps, "levels": args.levels, "grids": grids}
    print(json.dumps({"benchmark": "grid_report", **results, **describe()}, indent=1))


if __name__ == "__main__":
    main()
