"""Train by GRPO with TRL and with ours, and compare the policies. Prints a JSON object.

Both train frozenlake-tiny from the same weights on the same levels, in the same order and with the same settings, and
our evaluation judges both on the same validation levels. A trainer of TRL plays single turns, so a level of FrozenLake,
without slips, is one turn of up to ten moves. Each seed has other training levels. What differs is in `differences`.
Run, with the extra `bench` installed: python benchmarks/trl_equivalence.py [--seeds 5] [--steps 100]
"""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from machine import describe
from options import make_parser, parse_count
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from analysis.data.compare import (
    DEFAULT_MARGINS,
    Outcomes,
    add_adjusted_p_values,
    classify_difference,
    compare_with_baseline,
)
from analysis.stats.noise import fit_noise
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
DIFFERENCES = (
    "random numbers of sampling",
    "mini-batches: drawn at random by TRL, stratified by length by ours",
    "added to the std of a group: 1e-4 by TRL, 1e-6 by ours",
    "passes: transformers with TRL, compiled code with ours",
)


def make_trainer(seed: int, steps: int, path: str = "frozenlake-tiny") -> PPOTrainer:
    """Our trainer of one seed, with the policy at `path`."""
    changes = {"seed": seed, "trainer.total_training_steps": steps, "model.path": path}
    return PPOTrainer(apply_overrides(RunConfig(), {**SETTINGS, **changes}))


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


def make_dataset(trainer: PPOTrainer, tokenizer: AutoTokenizer, levels: Sequence[Level]) -> Dataset:
    """The prompts of `levels`, from which TRL must make the tokens that ours has, and their indices."""
    prompt_ids = [trainer.player.encode_first_turn(level) for level in levels]
    texts = tokenizer.batch_decode(prompt_ids)
    assert tokenizer(texts)["input_ids"] == prompt_ids
    return Dataset.from_dict({"prompt": texts, "level": range(len(levels))})


def train_with_trl(seed: int, steps: int, folder: str) -> float:
    """Success after training with TRL, which writes its files into `folder`."""
    ours = make_trainer(seed, steps)
    config, levels = ours.config, list(chain(*ours.levels))
    actor, rows = config.actor, config.env.env_groups * config.env.group_size
    mini_batches = rows // actor.ppo_mini_batch_size
    args = GRPOConfig(
        output_dir=folder,
        seed=seed,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=actor.ppo_mini_batch_size,
        gradient_accumulation_steps=1,
        num_generations=config.env.group_size,
        steps_per_generation=mini_batches,
        num_iterations=actor.ppo_epochs,
        max_steps=steps * mini_batches * actor.ppo_epochs,
        max_completion_length=config.rollout.response_length,
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=actor.clip_ratio_low,
        epsilon_high=actor.clip_ratio_high,
        delta=actor.clip_ratio_c,
        optim="adamw_torch",
        learning_rate=actor.lr,
        lr_scheduler_type="constant",
        adam_beta1=actor.betas[0],
        adam_beta2=actor.betas[1],
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.grad_clip,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
    )
    base = find_model(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    assert tokenizer.eos_token_id == ours.stop_token

    def compute_rewards(completion_ids: list[list[int]], level: list[int], **_: object) -> list[float]:
        return score_completions(ours, [levels[index] for index in level], completion_ids)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=compute_rewards,
        args=args,
        train_dataset=make_dataset(ours, tokenizer, levels),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for the JSON object
    trainer.train()
    shutil.copytree(base, folder, dirs_exist_ok=True)
    trainer.model.save_pretrained(folder)
    return evaluate(make_trainer(seed, steps, folder), steps)


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
