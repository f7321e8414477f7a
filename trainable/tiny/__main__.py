"""Rebuild a shipped policy: `python -m trainable.tiny --output DIR --policy NAME` (a few CPU minutes)."""

import argparse
from pathlib import Path

import torch

from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.tiny.policies import POLICIES
from trainable.tiny.recipe import TinyPolicy, make_model

# The settings of the laptop preset that matter for an evaluation. The preset itself is in `search_spaces`, which this
# package must not import.
LAPTOP_OVERRIDES = {
    "model.prompt_style": "compact",
    "model.dtype": "float32",
    "model.enable_gradient_checkpointing": False,
    "rollout.name": "torch",
    "rollout.max_model_len": None,
    "rollout.val_temperature": 1.0,
    "trainer.total_training_steps": 1,
    "trainer.device": "cpu",
}


def main() -> None:
    """Make the model and evaluate it, or with --evaluate only evaluate an existing model."""
    parser = argparse.ArgumentParser(
        prog="python -m trainable.tiny",
        description="Rebuild a shipped tiny policy from solver demonstrations, or evaluate a policy.",
        epilog="Example: python -m trainable.tiny --output my-sokoban-tiny",
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), default="sokoban-tiny", help="the policy, and its game")
    parser.add_argument("--output", type=Path, help="folder for the model, new or empty (default: the policy's name)")
    parser.add_argument("--evaluate", metavar="MODEL", help="only evaluate this model (a shipped policy, or a folder)")
    arguments = parser.parse_args()
    policy = POLICIES[arguments.policy]
    if arguments.evaluate:
        evaluate(arguments.evaluate, policy)
        return
    output = arguments.output or Path(arguments.policy.replace("-", "_"))
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: choose a new folder with --output")
    make_model(output, policy, lambda line: print(line, flush=True))
    evaluate(str(output), policy)


def evaluate(path: str, policy: TinyPolicy) -> None:
    """Print the sampled and greedy success of the model at `path` in the game of `policy`, without training."""
    torch.set_num_threads(1)
    game_overrides = {
        "env.name": policy.environment.name,
        "env.max_turn": policy.limits.turns,
        "env.max_actions_per_turn": policy.limits.actions_per_turn,
        "env.max_actions_per_traj": policy.limits.actions,
        "rollout.response_length": policy.response_length,
    }
    trainer = PPOTrainer(apply_overrides(RunConfig(), {**LAPTOP_OVERRIDES, **game_overrides, "model.path": path}))
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
