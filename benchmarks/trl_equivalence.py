"""Train by GRPO with TRL and with ours, and compare the policies. Prints a JSON object.

Both train frozenlake-tiny from the same weights on the same levels, in the same order and with the same settings, and
our evaluation judges both on the same validation levels. A trainer of TRL plays single turns, so a level of FrozenLake,
without slips, is one turn of up to ten moves. Each seed has other training levels. What differs is in `differences`.
Run: python benchmarks/trl_equivalence.py [--seeds 5] [--steps 100]
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from machine import describe
from options import make_parser, parse_count
from transformers import PrinterCallback

from analysis.data.compare import (
    DEFAULT_MARGINS,
    Outcomes,
    add_adjusted_p_values,
    classify_difference,
    compare_with_baseline,
)
from analysis.stats.noise import fit_noise
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from trl_frozenlake import SETTINGS, make_grpo_trainer, make_trainer, score_completions

__all__ = ["SETTINGS", "evaluate", "judge", "make_trainer", "score_completions", "train_ours"]

DIFFERENCES = (
    "random numbers of sampling",
    "mini-batches: drawn at random by TRL, stratified by length by ours",
    "added to the std of a group: 1e-4 by TRL, 1e-6 by ours",
    "passes: transformers with TRL, compiled code with ours",
)


def evaluate(trainer: PPOTrainer, steps: int) -> float:
    """Success of the trainer's policy, with the random numbers that a validation after `steps` steps has."""
    trainer.step_index = steps
    return trainer.evaluate("val", "sampled").success


def train_ours(seed: int, steps: int) -> float:
    """Success after training with ours."""
    trainer = make_trainer(seed, steps)
    for _ in range(steps):
        trainer.step()
    return evaluate(trainer, steps)


def train_with_trl(seed: int, steps: int, folder: str) -> float:
    """Success after training with TRL, which writes its files into `folder`."""
    ours = make_trainer(seed, steps)
    trainer = make_grpo_trainer(ours, folder, save_strategy="no", logging_steps=10_000)
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the JSON object
    trainer.train()
    shutil.copytree(find_model(ours.config.model.path), folder, dirs_exist_ok=True)
    trainer.model.save_pretrained(folder)
    return evaluate(make_trainer(seed, steps, model__path=folder), steps)


def judge(ours: Sequence[float], trl: Sequence[float]) -> dict[str, object]:
    """Ours minus TRL's, with the interval and the verdict that a report would give."""
    values = pd.DataFrame([trl, ours], index=["trl", "ours"])
    outcomes = Outcomes("val_success", values, {}, fit_noise(values), is_fraction=True)
    row = compare_with_baseline(outcomes, "ours", "trl", DEFAULT_MARGINS["fraction"])
    table = add_adjusted_p_values(pd.DataFrame([{**row, "column": outcomes.column}]), outcomes.column)
    verdict = classify_difference(table.iloc[0], below="worse", above="better")
    columns = ("difference", "difference_low", "difference_high", "p", "p_equal")
    numbers = {name: None if np.isnan(row[name]) else round(row[name], 4) for name in columns}
    return {**numbers, "margin": row["margin"], "verdict": verdict}


def main() -> None:
    """Train each seed with both, and judge the successes."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=parse_count, default=5, help="runs of each implementation")
    parser.add_argument("--steps", type=parse_count, default=100, help="training steps of a run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    successes: dict[str, list[float]] = {"base": [], "ours": [], "trl": []}
    seconds = {"ours": 0.0, "trl": 0.0}
    for seed in range(args.seeds):
        successes["base"].append(evaluate(make_trainer(seed, args.steps), 0))
        start = time.process_time()
        successes["ours"].append(train_ours(seed, args.steps))
        middle = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            successes["trl"].append(train_with_trl(seed, args.steps, folder))
        seconds["ours"] += middle - start
        seconds["trl"] += time.process_time() - middle
    report = {
        "benchmark": "trl_equivalence",
        "seeds": args.seeds,
        "steps": args.steps,
        "trl_version": version("trl"),
        "differences": DIFFERENCES,
        "success": {name: [round(value, 4) for value in values] for name, values in successes.items()},
        "mean_success": {name: round(float(np.mean(values)), 4) for name, values in successes.items()},
        "ours_minus_trl": judge(successes["ours"], successes["trl"]),
        "cpu_seconds": {name: round(value, 1) for name, value in seconds.items()},
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
