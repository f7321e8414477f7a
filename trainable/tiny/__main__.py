"""Make a shipped policy or its teacher: `python -m trainable.tiny --policy NAME --output DIR` (a few CPU minutes)."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from trainable.config.constants import SHIPPED_MODEL, TEACHERS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.kernels.cache import leave_marker
from trainable.models.interface import PassSettings
from trainable.models.load import find_model, load_policy
from trainable.models.teachers import find_teacher_folder, is_made
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.sampler import SamplingParams
from trainable.tiny.policies import POLICIES
from trainable.tiny.recipe import PolicyRecipe, make_model

# The settings of the laptop preset that matter for an evaluation. The preset is in `search_spaces`, which this package
# must not import.
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
    """Make the model and evaluate it."""
    parser = argparse.ArgumentParser(
        prog="python -m trainable.tiny",
        description="Make a shipped tiny policy or its teacher from solver demonstrations, and evaluate it.",
        epilog="Examples: python -m trainable.tiny --output my-sokoban-tiny; "
        "python -m trainable.tiny --policy sokoban-tiny-teacher",
    )
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, *TEACHERS),
        default="sokoban-tiny",
        help="the policy and its game, or the teacher: the policy after the first stage of its recipe",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the model, new or empty (default: the policy's name; of a teacher, where runs look for it)",
    )
    parser.add_argument(
        "--width",
        type=int,
        choices=(32, 64, 96, 128, 192, 256),
        default=64,
        help="width of the model (default: 64, as shipped); its parameters grow with the square",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the code of the tiny policies and exit; studies do this themselves",
    )
    arguments = parser.parse_args()
    if arguments.compile:
        print(f"Compiled in {compile_kernels():.0f} s.")
        return
    name: str = arguments.policy
    policy = replace(POLICIES[TEACHERS.get(name, name)], width=arguments.width)
    is_teacher = name in TEACHERS

    def make(folder: Path) -> None:
        make_model(folder, policy, lambda line: print(line, flush=True), n_stages=1 if is_teacher else None)

    if is_teacher and arguments.output is None:
        output = find_teacher_folder(name)
        if is_made(output):
            print(f"{name} is already in {output}.")
            return
        make_in_cache(output, make)
        print(f"{name} is in {output}.")
    else:
        output = arguments.output or Path(name.replace("-", "_"))
        if output.exists() and any(output.iterdir()):
            parser.error(f"{output} is not empty: choose a new folder with --output")
        make(output)
    evaluate(str(output), policy)


def compile_kernels() -> float:
    """Compile each kernel by running it once as a study would, and leave the marker; return the seconds taken."""
    from trainable.rollout.compiled_sampler import CompiledSampler  # needs numba, unlike the rest of this module

    start_time = time.monotonic()
    torch.set_num_threads(1)
    policy = load_policy(SHIPPED_MODEL, torch.device("cpu"), PassSettings(compiled=True))
    conversation = CompiledSampler(policy.model).start_conversation(
        [[1, 2, 3]], SamplingParams(1.0, 2, policy.stop_token), np.random.default_rng(0).spawn(2)
    )
    conversation.sample_replies([0, 1], [[], []])
    policy.model.model.compute_hidden_states(torch.tensor([[1, 2, 3]]), torch.arange(3)).sum().backward()
    leave_marker()
    return time.monotonic() - start_time


def make_in_cache(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a teacher in a temporary folder, and rename it to `folder` when it is complete.

    So runs never read half a model. If another process was faster, its teacher stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary_folder:
        make(Path(temporary_folder) / folder.name)
        try:
            (Path(temporary_folder) / folder.name).rename(folder)
        except OSError:
            if not is_made(folder):
                raise


def make_config(path: str, policy: PolicyRecipe) -> RunConfig:
    """Make the config of a run of the model at `path` in the game of `policy`."""
    overrides = {
        **LAPTOP_OVERRIDES,
        "model.path": path,
        "env.name": policy.source.name,
        "env.max_turn": policy.limits.turns,
        "env.max_actions_per_turn": policy.limits.actions_per_turn,
        "env.max_actions_per_traj": policy.limits.actions,
        "rollout.response_length": policy.response_length,
        **policy.settings,
    }
    return apply_overrides(RunConfig(), overrides)


def evaluate(path: str, policy: PolicyRecipe) -> None:
    """Print the sampled and greedy success of the model at `path` in the game of `policy`."""
    torch.set_num_threads(1)
    trainer = PPOTrainer(make_config(path, policy))
    sampled_evaluation, (final_row, _) = trainer.evaluate("val", "sampled"), trainer.evaluate_final()
    print(
        f"{find_model(path).name}: {trainer.config.env.val_env_groups} validation levels, "
        f"sampled {sampled_evaluation.success:.3f}, greedy {final_row['val_greedy_success']:.3f}, "
        f"invalid turns {sampled_evaluation.invalid_turns:.3f}"
    )
    print(
        f"{len(trainer.test_levels)} test levels, "
        f"sampled {final_row['test_success']:.3f}, greedy {final_row['test_greedy_success']:.3f}"
    )


if __name__ == "__main__":
    main()
