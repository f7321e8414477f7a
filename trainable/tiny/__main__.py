"""Rebuild sokoban-tiny: `python -m trainable.tiny --output DIR` (a few CPU minutes)."""

import argparse
from pathlib import Path

import torch

from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.tiny.recipe import Recipe, make_model

# The settings of the laptop preset that matter for an evaluation. The preset itself is in `search_spaces`, which this
# package must not import. The policy's replies have about 13 tokens, so 24 are enough.
LAPTOP_OVERRIDES = {
    "model.prompt_style": "compact",
    "model.dtype": "float32",
    "model.enable_gradient_checkpointing": False,
    "rollout.name": "torch",
    "rollout.max_model_len": None,
    "rollout.response_length": 24,
    "rollout.val_temperature": 1.0,
    "trainer.total_training_steps": 1,
    "trainer.device": "cpu",
}


def main() -> None:
    """Make the model and evaluate it, or with --evaluate only evaluate an existing model."""
    parser = argparse.ArgumentParser(
        prog="python -m trainable.tiny",
        description="Rebuild the shipped tiny policy from solver demonstrations, or evaluate a policy.",
        epilog="Example: python -m trainable.tiny --output my-sokoban-tiny",
    )
    parser.add_argument("--output", type=Path, default=Path("sokoban_tiny"), help="folder for the model (new or empty)")
    parser.add_argument("--evaluate", metavar="MODEL", help="only evaluate this model (sokoban-tiny, or a folder)")
    arguments = parser.parse_args()
    if arguments.evaluate:
        evaluate(arguments.evaluate)
        return
    if arguments.output.exists() and any(arguments.output.iterdir()):
        parser.error(f"{arguments.output} is not empty: choose a new folder with --output")
    make_model(arguments.output, Recipe(), lambda line: print(line, flush=True))
    evaluate(str(arguments.output))


def evaluate(path: str) -> None:
    """Print the sampled and greedy success of the policy at `path` on validation and test levels, without training."""
    torch.set_num_threads(1)
    trainer = PPOTrainer(apply_overrides(RunConfig(), {**LAPTOP_OVERRIDES, "model.path": path}))
    sampled_evaluation, (final_evaluation, _) = trainer.evaluate("val", "sampled"), trainer.evaluate_final()
    print(
        f"{find_model(path).name}: {trainer.config.env.val_env_groups} validation levels, "
        f"sampled {sampled_evaluation.success:.3f}, greedy {final_evaluation.val_greedy_success:.3f}, "
        f"invalid turns {sampled_evaluation.invalid_turns:.3f}"
    )
    print(
        f"{len(trainer.test_levels)} test levels, "
        f"sampled {final_evaluation.test_success:.3f}, greedy {final_evaluation.test_greedy_success:.3f}"
    )


if __name__ == "__main__":
    main()
