"""Seconds per 1,000 trained tokens of one GRPO batch: ours beside TRL's, at the same shapes, as one JSON object.

One batch: 8 prompts of exactly 100 tokens x 16 completions of exactly 45, generated, then 4 optimizer steps of 32 rows;
18,560 tokens pass through the model in training. Both use sokoban-tiny in float32 on one thread, no KL. TRL keeps its
defaults elsewhere but for gradient checkpointing and bf16, which are slower here. Token shapes are asserted.
Run, with the extra `bench` installed: python benchmarks/trl_grpo.py [--repetitions 6]
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import torch
from datasets import Dataset
from machine import describe
from options import make_parser, read_count
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainable.algo.advantages import grpo
from trainable.backend.one_device import OneDevice
from trainable.config.sections import ActorConfig
from trainable.config.seeds import stream
from trainable.models.load import find_model, load_policy
from trainable.ppo.update import ActorUpdate, Targets
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.sampler import Sampled, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler

PROMPTS, COPIES, PROMPT, COMPLETION, MINI = 8, 16, 100, 45, 32
ROWS = PROMPTS * COPIES
TOKENS = ROWS * (PROMPT + COMPLETION)
NEVER = -1  # a stop token that no vocabulary has: every completion has its full length


def prompt_texts(count: int) -> list[str]:
    """Texts of exactly PROMPT tokens: two cells of a level are one token."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(["##", "#_", "_#", "__"], PROMPT)) for _ in range(count)]


def score(row: int) -> float:
    """A made-up score, the same for both."""
    return float(row * 7919 % 13)


def ours(encoded: Sequence[list[int]], batches: int) -> list[float]:
    """CPU seconds of each batch with our sampler and update, after one batch not counted."""
    policy = load_policy("sokoban-tiny", torch.device("cpu"))
    sampler = TorchSampler(policy.model)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6)
    settings = ActorConfig(ppo_mini_batch_size=MINI, ppo_micro_batch_size_per_gpu=MINI)
    backend = OneDevice("actor_optimizer", {"actor": policy.model}, optimizer, settings.grad_clip)
    update = ActorUpdate(policy.model, backend, settings, 1.0)
    seconds = []
    for number in range(batches + 1):
        prompts = list(encoded[number * PROMPTS : (number + 1) * PROMPTS])
        started = time.process_time()
        params = SamplingParams(1.0, COMPLETION, NEVER)
        talk = sampler.converse(prompts, COPIES, params, stream(0, "sampling", number))
        replies = talk.reply(range(ROWS), [[] for _ in range(ROWS)])
        assert all(len(reply.ids) == COMPLETION for reply in replies)
        batch = to_batch(prompts, replies)
        advantages = grpo(batch.scores, batch.group_ids, batch.mask, norm_by_std=True)
        zeros = torch.zeros_like(advantages)
        update.run(batch, Targets(advantages, zeros, zeros, None), torch.arange(ROWS))
        seconds.append(time.process_time() - started)
    return seconds[1:]


def to_batch(prompts: Sequence[list[int]], replies: Sequence[Sampled]) -> Batch:
    """Prompts and replies as a batch of episodes of one turn, with made-up scores."""
    episodes = []
    for row, reply in enumerate(replies):
        prompt = prompts[row // COPIES]
        unsampled = np.zeros(PROMPT, dtype=np.float32)
        episodes.append(Episode(
            level_seed=0, group=row // COPIES, tokens=np.array([*prompt, *reply.ids]),
            mask=np.repeat([False, True], [PROMPT, COMPLETION]), logprobs=np.append(unsampled, reply.logprobs),
            entropies=np.append(unsampled, reply.entropies), turns=np.zeros(PROMPT + COMPLETION, dtype=np.int64),
            turn_rewards=(score(row),), actions=0, invalid_turns=0, stop=StopReason.OUT_OF_TURNS, texts=("",),
        ))  # fmt: skip
    return collate(episodes)


class StepClock(TrainerCallback):
    """CPU time at the end of every optimizer step."""

    def __init__(self) -> None:
        self.times = [time.process_time()]

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the time."""
        self.times.append(time.process_time())


def trl(texts: list[str], batches: int, folder: str) -> list[float]:
    """CPU seconds of each batch with TRL's GRPOTrainer, after one batch not counted; `folder` is for its files."""
    lengths: set[int] = set()

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.update(len(ids) for ids in completion_ids)
        return [score(row) for row in range(len(completions))]

    steps = ROWS // MINI
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
        per_device_train_batch_size=MINI, gradient_accumulation_steps=1, num_generations=COPIES,
        steps_per_generation=steps, max_completion_length=COMPLETION, temperature=1.0, beta=0.0, learning_rate=1e-6,
        max_steps=steps * (batches + 1), generation_kwargs={"min_new_tokens": COMPLETION, "top_k": 0},
        report_to="none", save_strategy="no", logging_steps=10_000, disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny"), dtype=torch.float32)
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(find_model("sokoban-tiny"), padding_side="left"),
        callbacks=[clock],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # which writes to the output, where the JSON object goes
    clock.times = [time.process_time()]
    trainer.train()
    assert lengths == {COMPLETION}, lengths
    ends = clock.times[::steps]
    return [after - before for before, after in pairwise(ends[1:])]


def main() -> None:
    """Run both in turn, and compare medians."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=read_count, default=6, help="counted batches of each run")
    batches = parser.parse_args().repetitions
    torch.set_num_threads(1)
    texts = prompt_texts(PROMPTS * (batches + 1))
    tokenizer = AutoTokenizer.from_pretrained(find_model("sokoban-tiny"))
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    assert {len(ids) for ids in encoded} == {PROMPT}
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs, again = ours(encoded, batches), trl(texts, batches, folder), ours(encoded, batches)
    per_thousand = {
        "ours": round(statistics.median([*mine, *again]) / TOKENS * 1000, 4),
        "trl": round(statistics.median(theirs) / TOKENS * 1000, 4),
    }
    print(json.dumps({
        "benchmark": "trl_grpo", "tokens_a_batch": TOKENS, "batches": batches, "trl_version": version("trl"),
        "cpu_seconds_per_1000_trained_tokens": per_thousand,
        "ratio": round(per_thousand["trl"] / per_thousand["ours"], 2), **describe(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
