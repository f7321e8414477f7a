"""Time the phases of a PPO step of a Qwen2 with random weights, separate critic and reference. Prints a JSON object.

The batch is synthetic: groups of 16 episodes of 5 turns, with replies of 1 to --tokens tokens. MFU is the FLOP/s of
the model in a phase, relative to the throughput of large matrix products (bfloat16 on a GPU, float32 on a CPU) that
this run measures. A forward pass counts once and a backward pass twice. Recomputed activations do not count, nor do
thoughts' shared prefixes.
Run: python benchmarks/gpu_step.py --shape 3b --device cuda; python benchmarks/gpu_step.py --shape tiny --device cpu
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from machine import describe

from trainable.algo.batching import order_length_stratified
from trainable.algo.mutual_information import compute_information_metrics
from trainable.backend.torch_backend import TorchBackend, make_adamw
from trainable.config.sections import ActorConfig, CriticConfig, OptimConfig
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.interface import PassSettings, ValueModel
from trainable.models.load import find_model, make_frozen_copy
from trainable.models.qwen2 import Qwen2, Qwen2Trunk
from trainable.models.qwen2_shape import Qwen2Shape
from trainable.ppo.phases import estimate_forward_flops, measure_peak_flops, time_call
from trainable.ppo.update import ActorUpdate, Targets, TokenFunction, compute_at_trained_tokens, update_critic
from trainable.rollout.episode import Batch, Episode, StopReason, collate
from tune_study.placement.model_files import find_published_sizes

GROUP_SIZE = 16
TURNS = 5
NUM_SAMPLES = 64  # thoughts in each sample of the collapse diagnostics
NUM_OPENINGS = 8  # prompts of the first-turn sample
NO_GRAD_ROWS = 8  # sequences per forward pass without gradients
ACTOR_CONFIG = ActorConfig(use_kl_loss=True, kl_loss_type="low_var_kl", entropy_coeff=0.001)


class TurnLengths(NamedTuple):
    """Tokens of the opening, of each later observation, and of the longest reply (unless --tokens is given).

    For the published prompt, they are round numbers close to the lengths with Qwen2.5's tokenizer.
    """

    opening: int
    observation: int
    reply: int


TURN_LENGTHS = {"tiny": TurnLengths(30, 20, 24), "0.5b": TurnLengths(400, 100, 400), "3b": TurnLengths(400, 100, 400)}


class Phase(NamedTuple):
    """A function to time, and the floating-point operations that count for its MFU."""

    run: Callable[[], object]
    flops: float


class Networks(NamedTuple):
    """The networks of one run, on one device."""

    policy: Qwen2
    critic: ValueModel
    reference: Qwen2


def make_shape(name: str) -> Qwen2Shape:
    """The shape of the shipped model, or of Qwen2.5 in the given size."""
    if name == "tiny":
        return Qwen2Shape.read(find_model("sokoban-tiny"))
    sizes = find_published_sizes(f"Qwen/Qwen2.5-{name.upper()}")
    return Qwen2Shape(**sizes, max_position_embeddings=32_768, rope_theta=1e6, rms_norm_eps=1e-6, eos_token_id=151_643)


def make_networks(shape: Qwen2Shape, device: torch.device, dtype: torch.dtype, recompute: bool) -> Networks:
    """Policy and critic with weights from N(0, 0.02), and the policy's frozen copy."""
    torch.manual_seed(0)
    with device:
        policy, critic = Qwen2(shape), ValueModel(Qwen2Trunk(shape))
    for network in (policy, critic):
        network.model.pass_settings = PassSettings(dtype, recompute)
        for name, weight in network.named_parameters():
            # Norm weights stay 1, as in a model before training; 0.02 is the initializer_range of Qwen2.
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.02)
    return Networks(policy, critic, make_frozen_copy(policy))


def make_episodes(count: int, turn_lengths: TurnLengths, vocabulary: int) -> list[Episode]:
    """Episodes of random tokens; each group of `GROUP_SIZE` shares an opening."""
    rng = np.random.default_rng(0)
    openings = rng.integers(0, vocabulary, (-(-count // GROUP_SIZE), turn_lengths.opening))
    episodes = []
    for episode_index in range(count):
        reply_lengths = rng.integers(1, turn_lengths.reply + 1, TURNS)
        prompt_lengths = [turn_lengths.opening, *[turn_lengths.observation] * (TURNS - 1)]
        segment_lengths = [size for turn in zip(prompt_lengths, reply_lengths, strict=True) for size in turn]
        tokens = rng.integers(0, vocabulary, sum(segment_lengths))
        tokens[: turn_lengths.opening] = openings[episode_index // GROUP_SIZE]
        zeros = np.zeros(len(tokens), dtype=np.float32)
        episodes.append(
            Episode(
                level_seed=0,
                group=episode_index // GROUP_SIZE,
                tokens=tokens,
                mask=np.repeat([False, True] * TURNS, segment_lengths),
                logprobs=zeros,
                entropies=zeros,
                turns=np.repeat(np.arange(TURNS).repeat(2), segment_lengths),
                turn_rewards=tuple(rng.normal(size=TURNS)),
                turn_actions=(("Up",),) * TURNS,
                turn_validity=(True,) * TURNS,
                stop_reason=StopReason.OUT_OF_TURNS,
                texts=("",) * TURNS,
            )
        )
    return episodes


# ---------------------------------------------------------------------------- FLOPs


def estimate_scoring_flops(
    shape: Qwen2Shape, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]]
) -> float:
    """FLOPs of scoring every thought after every prompt, if each prompt is read once."""
    total, thought_lengths = 0.0, [len(thought) for thought in thoughts]
    for prompt in prompts:
        total += estimate_forward_flops(shape, [len(prompt)], 1, 0)
        total += estimate_forward_flops(shape, thought_lengths, sum(thought_lengths), shape.vocab_size, len(prompt))
    return total


# ---------------------------------------------------------------------------- phases


def make_backend(name: str, network: torch.nn.Module, settings: OptimConfig) -> TorchBackend:
    """A torch backend with the AdamW of runs for one network."""
    return TorchBackend(f"{name}_optimizer", {name: network}, make_adamw([network], [settings.lr], settings), 1.0)


def make_training_phases(networks: Networks, batch: Batch) -> dict[str, Phase]:
    """Phases of values, reference log-probabilities and both updates, in the order of a step."""
    shape, lengths, trained_tokens = networks.policy.shape, batch.count_needed_tokens().tolist(), int(batch.mask.sum())
    policy_flops, value_flops = (
        estimate_forward_flops(shape, lengths, trained_tokens, outputs) for outputs in (shape.vocab_size, 1)
    )
    random_advantages = (
        torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).to(batch.mask.device) * batch.mask
    )
    order, rows = order_length_stratified(batch.lengths), NO_GRAD_ROWS
    reference = TokenFunction.for_logprobs(networks.reference, 1.0)
    values = TokenFunction(networks.critic.model, networks.critic.score)
    # The reference is a copy of the policy, so its log-probs are also those of the policy before the update.
    old_logprobs = compute_at_trained_tokens(batch, rows, reference)
    batch, targets = (
        batch._replace(logprobs=old_logprobs),
        Targets(random_advantages, random_advantages, 0.5 * random_advantages, old_logprobs),
    )
    actor_update = ActorUpdate(networks.policy, make_backend("actor", networks.policy, ACTOR_CONFIG), ACTOR_CONFIG, 1.0)
    critic_backend = make_backend("critic", networks.critic, CriticConfig())
    return {
        "values": Phase(lambda: compute_at_trained_tokens(batch, rows, values), value_flops),
        "reference": Phase(lambda: compute_at_trained_tokens(batch, rows, reference), policy_flops),
        "update_critic": Phase(
            lambda: update_critic(networks.critic, critic_backend, batch, targets, order, CriticConfig()),
            3 * value_flops,  # a forward pass, and a backward pass that counts twice
        ),
        "update_actor": Phase(lambda: actor_update.run(batch, targets, order), 3 * policy_flops),
    }


def make_collapse_phase(policy: Qwen2, episodes: Sequence[Episode]) -> Phase:
    """Phase of the collapse diagnostics on both samples; a thought is a whole reply, its prompt all tokens before."""
    rng = np.random.default_rng(1)
    prompts, thoughts, first_thoughts = [], [], []
    for _ in range(NUM_SAMPLES):
        episode, turn = episodes[int(rng.integers(len(episodes)))], int(rng.integers(TURNS))
        turn_positions, first_positions = (
            np.flatnonzero(episode.mask & (episode.turns == turn_index)) for turn_index in (turn, 0)
        )
        prompts.append(episode.tokens[: turn_positions[0]].tolist())
        thoughts.append(episode.tokens[turn_positions].tolist())
        first_thoughts.append(episode.tokens[first_positions].tolist())
    opening_length = int(np.flatnonzero(episodes[0].mask)[0])
    openings = [episode.tokens[:opening_length].tolist() for episode in episodes[::GROUP_SIZE][:NUM_OPENINGS]]

    def run() -> None:
        scores, lengths = compute_cross_scores(policy, prompts, thoughts), torch.tensor(list(map(len, thoughts)))
        compute_information_metrics(scores, lengths, torch.arange(NUM_SAMPLES))
        compute_cross_scores(policy, openings, first_thoughts)

    shape = policy.shape
    return Phase(
        run, estimate_scoring_flops(shape, prompts, thoughts) + estimate_scoring_flops(shape, openings, first_thoughts)
    )


def measure_phase(phase: Phase, device: torch.device, peak_flops_per_s: float) -> dict[str, float | None]:
    """Seconds, TFLOPs, MFU and peak GPU memory of one phase."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = time_call(phase.run, device.type)
    return {
        "seconds": round(seconds, 3),
        "tflop": round(phase.flops / 1e12, 4),
        "mfu": round(phase.flops / seconds / peak_flops_per_s, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
    }


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shape, device = ("3b", "cuda") if torch.cuda.is_available() else ("tiny", "cpu")
    parser.add_argument(
        "--shape", choices=list(TURN_LENGTHS), default=shape, help="default: 3b if a GPU is visible, otherwise tiny"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--episodes", type=int, default=8 * GROUP_SIZE, help="a multiple of 16; default: 128")
    parser.add_argument("--tokens", type=int, help="maximum tokens of a reply; default: 400, or 24 for the shape tiny")
    parser.add_argument(
        "--keep-activations", action="store_true", help="do not recompute activations in the backward pass"
    )
    args = parser.parse_args()
    if args.episodes < GROUP_SIZE or args.episodes % GROUP_SIZE:
        parser.error(f"--episodes={args.episodes}: must be a multiple of {GROUP_SIZE}, such as 128")
    if args.tokens is not None and args.tokens < 2:
        parser.error(f"--tokens={args.tokens}: must be at least 2, such as 400")
    return args


def main() -> None:
    """Run every phase twice, and print the time of the second run."""
    args = parse_options()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in the other benchmarks, whose CPU seconds are of one thread
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    turn_lengths = TURN_LENGTHS[args.shape]._replace(reply=args.tokens or TURN_LENGTHS[args.shape].reply)
    networks = make_networks(make_shape(args.shape), device, getattr(torch, dtype), not args.keep_activations)
    episodes = make_episodes(args.episodes, turn_lengths, networks.policy.shape.vocab_size)
    batch = collate(episodes).to(device)
    phases = {"collapse": make_collapse_phase(networks.policy, episodes), **make_training_phases(networks, batch)}
    # Not timed: the first run selects kernels and allocates the optimizer's moments.
    for phase in phases.values():
        phase.run()
    peak_flops_per_s = measure_peak_flops(device.type, torch.bfloat16 if device.type == "cuda" else torch.float32)
    measurements = {name: measure_phase(phase, device, peak_flops_per_s) for name, phase in phases.items()}
    report = {
        "benchmark": "gpu_step",
        "shape": args.shape,
        "dtype": dtype,
        "episodes": len(episodes),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "conversation_tokens": int(batch.lengths.sum()),
        "trained_tokens": int(batch.mask.sum()),
        "max_length": int(batch.lengths.max()),
        "parameters": sum(weight.numel() for weight in networks.policy.parameters()),
        "peak_tflops_per_s": round(peak_flops_per_s / 1e12, 3),
        "phases": measurements,
        "seconds_all_phases": round(sum(row["seconds"] or 0.0 for row in measurements.values()), 3),
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
