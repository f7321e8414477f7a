"""Mismatch between the log-probs of the sampling engine and of the trainer, for the same sampled tokens.

Outdated weights, another temperature or different rounding make an engine's log-probs differ from the trainer's.
Columns report the mismatch over the sampled tokens of every step. A run ends if the mean mismatch on a fixed prompt,
right after a sync, is above the tolerance. Importance weights can correct a mismatch that is only due to rounding.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.runs.failures import NonFiniteError


class EngineMismatchError(ArithmeticError):
    """The engine's log-probs of the fixed prompt differ from the trainer's: its weights differ, so no retry helps."""


class LogprobMismatch(NamedTuple):
    """Mismatch over N sampled tokens, with d = trainer's log-prob minus engine's log-prob.

    mean_abs, max_abs: mean and maximum of |d|, in nats. kl: KL(engine || trainer) in nats per token, estimated as the
    mean of exp(d) - 1 - d (k3, Schulman 2020), which is never negative. ess_fraction: effective sample size of the
    weights w = exp(d), as a fraction of N: (sum w)^2 / (N sum w^2), in (0, 1] (Kish 1965); 1 if all weights are equal.
    """

    mean_abs: float
    max_abs: float
    kl: float
    ess_fraction: float


def measure_mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor, step: int) -> LogprobMismatch:
    """Compare log-probs (N,) of the same N >= 1 tokens, sampled in `step` at the same temperature.

    Raises NonFiniteError if log-probs are not finite, since this is not a mismatch, and ValueError without tokens.
    """
    log_probs = {"trainer": trainer_logprobs, "engine": engine_logprobs}
    names = [name for name, values in log_probs.items() if not bool(torch.isfinite(values).all())]
    if names:
        raise NonFiniteError(f"log-probs of the {' and the '.join(names)} were not finite at step {step}")
    difference = trainer_logprobs.double() - engine_logprobs.double()
    if not len(difference):
        raise ValueError("There are no sampled tokens to compare: give at least one episode with a reply.")
    # Subtract the maximum to prevent overflow. A common factor does not change the effective sample size.
    weights = (difference - difference.max()).exp()
    return LogprobMismatch(
        mean_abs=float(difference.abs().mean()),
        max_abs=float(difference.abs().max()),
        kl=float((torch.expm1(difference) - difference).mean()),  # KL(engine || trainer): tokens are the engine's
        ess_fraction=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    )


def check_mismatch(mean_abs: float, tolerance: float, step: int) -> None:
    """Raise EngineMismatchError if the mean |difference| at `step`, in nats, is above `tolerance` or not a number."""
    if mean_abs <= tolerance:  # not `>` and raise: a comparison with NaN is False
        return
    tolerance_text = f"{2 * mean_abs:.1g}" if math.isfinite(mean_abs) else "N"
    raise EngineMismatchError(
        f"After the sync of step {step} the engine's log-probs of a fixed prompt differ from the trainer's by "
        f"{mean_abs:.3g} nats per token on average, and {tolerance:g} is allowed: the engine samples from other "
        f"weights than the trainer trains. Check that the weights were synced to the engine. If only rounding differs, "
        f"raise the limit with --set rollout.logprob_tolerance={tolerance_text}, or compute in higher "
        f"precision with --set model.dtype=float32."
    )
