"""Time the report of a grid with 68 and with 164 arms of 50 steps and 512 levels. Prints a JSON object.

Rows are synthetic (tests/fakes/grid_folders.py), and tables are read from parquet files, as after a run. CPU and wall
seconds are those of one call of `analysis.report.pages.write_report` per grid.
Run: python benchmarks/grid_report.py [--arms 164] [--steps 50] [--levels 512]
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from machine import describe
from options import make_parser, parse_count

from analysis.data.load import load
from analysis.report.pages import write_report

# The tests are not installed with the project.
sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.fakes.grid_folders import ALL_TYPES, ONE_TYPE, list_smoke_arms, make_runs, make_study
from tests.fakes.run_folders import write_study


def measure_report(kl_types: Mapping[str, Iterable[str]], arms: int, steps: int, levels: int) -> dict[str, float]:
    """CPU and wall seconds of one report, and the size of its page in MB."""
    with tempfile.TemporaryDirectory() as output:
        runs = make_runs(kl_types, steps=steps)[:arms]
        folder = write_study(Path(output), runs, make_study(levels=levels, steps=steps))
        load(folder).write_parquet(folder)
        cpu, wall = time.process_time(), time.perf_counter()
        page = write_report(folder)
        return {
            "arms": len(runs),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "wall_seconds": round(time.perf_counter() - wall, 1),
            "megabytes": round(page.stat().st_size / 1e6, 1),
        }


def main() -> None:
    """Time both grids."""
    parser = make_parser(__doc__)
    max_arms = len(list_smoke_arms(ALL_TYPES))
    parser.add_argument(
        "--arms", type=parse_count, default=max_arms, help="number of arms of each grid, counted from its first"
    )
    parser.add_argument("--steps", type=parse_count, default=50, help="training steps of each run")
    parser.add_argument("--levels", type=parse_count, default=512, help="validation levels of each run")
    args = parser.parse_args()
    grids = [measure_report(kl_types, args.arms, args.steps, args.levels) for kl_types in (ONE_TYPE, ALL_TYPES)]
    results = {"steps": args.steps, "levels": args.levels, "grids": grids}
    print(json.dumps({"benchmark": "grid_report", **results, **describe()}, indent=1))


if __name__ == "__main__":
    main()
