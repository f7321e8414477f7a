"""Compare rollouts of our samplers and of transformers' generate on the same prompts. Prints a JSON object.

All play the same 8 levels x 16 episodes with the same protocol. generate prefills the whole conversation at each turn,
because it keeps no cache between calls with rows of different lengths. Our two samplers also play a validation.
Run: python benchmarks/rollout.py [--repetitions 7]
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from machine import describe
from options import make_parser, parse_count
from transformers import AutoModelForCausalLM

from search_spaces.declaration.presets import PRESETS
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.envs.environment import Level
from trainable.envs.level_sets import make_validation_levels
from trainable.models.load import find_model
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.compiled_sampler import CompiledSampler
from trainable.rollout.episode_loop import RolloutRequest
from trainable.rollout.sampler import Conversation, SampledReply, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler


class GenerateConversation(Conversation):
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
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation with equally many rows per prompt (see `Sampler.start_conversation`)."""
        torch.manual_seed(int(rngs[0].integers(2**31)))
        group_size = len(rngs) // len(prompts)
        return GenerateConversation(self.model, [list(p) for p in prompts for _ in range(group_size)], params)


def time_rollout(
    trainer: PPOTrainer, sampler: Sampler, levels: Sequence[Level], group_size: int, step: int
) -> tuple[float, int]:
    """CPU seconds and sampled tokens of one rollout of `levels`, `group_size` episodes each."""
    start_time = time.process_time()
    episodes = trainer.player.roll_out(
        RolloutRequest(
            levels,
            group_size,
            sampler,
            SamplingParams(1.0, 24, trainer.model.shape.eos_token_id),
            make_rng(0, "sampling", step),
            make_rng(0, "environment", step),
        )
    )
    return time.process_time() - start_time, sum(episode.response_tokens for episode in episodes)


def summarize_ratios(rates: Mapping[str, list[float]], other: str) -> dict[str, object]:
    """Median and range of the rates of the compiled sampler over those of another, pair by pair."""
    ratios = [ours / theirs for ours, theirs in zip(rates["compiled"], rates[other], strict=True)]
    return {"median": round(statistics.median(ratios), 2), "range": [round(min(ratios), 2), round(max(ratios), 2)]}


def main() -> None:
    """Alternate the samplers over the levels of several steps, and print medians; the first step is not timed."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=7, help="timed rollouts of each sampler")
    parser.add_argument("--validation-levels", type=parse_count, default=512, help="levels of a validation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {**PRESETS["laptop"].settings, "trainer.total_training_steps": args.repetitions + 1}
    trainer = PPOTrainer(apply_overrides(RunConfig(), settings))
    samplers: dict[str, Sampler] = {
        "compiled": CompiledSampler(trainer.model),
        "torch": TorchSampler(trainer.model),
        "generate": GenerateSampler(AutoModelForCausalLM.from_pretrained(find_model("sokoban-tiny")).eval()),
    }
    validation_levels = make_validation_levels(trainer.level_source, args.validation_levels)
    rates: dict[str, list[float]] = {name: [] for name in samplers}
    validation_rates: dict[str, list[float]] = {"compiled": [], "torch": []}
    for step in range(args.repetitions + 1):
        for name, sampler in samplers.items():
            seconds, tokens = time_rollout(trainer, sampler, trainer.levels[step], trainer.config.env.group_size, step)
            if step:  # the first rollout warms up and is not counted
                rates[name].append(tokens / seconds)
        for name in validation_rates:
            seconds, tokens = time_rollout(trainer, samplers[name], validation_levels, 1, step)
            if step:
                validation_rates[name].append(tokens / seconds)
    print(
        json.dumps(
            {
                "benchmark": "rollout",
                "sampled_tokens_per_cpu_second": {
                    name: round(statistics.median(values)) for name, values in rates.items()
                },
                "ratio_to_generate": summarize_ratios(rates, "generate"),
                "ratio_to_torch": summarize_ratios(rates, "torch"),
                "validation_ratio_to_torch": summarize_ratios(validation_rates, "torch"),
                "repetitions": args.repetitions,
                **describe(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
