"""Time conditions of the update-rule sandbox, with seeds as one ensemble and one after another. Prints a JSON object.

Conditions are the published ones of token_reversal (96 rollouts, 300 steps, an evaluation every 20 steps): DG, and GRPO
and TPOToken with four inner epochs. Sequential seconds are the cost of training the seeds one after another in a single
process. With a process per seed, each seed adds `process_seconds` (start of Python, imports, first models). The
benchmark uses one thread.
Run from the root of the repository: python benchmarks/update_rules.py [--steps 300] [--seeds 3]
"""

import json
import subprocess
import sys
import time

import torch
from machine import describe
from options import make_parser, parse_count

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.family import GROUP_SETTINGS, REVERSAL_SETTINGS
from sandboxes.update_rules.training.make import make_trainer
from trainable.config.run_config import apply_overrides

CONDITIONS = {
    "DG": {"method": "DG"},
    "GRPO, 4 inner epochs": {"method": "GRPO", **GROUP_SETTINGS},
    "TPOToken, 4 inner epochs": {"method": "TPOToken", **GROUP_SETTINGS},
}


def time_run(config: UpdateRuleConfig, seeds: tuple[int, ...]) -> dict[str, float]:
    """CPU and wall seconds of the whole run of `seeds` as one ensemble."""
    trainer = make_trainer(config, seeds)
    cpu, wall = time.process_time(), time.perf_counter()
    while trainer.seeds:
        trainer.step()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def measure_process_seconds() -> float:
    """Wall seconds of a new process that starts, makes its first models, and exits."""
    code = (
        "from sandboxes.update_rules.config.settings import UpdateRuleConfig; "
        "from sandboxes.update_rules.training.make import make_trainer; "
        "make_trainer(UpdateRuleConfig(task='token_reversal'), (0,))"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def compare_condition(settings: dict[str, object], steps: int, seeds: int) -> dict[str, object]:
    """Time one condition as an ensemble and sequentially; the ratio is that of CPU seconds."""
    config = apply_overrides(
        UpdateRuleConfig(), {**REVERSAL_SETTINGS, "trainer.total_training_steps": steps, **settings}
    )
    ensemble_seconds = time_run(config, tuple(range(seeds)))
    single_seconds = [time_run(config, (seed,)) for seed in range(seeds)]
    sequential_seconds = {name: sum(single[name] for single in single_seconds) for name in ensemble_seconds}
    return {
        "ensemble_seconds": {name: round(value, 2) for name, value in ensemble_seconds.items()},
        "sequential_seconds": {name: round(value, 2) for name, value in sequential_seconds.items()},
        "sequential_over_ensemble": round(sequential_seconds["cpu"] / ensemble_seconds["cpu"], 3),
    }


def main() -> None:
    """Time the three conditions."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=parse_count, default=300, help="training steps of each run")
    parser.add_argument("--seeds", type=parse_count, default=3, help="seeds of each condition")
    args = parser.parse_args()
    torch.set_num_threads(1)
    condition_results = {
        name: compare_condition(dict(settings), args.steps, args.seeds) for name, settings in CONDITIONS.items()
    }
    startup_seconds = round(measure_process_seconds(), 2)
    results = {
        "steps": args.steps,
        "seeds": args.seeds,
        "conditions": condition_results,
        "process_seconds": startup_seconds,
    }
    print(json.dumps({"benchmark": "update_rules", **results, **describe()}, indent=1))


if __name__ == "__main__":
    main()
