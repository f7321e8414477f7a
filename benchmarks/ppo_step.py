"""CPU seconds of one PPO step by variant, each phase apart, as one JSON object.

Variants take turns, step by step, on the same levels, so that a drifting machine moves all of them alike.
Run: python benchmarks/ppo_step.py [--steps 8] [--levels 8]
"""

import json
import statistics

import torch
from machine import describe
from options import make_parser, read_count

from search_spaces.declaration.presets import PRESETS
from search_spaces.language_model.kl import STUDY
from trainable.config.run_config import RunConfig, with_overrides
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer

PHASES = ("rollout", "values", "reference", "update_critic", "update_actor")
VARIANTS: dict[str, dict[str, object]] = {
    "separate critic": {},
    "separate critic, KL 0.1": {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "shared trunk": {"critic.shared_trunk": True},
    "shared trunk, KL 0.1": {"critic.shared_trunk": True, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "GRPO": {"algorithm.adv_estimator": "grpo"},
}


def make_trainer(changes: dict[str, object], steps: int, levels: int) -> PPOTrainer:
    """The laptop preset's KL study at coefficient 0, changed."""
    fixed = {"trainer.val_before_train": False, "trainer.test_freq": -1, "trainer.total_training_steps": steps + 1,
             "env.env_groups": levels}  # fmt: skip
    settings = {**PRESETS["laptop"], **STUDY.fixed, "actor.kl_loss_coef": 0, **fixed, **changes}
    # A learning rate of almost 0 keeps every variant on the same policy, and so on the same lengths.
    config = with_overrides(RunConfig(), {**settings, "actor.lr": 1e-12, "critic.lr": 1e-12})
    return PPOTrainer(config, diagnostics=DIAGNOSTICS)


def main() -> None:
    """Median CPU seconds per step, and per 1,000 trained tokens, after one step not counted."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=read_count, default=8, help="counted training steps of each variant")
    parser.add_argument("--levels", type=read_count, default=8, help="training levels per step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trainers = {name: make_trainer(changes, given.steps, given.levels) for name, changes in VARIANTS.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for step in range(given.steps + 1):
        for name, trainer in trainers.items():
            row = trainer.step().row
            if step:
                rows[name].append(row)
    result = {}
    for name, found in rows.items():
        result[name] = {
            "cpu_seconds_step": round(statistics.median(row["cpu_seconds_step"] for row in found), 3),
            "cpu_seconds_per_1000_trained_tokens": round(
                statistics.median(1000 * row["cpu_seconds_step"] / row["trained_tokens"] for row in found), 4
            ),
            "wall_seconds": {
                phase: round(statistics.median(row.get(f"seconds_{phase}") or 0.0 for row in found), 3)
                for phase in PHASES
            },
        }
    tokens = statistics.median(row["trained_tokens"] for row in rows["separate critic"])
    print(json.dumps({"benchmark": "ppo_step", "trained_tokens_a_step": tokens, "steps": given.steps,
                      "levels": given.levels, "variants": result, **describe()}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
