"""Rollout of one training step: our sampler beside transformers' generate on the same prompts, as one JSON object.

Both play the same 8 levels x 16 episodes with the same protocol; generate prefills the whole conversation at each turn,
since it keeps no cache between calls with ragged rows.
Run: python benchmarks/rollout.py [--repetitions 7]
"""

import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from machine import describe
from options import make_parser, read_count
from transformers import AutoModelForCausalLM

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, with_overrides
from trainable.config.seeds import stream
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.play import play
from trainable.rollout.sampler import Conversation, Sampled, Sampler, SamplingParams


class GenerateConversation:
    """Rows whose whole history is given to transformers' generate at each turn."""

    def __init__(self, model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams) -> None:
        self.model, self.params, self.histories = model, params, prompts

    def reply(self, rows: Sequence[int], given: Sequence[Sequence[int]]) -> list[Sampled]:
        """One generate call over the rows that are left."""
        for row, new in zip(rows, given, strict=True):
            self.histories[row] = [*self.histories[row], *new]
        longest = max(len(self.histories[row]) for row in rows)
        tokens = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            history = self.histories[row]
            tokens[place, longest - len(history) :] = torch.tensor(history)
            mask[place, longest - len(history) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=self.params.max_new_tokens, eos_token_id=self.params.stop_token, pad_token_id=0,
            )  # fmt: skip
        return [self._cut(row, reply) for row, reply in zip(rows, out[:, longest:].numpy(), strict=True)]

    def _cut(self, row: int, reply: np.ndarray) -> Sampled:
        ends = np.flatnonzero(reply == self.params.stop_token)
        reply = reply[: ends[0] + 1] if len(ends) else reply
        self.histories[row] = [*self.histories[row], *reply.tolist()]
        zeros = np.zeros(len(reply), dtype=np.float32)
        return Sampled(reply.astype(np.int64), zeros, zeros, bool(len(ends)))


class GenerateSampler:
    """transformers' generate behind the Sampler protocol; it returns no log-probs, which favours it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def converse(
        self, prompts: Sequence[Sequence[int]], copies: int, params: SamplingParams, uniforms: np.random.Generator
    ) -> Conversation:
        """Open a conversation."""
        torch.manual_seed(int(uniforms.integers(2**31)))
        return GenerateConversation(self.model, [list(p) for p in prompts for _ in range(copies)], params)


def timed_play(trainer: PPOTrainer, sampler: Sampler, step: int) -> tuple[float, int]:
    """CPU seconds and sampled tokens of one rollout."""
    started = time.process_time()
    episodes = play(
        trainer.levels[step], trainer.config.env.group_size, sampler, trainer.protocol, trainer.codec, trainer.rules,
        SamplingParams(1.0, 24, trainer.model.shape.eos_token_id), stream(0, "sampling", step),
    )  # fmt: skip
    return time.process_time() - started, sum(episode.response_tokens for episode in episodes)


def main() -> None:
    """Alternate the two samplers over the levels of several steps; medians after one repetition not counted."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=read_count, default=7, help="counted rollouts of each sampler")
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    game = {**PRESETS["laptop"], "trainer.total_training_steps": repetitions + 1}
    trainer = PPOTrainer(with_overrides(RunConfig(), game))
    peer = GenerateSampler(AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny")).eval())
    rates: dict[str, list[float]] = {"ours": [], "generate": []}
    for step in range(repetitions + 1):
        for name, sampler in (("ours", trainer.engine.sampler), ("generate", peer)):
            seconds, tokens = timed_play(trainer, sampler, step)
            if step:
                rates[name].append(tokens / seconds)
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    pairs = [ours / theirs for ours, theirs in zip(rates["ours"], rates["generate"], strict=True)]
    print(json.dumps({
        "benchmark": "rollout",
        "sampled_tokens_per_cpu_second": medians,
        "ratio": {"median": round(statistics.median(pairs), 2), "range": [round(min(pairs), 2), round(max(pairs), 2)]},
        "repetitions": repetitions,
        **describe(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
