"""Time a PPO step and its phases, for several variants. Prints a JSON object with CPU seconds.

Variants alternate, step by step, on the same levels, so that changes in the machine's load affect all of them equally.
Run: python benchmarks/ppo_step.py [--steps 8] [--levels 8]
"""

import json
import statistics

import torch
from machine import describe
from options import make_parser, parse_count

from search_spaces.declaration.presets import PRESETS
from search_spaces.language_model.kl import STUDY
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from tune_study.placement.resources import TORCH_SETTINGS

PHASES = ("rollout", "values", "reference", "update_critic", "update_actor")
KL_SETTINGS: dict[str, object] = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
VARIANTS: dict[str, dict[str, object]] = {
    "separate critic": {},
    "separate critic, KL 0.1": KL_SETTINGS,
    "separate critic, KL 0.1, torch": {**KL_SETTINGS, **TORCH_SETTINGS},
    "shared trunk": {"critic.shared_trunk": True},
    "shared trunk, KL 0.1": {"critic.shared_trunk": True, **KL_SETTINGS},
    "GRPO": {"algorithm.adv_estimator": "grpo"},
    "GRPO, torch": {"algorithm.adv_estimator": "grpo", **TORCH_SETTINGS},
}


def make_trainer(overrides: dict[str, object], steps: int, levels: int) -> PPOTrainer:
    """A trainer of the KL study at coefficient 0, with the laptop preset and the overrides of a variant."""
    run_settings = {
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": steps + 1,
        "env.env_groups": levels,
    }
    settings = {
        **PRESETS["laptop"].settings,
        **STUDY.fixed_settings,
        "actor.kl_loss_coef": 0,
        **run_settings,
        **overrides,
    }
    # A learning rate of almost 0 keeps the policy, and with it the lengths of replies, the same for every variant.
    config = apply_overrides(RunConfig(), {**settings, "actor.lr": 1e-12, "critic.lr": 1e-12})
    return PPOTrainer(config, diagnostics=DIAGNOSTICS)


def main() -> None:
    """Print median CPU seconds per step, and per 1,000 trained tokens, after one step that is not timed."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=parse_count, default=8, help="timed training steps of each variant")
    parser.add_argument("--levels", type=parse_count, default=8, help="training levels per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainers = {name: make_trainer(changes, args.steps, args.levels) for name, changes in VARIANTS.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for step in range(args.steps + 1):
        for name, trainer in trainers.items():
            row = trainer.step().row
            if step:  # the first step allocates memory and is not timed
                rows[name].append(row)
    results = {}
    for name, variant_rows in rows.items():
        results[name] = {
            "cpu_seconds_step": round(statistics.median(row["cpu_seconds_step"] for row in variant_rows), 3),
            "cpu_seconds_per_1000_trained_tokens": round(
                statistics.median(1000 * row["cpu_seconds_step"] / row["trained_tokens"] for row in variant_rows), 4
            ),
            "wall_seconds": {
                phase: round(statistics.median(row.get(f"seconds_{phase}") or 0.0 for row in variant_rows), 3)
                for phase in PHASES
            },
        }
    ratios = {
        name: [
            slow["cpu_seconds_step"] / fast["cpu_seconds_step"]
            for slow, fast in zip(rows[f"{name}, torch"], rows[name], strict=True)
        ]
        for name in rows
        if f"{name}, torch" in rows
    }
    # The same for all variants, which train on the same levels with nearly the same policy.
    trained_tokens = statistics.median(row["trained_tokens"] for row in rows["separate critic"])
    report = {
        "benchmark": "ppo_step",
        "trained_tokens_per_step": trained_tokens,
        "steps": args.steps,
        "levels": args.levels,
        "variants": results,
        "torch_over_compiled": {
            name: {
                "median": round(statistics.median(values), 2),
                "range": [round(min(values), 2), round(max(values), 2)],
            }
            for name, values in ratios.items()
        },
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
