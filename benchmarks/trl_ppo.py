"""Train by PPO with TRL and with ours, on the game of trl_equivalence.py. Prints a JSON object.

TRL had PPO up to version 1.12.0, as an experiment. Rewards come from our environment, which plays the sampled replies,
and both critics start from the same weights, but for a bias that TRL lacks. Neither clips gradients, as TRL does not.
Run, in an environment with trl==1.12.0: python benchmarks/trl_ppo.py [--seeds 5] [--steps 60]
"""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from machine import describe
from options import make_parser, parse_count
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Qwen2ForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig
from trl.experimental.ppo import PPOTrainer as TrlTrainer
from trl_equivalence import SETTINGS, evaluate, judge, make_trainer, score_completions, train_ours

from trainable.envs.environment import Level
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer

UNLIMITED = 1e6
SETTINGS |= {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": UNLIMITED,
    "actor.grad_clip": UNLIMITED,
    "critic.grad_clip": UNLIMITED,
    "critic.lr": 3e-4,  # TRL has one optimizer for both networks
    "critic.weight_decay": 0.0,
    "critic.ppo_micro_batch_size_per_gpu": 32,
    "critic.cliprange_value": 0.5,
}


class GameReward(nn.Module):
    """A reward model in TRL's sense: its backbone gives the score of a conversation at each of its tokens."""

    base_model_prefix = "backbone"

    def __init__(self, ours: PPOTrainer, levels: Sequence[Level]) -> None:
        super().__init__()
        self.ours, self.score = ours, nn.Identity()
        self.levels = {tuple(ours.player.encode_first_turn(level)): level for level in levels}
        self.backbone = self.compute_scores

    def compute_scores(self, input_ids: Tensor, attention_mask: Tensor, **_: object) -> SimpleNamespace:
        """Play the replies (B, T), and return the scores as hidden states (B, T, 1)."""
        levels, replies = [], []
        for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
            tokens = tuple(ids[mask].tolist())
            prompt = next(prompt for prompt in self.levels if tokens[: len(prompt)] == prompt)
            levels.append(self.levels[prompt])
            replies.append(list(tokens[len(prompt) :]) or [0])
        scores = torch.tensor(score_completions(self.ours, levels, replies))
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])


def train_with_trl(seed: int, steps: int, folder: str) -> float:
    """Success after training with TRL, which writes its files into `folder`."""
    ours = make_trainer(seed, steps)
    levels, config = list(chain(*ours.levels)), ours.config
    base, rows = find_model(config.model.path), config.env.env_groups * config.env.group_size
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    critic = Qwen2ForSequenceClassification(AutoConfig.from_pretrained(base, num_labels=1)).float()
    critic.load_state_dict(dict(ours.critic.state_dict()), strict=False)
    prompt_ids = [ours.player.encode_first_turn(level) for level in levels for _ in range(config.env.group_size)]
    data = Dataset.from_dict({"input_ids": prompt_ids})
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    args = PPOConfig(
        output_dir=folder,
        seed=seed,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_mini_batches=rows // config.actor.ppo_mini_batch_size,
        num_ppo_epochs=config.actor.ppo_epochs,
        total_episodes=rows * steps,
        local_rollout_forward_batch_size=rows,
        num_sample_generations=0,
        response_length=config.rollout.response_length,
        stop_token="eos",
        temperature=config.rollout.temperature,
        kl_coef=0.0,
        cliprange=config.actor.clip_ratio_low,
        vf_coef=1.0,
        cliprange_value=config.critic.cliprange_value,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        learning_rate=config.actor.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
    )
    trainer = TrlTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=GameReward(ours, levels),
        train_dataset=data,
        value_model=critic,
        eval_dataset=data.select(range(8)),
    )
    trainer.dataloader = DataLoader(data, batch_size=rows, shuffle=False, collate_fn=trainer.data_collator)
    trainer.remove_callback(PrinterCallback)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the JSON object
        trainer.train()
    shutil.copytree(base, folder, dirs_exist_ok=True)
    policy.save_pretrained(folder)
    return evaluate(make_trainer(seed, steps, folder), steps)


def main() -> None:
    """Train each seed with both, and judge the successes."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=parse_count, default=5, help="runs of each implementation")
    parser.add_argument("--steps", type=parse_count, default=60, help="training steps of a run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    successes: dict[str, list[float]] = {"ours": [], "trl": []}
    for seed in range(args.seeds):
        successes["ours"].append(train_ours(seed, args.steps))
        with tempfile.TemporaryDirectory() as folder:
            successes["trl"].append(train_with_trl(seed, args.steps, folder))
    report = {
        "benchmark": "trl_ppo",
        "seeds": args.seeds,
        "steps": args.steps,
        "trl_version": version("trl"),
        "success": {name: [round(value, 4) for value in values] for name, values in successes.items()},
        "mean_success": {name: round(float(np.mean(values)), 4) for name, values in successes.items()},
        "ours_minus_trl": judge(successes["ours"], successes["trl"]),
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
