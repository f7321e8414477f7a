"""One PPO step of a Qwen2 with random weights, phase by phase, as one JSON object: a separate critic, a reference.

The batch is made up: levels x 16 episodes of 5 turns, whose replies have 1 to --tokens tokens. Utilisation is the share
of this run's own measured rate of large matrix products (bfloat16 on a GPU, float32 on a processor) at which a phase
does the model's operations: a forward pass is counted once, a backward pass twice, what is computed again is not
counted, and neither are thoughts' common beginnings. The rollout is a stand-in: one short reply of the torch sampler.
Run: python benchmarks/gpu_step.py --shape 3b --device cuda; python benchmarks/gpu_step.py --shape tiny --device cpu
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from machine import describe

from trainable.algo.batching import length_stratified_order
from trainable.algo.mutual_information import mutual_information
from trainable.backend.one_device import OneDevice
from trainable.config.sections import ActorConfig, CriticConfig
from trainable.diagnostics.cross_scores import cross_scores
from trainable.models.load import find_model, frozen_copy
from trainable.models.qwen2 import PassSettings, Qwen2, ValueModel
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.ppo.flops import clocked, forward_flops, matrix_rate
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, at_trained_tokens, update_critic
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode, StopReason
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from tune_study.placement.model_shapes import published_sizes

COPIES = 16
TURNS = 5
SAMPLES = 64
COLUMNS = 8  # prompts of the first-turn sample
ROLLOUT_TOKENS = 16
ROWS_WITHOUT_GRADIENTS = 8
ACTOR = ActorConfig(use_kl_loss=True, kl_loss_type="low_var_kl", entropy_coeff=0.001)


class Scale(NamedTuple):
    """Tokens of an opening, of each later observation, and of the longest reply, unless --tokens says otherwise.

    Those of the published prompt are round numbers near what Qwen2.5's tokenizer makes of it.
    """

    opening: int
    observation: int
    reply: int


SCALES = {"tiny": Scale(30, 20, 24), "0.5b": Scale(400, 100, 400), "3b": Scale(400, 100, 400)}


class Phase(NamedTuple):
    """Something to time, and the floating-point operations that it is counted with."""

    run: Callable[[], object]
    flops: float


class Networks(NamedTuple):
    """Those of one run on one device."""

    policy: Qwen2
    critic: ValueModel
    reference: Qwen2


def shape_of(name: str) -> Qwen2Shape:
    """The shipped model's shape, or that of Qwen2.5 in a size."""
    if name == "tiny":
        return Qwen2Shape.read(find_model("sokoban-tiny"))
    sizes = published_sizes(f"Qwen/Qwen2.5-{name.upper()}")
    return Qwen2Shape(**sizes, max_position_embeddings=32_768, rope_theta=1e6, rms_norm_eps=1e-6, eos_token_id=151_643)


def make_networks(shape: Qwen2Shape, device: torch.device, dtype: torch.dtype, recompute: bool) -> Networks:
    """Policy and critic with weights from N(0, 0.02), and the policy's frozen copy."""
    torch.manual_seed(0)
    with device:
        policy, critic = Qwen2(shape), ValueModel(shape)
    for network in (policy, critic):
        network.model.passes = PassSettings(dtype, recompute)
        for name, weight in network.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.02)
    return Networks(policy, critic, frozen_copy(policy))


def make_episodes(count: int, scale: Scale, vocabulary: int) -> list[Episode]:
    """Episodes of random tokens, `COPIES` of an opening."""
    rng = np.random.default_rng(0)
    openings = rng.integers(0, vocabulary, (-(-count // COPIES), scale.opening))
    episodes = []
    for number in range(count):
        replies = rng.integers(1, scale.reply + 1, TURNS)
        given = [scale.opening, *[scale.observation] * (TURNS - 1)]
        sizes = [size for turn in zip(given, replies, strict=True) for size in turn]
        tokens = rng.integers(0, vocabulary, sum(sizes))
        tokens[: scale.opening] = openings[number // COPIES]
        nothing = np.zeros(len(tokens), dtype=np.float32)
        episodes.append(Episode(
            level_seed=0, group=number // COPIES, tokens=tokens, mask=np.repeat([False, True] * TURNS, sizes),
            logprobs=nothing, entropies=nothing, turns=np.repeat(np.arange(TURNS).repeat(2), sizes),
            turn_rewards=tuple(rng.normal(size=TURNS)), actions=TURNS, invalid_turns=0,
            stop=StopReason.OUT_OF_TURNS, texts=("",) * TURNS,
        ))  # fmt: skip
    return episodes


# ---------------------------------------------------------------------------- what is counted


def scoring_flops(shape: Qwen2Shape, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]) -> float:
    """Operations of every thought after every prompt, each prompt read once."""
    total, tokens = 0.0, [len(thought) for thought in thoughts]
    for prompt in prompts:
        total += forward_flops(shape, [len(prompt)], 1, 0)
        total += forward_flops(shape, tokens, sum(tokens), shape.vocab_size, len(prompt))
    return total


# ---------------------------------------------------------------------------- the step


def backend(name: str, network: torch.nn.Module, rate: float) -> OneDevice:
    """AdamW of one network, in torch."""
    return OneDevice(f"{name}_optimizer", {name: network}, torch.optim.AdamW(network.parameters(), rate), 1.0)


def training_phases(networks: Networks, batch: Batch) -> dict[str, Phase]:
    """Values, reference, and both updates, in the order of a step."""
    shape, lengths, trained = networks.policy.shape, batch.read_lengths().tolist(), int(batch.mask.sum())
    policy_flops, value_flops = (
        forward_flops(shape, lengths, trained, outputs) for outputs in (shape.vocab_size, 1)
    )  # fmt: skip
    drawn = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).to(batch.mask.device) * batch.mask
    order, rows = length_stratified_order(batch.lengths), ROWS_WITHOUT_GRADIENTS
    reference = TokenFunction.logprobs(networks.reference, 1.0)
    values = TokenFunction.values(networks.critic.model, networks.critic.score)
    # The policy's log-probs before the update are those of its frozen copy.
    old = at_trained_tokens(batch, rows, reference)
    batch, targets = batch._replace(logprobs=old), Targets(drawn, drawn, 0.5 * drawn, old)
    actor = ActorUpdate(networks.policy, backend("actor", networks.policy, 1e-6), ACTOR, 1.0)
    critics = backend("critic", networks.critic, 1e-5)
    return {
        "values": Phase(lambda: at_trained_tokens(batch, rows, values), value_flops),
        "reference": Phase(lambda: at_trained_tokens(batch, rows, reference), policy_flops),
        "update_critic": Phase(
            lambda: update_critic(networks.critic, critics, batch, targets, order, CriticConfig()), 3 * value_flops
        ),
        "update_actor": Phase(lambda: actor.run(batch, targets, order), 3 * policy_flops),
    }


def collapse_phase(policy: Qwen2, episodes: Sequence[Episode]) -> Phase:
    """Both samples of the diagnostics: thoughts are whole replies, after all that stood before them."""
    rng = np.random.default_rng(1)
    prompts, thoughts, firsts = [], [], []
    for _ in range(SAMPLES):
        episode, turn = episodes[int(rng.integers(len(episodes)))], int(rng.integers(TURNS))
        own, first = (np.flatnonzero(episode.mask & (episode.turns == number)) for number in (turn, 0))
        prompts.append(episode.tokens[: own[0]].tolist())
        thoughts.append(episode.tokens[own].tolist())
        firsts.append(episode.tokens[first].tolist())
    opening = int(np.flatnonzero(episodes[0].mask)[0])
    openings = [episode.tokens[:opening].tolist() for episode in episodes[::COPIES][:COLUMNS]]

    def run() -> None:
        scores = cross_scores(policy, prompts, thoughts)
        mutual_information(scores.sums, scores.lengths, torch.arange(SAMPLES))
        cross_scores(policy, openings, firsts)

    shape = policy.shape
    return Phase(run, scoring_flops(shape, prompts, thoughts) + scoring_flops(shape, openings, firsts))


def rollout_phase(policy: Qwen2, episodes: Sequence[Episode]) -> Phase:
    """One short reply of every episode."""
    opening = int(np.flatnonzero(episodes[0].mask)[0])
    prompts = [episode.tokens[:opening].tolist() for episode in episodes[::COPIES]]
    rows, shape = COPIES * len(prompts), policy.shape
    params = SamplingParams(1.0, ROLLOUT_TOKENS, -1)  # nothing ends a reply early

    def run() -> None:
        conversation = TorchSampler(policy).converse(prompts, COPIES, params, np.random.default_rng(0))
        conversation.reply(range(rows), [[] for _ in range(rows)])

    read = forward_flops(shape, [opening] * len(prompts), len(prompts), 0)
    sampled = [ROLLOUT_TOKENS] * rows
    return Phase(run, read + forward_flops(shape, sampled, sum(sampled), shape.vocab_size, opening))


def measured(phase: Phase, device: torch.device, rate: float) -> dict[str, float | None]:
    """Seconds, utilisation and the most memory held of one phase."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = clocked(phase.run, device.type)
    return {
        "seconds": round(seconds, 3),
        "tflop": round(phase.flops / 1e12, 4),
        "utilisation": round(phase.flops / seconds / rate, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
    }


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shape, device = ("3b", "cuda") if torch.cuda.is_available() else ("tiny", "cpu")
    parser.add_argument("--shape", choices=list(SCALES), default=shape, help="default: 3b where a GPU is visible")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--episodes", type=int, default=8 * COPIES, help="a multiple of 16; default 128")
    parser.add_argument("--tokens", type=int, help="of a reply at most; default 400, of the tiny shape 24")
    parser.add_argument("--keep-activations", action="store_true", help="no block is recomputed in the backward pass")
    parser.add_argument("--skip-rollout", action="store_true")
    given = parser.parse_args()
    if given.episodes < COPIES or given.episodes % COPIES:
        parser.error(f"--episodes is {given.episodes}; it must be a multiple of {COPIES}, such as 128")
    if given.tokens is not None and given.tokens < 2:
        parser.error(f"--tokens is {given.tokens}; it must be at least 2, such as 400")
    return given


def main() -> None:
    """Every phase of the second of two steps."""
    given = options()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    dtype = given.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    scale = SCALES[given.shape]._replace(reply=given.tokens or SCALES[given.shape].reply)
    networks = make_networks(shape_of(given.shape), device, getattr(torch, dtype), not given.keep_activations)
    episodes = make_episodes(given.episodes, scale, networks.policy.shape.vocab_size)
    batch = Batch(*(part.to(device) for part in collate(episodes)))
    phases = {} if given.skip_rollout else {"rollout_stand_in": rollout_phase(networks.policy, episodes)}
    phases |= {"collapse": collapse_phase(networks.policy, episodes), **training_phases(networks, batch)}
    for phase in phases.values():  # not counted: kernels are chosen and moments made
        phase.run()
    rate = matrix_rate(device.type, torch.bfloat16 if device.type == "cuda" else torch.float32)
    found = {name: measured(phase, device, rate) for name, phase in phases.items()}
    print(json.dumps({
        "benchmark": "gpu_step", "shape": given.shape, "dtype": dtype, "episodes": len(episodes),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "conversation_tokens": int(batch.lengths.sum()), "trained_tokens": int(batch.mask.sum()),
        "longest": int(batch.lengths.max()),
        "parameters": sum(weight.numel() for weight in networks.policy.parameters()),
        "matrix_tflops": round(rate / 1e12, 3), "phases": found,
        "seconds_all_phases": round(sum(row["seconds"] or 0.0 for row in found.values()), 3), **describe(),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
