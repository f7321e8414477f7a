"""Time cross-scoring of thoughts: each prompt read once, and naively, one sequence per pair. Prints a JSON object.

Both methods score the same prompts and thoughts of one rollout of 8 levels x 16 episodes. The first sample has 64
thoughts of any turn and their 64 prompts. The second has 64 thoughts of first turns and the 8 openings. Every thought
is scored after every prompt. The training fraction is the part of the time of training without validation that the
diagnostics take, if both samples are scored every fifth step.
Run: python benchmarks/cross_scoring.py [--repetitions 5] [--steps 5] [--samples 64]
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from machine import describe
from options import make_parser, parse_count
from torch import Tensor

from search_spaces.declaration.presets import PRESETS
from trainable.algo.mutual_information import compute_information_metrics, compute_retrieval_metrics
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.diagnostics.collapse import ThoughtPairs, read_turns, sample_first_turn_pairs, sample_trajectory_pairs
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import RolloutRequest
from trainable.rollout.sampler import SamplingParams

COMPUTE_FREQ = 5  # steps per diagnosis
SETTINGS = {
    **PRESETS["laptop"].settings,
    "model.compiled_passes": False,  # both ways in torch
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    # A learning rate of almost 0 keeps the policy, and with it the lengths of replies, the same in every step.
    "actor.lr": 1e-12,
    "critic.lr": 1e-12,
}


class CallTime(NamedTuple):
    """Wall and CPU seconds of one call."""

    wall: float
    cpu: float


def time_call(work: Callable[[], object]) -> CallTime:
    """Wall and CPU seconds of `work`."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return CallTime(time.perf_counter() - wall, time.process_time() - cpu)


def compute_median_time(call_times: Sequence[CallTime]) -> CallTime:
    """Median of each clock."""
    return CallTime(*(statistics.median(values) for values in zip(*call_times, strict=True)))


def compute_naive_scores(model: Qwen2, pairs: ThoughtPairs) -> Tensor:
    """Log-probability sums (N, M) of N thoughts after M prompts, with one sequence per pair, batched by prompt."""
    lengths = torch.tensor([len(thought) for thought in pairs.thoughts])
    thought_index = torch.arange(len(lengths)).repeat_interleave(lengths)
    targets = torch.from_numpy(np.concatenate(pairs.thoughts))
    thought_mask = torch.arange(int(lengths.max())) < lengths[:, None]
    sums = torch.zeros((len(pairs.thoughts), len(pairs.prompts)), dtype=torch.float64)
    with torch.inference_mode():
        for column, prompt in enumerate(pairs.prompts):
            # One row per thought, padded on the right; causal attention never reads the padding.
            tokens = torch.zeros((len(lengths), len(prompt) + thought_mask.shape[1]), dtype=torch.long)
            tokens[:, : len(prompt)] = torch.from_numpy(prompt)
            tokens[:, len(prompt) :][thought_mask] = targets
            scored_mask = torch.cat((torch.zeros(len(lengths), len(prompt), dtype=torch.bool), thought_mask), dim=1)
            # The state at a position predicts the next token, hence minus 1.
            hidden = model.model.compute_hidden_states(tokens, scored_mask.flatten().nonzero().squeeze(-1) - 1)
            logprobs = model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
            sums[:, column].index_add_(0, thought_index, logprobs.double())
    return sums


def compute_shared_scores(model: Qwen2, pairs: ThoughtPairs) -> Tensor:
    """The same sums as the trainer computes them, reading each prompt once."""
    return compute_cross_scores(model, pairs.prompts, pairs.thoughts)


def roll_out(trainer: PPOTrainer) -> list[Episode]:
    """One rollout of the preset's levels."""
    config = trainer.config
    return trainer.player.roll_out(
        RolloutRequest(
            trainer.levels[0],
            config.env.group_size,
            trainer.engine.sampler,
            SamplingParams(1.0, config.rollout.response_length, trainer.stop_token),
            make_rng(0, "sampling", 1),
            make_rng(0, "environment", 1),
        )
    )


def sample_pairs(trainer: PPOTrainer, episodes: Sequence[Episode], count: int) -> dict[str, ThoughtPairs]:
    """Both samples of the diagnostics, with `count` pairs each."""
    turns, rng = read_turns(episodes, trainer.codec), np.random.default_rng(0)
    return {
        "trajectory": sample_trajectory_pairs(turns, count, rng),
        "first_turn": sample_first_turn_pairs(turns, [episode.group for episode in episodes], count, rng),
    }


def compare_methods(
    model: Qwen2, pairs: ThoughtPairs, repetitions: int
) -> tuple[dict[str, object], dict[str, CallTime]]:
    """Time both methods alternately. A first call of each is not timed, and compares their results."""
    methods = {"shared": compute_shared_scores, "naive": compute_naive_scores}
    shared_sums, naive_sums = (method(model, pairs) for method in methods.values())
    call_times: dict[str, list[CallTime]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name, method in methods.items():
            call_times[name].append(time_call(lambda method=method: method(model, pairs)))
    medians = {name: compute_median_time(times) for name, times in call_times.items()}
    # One ratio per repetition, so that a change of the machine's load affects both methods of a ratio.
    ratios = [naive.cpu / shared.cpu for naive, shared in zip(call_times["naive"], call_times["shared"], strict=True)]
    relative_errors = (shared_sums - naive_sums) / naive_sums.abs().clamp_min(1)
    results = {
        "thoughts": len(pairs.thoughts),
        "prompts": len(pairs.prompts),
        "thought_tokens": sum(len(thought) for thought in pairs.thoughts),
        "prompt_tokens": sum(len(prompt) for prompt in pairs.prompts),
        "wall_seconds": {name: round(median.wall, 4) for name, median in medians.items()},
        "cpu_seconds": {name: round(median.cpu, 4) for name, median in medians.items()},
        "cpu_ratio": {
            "median": round(statistics.median(ratios), 1),
            "min": round(min(ratios), 1),
            "max": round(max(ratios), 1),
        },
        # In nats for sums below 1 nat in size, otherwise relative to the sum.
        "largest_difference": float(relative_errors.abs().max()),
    }
    return results, medians


def time_overhead(trainer: PPOTrainer, episodes: Sequence[Episode], samples: int, repetitions: int) -> CallTime:
    """Time of a diagnosis without the scoring: reading turns, sampling pairs, computing metrics."""
    scored_pairs = {
        name: (pairs, compute_cross_scores(trainer.model, pairs.prompts, pairs.thoughts))
        for name, pairs in sample_pairs(trainer, episodes, samples).items()
    }

    def work() -> None:
        sample_pairs(trainer, episodes, samples)
        for pairs, scores in scored_pairs.values():
            own_prompts, lengths = torch.from_numpy(pairs.own_columns), torch.tensor(list(map(len, pairs.thoughts)))
            compute_information_metrics(scores, lengths, own_prompts)
            compute_retrieval_metrics(scores, own_prompts, torch.from_numpy(pairs.classes))

    return compute_median_time([time_call(work) for _ in range(repetitions)])


def main() -> None:
    """Print the medians of both methods on both samples, and the fraction of training time that they take."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=5, help="timed repetitions of each method")
    parser.add_argument("--steps", type=parse_count, default=5, help="timed training steps")
    parser.add_argument("--samples", type=parse_count, default=64, help="thoughts in each sample")
    args = parser.parse_args()
    torch.set_num_threads(1)  # CPU seconds are comparable only at one number of threads
    # Two more steps: the first is not timed, and the last, which has the final evaluation, is not run.
    trainer = PPOTrainer(apply_overrides(RunConfig(), {**SETTINGS, "trainer.total_training_steps": args.steps + 2}))
    episodes = roll_out(trainer)
    results, median_times = {}, {}
    for name, pairs in sample_pairs(trainer, episodes, args.samples).items():
        results[name], median_times[name] = compare_methods(trainer.model, pairs, args.repetitions)
    overhead = time_overhead(trainer, episodes, args.samples, args.repetitions)
    rows = [trainer.step().row for _ in range(args.steps + 1)][1:]  # the first step is not timed
    step_seconds, rollout_seconds = (
        statistics.median(row[key] for row in rows) for key in ("cpu_seconds_step", "seconds_rollout")
    )
    training_fractions = {}
    for method in ("shared", "naive"):
        diagnosis_seconds = overhead.cpu + sum(medians[method].cpu for medians in median_times.values())
        training_fractions[method] = round(diagnosis_seconds / (diagnosis_seconds + COMPUTE_FREQ * step_seconds), 4)
    report = {
        "benchmark": "cross_scoring",
        **results,
        "cpu_seconds_overhead": round(overhead.cpu, 4),
        "cpu_seconds_step": round(step_seconds, 3),
        "seconds_rollout": round(rollout_seconds, 3),
        "compute_freq": COMPUTE_FREQ,
        "training_fraction": training_fractions,
        "repetitions": args.repetitions,
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
