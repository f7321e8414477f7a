"""Literal versions of trainable/algo/gradient_signal.py on lists of vectors, and a bandit that can be enumerated."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tests.oracles.algo import aggregate
from tests.strategies.algo import numbers
from trainable.algo.losses import entropy_from_logits, estimate_kl, full_kl, ppo_clip_loss

Vector = Sequence[float]

REWARDS = torch.tensor([[1.0, -0.5, 0.2], [0.0, 2.0, -1.0]], dtype=torch.float64)
OFFSETS = torch.tensor([[0.0, 0.7, -0.4], [-1.1, 0.3, 0.5]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.6, -0.8, 0.1], [0.2, 0.9, -0.7]], dtype=torch.float64)
THETA = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
ENTROPY_COEFF, KL_LOSS_COEF = 0.2, 0.3
BANDIT_COMPONENTS = {"task": [1.0, 0, 0], "entropy": [0, 1.0, 0], "kl": [0, 0, 1.0], "whole": [1.0, 1.0, 1.0]}


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def mean(vectors: Sequence[Vector], counts: Sequence[float]) -> list[float]:
    total = math.fsum(counts)
    return [
        math.fsum(n * x for n, x in zip(counts, column, strict=True)) / total for column in zip(*vectors, strict=True)
    ]


def squared_distance(a: Vector, b: Vector) -> float:
    return math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def noise(vectors: Sequence[Vector], counts: Sequence[float]) -> float:
    """Weighted squared distances of the folds from their mean, over K − 1."""
    center, total = mean(vectors, counts), math.fsum(counts)
    return math.fsum(n / total * squared_distance(x, center) for n, x in zip(counts, vectors, strict=True)) / (
        len(vectors) - 1
    )


def signal(vectors: Sequence[Vector], counts: Sequence[float]) -> float:
    center = mean(vectors, counts)
    return dot(center, center) - noise(vectors, counts)


def mean_of_products(vectors: Sequence[Vector]) -> float:
    """Mean of <x_k, x_l> over all ordered pairs k ≠ l."""
    pairs = [dot(a, b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    return math.fsum(pairs) / len(pairs)


def split_halves(vectors: Sequence[Vector]) -> Iterator[tuple[list[float], list[float]]]:
    """Means of both halves, for every split of an even number of folds into two halves."""
    folds = range(len(vectors))
    for chosen_folds in combinations(folds, len(vectors) // 2):
        one = [vectors[k] for k in chosen_folds]
        other = [vectors[k] for k in folds if k not in chosen_folds]
        yield mean(one, [1] * len(one)), mean(other, [1] * len(other))


def compute_interval(
    vectors: Sequence[Vector], counts: Sequence[float], confidence_level: float
) -> tuple[float, float]:
    """Compute the jackknife interval of the ratio: it is computed again without each of the folds."""
    folds, ratios = len(vectors), []
    for left_out in range(folds):
        remaining_vectors = [x for k, x in enumerate(vectors) if k != left_out]
        remaining_counts = [n for k, n in enumerate(counts) if k != left_out]
        noise_of_all = noise(remaining_vectors, remaining_counts) * math.fsum(remaining_counts) / math.fsum(counts)
        ratios.append(signal(remaining_vectors, remaining_counts) / noise_of_all)
    center = math.fsum(ratios) / folds
    error = math.sqrt((folds - 1) / folds * math.fsum((r - center) ** 2 for r in ratios))
    half_width = float(stats.t.ppf(0.5 + confidence_level / 2, folds - 1)) * error
    ratio = signal(vectors, counts) / noise(vectors, counts)
    return ratio - half_width, ratio + half_width


def cross_products(folds: Sequence[Sequence[Vector]], counts: Sequence[float]) -> list[float]:
    """Compute <G_c, G> of each component without the noise that both share, for folds (K, C, D)."""
    total, products = math.fsum(counts), []
    fold_totals = [
        [math.fsum(entries) for entries in zip(*component_vectors, strict=True)] for component_vectors in folds
    ]
    center = mean(fold_totals, counts)
    for fold_vectors in zip(*folds, strict=True):
        component_mean = mean(fold_vectors, counts)
        shared_noise = math.fsum(
            n / total * (x - a) * (y - b)
            for n, fold_vector, fold_total in zip(counts, fold_vectors, fold_totals, strict=True)
            for x, a, y, b in zip(fold_vector, component_mean, fold_total, center, strict=True)
        )
        products.append(dot(component_mean, center) - shared_noise / (len(folds) - 1))
    return products


def compute_share_intervals(
    folds: Sequence[Sequence[Vector]], counts: Sequence[float], confidence_level: float
) -> list[tuple[float, float, float]]:
    """Return (share, low, high) of each component. The interval is a jackknife over the folds."""

    def compute_shares(fold_indices: Sequence[int]) -> list[float]:
        products = cross_products([folds[k] for k in fold_indices], [counts[k] for k in fold_indices])
        return [product / math.fsum(products) for product in products]

    all_folds = range(len(folds))
    jackknife_shares = [compute_shares([k for k in all_folds if k != left_out]) for left_out in all_folds]
    intervals = []
    for share, values in zip(compute_shares(all_folds), zip(*jackknife_shares, strict=True), strict=True):
        center = math.fsum(values) / len(values)
        error = math.sqrt((len(values) - 1) / len(values) * math.fsum((x - center) ** 2 for x in values))
        half_width = float(stats.t.ppf(0.5 + confidence_level / 2, len(values) - 1)) * error
        intervals.append((share, share - half_width, share + half_width))
    return intervals


class Outcome(NamedTuple):
    """One prompt's draw: its probability, and the gradient (C, 3) of its task, entropy and KL loss."""

    probability: float
    gradients: Tensor


def compute_bandit_losses(theta: Tensor, contexts: Tensor, arms: Tensor) -> Tensor:
    """Task, entropy and KL loss (N, 3) of draws from a softmax policy over three arms, as the trainer has them."""
    logits = theta + OFFSETS[contexts]
    logprobs = logits.log_softmax(dim=-1)[torch.arange(len(arms)), arms]
    reference = REFERENCE.log_softmax(dim=-1)[contexts, arms]
    task = ppo_clip_loss(logprobs, logprobs.detach(), REWARDS[contexts, arms], 0.2, 0.28, 3.0).loss
    entropy = -ENTROPY_COEFF * entropy_from_logits(logits)
    return torch.stack([task, entropy, KL_LOSS_COEF * estimate_kl(logprobs, reference, "k2")], dim=-1)


def _list_outcomes() -> list[Outcome]:
    """List all draws of one prompt: one of two contexts, then one of three arms."""
    outcomes = []
    policy = (THETA + OFFSETS).softmax(dim=-1)
    for context, arm in product(range(2), range(3)):
        theta = THETA.clone().requires_grad_()
        losses = compute_bandit_losses(theta, torch.tensor([context]), torch.tensor([arm]))[0]
        gradients = torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses])
        outcomes.append(Outcome(0.5 * policy[context, arm].item(), gradients))
    return outcomes


def _compute_true_gradients() -> Tensor:
    """Gradient (3, 3) of −E reward, −coeff · E entropy and coeff · E KL(π‖π_ref), without any sampling."""
    theta = THETA.clone().requires_grad_()
    logits = theta + OFFSETS
    reward = (logits.softmax(dim=-1) * REWARDS).sum(dim=-1).mean()
    entropy, kl = entropy_from_logits(logits).mean(), full_kl(logits, REFERENCE).mean()
    objectives = (-reward, -ENTROPY_COEFF * entropy, KL_LOSS_COEF * kl)
    return torch.stack([torch.autograd.grad(x, theta, retain_graph=True)[0] for x in objectives])


def iterate_bandit_draws(component: str, prompts: int) -> Iterator[tuple[float, Tensor]]:
    """Every draw of that many prompts: its probability, and each prompt's gradient (prompts, 3)."""
    weights = torch.tensor(BANDIT_COMPONENTS[component], dtype=torch.float64)
    for draw in product(_list_outcomes(), repeat=prompts):
        yield math.prod(o.probability for o in draw), torch.stack([weights @ o.gradients for o in draw])


def iterate_component_draws(prompts: int) -> Iterator[tuple[float, Tensor]]:
    """Every draw of that many prompts: its probability, and each prompt's gradients by component (prompts, 3, 3)."""
    for draw in product(_list_outcomes(), repeat=prompts):
        yield math.prod(o.probability for o in draw), torch.stack([o.gradients for o in draw])


def compute_bandit_products() -> Tensor:
    """<E g_c, E g> of task, entropy and KL, (3,), by differentiating the expected objectives."""
    gradients = _compute_true_gradients()
    return gradients @ gradients.sum(dim=0)


def compute_bandit_moments(component: str) -> tuple[float, float]:
    """|E g|² by differentiating the expected objective, and the trace of the covariance of one prompt's g."""
    gradient = torch.tensor(BANDIT_COMPONENTS[component], dtype=torch.float64) @ _compute_true_gradients()
    variance = sum(p * (g[0] - gradient).square().sum().item() for p, g in iterate_bandit_draws(component, 1))
    return gradient.square().sum().item(), variance


def published_norm(
    features: list[list[list[float]]], mask: list[list[bool]], mini_batch_size: int, micro_batch_size: int
) -> float:
    """Mean norm over mini-batches. Each sums token means of micro-batches and divides by the number in a full one.

    `features` (B, T, D) is the gradient of each token's loss.
    """
    size, norms = len(mask), []
    for start in range(0, size, mini_batch_size):
        stop = min(start + mini_batch_size, size)
        gradient = [0.0] * len(features[0][0])
        for first in range(start, stop, micro_batch_size):
            micro_batch = range(first, min(first + micro_batch_size, stop))
            for i in range(len(gradient)):
                loss = [[token[i] for token in features[b]] for b in micro_batch]
                mean_loss = aggregate(loss, [mask[b] for b in micro_batch], "token-mean", len(mask[0]))
                gradient[i] += mean_loss / (mini_batch_size / micro_batch_size)
        norms.append(math.sqrt(dot(gradient, gradient)))
    return math.fsum(norms) / len(norms)


@st.composite
def folds(draw: st.DrawFn, smallest: int = 2, components: int = 1) -> tuple[Tensor, list[float]]:
    """Draw fold gradients (K, C, D) with zeros and ties, and counts (K,)."""
    count, width = draw(st.integers(smallest, 6)), draw(st.integers(1, 4))
    size = count * components * width
    values = draw(st.lists(numbers, min_size=size, max_size=size))
    counts = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.5]), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).view(count, components, width), counts
