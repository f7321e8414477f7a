"""Cross-scoring of thoughts: one read per prompt beside one whole sequence per pair, as one JSON object.

Both score the same prompts and thoughts of one rollout of 8 levels x 16 episodes: 64 trajectory draws, each against
every other's prompt, and 64 first turns against the 8 openings. The share is of training without validation, when both
samples are diagnosed every fifth step.
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
from options import make_parser, read_count
from torch import Tensor

from search_spaces.declaration.presets import PRESETS
from trainable.algo.mutual_information import mutual_information, retrieval
from trainable.config.run_config import RunConfig, with_overrides
from trainable.config.seeds import stream
from trainable.diagnostics.cross_scores import cross_scores
from trainable.diagnostics.thoughts import Pairs, first_turn_pairs, read_turns, trajectory_pairs
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode import Episode
from trainable.rollout.play import play
from trainable.rollout.sampler import SamplingParams

COMPUTE_FREQ = 5
GAME = {
    **PRESETS["laptop"],
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    # Almost 0 keeps every step on the same policy, and so on the same lengths.
    "actor.lr": 1e-12,
    "critic.lr": 1e-12,
}


class Spent(NamedTuple):
    """Wall and CPU seconds of one call."""

    wall: float
    cpu: float


def clocked(work: Callable[[], object]) -> Spent:
    """What `work` takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def median(spent: Sequence[Spent]) -> Spent:
    """Medians of both clocks."""
    return Spent(*(statistics.median(values) for values in zip(*spent, strict=True)))


def naive_scores(model: Qwen2, pairs: Pairs) -> Tensor:
    """Every thought after every prompt as a whole sequence, all thoughts of a prompt in one batch: (N, M)."""
    lengths = torch.tensor([len(thought) for thought in pairs.thoughts])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    targets = torch.from_numpy(np.concatenate(pairs.thoughts))
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    sums = torch.zeros((len(pairs.thoughts), len(pairs.prompts)), dtype=torch.float64)
    with torch.inference_mode():
        for column, prompt in enumerate(pairs.prompts):
            tokens = torch.zeros((len(lengths), len(prompt) + inside.shape[1]), dtype=torch.long)
            tokens[:, : len(prompt)] = torch.from_numpy(prompt)
            tokens[:, len(prompt) :][inside] = targets
            scored = torch.cat((torch.zeros(len(lengths), len(prompt), dtype=torch.bool), inside), dim=1)
            hidden = model.model.hidden_at(tokens, scored.flatten().nonzero().squeeze(-1) - 1)
            logs = model.lm_head(hidden).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
            sums[:, column].index_add_(0, rows, logs.double())
    return sums


def shared_scores(model: Qwen2, pairs: Pairs) -> Tensor:
    """The same numbers, as the trainer makes them."""
    return cross_scores(model, pairs.prompts, pairs.thoughts).sums


def rolled_out(trainer: PPOTrainer) -> list[Episode]:
    """One rollout of the preset's levels."""
    config = trainer.config
    return play(
        trainer.levels[0], config.env.group_size, trainer.engine.sampler, trainer.protocol, trainer.codec,
        trainer.rules,
        SamplingParams(1.0, config.rollout.response_length, trainer.stop_token), stream(0, "sampling", 1),
    )  # fmt: skip


def sample(trainer: PPOTrainer, episodes: Sequence[Episode], count: int) -> dict[str, Pairs]:
    """Both samples of the diagnostics, `count` draws each."""
    turns, rng = read_turns(episodes, trainer.codec), np.random.default_rng(0)
    return {
        "trajectory": trajectory_pairs(turns, count, rng),
        "first_turn": first_turn_pairs(turns, [episode.group for episode in episodes], count, rng),
    }


def compared(model: Qwen2, pairs: Pairs, repetitions: int) -> tuple[dict[str, object], dict[str, Spent]]:
    """Both ways by turns, after one call of each not counted, which is where they are checked against each other."""
    ways = {"shared": shared_scores, "naive": naive_scores}
    shared, naive = (way(model, pairs) for way in ways.values())
    spent: dict[str, list[Spent]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            spent[name].append(clocked(lambda way=way: way(model, pairs)))
    medians = {name: median(those) for name, those in spent.items()}
    ratios = [naive.cpu / shared.cpu for naive, shared in zip(spent["naive"], spent["shared"], strict=True)]
    return {
        "thoughts": len(pairs.thoughts),
        "prompts": len(pairs.prompts),
        "thought_tokens": sum(len(thought) for thought in pairs.thoughts),
        "prompt_tokens": sum(len(prompt) for prompt in pairs.prompts),
        "wall_seconds": {name: round(those.wall, 4) for name, those in medians.items()},
        "cpu_seconds": {name: round(those.cpu, 4) for name, those in medians.items()},
        "cpu_ratio": {"median": round(statistics.median(ratios), 1), "min": round(min(ratios), 1),
                      "max": round(max(ratios), 1)},
        # Of a sum near 0, in nats; of others, as a share of the sum.
        "largest_difference": float(((shared - naive) / naive.abs().clamp_min(1)).abs().max()),
    }, medians  # fmt: skip


def around(trainer: PPOTrainer, episodes: Sequence[Episode], samples: int, repetitions: int) -> Spent:
    """All that a diagnosis takes besides the scoring: reading turns, sampling pairs, metrics."""
    scored = {name: (pairs, cross_scores(trainer.model, pairs.prompts, pairs.thoughts))
              for name, pairs in sample(trainer, episodes, samples).items()}  # fmt: skip

    def work() -> None:
        sample(trainer, episodes, samples)
        for pairs, found in scored.values():
            own = torch.from_numpy(pairs.own)
            mutual_information(found.sums, found.lengths, own)
            retrieval(found.sums, own, torch.from_numpy(pairs.classes))

    return median([clocked(work) for _ in range(repetitions)])


def main() -> None:
    """Medians of both ways on both samples, and their share of training at the published frequency."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=read_count, default=5, help="counted repetitions of each way")
    parser.add_argument("--steps", type=read_count, default=5, help="counted training steps")
    parser.add_argument("--samples", type=read_count, default=64, help="draws of each sample")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trainer = PPOTrainer(with_overrides(RunConfig(), {**GAME, "trainer.total_training_steps": given.steps + 2}))
    episodes = rolled_out(trainer)
    results, spent = {}, {}
    for name, pairs in sample(trainer, episodes, given.samples).items():
        results[name], spent[name] = compared(trainer.model, pairs, given.repetitions)
    other = around(trainer, episodes, given.samples, given.repetitions)
    rows = [trainer.step().row for _ in range(given.steps + 1)][1:]
    step, rollout = (statistics.median(row[key] for row in rows) for key in ("cpu_seconds_step", "seconds_rollout"))
    shares = {}
    for way in ("shared", "naive"):
        once = other.cpu + sum(medians[way].cpu for medians in spent.values())
        shares[way] = round(once / (once + COMPUTE_FREQ * step), 4)
    print(json.dumps({
        "benchmark": "cross_scoring",
        **results,
        "cpu_seconds_around": round(other.cpu, 4),
        "cpu_seconds_step": round(step, 3),
        "seconds_rollout": round(rollout, 3),
        "compute_freq": COMPUTE_FREQ,
        "share_of_training": shares,
        "repetitions": given.repetitions,
        **describe(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
