"""Time a GRPO step over trees of rollouts in REPLs, with and without children. Prints a JSON object.

Variants alternate, step by step, on the same questions. Wall seconds include the processes that execute the code, which
the CPU seconds of the trainer do not.
Run: python benchmarks/tree_step.py [--steps 8] [--questions 4]
"""

import json
import statistics

import torch
from machine import describe
from options import make_parser, parse_count

from sandboxes.trees.study import STUDY
from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.ppo.trainer import PPOTrainer

VARIANTS = ("root-and-children", "no-children")


def make_trainer(arm: str, steps: int, questions: int) -> PPOTrainer:
    """A trainer of an arm of the study of trees, with the laptop preset."""
    settings = {
        **PRESETS["laptop"].settings,
        **STUDY.fixed_settings,
        **STUDY.presets["laptop"],
        **(STUDY.axis.named_settings[arm]),
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": steps + 1,
        "env.env_groups": questions,
        "env.test_env_groups": 0,
        # Almost 0, so that the policy keeps asking as many children as before training.
        "actor.lr": 1e-12,
    }
    return PPOTrainer(apply_overrides(RunConfig(), settings))


def main() -> None:
    """Print median seconds per step and per tree, after one step that is not timed."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=parse_count, default=8, help="timed training steps of each variant")
    parser.add_argument("--questions", type=parse_count, default=4, help="questions per step, of eight trees each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainers = {arm: make_trainer(arm, args.steps, args.questions) for arm in VARIANTS}
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in trainers}
    for step in range(args.steps + 1):
        for arm, trainer in trainers.items():
            row = trainer.step().row
            if step:  # the first step starts the launcher of the REPLs
                rows[arm].append(row)
    for trainer in trainers.values():
        trainer.close()

    def compute_median(arm: str, column: str, digits: int = 3) -> float:
        return round(statistics.median(row[column] for row in rows[arm]), digits)

    trees = args.questions * trainers[VARIANTS[0]].config.env.group_size
    ratios = [
        tree_row["seconds_step"] / root_row["seconds_step"]
        for tree_row, root_row in zip(rows[VARIANTS[0]], rows[VARIANTS[1]], strict=True)
    ]
    report = {
        "benchmark": "tree_step",
        "trees_per_step": trees,
        "steps": args.steps,
        "variants": {
            arm: {
                "seconds_step": compute_median(arm, "seconds_step"),
                "cpu_seconds_step": compute_median(arm, "cpu_seconds_step"),
                "seconds_rollout": compute_median(arm, "seconds_rollout"),
                "seconds_update_actor": compute_median(arm, "seconds_update_actor"),
                "children_per_tree": compute_median(arm, "train_children"),
                "trained_tokens": compute_median(arm, "trained_tokens", 0),
            }
            for arm in VARIANTS
        },
        "children_over_none": {
            "median": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        },
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
