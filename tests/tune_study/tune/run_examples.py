"""Run the examples with Ray Tune in one process, and print a line of JSON per example: python -m ... OUTPUT NAME..."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from ray.tune import ResultGrid

EXAMPLES = Path(__file__).parents[3] / "examples"


def run_example(name: str, output: str) -> dict[str, Any]:
    """What an example prints, and of each of its trials: configuration, reported rows, error and last checkpoint."""
    printed = io.StringIO()
    sys.argv = [name, output]
    with contextlib.redirect_stdout(printed):
        values = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    grid = values.get("results")
    trials = [] if not isinstance(grid, ResultGrid) else [describe(result) for result in grid]
    return {"text": printed.getvalue(), "trials": trials}


def describe(result: Any) -> dict[str, Any]:
    lines = Path(result.path, "result.json").read_text().splitlines()
    return {
        "config": result.config,
        "rows": [json.loads(line) for line in lines],
        "error": None if result.error is None else str(result.error),
        "checkpoint": None if result.checkpoint is None else result.checkpoint.path,
    }


if __name__ == "__main__":
    for example in sys.argv[2:]:
        print(json.dumps({"name": example, **run_example(example, sys.argv[1])}), flush=True)
