"""GRPO of TRL on one turn of FrozenLake, as a script of your own: `new --command` makes a study of its arguments.

    python examples/trl_frozenlake.py --beta 0.04 --seed 0 --max_steps 20 --output_dir out

Levels, prompts and rewards are those of this project's game, so that its own trainer can train the same arms.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.envs.environment import Level
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode_loop import RolloutRequest
from trainable.rollout.sampler import Conversation, SampledReply, SamplingParams

SETTINGS: dict[str, object] = {
    **PRESETS["laptop"].settings,
    "env.name": "frozenlake",
    "env.frozenlake.success_rate": 1.0,
    "model.path": "frozenlake-tiny",
    "env.max_turn": 1,
    "env.max_actions_per_turn": 10,
    "algorithm.adv_estimator": "grpo",
    # The loss of TRL's loss_type=grpo, whose micro-batch is a mini-batch here.
    "actor.loss_agg_mode": "seq-mean-token-mean",
    "actor.ppo_micro_batch_size_per_gpu": 32,
    # TRL's optimizer leaves biases and norms out of it.
    "actor.weight_decay": 0.0,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.measure_val_kl": False,
    "trainer.log_val_generations": 0,
    "env.test_env_groups": 0,
    # Four rollouts of each of the 512 levels, for less noise.
    "env.val_group_size": 4,
}


def make_trainer(seed: int, steps: int, **settings: object) -> PPOTrainer:
    """Our trainer of one seed, which plays the game. settings: with `__` for dots."""
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    changes |= {"seed": seed, "trainer.total_training_steps": steps}
    return PPOTrainer(apply_overrides(RunConfig(), {**SETTINGS, **changes}))


@dataclass
class Replay(Conversation):
    """A sampler whose replies are known: the completions of TRL."""

    replies: list[SampledReply]

    def start_conversation(self, *_: object) -> Conversation:
        """Start with a reply to each prompt."""
        return self

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Return the replies of `rows`."""
        return [self.replies[row] for row in rows]


def score_completions(trainer: PPOTrainer, levels: Sequence[Level], completion_ids: Sequence[list[int]]) -> list[float]:
    """Scores of one completion per level, played by our environment."""
    zeros = np.zeros(trainer.config.rollout.response_length, dtype=np.float32)
    replies = [
        SampledReply(np.array(ids), zeros[: len(ids)], zeros[: len(ids)], ids[-1] == trainer.stop_token)
        for ids in completion_ids
    ]
    params = SamplingParams(1.0, trainer.config.rollout.response_length, trainer.stop_token)
    rng = np.random.default_rng(0)  # nothing is left to chance: replies are known, and there are no slips
    episodes = trainer.player.roll_out(RolloutRequest(levels, 1, Replay(replies), params, rng, rng))
    return [episode.score for episode in episodes]


def make_dataset(trainer: PPOTrainer, tokenizer: AutoTokenizer, levels: Sequence[Level], first: int) -> Dataset:
    """The prompts of `levels`, from which TRL must make the tokens that ours has, and their indices from `first` on."""
    prompt_ids = [trainer.player.encode_first_turn(level) for level in levels]
    texts = tokenizer.batch_decode(prompt_ids)
    assert tokenizer(texts)["input_ids"] == prompt_ids
    return Dataset.from_dict({"prompt": texts, "level": range(first, first + len(levels))})


def make_grpo_trainer(ours: PPOTrainer, folder: str, **arguments: object) -> GRPOTrainer:
    """TRL's trainer with the settings, levels and rewards of `ours`. arguments: further ones of GRPOConfig."""
    config, levels = ours.config, list(chain(*ours.levels))
    actor, rows = config.actor, config.env.env_groups * config.env.group_size
    mini_batches = rows // actor.ppo_mini_batch_size
    settings: dict[str, object] = {
        "output_dir": folder,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": actor.ppo_mini_batch_size,
        "gradient_accumulation_steps": 1,
        "num_generations": config.env.group_size,
        "steps_per_generation": mini_batches,
        "num_iterations": actor.ppo_epochs,
        "max_steps": config.trainer.total_training_steps * mini_batches * actor.ppo_epochs,
        "max_completion_length": config.rollout.response_length,
        "temperature": config.rollout.temperature,
        "top_k": 0,
        "loss_type": "grpo",
        "beta": config.actor.kl_loss_coef if config.actor.use_kl_loss else 0.0,
        "epsilon": actor.clip_ratio_low,
        "epsilon_high": actor.clip_ratio_high,
        "delta": actor.clip_ratio_c,
        "optim": "adamw_torch",
        "learning_rate": actor.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": actor.betas[0],
        "adam_beta2": actor.betas[1],
        "weight_decay": actor.weight_decay,
        "max_grad_norm": actor.grad_clip,
        "shuffle_dataset": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    base = find_model(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    assert tokenizer.eos_token_id == ours.stop_token
    all_levels = [*levels, *ours.val_levels]

    def score(completion_ids: list[list[int]], level: list[int], **_: object) -> list[float]:
        return score_completions(ours, [all_levels[index] for index in level], completion_ids)

    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=score,
        args=GRPOConfig(**{**settings, **arguments}),
        train_dataset=make_dataset(ours, tokenizer, levels, 0),
        eval_dataset=make_dataset(ours, tokenizer, ours.val_levels, len(levels)),
        processing_class=tokenizer,
    )


def main() -> None:
    """Train, validate and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=0.0, help="coefficient of the KL to the reference")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--eval_steps", type=int, default=5, help="steps between validations, and between checkpoints")
    parser.add_argument("--eval_levels", type=int, default=64)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours = make_trainer(
        args.seed,
        args.max_steps,
        actor__lr=args.learning_rate,
        actor__use_kl_loss=True,
        actor__kl_loss_coef=args.beta,
        actor__ppo_mini_batch_size=128,
        actor__ppo_micro_batch_size_per_gpu=128,
        env__val_env_groups=args.eval_levels,
        env__val_group_size=1,
    )
    trainer = make_grpo_trainer(
        ours,
        args.output_dir,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        save_steps=args.eval_steps,
        num_generations_eval=1,
        per_device_eval_batch_size=args.eval_levels,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
