"""Passes without padding beside padded ones, by turns in one process, as one JSON object.

The padded route is the one that `Qwen2Trunk.hidden_at` had before: rows of a pass as a rectangle, passes of 16
rows. Both make the log-probs of the trained tokens of a batch and their gradient (update), and the log-probs alone,
both in the same passes of 8 rows (reference). Batches: one rollout of the laptop preset; the same with every token four
times; on a GPU made-up conversations of the published lengths, for a Qwen2.5-0.5B with random weights in bfloat16.
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
from gpu_step import SCALES, make_episodes, make_networks, shape_of
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

from search_spaces.declaration.presets import PRESETS
from trainable.algo.batching import length_stratified_order
from trainable.algo.vocabulary import logprobs_from_hidden
from trainable.config.run_config import RunConfig, with_overrides
from trainable.config.seeds import stream
from trainable.models.qwen2 import Qwen2, Qwen2Trunk
from trainable.models.qwen2_shape import rotary
from trainable.ppo.flops import clocked
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import Targets, weighted_passes
from trainable.rollout.batch import Batch, collate, mini_batches

MINI, ROWS, ROWS_WITHOUT_GRADIENTS, TOKENS = 32, 16, 8, 16_384
Cut = Iterable[tuple[Tensor, Tensor, Tensor]]
"""Passes: tokens (b, t), flat positions (n,) to predict from, and the tokens (n,) that they predict."""
Route = Callable[[Qwen2Trunk, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A model and a batch to run it on."""

    model: Qwen2
    batch: Batch


def padded_hidden_at(trunk: Qwen2Trunk, tokens: Tensor, where: Tensor) -> Tensor:
    """What `Qwen2Trunk.hidden_at` gives, every token of the rectangle computed; blocks are kept whole."""
    with trunk._autocast(tokens.device):
        x = trunk.embed_tokens(tokens)
        cos, sin = rotary(torch.arange(tokens.shape[1], device=tokens.device), trunk.shape)
        for number, layer in enumerate(trunk.blocks, 1):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            mixed = mixed.transpose(1, 2).flatten(2)
            if number == len(trunk.layers):
                x, mixed = x.flatten(0, 1)[where], mixed.flatten(0, 1)[where]
            x = layer.finish(x, mixed)
        normed: Tensor = trunk.norm(x)
        return normed


def by_rows(batch: Batch, groups: Iterable[Tensor]) -> Cut:
    """A pass for each group of rows."""
    for rows in groups:
        part = batch.rows(rows)
        yield part.tokens, part.where(), part.tokens[part.mask]


def padded_updates(batch: Batch) -> Iterator[Tensor]:
    """Rows of each pass of an update as they were: the mini-batches' consecutive ones."""
    size = max(1, min(ROWS, TOKENS // batch.tokens.shape[1]))
    for rows in mini_batches(length_stratified_order(batch.lengths), MINI):
        yield from rows.split(size)


def packed_updates(batch: Batch) -> Cut:
    """The passes of an update as the trainer cuts them."""
    nothing = torch.zeros(batch.mask.shape, device=batch.mask.device)
    targets = Targets(nothing, nothing, nothing, None)
    for rows in mini_batches(length_stratified_order(batch.lengths), MINI):
        for part in weighted_passes(batch, targets, rows, nothing[rows]):
            yield part.batch.tokens, part.batch.where(), part.flat(part.batch.tokens)


def run(model: Qwen2, route: Route, cut: Callable[[], Cut], with_gradients: bool) -> list[Tensor]:
    """The gradient of the sum of all log-probs; or those log-probs, pass by pass."""
    model.zero_grad(set_to_none=True)
    found = []
    with torch.set_grad_enabled(with_gradients):
        for tokens, where, targets in cut():
            head = partial(logprobs_from_hidden, tokens=targets, temperature=1.0, elements=2**27)
            logprobs = model.lm_head(route(model.model, tokens, where), head)
            if with_gradients:
                logprobs.sum().backward()
            else:
                found.append(logprobs)
    return [weight.grad for weight in model.parameters() if weight.grad is not None] if with_gradients else found


def routes(case: Case, with_gradients: bool) -> dict[str, Callable[[], list[Tensor]]]:
    """Both ways to do one piece of work."""
    model, batch = case
    sorted_rows = torch.argsort(batch.lengths, stable=True).split(ROWS_WITHOUT_GRADIENTS)
    cuts: Mapping[str, tuple[Route, Callable[[], Cut]]] = {
        "padded": (padded_hidden_at,
                   lambda: by_rows(batch, padded_updates(batch) if with_gradients else sorted_rows)),
        "packed": (Qwen2Trunk.hidden_at,
                   lambda: packed_updates(batch) if with_gradients else by_rows(batch, sorted_rows)),
    }  # fmt: skip
    return {name: partial(run, model, route, cut, with_gradients) for name, (route, cut) in cuts.items()}


def padding(batch: Batch, groups: Iterable[Tensor]) -> float:
    """Share of the rectangles of these passes that no pass reads now."""
    needed, whole = 0, 0
    for rows in groups:
        needed += int(batch.read_lengths()[rows].sum())
        whole += len(rows) * int(batch.lengths[rows].max())
    return 1 - needed / whole


def seconds(work: Callable[[], object], kind: str) -> float:
    """Seconds of `work` on a GPU; on a processor, which may be shared, CPU seconds."""
    if kind == "cuda":
        return clocked(work, kind)
    started = time.process_time()
    work()
    return time.process_time() - started


def compared(case: Case, with_gradients: bool, repetitions: int) -> dict[str, object]:
    """What both ways take, by turns, after one call of each, in which they are checked against each other."""
    kind = case.batch.tokens.device.type
    ways = routes(case, with_gradients)
    wanted, found = (torch.cat([part.flatten().double() for part in way()]) for way in ways.values())
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            spent[name].append(seconds(way, kind))
    ratios = [packed / padded for packed, padded in zip(spent["packed"], spent["padded"], strict=True)]
    order = torch.argsort(case.batch.lengths, stable=True)
    cut = padded_updates(case.batch) if with_gradients else order.split(ROWS_WITHOUT_GRADIENTS)
    return {
        "padding_share": round(padding(case.batch, cut), 3),
        "seconds": {name: round(statistics.median(those), 4) for name, those in spent.items()},
        "packed_over_padded": {"median": round(statistics.median(ratios), 3),
                               "quartiles": [round(cut, 3) for cut in statistics.quantiles(ratios)[::2]]},
        "relative_difference": float((found - wanted).norm() / wanted.norm()),
    }  # fmt: skip


def laptop() -> Case:
    """The batch of a first step of the laptop preset."""
    trainer = PPOTrainer(with_overrides(RunConfig(), {**PRESETS["laptop"], "trainer.total_training_steps": 1}))
    config = trainer.config
    episodes = trainer.roll_out(trainer.levels[0], config.env.group_size, stream(0, "sampling", 1))
    return Case(trainer.model, collate(episodes))


def four_times(case: Case) -> Case:
    """A quarter of the episodes, with every token four times."""
    batch = Batch(*(part[::4] for part in case.batch))
    longer = {name: part.repeat_interleave(4, dim=1) for name, part in batch._asdict().items() if part.dim() == 2}
    return Case(case.model, batch._replace(**longer, lengths=4 * batch.lengths))


def published(device: torch.device) -> Case:
    """128 made-up conversations of five turns, for a Qwen2.5-0.5B with random weights."""
    model: nn.Module = make_networks(shape_of("0.5b"), device, torch.bfloat16, recompute=False).policy
    assert isinstance(model, Qwen2)
    episodes = make_episodes(128, SCALES["0.5b"], model.shape.vocab_size)
    return Case(model, Batch(*(part.to(device) for part in collate(episodes))))


def main() -> None:
    """Ratios of both pieces of work on every batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=21)
    given = parser.parse_args()
    if given.repetitions < 2:
        parser.error(f"--repetitions is {given.repetitions}; it must be at least 2, such as 21")
    if given.device == "cuda":
        cases = {"published lengths, 0.5b": published(torch.device("cuda"))}
    else:
        torch.set_num_threads(1)
        cases = {"laptop": laptop()}
        cases["laptop, every token four times"] = four_times(cases["laptop"])
    results = {
        name: {work: compared(case, work == "update", given.repetitions) for work in ("update", "reference")}
        for name, case in cases.items()
    }
    print(json.dumps({"benchmark": "packing", "device": given.device, **results,
                      "repetitions": given.repetitions, **describe()}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
