"""Compare rollouts of our sampler and of transformers' generate on the same prompts. Prints a JSON object.

Both play the same 8 levels x 16 episodes with the same protocol. generate prefills the whole conversation at each turn,
because it keeps no cache between calls with rows of different lengths.
Run: python benchmarks/rollout.py [--repetitions 7]
"""

import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from machine import describe
from options import make_parser, parse_count
from transformers import AutoModelForCausalLM

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode_loop import draw_luck, roll_out_episodes
from trainable.rollout.sampler import Conversation, SampledReply, Sampler, SamplingParams


class GenerateConversation:
    """A conversation that passes the whole history of its rows to transformers' generate at each turn."""

    def __init__(self, model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams) -> None:
        self.model, self.params, self.histories = model, params, prompts

    def sample_replies(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[SampledReply]:
        """Reply in all `rows` with one call of generate."""
        for row, new_ids in zip(rows, new_tokens, strict=True):
            self.histories[row] = [*self.histories[row], *new_ids]
        # generate needs padding on the left, so that all rows continue at the same position.
        longest = max(len(self.histories[row]) for row in rows)
        tokens = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row_index, row in enumerate(rows):
            history = self.histories[row]
            tokens[row_index, longest - len(history) :] = torch.tensor(history)
            mask[row_index, longest - len(history) :] = 1
        with torch.inference_mode():
            generated_tokens = self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.params.max_new_tokens,
                eos_token_id=self.params.stop_token,
                pad_token_id=0,
            )
        return [
            self._cut_at_stop(row, reply)
            for row, reply in zip(rows, generated_tokens[:, longest:].numpy(), strict=True)
        ]

    def _cut_at_stop(self, row: int, reply: np.ndarray) -> SampledReply:
        # generate pads the replies of rows that stop early up to the longest reply.
        stop_positions = np.flatnonzero(reply == self.params.stop_token)
        reply = reply[: stop_positions[0] + 1] if len(stop_positions) else reply
        self.histories[row] = [*self.histories[row], *reply.tolist()]
        zeros = np.zeros(len(reply), dtype=np.float32)
        return SampledReply(reply.astype(np.int64), zeros, zeros, bool(len(stop_positions)))


class GenerateSampler:
    """transformers' generate as a Sampler. It returns zeros for log-probs, so it does less work than our sampler."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: np.random.Generator
    ) -> Conversation:
        """Start a conversation with `group_size` rows per prompt."""
        torch.manual_seed(int(rng.integers(2**31)))
        return GenerateConversation(self.model, [list(p) for p in prompts for _ in range(group_size)], params)


def time_rollout(trainer: PPOTrainer, sampler: Sampler, step: int) -> tuple[float, int]:
    """CPU seconds and sampled tokens of one rollout."""
    num_episodes = len(trainer.levels[step]) * trainer.config.env.group_size
    luck = draw_luck(make_rng(0, "environment", step), num_episodes, trainer.limits)
    start_time = time.process_time()
    episodes = roll_out_episodes(
        trainer.environment,
        trainer.levels[step],
        trainer.config.env.group_size,
        sampler,
        trainer.prompt_template,
        trainer.codec,
        trainer.limits,
        SamplingParams(1.0, 24, trainer.model.shape.eos_token_id),
        make_rng(0, "sampling", step),
        luck,
    )
    return time.process_time() - start_time, sum(episode.response_tokens for episode in episodes)


def main() -> None:
    """Alternate the two samplers over the levels of several steps, and print medians; the first step is not timed."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=7, help="timed rollouts of each sampler")
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    settings = {**PRESETS["laptop"].settings, "trainer.total_training_steps": repetitions + 1}
    trainer = PPOTrainer(apply_overrides(RunConfig(), settings))
    generate_sampler = GenerateSampler(AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny")).eval())
    rates: dict[str, list[float]] = {"ours": [], "generate": []}
    for step in range(repetitions + 1):
        for name, sampler in (("ours", trainer.engine.sampler), ("generate", generate_sampler)):
            seconds, tokens = time_rollout(trainer, sampler, step)
            if step:  # the first rollout warms up and is not counted
                rates[name].append(tokens / seconds)
    medians = {name: round(statistics.median(values)) for name, values in rates.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["generate"], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "rollout",
                "sampled_tokens_per_cpu_second": medians,
                "ratio": {
                    "median": round(statistics.median(ratios), 2),
                    "range": [round(min(ratios), 2), round(max(ratios), 2)],
                },
                "repetitions": repetitions,
                **describe(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
