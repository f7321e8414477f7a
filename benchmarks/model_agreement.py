"""Compare a model's conversations and log-probs with transformers' own, for each way to train it. Prints a JSON object.

The weights are first moved a little at random, as by training. transformers then reads the exported model: its chat
template, tokenizer and forward pass must give the tokens and log-probs with which a run trains.
Run: python benchmarks/model_agreement.py build/smollm2 [--rollout vllm] [--conversations 32]
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from options import make_parser, parse_count
from transformers import AutoModelForCausalLM, AutoTokenizer

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.export.policy import write_tokenizer, write_weights
from trainable.models.load import load_policy
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import recompute_logprobs
from trainable.rollout.episode import Episode, collate
from trainable.rollout.sampler import SamplingParams

LORA = {"model.lora_rank": 16, "model.lora_alpha": 32}
VARIANTS: dict[str, dict[str, object]] = {
    "full, float32": {"model.lora_rank": 0, "model.dtype": "float32"},
    "LoRA, float32": {**LORA, "model.dtype": "float32"},
    "LoRA, bfloat16": {**LORA, "model.dtype": "bfloat16"},
    "LoRA on 4 bits, float32": {**LORA, "model.dtype": "float32", "model.load_in_4bit": True},
}
GROUP_SIZE = 4
NOISE = 0.003
"""Standard deviation of the change of each trained weight."""


def make_trainer(model: str, changes: dict[str, object], file: Path, groups: int) -> PPOTrainer:
    """A trainer of the preset `small` on sums, whose trained weights have moved."""
    settings = {
        **PRESETS["small"].settings,
        **PRESETS["small"].own_scale,
        "model.path": model,
        "model.prompt_style": "plain",
        "env.name": "dataset",
        "env.max_turn": 1,
        "rollout.response_length": 48,
        "rollout.logprob_tolerance": 10.0,  # the comparison shows how far they are apart
        "env.dataset.file": str(file),
        "env.env_groups": groups,
        "env.group_size": GROUP_SIZE,
        "env.val_env_groups": 1,
        "env.test_env_groups": 1,
        "trainer.total_training_steps": 1,
        **changes,
    }
    trainer = PPOTrainer(apply_overrides(RunConfig(), settings), diagnostics=DIAGNOSTICS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight += NOISE * torch.randn(weight.shape, generator=generator)
    trainer.engine.sync_weights(0)
    return trainer


def compare(trainer: PPOTrainer, folder: Path) -> dict[str, Any]:
    """Compare sampled conversations of a trainer with what transformers makes of the exported model."""
    config = trainer.config
    policy = replace(load_policy(config.model.path, trainer.device), model=trainer.model)
    write_weights(policy, folder, "float32")
    write_tokenizer(policy, folder, config.model.prompt_style)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    levels = trainer.levels[0]
    episodes = trainer.roll_out(levels, config.env.group_size, "sampling")
    prompts = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": config.env.dataset.instructions},
                {"role": "user", "content": levels[episode.group].prompt},
            ],
            add_generation_prompt=True,
            return_dict=False,
        )
        for episode in episodes
    ]
    replies = [episode.tokens[episode.mask].tolist() for episode in episodes]
    texts = tokenizer.batch_decode(replies, skip_special_tokens=False)
    batch = collate(episodes)
    trained_rows = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    logprobs = {
        "sampler": [
            episode.logprobs if episode.engine_logprobs is None else episode.engine_logprobs for episode in episodes
        ],
        "trainer": [
            episode.logprobs for episode in recompute_logprobs(trainer.model, episodes, 1.0, 8, trainer.device)
        ],
    }
    expected_logprobs = [compute_logprobs(model, episode) for episode in episodes]
    is_ended = [reply[-1] == tokenizer.eos_token_id for reply in replies]
    conversations = list(zip(episodes, prompts, replies, strict=True))
    return {
        "conversations": len(episodes),
        "tokens_of_replies": sum(map(len, replies)),
        "tokens_of_the_template": sum(
            episode.tokens.tolist() == prompt + reply for episode, prompt, reply in conversations
        ),
        "masks_of_the_reply": sum(
            episode.mask.tolist() == [False] * len(prompt) + [True] * len(reply)
            for episode, prompt, reply in conversations
        ),
        "ended_by_the_end_token": sum(is_ended),
        "ended_by_length": sum(
            len(reply) == config.rollout.response_length
            for reply, ended in zip(replies, is_ended, strict=True)
            if not ended
        ),
        "trained_as_sampled": sum(row == reply for row, reply in zip(trained_rows, replies, strict=True)),
        "other_tokens_if_tokenized_again": sum(
            tokenizer.encode(text, add_special_tokens=False) != reply
            for text, reply in zip(texts, replies, strict=True)
        ),
        **{
            f"{name}_minus_transformers": summarize_differences(episodes, rows, expected_logprobs)
            for name, rows in logprobs.items()
        },
        "greedy_replies": len(levels),
        "greedy_replies_of_the_export": count_equal_replies(trainer, model, prompts[:: config.env.group_size]),
    }


@torch.no_grad()
def compute_logprobs(model: Any, episode: Episode) -> np.ndarray:
    """The log-probs (T,) of an episode's tokens, by transformers' own forward pass."""
    tokens = torch.from_numpy(episode.tokens)
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return np.concatenate(([0.0], logprobs.numpy()))


def summarize_differences(
    episodes: Sequence[Episode], logprobs: Sequence[np.ndarray], expected_logprobs: Sequence[np.ndarray]
) -> dict[str, float]:
    """The mean and maximum of the absolute differences at sampled tokens, in nats."""
    differences = np.concatenate(
        [
            np.abs(row - expected)[episode.mask]
            for episode, row, expected in zip(episodes, logprobs, expected_logprobs, strict=True)
        ]
    )
    return {"mean": float(f"{differences.mean():.2g}"), "max": float(f"{differences.max():.2g}")}


def count_equal_replies(trainer: PPOTrainer, model: Any, prompts: Sequence[list[int]]) -> int:
    """Count the greedy replies of the trainer's sampler that equal transformers' own with the exported model."""
    length = trainer.config.rollout.response_length
    params = SamplingParams(0.0, length, trainer.stop_token, trainer.other_stop_tokens)
    with trainer.engine.wake_up():
        rngs = np.random.default_rng(0).spawn(len(prompts))
        conversation = trainer.engine.sampler.start_conversation(prompts, params, rngs)
        replies = conversation.sample_replies(list(range(len(prompts))), [[]] * len(prompts))
    equal = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)[0, len(prompt) :]
        equal += output.tolist() == reply.token_ids.tolist()
    return equal


def main() -> None:
    """Print the comparison of each variant."""
    parser = make_parser(__doc__)
    parser.add_argument("model", help="folder of the model, such as build/smollm2, or its name")
    parser.add_argument("--rollout", choices=("torch", "vllm"), default="torch", help="engine that samples")
    parser.add_argument("--conversations", type=parse_count, default=32, help="conversations per variant")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sums.jsonl")
        sums = [
            {"prompt": f"{left} + {right} =", "answer": left + right} for left in range(1, 31) for right in range(1, 31)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in sums))
        for number, (name, changes) in enumerate(VARIANTS.items()):
            exported = Path(folder, str(number))
            exported.mkdir()
            settings = {**changes, "rollout.name": args.rollout}
            trainer = make_trainer(args.model, settings, file, max(1, args.conversations // GROUP_SIZE))
            results[name] = compare(trainer, exported)
            trainer.close()
    print(json.dumps({"benchmark": "model_agreement", **describe(), "rollout": args.rollout, **results}, indent=2))


if __name__ == "__main__":
    main()
