"""Seconds that the report of a grid takes, 68 and 164 arms of 50 steps and 512 rooms, as one JSON object.

Rows are made up (tests/grid_folders.py), tables are read from parquet as after a run. CPU and wall seconds of one
`analysis.report.write_report` each. Run from the root: PYTHONPATH=. python benchmarks/grid_report.py
"""

import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from machine import describe

from analysis.load import load
from analysis.report import write_report
from tests.grid_folders import ALL_TYPES, ONE_TYPE, made_runs, made_study
from tests.run_folders import write_study

STEPS, ROOMS = 50, 512


def seconds(kl_types: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """CPU and wall seconds of one report, and the page's size in MB."""
    with tempfile.TemporaryDirectory() as output:
        runs = made_runs(kl_types, steps=STEPS)
        folder = write_study(Path(output), runs, made_study(rooms=ROOMS, steps=STEPS))
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
    grids = [seconds(kl_types) for kl_types in (ONE_TYPE, ALL_TYPES)]
    print(json.dumps({"benchmark": "grid_report", "grids": grids, **describe()}, indent=1))


if __name__ == "__main__":
    main()
