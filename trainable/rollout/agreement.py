"""Whether an engine samples from the trainer's weights, from the log-probs that both give the same sampled tokens.

An engine with old weights, another temperature or another rounding gives other log-probs than the trainer's pass. The
columns measure that at every step; a mean beyond the tolerance ends the run; truncated importance weights correct what
rounding alone leaves.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class EngineMismatchError(ArithmeticError):
    """The engine's log-probs are not the trainer's. Deterministic: a second try would end in the same way."""


class LogprobMismatch(NamedTuple):
    """How far apart trainer and engine are over N sampled tokens, with d = trainer's minus engine's log-prob.

    mean, largest: of |d|, in nats. kl: of the engine's distribution from the trainer's, in nats a token, estimated as
    the mean of exp(d) - 1 - d (k3, Schulman 2020: never negative). effective_share: the effective sample size of the
    weights w = exp(d) over N, (sum w)^2 / (N sum w^2), in (0, 1] (Kish 1965); 1 where all weights are equal.
    """

    mean_abs: float
    max_abs: float
    kl: float
    ess_fraction: float


def measure_mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> LogprobMismatch:
    """Compare log-probs (N,) of the same N >= 1 sampled tokens, of distributions at the same temperature.

    Numbers that are not finite make a mean that is not, which `check_agreement` refuses.
    """
    difference = trainer_logprobs.double() - engine_logprobs.double()
    if not len(difference):
        raise ValueError("there are no sampled tokens to compare")
    weights = (difference - difference.max()).exp()  # one factor more or less leaves the effective size as it is
    return LogprobMismatch(
        mean_abs=float(difference.abs().mean()),
        max_abs=float(difference.abs().max()),
        kl=float((torch.expm1(difference) - difference).mean()),
        ess_fraction=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    )


def check_mismatch(mean_abs: float, tolerance: float, step: int) -> None:
    """EngineMismatchError where the mean |difference| at `step`, in nats, is beyond `tolerance` or not a number."""
    if mean_abs <= tolerance:
        return
    raise EngineMismatchError(
        f"At step {step} the engine's log-probs differ from the trainer's by {mean_abs:.3g} nats a token on average; "
        f"{tolerance:g} is allowed: the engine samples from other weights than the trainer trains. Look at the weights "
        f"that were pushed to it and at its temperature; where only rounding differs, raise the limit with --set "
        f"rollout.logprob_tolerance={_suggest_tolerance(mean_abs)}, or compute in more bits with --set model.dtype=float32."
    )


def importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(trainer - engine), cap) of each token, any shape, without gradient.

    trainer, engine: log-probs of the sampled token. Times the loss of a token they make it, up to the cut, the loss
    under the trainer's own distribution: E_engine[w f] = E_trainer[f] (Ionides 2008; for engines of LLMs Yao et al.
    2025).
    """
    return (trainer_logprobs - engine_logprobs).detach().clamp_max(math.log(cap)).exp()


def _suggest_tolerance(mean_abs: float) -> str:
    """A round number above `mean`; the command's placeholder where there is none."""
    return f"{2 * mean_abs:.1g}" if math.isfinite(mean_abs) else "N"
