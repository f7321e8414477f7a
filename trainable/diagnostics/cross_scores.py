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

from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.models.interface import LanguageModel

TREE_TOKENS = 256  # of one tree: what its tokens see of each other grows with the square
PASS_TOKENS, PASS_TOKENS_CUDA = 2048, 2**16
"""Rows times length of a pass: few fit a processor's caches; a GPU reads all weights once a pass, so it takes many."""


class CrossScores(NamedTuple):
    """sums: (N, M) float64 log-prob of thought i after prompt j, summed over its tokens, in nats, at temperature 1.

    lengths: (N,) int64 tokens of each thought. Both are on the processor.
    """

    logprob_sums: Tensor
    lengths: Tensor


class ThoughtTree(NamedTuple):
    """Some of the thoughts as a tree of T tokens, of which the F that have children are run.

    rows: (R,) which thoughts. on_path: (R, T) float64, 1 where a token is part of the thought. tokens: (T,).
    parents: (T,) index of the state that predicts a token: 0 is the prompt's last, 1 + f that of run token f.
    run, depths: (F,) tokens and their depths. sees: (F, F) bool, itself and its ancestors.
    """

    thought_rows: Tensor
    is_on_path: Tensor
    tokens: Tensor
    parents: Tensor
    run_tokens: Tensor
    run_depths: Tensor
    run_visibility: Tensor


def compute_cross_scores(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    thoughts: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    world: World = SINGLE_PROCESS,
) -> CrossScores:
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
    _check_inputs(model, prompts, thoughts, max_tokens)
    unique_prompts, column_of = _deduplicate(prompts)
    unique_thoughts, row_of = _deduplicate(thoughts)
    trees = list(_make_trees(unique_thoughts, min(TREE_TOKENS, max_tokens), device))
    logprob_sums = torch.zeros((len(unique_thoughts), len(unique_prompts)), dtype=torch.float64, device=device)
    with torch.inference_mode():
        longest_tree = max(len(tree.run_tokens) for tree in trees)
        for batch in _make_batches([max(len(prompt), longest_tree) for prompt in unique_prompts], max_tokens, world):
            logprob_sums[:, batch] = _score_after_prompts(
                model, [unique_prompts[number] for number in batch], trees, len(unique_thoughts)
            )
    logprob_sums = world.all_reduce(logprob_sums)
    return CrossScores(logprob_sums[row_of][:, column_of].cpu(), torch.tensor([len(thought) for thought in thoughts]))


def _check_inputs(
    model: LanguageModel, prompts: Sequence[Sequence[int]], thoughts: Sequence[Sequence[int]], max_tokens: int
) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1, such as 2048.")
    for name, sequences in (("prompt", prompts), ("thought", thoughts)):
        lengths = [len(tokens) for tokens in sequences]
        if min(lengths, default=0) == 0:
            problem = f"{name} {lengths.index(0)} is empty" if lengths else f"there is no {name}"
            raise ValueError(f"{problem}: scoring needs at least one {name}, each of one token or more. Leave it out.")
    longest_prompt, longest_thought = (
        max(range(len(given)), key=lambda n: len(given[n])) for given in (prompts, thoughts)
    )
    needed_tokens, context = (
        len(prompts[longest_prompt]) + len(thoughts[longest_thought]),
        model.shape.max_position_embeddings,
    )
    if needed_tokens > context:
        raise ValueError(
            f"prompt {longest_prompt} has {len(prompts[longest_prompt])} tokens and thought {longest_thought} has {len(thoughts[longest_thought])}, "
            f"{needed_tokens} together; the model's context has {context}. Leave the longest ones out."
        )


def _deduplicate(sequences: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different sequences, in the order in which they first come, and for each given one its number."""
    index_of: dict[tuple[int, ...], int] = {}
    indices = [index_of.setdefault(tuple(np.asarray(tokens).tolist()), len(index_of)) for tokens in sequences]
    return list(index_of), indices


def _make_batches(lengths: Sequence[int], max_tokens: int, world: World) -> Iterator[list[int]]:
    """This rank's rows that are run together, short ones first, so that little is padding."""
    batch: list[int] = []
    for number in np.argsort(lengths, kind="stable")[world.rank :: world.size].tolist():
        if batch and (len(batch) + 1) * lengths[number] > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:  # a rank may have none
        yield batch


def _make_trees(thoughts: Sequence[tuple[int, ...]], max_tokens: int, device: torch.device) -> Iterator[ThoughtTree]:
    """Trees of thoughts that have at most `size` tokens, or of one; neighbours in sorted order share most."""
    rows: list[int] = []
    for row in sorted(range(len(thoughts)), key=lambda row: thoughts[row]):
        if rows and sum(len(thoughts[other]) for other in [*rows, row]) > max_tokens:
            yield _make_tree(thoughts, rows, device)
            rows = []
        rows.append(row)
    yield _make_tree(thoughts, rows, device)


def _make_tree(thoughts: Sequence[tuple[int, ...]], rows: Sequence[int], device: torch.device) -> ThoughtTree:
    """The tree of the thoughts at `rows`."""
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node; -1 is the prompt's end
    end_nodes = []
    for row in rows:
        node = -1
        for token in thoughts[row]:
            node = nodes.setdefault((node, token), len(nodes))
        end_nodes.append(node)
    parents, tokens = np.array(list(nodes), dtype=np.int64).T
    is_visible = np.eye(len(nodes), dtype=bool)
    for node, parent in enumerate(parents.tolist()):  # a parent comes before its children
        if parent >= 0:
            is_visible[node] |= is_visible[parent]
    run_nodes = np.unique(parents[parents >= 0])
    state_index = np.zeros(len(nodes) + 1, dtype=np.int64)  # the last one stands for parent -1
    state_index[run_nodes] = 1 + np.arange(len(run_nodes))
    depths = is_visible.sum(axis=1) - 1
    arrays = (
        np.array(rows),
        is_visible[end_nodes].astype(np.float64),
        tokens,
        state_index[parents],
        tokens[run_nodes],
        depths[run_nodes],
        is_visible[np.ix_(run_nodes, run_nodes)],
    )
    return ThoughtTree(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


def _score_after_prompts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], trees: Sequence[ThoughtTree], num_thoughts: int
) -> Tensor:
    """Sums (thoughts, B) after B prompts, which are read here."""
    device = model.lm_head.weight.device
    longest_prompt = max(len(prompt) for prompt in prompts)
    padded_tokens = torch.tensor(
        [[0] * (longest_prompt - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    positions = torch.arange(longest_prompt, device=device) - (longest_prompt - lengths[:, None])
    cache = model.model.make_cache(len(prompts), longest_prompt)
    last_hidden = model.model.extend(padded_tokens, positions.clamp_min(0), positions >= 0, cache)
    logprob_sums = torch.zeros((num_thoughts, len(prompts)), dtype=torch.float64, device=device)
    for tree in trees:
        hidden = last_hidden[:, None]
        if len(tree.run_tokens):
            tree_hidden = model.model.forward_tree(
                tree.run_tokens, tree.run_depths, tree.run_visibility, lengths, cache
            )
            hidden = torch.cat((hidden, tree_hidden), dim=1)
        logprob_sums[tree.thought_rows] = tree.is_on_path @ _compute_token_logprobs(model, hidden, tree).double().T
    return logprob_sums


def _compute_token_logprobs(model: LanguageModel, hidden: Tensor, tree: ThoughtTree) -> Tensor:
    """Log-probs (B, T) of a tree's tokens from the states (B, 1 + F, hidden) that predict them."""
    logprobs = torch.empty((len(hidden), len(tree.tokens)), device=hidden.device)
    chunk_states = max(1, min(hidden.shape[1], CHUNK_ELEMENTS // model.shape.vocab_size))
    chunk_prompts = max(1, CHUNK_ELEMENTS // (chunk_states * model.shape.vocab_size))
    for first_state in range(0, hidden.shape[1], chunk_states):
        # The tokens that these states predict: each token has one parent.
        token_indices = (
            ((tree.parents >= first_state) & (tree.parents < first_state + chunk_states)).nonzero().squeeze(-1)
        )
        parents, tokens = tree.parents[token_indices] - first_state, tree.tokens[token_indices]
        for start in range(0, len(hidden), chunk_prompts):
            logits = model.lm_head(
                hidden[start : start + chunk_prompts, first_state : first_state + chunk_states]
            ).float()
            logprobs[start : start + chunk_prompts, token_indices] = (
                logits[:, parents, tokens] - logits.logsumexp(-1)[:, parents]
            )
    return logprobs
