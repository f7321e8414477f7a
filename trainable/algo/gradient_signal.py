"""How much of a gradient is signal: unbiased squared norm, noise and components, from folds of the prompts.

The norm of a sampled gradient is biased upwards, E|G|² = |E G|² + noise, so that a bucket without any signal still
shows a gradient. Prompts are independent, so a bucket is cut into folds by prompt, and products between different
folds have the noise averaged out of them. Whitened advantages tie prompts weakly together, through one mean and std
over the batch: the estimates take these two as fixed.

Shapes: K folds, C components (task, entropy, KL). x_{k,c} is the mean gradient of component c in fold k, and the
bucket's mean gradient is G_c = Σ_k w_k x_{k,c} with w_k = n_k / Σ n. n_k, the `counts`, is what fold k adds to the
divisor of the mean: its trained tokens (token-mean) or its sequences. Without counts all w_k are 1 / K; that is
right for equal folds, and for x_{k,c} = K · (fold k's sum of weighted gradients), where the divisor is a constant.

All is read off the Gram matrix gram[k, c, l, d] = <x_{k,c}, x_{l,d}>, (K, C, K, C) in float64: the gradients
themselves are needed only a block of parameters at a time. `gram[:, c, :, c]` is the (K, K) matrix of one component,
`gram.sum(dim=(1, 3))` that of the whole update, the sum of the components.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")
# A difference of squares that is a smaller share of them than this is rounding, of float32 gradients at the latest.
ROUNDING = 1e-12


def split_folds(group_ids: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Fold of each entry of `group_ids`, at random; entries of one group share a fold.

        K = min(folds, P);   each fold has floor(P / K) or ceil(P / K) of the P groups

    Args:
        group_ids: (P,) or (B,) group of each entry; P is the number of distinct ones.
        folds: how many at most, at least 1.
        generator: source of the random order of the groups, on the processor.

    Returns:
        int64, shape of `group_ids`, from 0 to K − 1; no fold is empty.

    Raises:
        ValueError: `folds` is below 1.

    Source: definition.  Degenerate: no entry gives an empty result.
    """
    if folds < 1:
        raise ValueError(f"{folds} folds; it must be at least 1, and at least 3 for an interval.")
    groups, index = torch.unique(group_ids, return_inverse=True)
    order = torch.randperm(len(groups), generator=generator).to(index.device)
    return order[index] % max(1, min(folds, len(groups)))


def fold_gram(blocks: Iterable[Tensor]) -> Tensor:
    """Gram matrix (K, C, K, C) of the fold gradients in float64, summed over blocks of parameters.

        gram[k, c, l, d] = Σ_blocks <x_{k,c}, x_{l,d}>

    Args:
        blocks: at least one tensor (K, C, ...) of any float type: the gradients with respect to some of the
            parameters. One block at a time is held in float64.

    Source: definition.  Degenerate: gradients that are not finite give products that are not.
    """
    products = []
    for block in blocks:
        x = block.flatten(2).double()
        products.append(torch.einsum("kcn,ldn->kcld", x, x))
    return torch.stack(products).sum(dim=0)


class GradientSignal(NamedTuple):
    """A mean gradient split into signal and noise. Units: those of the squared gradient; the last three have none."""

    norm: float
    """|G|, the norm of the mean gradient: biased upwards, |G|² = signal + noise."""
    signal: float
    """Unbiased estimate of |E G|²; negative where noise alone would give more."""
    noise: float
    """Unbiased estimate of E|G − E G|², the summed variance of the mean gradient's entries, >= 0."""
    snr: float
    """signal / noise, at least −1."""
    low: float
    high: float


def gradient_signal(gram: Tensor, counts: Tensor | None = None, level: float = 0.95) -> GradientSignal:
    """Signal, noise and their ratio for one mean gradient, with a delete-one-fold jackknife interval of the ratio.

        noise  = Σ_k w_k |x_k − G|² / (K − 1)
        signal = |G|² − noise                           with w = 1/K: mean of <x_k, x_l> over k ≠ l
        snr    = signal / noise
        snr_k  = signal_k / ((1 − w_k) noise_k)         without fold k; its noise carried over to all folds
        interval: snr ± t_{K−1} sqrt((K − 1)/K · Σ_k (snr_k − mean snr_k)²)

    With equal folds, signal is the mean of <g_A, g_B> and noise that of |g_A − g_B|²/4 over all splits into halves.
    Both are unbiased for independent folds with one mean and variance proportional to 1 / n_k. The ratio is not:
    1 + snr is too large by about ν / (ν − 2), where ν is K − 1 times the number of directions that hold the noise. The
    interval is centred on the ratio as it is, and approximate.

    Args:
        gram: (K, K) products of the fold gradients.
        counts: (K,) above 0, what each fold adds to the divisor of the mean; None is equal folds.
        level: of the interval, in (0, 1).

    Raises:
        ValueError: the shapes do not fit, or a count is not above 0.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1 (two batch sizes) in its K-fold form; jackknife:
    Efron and Stein 1981.
    Degenerate: K = 1 gives the norm and NaN for the rest. Noise of at most 1e-12 of the mean |x_k|² is rounding and
    becomes 0: the ratio and its interval are then NaN. K < 3, or folds that without one of them have no noise, give
    a NaN interval.
    """
    if gram.dim() != 2 or len(gram) != gram.shape[1]:
        raise ValueError(f"gram has shape {tuple(gram.shape)}; it must be (K, K), such as gram[:, c, :, c].")
    products, weights = gram.double(), _weights(counts, len(gram), gram)
    square, noise = _square_and_noise(products, weights[None])
    snr = _ratio(square - noise, noise).item()
    half = _half_width(products, weights, level)
    return GradientSignal(
        math.sqrt(square.item()), (square - noise).item(), noise.item(), snr, low=snr - half, high=snr + half
    )


def component_cosines(gram: Tensor, counts: Tensor | None = None) -> Tensor:
    """Cosine (C, C) between the mean gradients of the components.

        cos_{c,d} = <G_c, G_d> / (|G_c| |G_d|)

    Args:
        gram: (K, C, K, C) as `fold_gram` gives it.
        counts: (K,) above 0, as in `gradient_signal`.

    Source: definition.
    Degenerate: NaN beside a mean gradient of zero, that is with |G_c|² at most 1e-12 of the mean |x_{k,c}|².
    """
    weights, means = _weights(counts, len(gram), gram), _mean_products(gram, counts)
    spread = torch.einsum("k,kckc->c", weights, gram.double())
    squares = means.diagonal()
    norms = torch.where(squares > ROUNDING * spread, squares, NAN).sqrt()
    return (means / norms[:, None] / norms).clamp(-1, 1)


def update_shares(gram: Tensor, counts: Tensor | None = None) -> Tensor:
    """Signed share (C,) of each component in the update as it was sampled; the shares sum to 1.

        share_c = <G_c, G> / |G|²,   G = Σ_c G_c

    A share below 0 pulls against the update, one above 1 is partly undone by the others. |G|² holds the noise as well,
    so that the noisiest component has the largest share: `signal_shares` are those in the expected update.

    Args:
        gram: (K, C, K, C) as `fold_gram` gives it.
        counts: (K,) above 0, as in `gradient_signal`.

    Source: definition.  Degenerate: NaN where the components cancel, |G|² at most 1e-12 of Σ_c |G_c|².
    """
    means = _mean_products(gram, counts)
    square = means.sum()
    return means.sum(dim=1) / torch.where(square > ROUNDING * means.diagonal().sum(), square, NAN)


class SignalShares(NamedTuple):
    """Each component's part in the expected update, (C,) each, float64. Unit of `products`: that of |G|²."""

    products: Tensor
    """Unbiased estimates of <E G_c, E G>, which sum to the signal of G; negative where noise alone would give more."""
    share: Tensor
    """products / their sum; the shares sum to 1."""
    low: Tensor
    high: Tensor


def signal_shares(gram: Tensor, counts: Tensor | None = None, level: float = 0.95) -> SignalShares:
    """Signed share of each component in the expected update, with a delete-one-fold jackknife interval.

        noise_c   = Σ_k w_k <x_{k,c} − G_c, x_k − G> / (K − 1),   x_k = Σ_c x_{k,c},   G = Σ_c G_c
        product_c = <G_c, G> − noise_c              with w = 1/K: mean of <x_{k,c}, x_l> over k ≠ l
        share_c   = product_c / Σ_d product_d
        interval: share_c ± t_{K−1} sqrt((K − 1)/K · Σ_k (share_{c,k} − mean_k share_{c,k})²),   k: without fold k

    Numerator and denominator are unbiased as `gradient_signal` is; their ratio is not, and is worth reading only where
    the denominator, the update's signal, stands well above its own error.

    Args:
        gram: (K, C, K, C) as `fold_gram` gives it.
        counts: (K,) above 0, as in `gradient_signal`.
        level: of the interval, in (0, 1).

    Source: definition, with the products of `gradient_signal`; jackknife: Efron and Stein 1981.
    Degenerate: an update has no signal where the products' sum is at most 1e-12 of its terms. Shares are NaN where it
    has none, or has none without one of its folds: they would be quotients of noise. K = 2 gives no interval, K = 1 NaN
    for all.
    """
    weights = _weights(counts, len(gram), gram)
    products = gram.double().sum(dim=3)  # (K, C, K): <x_{k,c}, x_l>
    found, share = _products_and_shares(products, weights[None])
    if len(weights) < 3:
        return SignalShares(found[0], share[0], *torch.full((2, len(share[0])), NAN, dtype=torch.float64))
    _, shares = _products_and_shares(products, _without_one(weights))
    half = _t_quantile(level, len(weights) - 1) * _jackknife_variance(shares).sqrt()
    centre = torch.where(half.isnan(), NAN, share[0])
    return SignalShares(found[0], centre, low=centre - half, high=centre + half)


class PublishedNorm(NamedTuple):
    """The published number for a bucket, and the same over its sequences and over its trained tokens."""

    norm: float
    per_sample: float
    per_token: float


def published_norm(
    norms: Tensor, sequences: Tensor, tokens: int, mini_batch_size: int, micro_batch_size: int
) -> PublishedNorm:
    """Mean over a bucket's M mini-batches of the norm of each one's gradient; a short one is divided as if whole.

        norm = (1/M) Σ_m |g_m| · ceil(n_m / micro) / (mini / micro)
        per_sample = norm / Σ n_m,   per_token = norm / tokens

    It grows with the noise of a mini-batch, and falls when the last mini-batch is short.

    Args:
        norms: (M,) norm of the gradient of each mini-batch's loss, weighted by `loss_weights` with `micro_batch_size`.
        sequences: (M,) n_m, sequences in each mini-batch.
        tokens: trained tokens in the bucket.
        mini_batch_size: sequences in a whole mini-batch, a multiple of `micro_batch_size`.
        micro_batch_size: sequences in a micro-batch.

    Source: published code (RAGEN gradient analysis: verl's division by the configured number of accumulation steps).
    Degenerate: NaN without a mini-batch; per_token is NaN without a trained token.
    """
    whole = mini_batch_size // micro_batch_size
    parts = (sequences + micro_batch_size - 1) // micro_batch_size
    norm = (norms.double() * parts / whole).mean().item()
    samples = int(sequences.sum())
    return PublishedNorm(norm, norm / samples if samples else NAN, norm / tokens if tokens else NAN)


def _weights(counts: Tensor | None, folds: int, like: Tensor) -> Tensor:
    """Weight (K,) of each fold in the mean, float64, beside `like`."""
    if counts is None:
        return torch.full((folds,), 1 / folds, dtype=torch.float64, device=like.device)
    if counts.shape != (folds,) or not bool((counts > 0).all()):
        raise ValueError(
            f"counts are {counts.tolist()} for {folds} folds; there must be one above 0 for each: "
            "leave a fold without trained tokens out of the Gram matrix."
        )
    exact = counts.to(like.device, torch.float64)
    return exact / exact.sum()


def _mean_products(gram: Tensor, counts: Tensor | None) -> Tensor:
    """<G_c, G_d>, (C, C)."""
    weights = _weights(counts, len(gram), gram)
    return torch.einsum("k,kcld,l->cd", weights, gram.double(), weights)


def _square_and_noise(gram: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """|G|² and the noise of G, both (R,), for each row of `weights` (R, K); a weight of 0 leaves the fold out."""
    square = ((weights @ gram) * weights).sum(dim=1).clamp(min=0)
    spread = weights @ gram.diagonal()
    folds = (weights > 0).sum(dim=1)
    noise = torch.where(folds > 1, (spread - square) / (folds - 1), NAN)
    return square, torch.where(noise <= ROUNDING * spread, 0, noise)


def _ratio(signal: Tensor, noise: Tensor) -> Tensor:
    return signal / torch.where(noise > 0, noise, NAN)


def _half_width(gram: Tensor, weights: Tensor, level: float) -> float:
    """Half of the jackknife interval's width; NaN with fewer than 3 folds, where one left out leaves no noise."""
    folds = len(weights)
    if folds < 3:
        return NAN
    square, noise = _square_and_noise(gram, _without_one(weights))
    ratios = _ratio(square - noise, (1 - weights) * noise)
    return _t_quantile(level, folds - 1) * math.sqrt(_jackknife_variance(ratios).item())


def _without_one(weights: Tensor) -> Tensor:
    """Weights (K, K) of the folds in the mean: row k without fold k."""
    others = weights * (1 - torch.eye(len(weights), dtype=torch.float64, device=weights.device))
    return others / others.sum(dim=1, keepdim=True)


def _jackknife_variance(found: Tensor) -> Tensor:
    """Variance of a statistic, (...), from its values (K, ...) without one fold each."""
    return (len(found) - 1) / len(found) * (found - found.mean(dim=0)).square().sum(dim=0)


def _products_and_shares(products: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`SignalShares.products` and `.share`, (R, C) each, for each row of `weights` (R, K); products (K, C, K)."""
    square = torch.einsum("rk,kcl,rl->rc", weights, products, weights)
    spread = torch.einsum("rk,kck->rc", weights, products)
    folds = (weights > 0).sum(dim=1, keepdim=True)
    found = torch.where(folds > 1, square - (spread - square) / (folds - 1), NAN)
    whole = found.sum(dim=1, keepdim=True)
    terms = square.abs().sum(dim=1, keepdim=True)
    return found, found / torch.where(whole > ROUNDING * terms, whole, NAN)


def _t_quantile(level: float, df: int) -> float:
    """The t >= 0 with P(|T| <= t) = level for Student's T with `df` degrees of freedom, by bisection of its angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, df) < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _t_probability(angle: float, df: int) -> float:
    """P(|T| <= sqrt(df) tan(angle)). Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    odd = df % 2
    term, series = math.cos(angle) if odd else 1.0, 0.0
    for step in range(1, df // 2 + 1):
        series += term
        term *= math.cos(angle) ** 2 * (2 * step - 1 + odd) / (2 * step + odd)
    return 2 / math.pi * (angle + math.sin(angle) * series) if odd else math.sin(angle) * series
