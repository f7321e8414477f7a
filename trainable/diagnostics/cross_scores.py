"""Log-probs of every thought after every prompt, with each prompt read once.

The thoughts form trees in which those that begin alike share their beginning. A prompt's keys and values are kept and
a whole tree is scored after it as one row whose tokens see the prompt and their own ancestors: no key is copied for a
thought, and the last token of a thought, whose own hidden state nobody asks for, is not run at all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.backend.world import ALONE, World
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.models.interface import LanguageModel

TREE_TOKENS = 256  # of one tree: what its tokens see of each other grows with the square
PASS_TOKENS, PASS_TOKENS_CUDA = 2048, 2**16
"""Rows times length of a pass: few fit a processor's caches; a GPU reads all weights once a pass, so it takes many."""


class CrossScores(NamedTuple):
    """sums: (N, M) float64 log-prob of thought i after prompt j, summed over its tokens, in nats, at temperature 1.

    lengths: (N,) int64 tokens of each thought. Both are on the processor.
    """

    sums: Tensor
    lengths: Tensor


class Tree(NamedTuple):
    """Some of the thoughts as a tree of T tokens, of which the F that have children are run.

    rows: (R,) which thoughts. on_path: (R, T) float64, 1 where a token is part of the thought. tokens: (T,).
    parents: (T,) index of the state that predicts a token: 0 is the prompt's last, 1 + f that of run token f.
    run, depths: (F,) tokens and their depths. sees: (F, F) bool, itself and its ancestors.
    """

    rows: Tensor
    on_path: Tensor
    tokens: Tensor
    parents: Tensor
    run: Tensor
    depths: Tensor
    sees: Tensor


def cross_scores(
    model: LanguageModel, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]],
    max_tokens: int | None = None, world: World = ALONE,
) -> CrossScores:  # fmt: skip
    """Score every one of N thoughts after every one of M prompts, without gradients.

    Equal prompts are scored once, and so are equal thoughts.

    Args:
        model: what scores, on its own device; its weights and mode are left alone.
        prompts, thoughts: token ids, at least one of each; lengths may differ.
        max_tokens: rows times length of a pass at most, when prompts are read and when trees are scored: a bound on
            memory. One prompt, and one thought after one prompt, make a pass whatever their length. None:
            `PASS_TOKENS`, on a GPU `PASS_TOKENS_CUDA`.
        world: ranks that all call this with the same arguments; each scores some prompts, and all get all sums.

    Raises ValueError for an empty prompt or thought, and where a prompt and a thought outgrow the model's context.
    """
    device = model.lm_head.weight.device
    if max_tokens is None:
        max_tokens = PASS_TOKENS_CUDA if device.type == "cuda" else PASS_TOKENS
    _check(model, prompts, thoughts, max_tokens)
    columns, column_of = _distinct(prompts)
    rows, row_of = _distinct(thoughts)
    trees = list(_trees(rows, min(TREE_TOKENS, max_tokens), device))
    sums = torch.zeros((len(rows), len(columns)), dtype=torch.float64, device=device)
    with torch.inference_mode():
        longest = max(len(tree.run) for tree in trees)
        for batch in _batches([max(len(prompt), longest) for prompt in columns], max_tokens, world):
            sums[:, batch] = _after(model, [columns[number] for number in batch], trees, len(rows))
    sums = world.total(sums)
    return CrossScores(sums[row_of][:, column_of].cpu(), torch.tensor([len(thought) for thought in thoughts]))


def _check(
    model: LanguageModel, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]], max_tokens: int
) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1, such as 2048.")
    for name, given in (("prompt", prompts), ("thought", thoughts)):
        lengths = [len(tokens) for tokens in given]
        if min(lengths, default=0) == 0:
            which = f"{name} {lengths.index(0)} is empty" if lengths else f"there is no {name}"
            raise ValueError(f"{which}: scoring needs at least one {name}, each of one token or more. Leave it out.")
    prompt, thought = (max(range(len(given)), key=lambda n: len(given[n])) for given in (prompts, thoughts))
    needed, context = len(prompts[prompt]) + len(thoughts[thought]), model.shape.max_position_embeddings
    if needed > context:
        raise ValueError(
            f"prompt {prompt} has {len(prompts[prompt])} tokens and thought {thought} has {len(thoughts[thought])}, "
            f"{needed} together; the model's context has {context}. Leave the longest ones out."
        )


def _distinct(given: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different sequences, in the order in which they first come, and for each given one its number."""
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault(tuple(np.asarray(tokens).tolist()), len(numbers)) for tokens in given]
    return list(numbers), which


def _batches(lengths: Sequence[int], max_tokens: int, world: World) -> Iterator[list[int]]:
    """This rank's rows that are run together, short ones first, so that little is padding."""
    batch: list[int] = []
    for number in np.argsort(lengths, kind="stable")[world.rank :: world.size].tolist():
        if batch and (len(batch) + 1) * lengths[number] > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:  # a rank may have none
        yield batch


def _trees(thoughts: Sequence[tuple[int, ...]], size: int, device: torch.device) -> Iterator[Tree]:
    """Trees of thoughts that have at most `size` tokens, or of one; neighbours in sorted order share most."""
    rows: list[int] = []
    for row in sorted(range(len(thoughts)), key=lambda row: thoughts[row]):
        if rows and sum(len(thoughts[other]) for other in [*rows, row]) > size:
            yield _tree(thoughts, rows, device)
            rows = []
        rows.append(row)
    yield _tree(thoughts, rows, device)


def _tree(thoughts: Sequence[tuple[int, ...]], rows: Sequence[int], device: torch.device) -> Tree:
    """The tree of the thoughts at `rows`."""
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node; -1 is the prompt's end
    ends = []
    for row in rows:
        node = -1
        for token in thoughts[row]:
            node = nodes.setdefault((node, token), len(nodes))
        ends.append(node)
    parents, tokens = np.array(list(nodes), dtype=np.int64).T
    sees = np.eye(len(nodes), dtype=bool)
    for node, parent in enumerate(parents.tolist()):  # a parent comes before its children
        if parent >= 0:
            sees[node] |= sees[parent]
    run = np.unique(parents[parents >= 0])
    state = np.zeros(len(nodes) + 1, dtype=np.int64)  # the last one stands for parent -1
    state[run] = 1 + np.arange(len(run))
    depths = sees.sum(axis=1) - 1
    parts = (
        np.array(rows), sees[ends].astype(np.float64), tokens, state[parents], tokens[run], depths[run],
        sees[np.ix_(run, run)],
    )  # fmt: skip
    return Tree(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts))


def _after(model: LanguageModel, prompts: Sequence[Sequence[int]], trees: Sequence[Tree], thoughts: int) -> Tensor:
    """Sums (thoughts, B) after B prompts, which are read here."""
    device = model.lm_head.weight.device
    widest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (widest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    steps = torch.arange(widest, device=device) - (widest - lengths[:, None])
    cache = model.model.new_cache(len(prompts), widest)
    last = model.model.extend(padded, steps.clamp_min(0), steps >= 0, cache)
    sums = torch.zeros((thoughts, len(prompts)), dtype=torch.float64, device=device)
    for tree in trees:
        hidden = last[:, None]
        if len(tree.run):
            grown = model.model.branch(tree.run, tree.depths, tree.sees, lengths, cache)
            hidden = torch.cat((hidden, grown), dim=1)
        sums[tree.rows] = tree.on_path @ _token_logprobs(model, hidden, tree).double().T
    return sums


def _token_logprobs(model: LanguageModel, hidden: Tensor, tree: Tree) -> Tensor:
    """Log-probs (B, T) of a tree's tokens from the states (B, 1 + F, hidden) that predict them."""
    found = torch.empty((len(hidden), len(tree.tokens)), device=hidden.device)
    states = max(1, min(hidden.shape[1], CHUNK_ELEMENTS // model.shape.vocab_size))
    prompts = max(1, CHUNK_ELEMENTS // (states * model.shape.vocab_size))
    for first in range(0, hidden.shape[1], states):
        # The tokens that these states predict: each token has one parent.
        here = ((tree.parents >= first) & (tree.parents < first + states)).nonzero().squeeze(-1)
        parents, tokens = tree.parents[here] - first, tree.tokens[here]
        for start in range(0, len(hidden), prompts):
            logits = model.lm_head(hidden[start : start + prompts, first : first + states]).float()
            found[start : start + prompts, here] = logits[:, parents, tokens] - logits.logsumexp(-1)[:, parents]
    return found
