"""Time packed passes (without padding) and padded ones, alternately in one process. Prints a JSON object.

The padded method is that of an earlier `Qwen2Trunk.compute_hidden_states`: the rows of a pass form a rectangle, and an
update has passes of 16 rows. Both methods compute the log-probs of a batch's trained tokens and their gradient
(update), and the log-probs alone, then in the same passes of 8 rows (reference). Batches: one rollout of the laptop
preset; the same with every token repeated four times; on a GPU, synthetic conversations of the published lengths, for a
Qwen2.5-0.5B with random weights in bfloat16.
Run: python benchmarks/packing.py; python benchmarks/packing.py --device cuda
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from gpu_step import TURN_LENGTHS, make_episodes, make_networks, make_shape
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

from search_spaces.declaration.presets import PRESETS
from trainable.algo.batching import order_length_stratified
from trainable.algo.vocabulary import logprobs_from_hidden
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.qwen2 import Qwen2, Qwen2Trunk, compute_rotary
from trainable.ppo.phases import time_call
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import Targets, make_passes
from trainable.rollout.episode import Batch, collate

MINI_BATCH_SIZE, PADDED_PASS_ROWS, NO_GRAD_ROWS, PADDED_PASS_TOKENS = 32, 16, 8, 16_384
PassTensors = Iterable[tuple[Tensor, Tensor, Tensor]]
"""Inputs of each pass: tokens (b, t), flat positions (n,) that predict, and the tokens (n,) that they predict."""
HiddenStateFunction = Callable[[Qwen2Trunk, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A model and a batch to run it on."""

    model: Qwen2
    batch: Batch


def compute_padded_hidden_states(trunk: Qwen2Trunk, tokens: Tensor, flat_positions: Tensor) -> Tensor:
    """As `Qwen2Trunk.compute_hidden_states`, but for the whole rectangle, and without recomputing activations."""
    with trunk.pass_settings.autocast(tokens.device):
        x = trunk.embed_tokens(tokens)
        cos, sin = compute_rotary(torch.arange(tokens.shape[1], device=tokens.device), trunk.shape)
        for layer_number, layer in enumerate(trunk.blocks, 1):
            heads = layer.self_attn.project_heads(layer.input_layernorm(x), cos, sin)
            q, k, v = (projection.transpose(1, 2) for projection in heads)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            mixed = mixed.transpose(1, 2).flatten(2)
            # After the last attention only positions that predict a trained token are needed, also in the padded
            # method.
            if layer_number == len(trunk.layers):
                x, mixed = x.flatten(0, 1)[flat_positions], mixed.flatten(0, 1)[flat_positions]
            x = layer.finish(x, mixed)
        normed: Tensor = trunk.norm(x)
        return normed


def make_row_passes(batch: Batch, groups: Iterable[Tensor]) -> PassTensors:
    """One pass per group of rows."""
    for rows in groups:
        selected_batch = batch.select_rows(rows)
        yield (
            selected_batch.tokens,
            selected_batch.find_prediction_positions(),
            selected_batch.tokens[selected_batch.mask],
        )


def split_padded_rows(batch: Batch) -> Iterator[Tensor]:
    """Rows of each padded pass of an update: consecutive rows of a mini-batch."""
    # Fewer rows for long sequences, so that a rectangle has at most PADDED_PASS_TOKENS tokens.
    size = max(1, min(PADDED_PASS_ROWS, PADDED_PASS_TOKENS // batch.tokens.shape[1]))
    for rows in order_length_stratified(batch.lengths).split(MINI_BATCH_SIZE):
        yield from rows.split(size)


def make_packed_passes(batch: Batch) -> PassTensors:
    """The passes of an update as the trainer splits them."""
    zeros = torch.zeros(batch.mask.shape, device=batch.mask.device)
    targets = Targets(zeros, zeros, zeros, None)
    for rows in order_length_stratified(batch.lengths).split(MINI_BATCH_SIZE):
        for pass_inputs in make_passes(batch, targets._replace(loss_weights=zeros), rows):
            yield (
                pass_inputs.batch.tokens,
                pass_inputs.batch.find_prediction_positions(),
                pass_inputs.select_trained(pass_inputs.batch.tokens),
            )


def run_passes(
    model: Qwen2, compute_hidden: HiddenStateFunction, iterate_passes: Callable[[], PassTensors], with_gradients: bool
) -> list[Tensor]:
    """The gradient of the sum of all log-probs, by parameter; or without gradients, the log-probs of each pass.

    Both methods return the same quantities, so that `compare_methods` can compare them.
    """
    model.zero_grad(set_to_none=True)
    pass_logprobs = []
    with torch.set_grad_enabled(with_gradients):
        for tokens, flat_positions, targets in iterate_passes():
            head = partial(logprobs_from_hidden, tokens=targets, temperature=1.0, chunk_elements=2**27)
            logprobs = model.lm_head(compute_hidden(model.model, tokens, flat_positions), head)
            if with_gradients:
                logprobs.sum().backward()
            else:
                pass_logprobs.append(logprobs)
    return (
        [weight.grad for weight in model.parameters() if weight.grad is not None] if with_gradients else pass_logprobs
    )


def make_methods(case: Case, with_gradients: bool) -> dict[str, Callable[[], list[Tensor]]]:
    """Both methods, as functions without arguments. with_gradients: update, otherwise reference."""
    model, batch = case
    # Passes without gradients sort rows by length, as the trainer does, so that rectangles have little padding.
    sorted_rows = torch.argsort(batch.lengths, stable=True).split(NO_GRAD_ROWS)
    methods: Mapping[str, tuple[HiddenStateFunction, Callable[[], PassTensors]]] = {
        "padded": (
            compute_padded_hidden_states,
            lambda: make_row_passes(batch, split_padded_rows(batch) if with_gradients else sorted_rows),
        ),
        "packed": (
            Qwen2Trunk.compute_hidden_states,
            lambda: make_packed_passes(batch) if with_gradients else make_row_passes(batch, sorted_rows),
        ),
    }
    return {
        name: partial(run_passes, model, compute_hidden, iterate_passes, with_gradients)
        for name, (compute_hidden, iterate_passes) in methods.items()
    }


def compute_padding_fraction(batch: Batch, groups: Iterable[Tensor]) -> float:
    """Fraction of the tokens of the padded rectangles that packed passes do not compute."""
    needed_tokens, padded_tokens = 0, 0
    for rows in groups:
        needed_tokens += int(batch.count_needed_tokens()[rows].sum())
        padded_tokens += len(rows) * int(batch.lengths[rows].max())
    return 1 - needed_tokens / padded_tokens


def measure_seconds(work: Callable[[], object], device_type: str) -> float:
    """Wall seconds of `work` on a GPU; CPU seconds on a CPU, which other processes may share."""
    if device_type == "cuda":
        return time_call(work, device_type)
    started = time.process_time()
    work()
    return time.process_time() - started


def compare_methods(case: Case, with_gradients: bool, repetitions: int) -> dict[str, object]:
    """Time both methods alternately. A first call of each is not timed, and compares their results."""
    device_type = case.batch.tokens.device.type
    methods = make_methods(case, with_gradients)
    padded_result, packed_result = (
        torch.cat([tensor.flatten().double() for tensor in method()]) for method in methods.values()
    )
    seconds_by_method: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name, method in methods.items():
            seconds_by_method[name].append(measure_seconds(method, device_type))
    ratios = [
        packed / padded for packed, padded in zip(seconds_by_method["packed"], seconds_by_method["padded"], strict=True)
    ]
    order = torch.argsort(case.batch.lengths, stable=True)
    row_groups = split_padded_rows(case.batch) if with_gradients else order.split(NO_GRAD_ROWS)
    return {
        "padding_fraction": round(compute_padding_fraction(case.batch, row_groups), 3),
        "seconds": {name: round(statistics.median(seconds), 4) for name, seconds in seconds_by_method.items()},
        "packed_over_padded": {
            "median": round(statistics.median(ratios), 3),
            # statistics.quantiles gives three quartiles; the second is the median.
            "quartiles": [round(quartile, 3) for quartile in statistics.quantiles(ratios)[::2]],
        },
        "relative_difference": float((packed_result - padded_result).norm() / padded_result.norm()),
    }


def make_laptop_case() -> Case:
    """The batch of the first step of the laptop preset."""
    trainer = PPOTrainer(
        apply_overrides(
            RunConfig(),
            # Both ways in torch, which pads or packs.
            {**PRESETS["laptop"].settings, "model.compiled_passes": False, "trainer.total_training_steps": 1},
        )
    )
    config = trainer.config
    episodes = trainer.roll_out(trainer.levels[0], config.env.group_size, "sampling")
    return Case(trainer.model, collate(episodes))


def repeat_tokens(case: Case) -> Case:
    """A quarter of the episodes, with every token repeated four times: equally many tokens, in longer sequences."""
    batch = Batch(*(tensor[::4] for tensor in case.batch))
    repeated_fields = {
        name: tensor.repeat_interleave(4, dim=1) for name, tensor in batch._asdict().items() if tensor.dim() == 2
    }
    return Case(case.model, batch._replace(**repeated_fields, lengths=4 * batch.lengths))


def make_published_case(device: torch.device) -> Case:
    """128 synthetic conversations of five turns, for a Qwen2.5-0.5B with random weights."""
    model: nn.Module = make_networks(make_shape("0.5b"), device, torch.bfloat16, recompute=False).policy
    assert isinstance(model, Qwen2)
    episodes = make_episodes(128, TURN_LENGTHS["0.5b"], model.shape.vocab_size)
    return Case(model, collate(episodes).to(device))


def main() -> None:
    """Print the ratios of both methods for update and reference on every batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=21, help="timed repetitions of each method; default: 21")
    args = parser.parse_args()
    if args.repetitions < 2:  # quartiles need two
        parser.error(f"--repetitions={args.repetitions}: must be at least 2, such as 21")
    if args.device == "cuda":
        cases = {"published lengths, 0.5b": make_published_case(torch.device("cuda"))}
    else:
        torch.set_num_threads(1)
        cases = {"laptop": make_laptop_case()}
        cases["laptop, every token four times"] = repeat_tokens(cases["laptop"])
    results = {
        name: {work: compare_methods(case, work == "update", args.repetitions) for work in ("update", "reference")}
        for name, case in cases.items()
    }
    report = {
        "benchmark": "packing",
        "device": args.device,
        **results,
        "repetitions": args.repetitions,
        **describe(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
