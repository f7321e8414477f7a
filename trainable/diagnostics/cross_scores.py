"""Log-probs of every thought after every prompt, with each prompt read once.

Thoughts are merged into trees that share common beginnings. The keys and values of a prompt are cached. A tree is
scored after the prompt as one row, whose tokens attend to the prompt and their ancestors, so that keys are not copied
for each thought. The model does not run on the last token of a thought, because no log-prob depends on its hidden
state.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainable.algo.batching import split_by_tokens
from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.models.interface import LanguageModel

TREE_TOKENS = 256
"""Maximum number of tokens in a tree. Its attention mask grows with the square of this number."""
PASS_TOKENS, PASS_TOKENS_CUDA = 2048, 2**16
"""Maximum rows times length of a pass, on a CPU and on a GPU. A prompt, or a thought after one, may be longer alone.

The first fits into a CPU's caches. The second is large, because a GPU reads all weights in every pass.
"""


class ThoughtTree(NamedTuple):
    """Some thoughts as a tree of T tokens. The model runs only on the F tokens with children.

    thought_rows: (R,) indices of the thoughts. is_on_path: (R, T) float64, 1 where a token is part of the thought.
    tokens: (T,). parents: (T,) index of the state that predicts each token: 0 for the last state of the prompt, 1 + f
    for the state of token f of run_tokens. run_tokens, run_depths: (F,) tokens and their depths. run_visibility: (F, F)
    bool, True for a token itself and its ancestors.
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
    world: World = SINGLE_PROCESS,
) -> Tensor:
    """Score each of N thoughts after each of M prompts, without gradients.

    Returns (N, M) float64 on the CPU: the summed log-probs of the tokens of thought i after prompt j, in nats, at
    temperature 1. Equal prompts and equal thoughts are scored once.

    model: the scoring model; its weights and mode are unchanged. prompts, thoughts: token ids, at least one of each,
    none empty. Any prompt and thought together must fit into the model's context. world: ranks that all call this
    with the same arguments. Each scores some prompts, and all get all sums.
    """
    device = model.lm_head.weight.device
    max_tokens = PASS_TOKENS_CUDA if device.type == "cuda" else PASS_TOKENS
    unique_prompts, column_of = _deduplicate(prompts)
    unique_thoughts, row_of = _deduplicate(thoughts)
    trees = list(_make_trees(unique_thoughts, min(TREE_TOKENS, max_tokens), device))
    logprob_sums = torch.zeros((len(unique_thoughts), len(unique_prompts)), dtype=torch.float64, device=device)
    with torch.inference_mode():
        # A pass has one row per prompt, as long as the prompt (when reading it) or the tree (when scoring it).
        longest_tree = max(len(tree.run_tokens) for tree in trees)
        lengths = torch.tensor([max(len(prompt), longest_tree) for prompt in unique_prompts], device="cpu")
        local_rows = torch.argsort(lengths, stable=True)[world.rank :: world.size]
        for index in split_by_tokens(lengths[local_rows], max_tokens, needs_padding=True):
            batch = local_rows[index].tolist()
            logprob_sums[:, batch] = _score_after_prompts(
                model, [unique_prompts[number] for number in batch], trees, len(unique_thoughts)
            )
    # Each column is 0 on all ranks but one, so the sum over ranks gathers them.
    logprob_sums = world.all_reduce(logprob_sums)
    return logprob_sums[row_of][:, column_of].cpu()


def _deduplicate(sequences: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Find the distinct sequences, in order of first occurrence, and the index of each given sequence in them."""
    index_of: dict[tuple[int, ...], int] = {}
    indices = [index_of.setdefault(tuple(np.asarray(tokens).tolist()), len(index_of)) for tokens in sequences]
    return list(index_of), indices


def _make_trees(thoughts: Sequence[tuple[int, ...]], max_tokens: int, device: torch.device) -> Iterator[ThoughtTree]:
    """Yield trees of at most `max_tokens` tokens, or of one thought.

    Thoughts are sorted, so that thoughts with a common prefix are in the same tree. For simplicity, shared tokens are
    counted repeatedly, which only makes some trees smaller than necessary.
    """
    rows: list[int] = []
    for row in sorted(range(len(thoughts)), key=lambda row: thoughts[row]):
        if rows and sum(len(thoughts[other]) for other in [*rows, row]) > max_tokens:
            yield _make_tree(thoughts, rows, device)
            rows = []
        rows.append(row)
    yield _make_tree(thoughts, rows, device)


def _make_tree(thoughts: Sequence[tuple[int, ...]], rows: Sequence[int], device: torch.device) -> ThoughtTree:
    """Make the tree of the thoughts at `rows`."""
    # Dictionaries keep insertion order, so a node's number is its position in `nodes`.
    nodes: dict[tuple[int, int], int] = {}  # nodes by (parent, token); parent -1 is the end of the prompt
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
    # The model skips nodes without children, the ends of thoughts, since their states predict no token.
    run_nodes = np.unique(parents[parents >= 0])
    state_index = np.zeros(len(nodes) + 1, dtype=np.int64)  # the last entry is for parent -1
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
    """Read B prompts into a cache; return the log-prob sums (thoughts, B) of all thoughts after them."""
    device = model.lm_head.weight.device
    # Pad on the left, so that the last state of every row predicts the first token of a thought.
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
        # State 0 is the prompt's last state. The states of run tokens follow, if any thought has several tokens.
        hidden = last_hidden[:, None]
        if len(tree.run_tokens):
            tree_hidden = model.model.forward_tree(
                tree.run_tokens, tree.run_depths, tree.run_visibility, lengths, cache
            )
            hidden = torch.cat((hidden, tree_hidden), dim=1)
        logprob_sums[tree.thought_rows] = tree.is_on_path @ _compute_token_logprobs(model, hidden, tree).double().T
    return logprob_sums


def _compute_token_logprobs(model: LanguageModel, hidden: Tensor, tree: ThoughtTree) -> Tensor:
    """Compute log-probs (B, T) of a tree's tokens from the states (B, 1 + F, hidden) that predict them.

    States are processed in chunks, so that at most `CHUNK_ELEMENTS` logits are in memory.
    """
    logprobs = torch.empty((len(hidden), len(tree.tokens)), device=hidden.device)
    chunk_states = max(1, min(hidden.shape[1], CHUNK_ELEMENTS // model.shape.vocab_size))
    chunk_prompts = max(1, CHUNK_ELEMENTS // (chunk_states * model.shape.vocab_size))
    for first_state in range(0, hidden.shape[1], chunk_states):
        # The tokens that these states predict. Each token has one parent and is therefore in one chunk.
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
