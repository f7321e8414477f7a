"""Logs as other trainers write them, written by hand after the formats of their sources."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import pandas as pd

from trainable.sources.logs import RunLog
from trainable.sources.reading import read_logs

WORKER = "\x1b[36m(TaskRunner pid=26424)\x1b[0m "


def make_settings(seed: int = 1, **changes: Any) -> dict[str, Any]:
    """Make the nested settings of verl, as it prints them."""
    actor = {"optim": {"lr": 1e-06}, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "use_kl_loss": True} | changes
    return {
        "actor_rollout_ref": {"actor": actor, "model": {"path": "Qwen/Qwen2.5-0.5B", "lora_rank": 32}},
        "data": {"seed": seed, "train_files": "gsm8k/train.parquet"},
        "trainer": {"experiment_name": f"run-{seed}-{changes}", "total_training_steps": None, "logger": ["console"]},
    }


def format_verl_step(step: int, values: Mapping[str, float], digits: int | None = None) -> str:
    """Format a step as verl prints it: `step:N - key:value - ...`, in versions of 2024 with three digits."""
    texts = (f"{key}:{value if digits is None else f'{value:.{digits}f}'}" for key, value in values.items())
    return f"step:{step} - {' - '.join(texts)}"


def write_verl_console(path: Path, settings: Mapping[str, Any], lines: Sequence[str]) -> Path:
    """Write a console: settings over many lines, lines of other workers between them, colors, and NUL bytes."""
    head = pformat(settings, width=60).splitlines()
    head.insert(3, "\0\x1b[2m(WorkerDict pid=7, ip=10.0.0.2)\x1b[0m {'another': 'worker'}")
    text = [line if "WorkerDict" in line else WORKER + line for line in head]
    text += ["Loading: 10%\rLoading: 100%", *(WORKER + line for line in lines)]
    path.write_text("\n".join(text) + "\n")
    return path


def write_verl_run(path: Path, successes: Sequence[float], seed: int = 1, **changes: Any) -> Path:
    """Write a run of two steps per validation, with these validations."""
    lines = ["\"Initial validation metrics: {'val-core/gsm8k/reward/mean@1': np.float64(0.25)}\""]
    for step in range(1, 2 * len(successes) + 1):
        values = {"training/global_step": step, "critic/score/mean": 0.3, "actor/entropy": 0.5, "actor/kl_loss": 0.0}
        if step % 2 == 0:
            values["val-core/gsm8k/reward/mean@1"] = successes[step // 2 - 1]
        lines.append(format_verl_step(step, values))
    return write_verl_console(path, make_settings(seed, **changes), lines)


def write_json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_chart(
    path: Path, runs: Mapping[str, Sequence[float | None]], metric: str, axis: str = "Step", spread: float = 0
) -> Path:
    """Write what the page of W&B exports of a chart: a row per step, and three columns per run.

    The format is that of exports which people have published: all cells are quoted, and missing ones are empty.
    """
    header = [axis, *(f"{run} - {metric}{bound}" for run in runs for bound in ("", "__MIN", "__MAX"))]
    rows = [
        [step, *(value if value is None else value + change for value in row for change in (0, -spread, spread))]
        for step, row in enumerate(zip(*runs.values(), strict=True), 1)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    return path


COMPLETIONS: Mapping[str, Sequence[Any]] = {
    "prompt": ["2+2=", "2+2=", "3+3=", "3+3="],
    "completion": ["4", "5", "7", "6"],
    "is_right": [1.0, 0.0, 0.0, 1.0],
    "is_short": [0.5, 0.5, None, 0.25],
    "source": ["a", "a", "b", "b"],
    "advantage": [0.7, -0.7, -0.7, 0.7],
}


def write_completions(folder: Path, step: int, **columns: Sequence[Any]) -> Path:
    """Write a file as TRL's GRPOTrainer.log does."""
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame({"step": [step] * 4, **COMPLETIONS, **columns}).to_parquet(path)
    return path


def read_log(*paths: Path) -> RunLog:
    """Read the files of one run."""
    (log,) = read_logs(paths)
    return log
