"""Estimate how much of a gradient is signal: unbiased squared norm, noise and components, from folds of the prompts.

Groups of rollouts are assigned to buckets by their reward spread. The norm of a sampled gradient is biased upwards,
E|G|² = |E G|² + noise, so even a bucket without signal shows a gradient. Each bucket is therefore split into folds by
prompt. Prompts are independent, so noise averages out in products between different folds. Whitened advantages couple
prompts weakly, through one mean and std over the batch, which the estimates treat as fixed.

Shapes: K folds, C components (task, entropy, KL). x_{k,c} is the mean gradient of component c in fold k, and the
bucket's mean gradient is G_c = Σ_k w_k x_{k,c} with w_k = n_k / Σ n. n_k, the `counts`, is the contribution of fold k
to the divisor of the mean: its trained tokens (token-mean) or its sequences. Without counts, all w_k are 1 / K. This is
right for equal folds, and for x_{k,c} = K · (fold k's sum of weighted gradients), where the divisor is a constant.

All estimates are computed from the Gram matrix gram[k, c, l, d] = <x_{k,c}, x_{l,d}>, (K, C, K, C) in float64, so only
one block of parameters at a time needs its gradients. `gram[:, c, :, c]` is the (K, K) matrix of one component, and
`gram.sum(dim=(1, 3))` the matrix of the update, which is the sum of the components.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")
ROUNDING_TOLERANCE = 1e-12
"""Differences of squares below this fraction of the squares count as rounding errors. Gradients are float32, with
relative errors of 6e-8, whose square is 4e-15."""
CHUNK_ENTRIES = 2**24
"""Entries to sketch at once. Their random numbers and float64 copies take a few hundred megabytes."""
FIXED_EDGES = (1.0, 2.0, 3.0, 4.0, 5.0)
"""Edges of buckets by reward spread, in units of the reward. Published (RAGEN)."""
T_QUANTILES = {
    3: 4.302652729749458,
    4: 3.182446305283705,
    5: 2.7764451051977908,
    6: 2.570581835636314,
    7: 2.4469118511449675,
    8: 2.364624251592783,
}
"""Number of folds K, at most 8 -> t with P(|T| <= t) = 0.95, for Student's T with K - 1 degrees of freedom."""


def assign_quantile_buckets(scores: Tensor, max_buckets: int = 6) -> Tensor:
    """Assign equally many groups to each bucket, in ascending order of score. The last bucket takes the rest.

        n = min(max_buckets, P),  size = floor(P / n),  bucket of rank r = min(floor(r / size), n − 1)

    scores: (P,) score of each group, such as its reward std; equal scores rank by index. max_buckets: maximum number of
    buckets.

    Returns (P,) int64 bucket of each group, from 0.

    Example:
        >>> assign_quantile_buckets(torch.tensor([0.3, 0.1, 0.2, 0.4]), max_buckets=2).tolist()
        [1, 0, 0, 1]

    Source: published code (RAGEN `split_into_buckets`, mode quantile).  Degenerate: no groups give an empty result.
    """
    num_groups = len(scores)
    num_buckets = min(max_buckets, num_groups)
    # The inverse of the sorting permutation.
    ranks = torch.empty(num_groups, dtype=torch.long)
    ranks[torch.sort(scores, stable=True).indices] = torch.arange(num_groups)
    # The max() calls are for batches without groups, where the division or clamp would fail.
    return (ranks // max(1, num_groups // max(1, num_buckets))).clamp(max=max(0, num_buckets - 1))


def assign_fixed_buckets(scores: Tensor) -> Tensor:
    """Assign each group to a bucket between the `FIXED_EDGES`: [−∞, 1), [1, 2), …, [5, ∞).

    scores: (P,) score of each group.

    Returns (P,) int64 bucket of each group, from 0. Buckets may be empty.

    Example:
        >>> assign_fixed_buckets(torch.tensor([0.5, 1.0, 7.0])).tolist()
        [0, 1, 5]

    Source: published code (RAGEN `split_into_buckets`, mode fixed_rv).  Degenerate: no groups give an empty result.
    """
    return torch.bucketize(scores, torch.tensor(FIXED_EDGES, dtype=scores.dtype), right=True)


def split_folds(group_ids: Tensor, num_folds: int, generator: torch.Generator) -> Tensor:
    """Assign each entry of `group_ids` to a fold at random; entries of one group share a fold.

        K = min(num_folds, P);   each fold has floor(P / K) or ceil(P / K) of the P groups

    group_ids: (P,) or (B,) group of each entry; P is the number of distinct groups. num_folds: maximum number of folds,
    at least 1. generator: CPU generator that draws the order of the groups.

    Returns int64, shape of `group_ids`, from 0 to K − 1; no fold is empty.

    Example:
        >>> folds = split_folds(torch.tensor([5, 5, 9]), 2, torch.Generator().manual_seed(0)).tolist()
        >>> folds[0] == folds[1], sorted(set(folds))
        (True, [0, 1])

    Source: definition.  Degenerate: no entries give an empty result.
    """
    # Deal a permutation out in turn: random, but with fold sizes that differ by at most one.
    groups, group_index = torch.unique(group_ids, return_inverse=True)
    order = torch.randperm(len(groups), generator=generator).to(group_index.device)
    return order[group_index] % max(1, min(num_folds, len(groups)))


def compute_fold_gram(blocks: Iterable[Tensor]) -> Tensor:
    """Compute the Gram matrix (K, C, K, C) of the fold gradients in float64, summed over blocks of parameters.

        gram[k, c, l, d] = Σ_blocks <x_{k,c}, x_{l,d}>

    blocks: at least one tensor (K, C, ...) of any float type: the gradients with respect to some of the parameters.
    Only one block at a time is copied to float64.

    Example:
        Two folds of one component, x_0 = (1, 0) and x_1 = (1, 2).

        >>> compute_fold_gram([torch.tensor([[[1.0, 0.0]], [[1.0, 2.0]]])])[:, 0, :, 0].tolist()
        [[1.0, 1.0], [1.0, 5.0]]

    Source: definition.  Degenerate: non-finite gradients give non-finite products.
    """
    products = []
    for block in blocks:
        x = block.flatten(2).double()
        products.append(torch.einsum("kcn,ldn->kcld", x, x))
    return torch.stack(products).sum(dim=0)


def count_sketch(tensors: Iterable[Tensor], size: int, seed: int) -> Tensor:
    """Compute the CountSketch S x, (size,) in float64, of the concatenation x of `tensors`.

    A random projection from billions of entries to thousands, which nearly preserves inner products. Each entry of x is
    added to a random entry of the sketch, with a random sign.

        E <S x, S y> = <x, y>
        Var <S x, S y> = (|x|² |y|² + <x, y>² − 2 Σ x_i² y_i²) / size  <=  2 |x|² |y|² / size

    S is linear, so the sketch of a sum is the sum of the sketches, and depends only on `seed`, `size` and the shapes of
    the tensors. Compare only sketches for which these three and the device are equal.

    tensors: at least one tensor of any shape and float type, all on one device. size: entries of the sketch, at least
    1. seed: seed of the draws, which each call repeats instead of storing them.

    Example:
        For a single entry the inner product is exact.

        >>> x, y = [torch.tensor([3.0])], [torch.tensor([2.0])]
        >>> (count_sketch(x, size=8, seed=0) @ count_sketch(y, size=8, seed=0)).item()
        6.0

    Source: Charikar, Chen and Farach-Colton 2002; the variance: Weinberger et al. 2009, arXiv:0902.2206, lemma 2.
    Degenerate: non-finite entries give non-finite sketches.
    """
    sketch: Tensor | None = None
    generator = torch.Generator()
    for tensor in tensors:
        if sketch is None:
            sketch = torch.zeros(size, dtype=torch.float64, device=tensor.device)
            generator = torch.Generator(tensor.device).manual_seed(seed)
        for chunk in tensor.detach().flatten().split(CHUNK_ENTRIES):
            # One draw gives both: the last bit is the sign, and the others are the slot.
            slots_and_signs = torch.randint(2 * size, chunk.shape, generator=generator, device=chunk.device)
            sketch.index_add_(0, slots_and_signs >> 1, torch.where(slots_and_signs & 1 == 1, chunk, -chunk).double())
    assert sketch is not None
    return sketch


class GradientSignal(NamedTuple):
    """A mean gradient split into signal and noise, in units of the squared gradient. The ratio has no unit."""

    norm: float
    """|G|, the norm of the mean gradient, in units of the gradient. Biased upwards: |G|² = signal + noise."""
    signal: float
    """Unbiased estimate of |E G|², negative if noise alone would give a larger |G|²."""
    noise: float
    """Unbiased estimate of E|G − E G|², the summed variance of the mean gradient's entries, >= 0."""
    snr: float
    """signal / noise, at least −1, with the bounds of its interval."""
    low: float
    high: float


def estimate_gradient_signal(gram: Tensor, counts: Tensor | None = None) -> GradientSignal:
    """Estimate signal, noise and their ratio for a mean gradient, with a delete-one-fold jackknife interval.

        noise  = Σ_k w_k |x_k − G|² / (K − 1)
        signal = |G|² − noise                           with w = 1/K: mean of <x_k, x_l> over k ≠ l
        snr    = signal / noise
        snr_k  = signal_k / ((1 − w_k) noise_k)         without fold k; noise scaled to the mean of all folds
        interval: snr ± t_{K−1} sqrt((K − 1)/K · Σ_k (snr_k − mean snr_k)²)

    With equal folds, signal and noise are the means of <g_A, g_B> and |g_A − g_B|²/4 over all splits into halves. Both
    are unbiased if folds are independent, with equal means and variances proportional to 1 / n_k. The ratio is biased:
    1 + snr is too large by a factor of about ν / (ν − 2), where ν is K − 1 times the number of directions with noise.
    The interval is approximate, and centered on the ratio without correcting this bias.

    gram: (K, K) products of the fold gradients. counts: (K,) above 0, the contribution of each fold to the divisor of
    the mean; None for equal folds.

    Example:
        Folds x_0 = (1, 0) and x_1 = (1, 2) have mean (1, 1), so |G|² = 2, and differ from it by (0, ∓1).

        >>> result = estimate_gradient_signal(torch.tensor([[1.0, 1.0], [1.0, 5.0]]))
        >>> round(result.norm, 4), result.signal, result.noise, result.snr
        (1.4142, 1.0, 1.0, 1.0)

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1 (two batch sizes) in its K-fold form; jackknife:
    Efron and Stein 1981.
    Degenerate: K = 1 gives the norm, and NaN for the rest. Noise of at most 1e-12 of the mean |x_k|² is set to 0 as
    rounding error, and the ratio and its interval become NaN. The interval is also NaN for K < 3, or if leaving out a
    fold leaves no noise.
    """
    # The helpers take rows of fold weights: here one row with all folds, in the jackknife one row per left-out fold.
    products, weights = gram.double(), _compute_fold_weights(counts, len(gram), gram)
    squared_norm, noise = _estimate_norm_and_noise(products, weights[None])
    snr = _divide_by_noise(squared_norm - noise, noise).item()
    half_width = _compute_half_width(products, weights)
    return GradientSignal(
        math.sqrt(squared_norm.item()),
        (squared_norm - noise).item(),
        noise.item(),
        snr,
        low=snr - half_width,
        high=snr + half_width,
    )


def compute_component_cosines(gram: Tensor, counts: Tensor | None = None) -> Tensor:
    """Compute the cosines (C, C) between the mean gradients of the components.

        cos_{c,d} = <G_c, G_d> / (|G_c| |G_d|)

    gram: (K, C, K, C) from `compute_fold_gram`. counts: (K,) above 0, as in `estimate_gradient_signal`.

    Example:
        One fold of two components, (1, 0) and (3, 4).

        >>> gram = compute_fold_gram([torch.tensor([[[1.0, 0.0], [3.0, 4.0]]])])
        >>> compute_component_cosines(gram).round(decimals=4).tolist()
        [[1.0, 0.6], [0.6, 1.0]]

    Source: definition.
    Degenerate: NaN for a mean gradient of zero, that is with |G_c|² at most 1e-12 of the mean |x_{k,c}|².
    """
    weights, mean_products = _compute_fold_weights(counts, len(gram), gram), _compute_mean_products(gram, counts)
    mean_squares = torch.einsum("k,kckc->c", weights, gram.double())
    squared_norms = mean_products.diagonal()
    norms = torch.where(squared_norms > ROUNDING_TOLERANCE * mean_squares, squared_norms, NAN).sqrt()
    return (mean_products / norms[:, None] / norms).clamp(-1, 1)  # rounding may leave the range


def compute_update_fractions(gram: Tensor, counts: Tensor | None = None) -> Tensor:
    """Compute the signed fraction (C,) of each component in the sampled update. The fractions sum to 1.

        fraction_c = <G_c, G> / |G|²,   G = Σ_c G_c

    A component with a fraction below 0 pulls against the update, and one above 1 is partly undone by the others. |G|²
    includes noise, so noisier components have larger fractions. For the expected update, see
    `estimate_signal_fractions`.

    gram: (K, C, K, C) from `compute_fold_gram`. counts: (K,) above 0, as in `estimate_gradient_signal`.

    Example:
        Components (1, 0) and (3, 4) sum to (4, 4): 4 / 32 and 28 / 32 of the update.

        >>> compute_update_fractions(compute_fold_gram([torch.tensor([[[1.0, 0.0], [3.0, 4.0]]])])).tolist()
        [0.125, 0.875]

    Source: definition.  Degenerate: NaN if the components cancel, with |G|² at most 1e-12 of Σ_c |G_c|².
    """
    mean_products = _compute_mean_products(gram, counts)
    squared_norm = mean_products.sum()
    return mean_products.sum(dim=1) / torch.where(
        squared_norm > ROUNDING_TOLERANCE * mean_products.diagonal().sum(), squared_norm, NAN
    )


class SignalFractions(NamedTuple):
    """Contribution of each component to the expected update, (C,) each, float64. `products` has the unit of |G|²."""

    products: Tensor
    """Unbiased estimates of <E G_c, E G>, which sum to the signal of G. Negative if noise alone would give more."""
    fraction: Tensor
    """products / their sum, with the bounds of the interval. The fractions sum to 1."""
    low: Tensor
    high: Tensor


def estimate_signal_fractions(gram: Tensor, counts: Tensor | None = None) -> SignalFractions:
    """Estimate the signed fraction of each component in the expected update, with a delete-one-fold jackknife interval.

        noise_c    = Σ_k w_k <x_{k,c} − G_c, x_k − G> / (K − 1),   x_k = Σ_c x_{k,c},   G = Σ_c G_c
        product_c  = <G_c, G> − noise_c              with w = 1/K: mean of <x_{k,c}, x_l> over k ≠ l
        fraction_c = product_c / Σ_d product_d
        interval: fraction_c ± t_{K−1} sqrt((K − 1)/K · Σ_k (fraction_{c,k} − mean_k fraction_{c,k})²)

    where the index k means without fold k.

    Numerator and denominator are unbiased, as in `estimate_gradient_signal`. Their ratio is biased, and is meaningful
    only if the denominator, the signal of the update, is well above its standard error.

    gram: (K, C, K, C) from `compute_fold_gram`. counts: (K,) above 0, as in `estimate_gradient_signal`.

    Example:
        Component a is 1 in both folds, component b is 2 and then 0. As sampled they contribute equally; the products of
        different folds, (1·1 + 1·3) / 2 and (2·1 + 0·3) / 2, discount the noise of b.

        >>> gram = compute_fold_gram([torch.tensor([[[1.0], [2.0]], [[1.0], [0.0]]])])
        >>> compute_update_fractions(gram).tolist()
        [0.5, 0.5]
        >>> result = estimate_signal_fractions(gram)
        >>> result.products.tolist(), result.fraction.round(decimals=4).tolist()
        ([2.0, 1.0], [0.6667, 0.3333])

    Source: definition, with the products of `estimate_gradient_signal`; jackknife: Efron and Stein 1981.
    Degenerate: an update has no signal if the sum of the products is at most 1e-12 of its terms. Fractions are NaN if
    there is no signal, or none without one of the folds: they would be ratios of noise. K = 2 gives no interval, and
    K = 1 gives NaN throughout.
    """
    weights = _compute_fold_weights(counts, len(gram), gram)
    products = gram.double().sum(dim=3)  # (K, C, K): <x_{k,c}, x_l>
    estimates, fractions = _estimate_products(products, weights[None])
    # Leaving out one of two folds leaves a single one, without products of different folds.
    if len(weights) < 3:
        return SignalFractions(
            estimates[0], fractions[0], *torch.full((2, len(fractions[0])), NAN, dtype=torch.float64)
        )
    _, jackknife_fractions = _estimate_products(products, _make_jackknife_weights(weights))
    half_width = T_QUANTILES[len(weights)] * _jackknife_variance(jackknife_fractions).sqrt()
    # If leaving out a fold leaves no signal, the fractions of all folds are not reported, either.
    center = torch.where(half_width.isnan(), NAN, fractions[0])
    return SignalFractions(estimates[0], center, low=center - half_width, high=center + half_width)


def compute_published_norm(
    norms: Tensor, sequences: Tensor, tokens: int, mini_batch_size: int, micro_batch_size: int
) -> tuple[float, float, float]:
    """Average the gradient norm over a bucket's M mini-batches, dividing a short mini-batch as if it were full.

    Returns the published norm, and also divided by the bucket's sequences and by its trained tokens.

        norm = (1/M) Σ_m |g_m| · ceil(n_m / micro) / (mini / micro)
        per_sample = norm / Σ n_m,   per_token = norm / tokens

    This norm grows with the noise of a mini-batch, and shrinks when the last mini-batch is short.

    Args:
        norms: (M,) norm of the gradient of each mini-batch's loss, weighted by `compute_loss_weights` with
            `micro_batch_size`.
        sequences: (M,) n_m, sequences in each mini-batch.
        tokens: trained tokens in the bucket.
        mini_batch_size: sequences in a full mini-batch, a multiple of `micro_batch_size`.
        micro_batch_size: sequences in a micro-batch.

    Example:
        The second mini-batch has one micro-batch of two: its norm 4 counts as 2.

        >>> result = compute_published_norm(torch.tensor([2.0, 4.0]), torch.tensor([4, 2]), 40, 4, 2)
        >>> [round(number, 4) for number in result]
        [2.0, 0.3333, 0.05]

    Source: published code (RAGEN gradient analysis: verl's division by the configured number of accumulation steps).
    Degenerate: NaN without mini-batches; per_token is NaN without trained tokens.
    """
    # `compute_loss_weights` divides by the actual number of micro-batches (rounded up), and the published code by the
    # number in a full mini-batch.
    full_micro_batches = mini_batch_size // micro_batch_size
    micro_batches = (sequences + micro_batch_size - 1) // micro_batch_size
    norm = (norms.double() * micro_batches / full_micro_batches).mean().item()
    num_sequences = int(sequences.sum())
    return norm, norm / num_sequences if num_sequences else NAN, norm / tokens if tokens else NAN


def _compute_fold_weights(counts: Tensor | None, num_folds: int, reference: Tensor) -> Tensor:
    """Compute the weight of each fold in the mean, (K,) float64, on the device of `reference`."""
    if counts is None:
        return torch.full((num_folds,), 1 / num_folds, dtype=torch.float64, device=reference.device)
    counts64 = counts.to(reference.device, torch.float64)
    return counts64 / counts64.sum()


def _compute_mean_products(gram: Tensor, counts: Tensor | None) -> Tensor:
    """Compute <G_c, G_d>, (C, C)."""
    weights = _compute_fold_weights(counts, len(gram), gram)
    return torch.einsum("k,kcld,l->cd", weights, gram.double(), weights)


def _estimate_norm_and_noise(gram: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate |G|² and the noise of G, (R,) each, for each row of `weights` (R, K), where 0 leaves a fold out."""
    # |G|² can only be negative by rounding, and the caller takes its square root.
    squared_norm = ((weights @ gram) * weights).sum(dim=1).clamp(min=0)
    mean_square = weights @ gram.diagonal()
    num_folds = (weights > 0).sum(dim=1)
    # Σ_k w_k |x_k − G|² = Σ_k w_k |x_k|² − |G|²
    noise = torch.where(num_folds > 1, (mean_square - squared_norm) / (num_folds - 1), NAN)
    return squared_norm, torch.where(noise <= ROUNDING_TOLERANCE * mean_square, 0, noise)


def _divide_by_noise(signal: Tensor, noise: Tensor) -> Tensor:
    """Divide signal by noise. Return NaN instead of infinity if there is no noise."""
    return signal / torch.where(noise > 0, noise, NAN)


def _compute_half_width(gram: Tensor, weights: Tensor) -> float:
    """Compute half the width of the jackknife interval: NaN for K < 3, or if leaving out a fold leaves no noise."""
    num_folds = len(weights)
    if num_folds < 3:
        return NAN
    squared_norm, noise = _estimate_norm_and_noise(gram, _make_jackknife_weights(weights))
    # 1 − w_k scales the noise of the mean without fold k to the mean of all folds.
    ratios = _divide_by_noise(squared_norm - noise, (1 - weights) * noise)
    return T_QUANTILES[num_folds] * math.sqrt(_jackknife_variance(ratios).item())


def _make_jackknife_weights(weights: Tensor) -> Tensor:
    """Compute the weights (K, K) of the folds in means of which the k-th leaves out fold k."""
    weights_left = weights * (1 - torch.eye(len(weights), dtype=torch.float64, device=weights.device))
    return weights_left / weights_left.sum(dim=1, keepdim=True)


def _jackknife_variance(values: Tensor) -> Tensor:
    """Estimate the variance (...) of a statistic from its values (K, ...) with one fold left out each."""
    return (len(values) - 1) / len(values) * (values - values.mean(dim=0)).square().sum(dim=0)


def _estimate_products(products: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate `SignalFractions.products` and `.fraction`, (R, C) each, for each row of `weights` (R, K)."""
    mean_products = torch.einsum("rk,kcl,rl->rc", weights, products, weights)
    fold_products = torch.einsum("rk,kck->rc", weights, products)
    num_folds = (weights > 0).sum(dim=1, keepdim=True)
    estimates = torch.where(num_folds > 1, mean_products - (fold_products - mean_products) / (num_folds - 1), NAN)
    # NaN if the terms of the total cancel: a fraction of it would be a ratio of rounding errors.
    total = estimates.sum(dim=1, keepdim=True)
    terms = mean_products.abs().sum(dim=1, keepdim=True)
    return estimates, estimates / torch.where(total > ROUNDING_TOLERANCE * terms, total, NAN)
