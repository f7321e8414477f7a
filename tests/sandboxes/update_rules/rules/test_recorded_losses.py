"""Tests that every update rule has its recorded losses and gradients, for one batch in float64 and in float32.

    python -m tests.sandboxes.update_rules.rules.test_recorded_losses     # records the rules that are not in the file

The file was recorded with commit 3feed35, when the sandbox had its own group statistics, targets and KL. It therefore
also shows that the rules which now take them from `trainable.algo` have the same results. All rules except for
`ROUNDED_OTHERWISE` must be equal to the last bit on a machine that rounds like the one that recorded them.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sandboxes.update_rules.config.rules import METHODS
from sandboxes.update_rules.training.make import UPDATE_RULES
from tests.strategies.update_rules import Case, make_random_case

RECORDED = Path(__file__).parents[3] / "golden" / "update_rules.safetensors"
SEEDS = (2, 4)
"""The batch of seed 2 has positions that do not count, that of seed 4 an exact mean reward."""
DTYPES = (torch.float64, torch.float32)
ROUNDED_OTHERWISE = ("TPO", "TPONoAnchor", "TPOFullAction", "TPOToken", "GroupPG")
"""Rules whose sums `trainable.algo` takes in another order, or in float64, than they were recorded with."""


def describe_rounding() -> dict[str, str]:
    """Return torch's version and a hash of what the last bits of the losses depend on.

    Two processors of one instruction set can round an exponential differently, because the libraries below torch choose
    their code by the model of the processor.
    """
    digest = hashlib.sha256()
    for seed in SEEDS:
        for dtype in DTYPES:
            log_probs = make_random_case(seed, "GRPO", members=2, groups=2, length=3).log_probs.to(dtype)
            for result in (log_probs, log_probs.exp(), log_probs.log_softmax(-1), log_probs.mean(0), log_probs.sum()):
                digest.update(result.contiguous().numpy().tobytes())
    return {"torch": torch.__version__, "rounding": digest.hexdigest()}


def cast_case(case: Case, dtype: torch.dtype) -> Case:
    """Round the numbers of a case to `dtype`."""
    floats = {
        name: value.to(dtype)
        for name, value in vars(case.rollouts).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    candidates = case.rollouts.candidates
    if candidates is not None:
        log_probs, rewards = candidates.log_probs.to(dtype), candidates.rewards.to(dtype)
        candidates = replace(candidates, log_probs=log_probs, rewards=rewards)
    return case._replace(
        rollouts=replace(case.rollouts, **floats, candidates=candidates), log_probs=case.log_probs.to(dtype)
    )


def compute(method: str, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the losses [E] of a batch, and the gradient [E, B, T, A] of their sum by the log-probabilities."""
    case = cast_case(make_random_case(seed, method, members=2, groups=2, length=3), dtype)
    table = case.log_probs.clone().requires_grad_()
    loss = UPDATE_RULES[method](case.rollouts, table, case.config).loss
    (gradient,) = torch.autograd.grad(loss.sum(), table)
    return {"loss": loss.detach(), "gradient": gradient}


def make_prefix(method: str, seed: int, dtype: torch.dtype) -> str:
    return f"{method}/{seed}/{str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_are_the_recorded_ones(method: str, seed: int, dtype: torch.dtype) -> None:
    with safe_open(RECORDED, "pt") as recorded:
        rounds_alike = recorded.metadata() == describe_rounding()
        for name, value in compute(method, seed, dtype).items():
            expected = recorded.get_tensor(f"{make_prefix(method, seed, dtype)}/{name}")
            if rounds_alike and method not in ROUNDED_OTHERWISE:
                assert torch.equal(value, expected)
            # The bound is relative to the largest entry: p - q of two close shares has fewer digits than either.
            bound = 1e-6 * float(expected.abs().max())
            torch.testing.assert_close(value, expected, rtol=0, atol=bound)


def record() -> None:
    """Add the rules that the file does not have. The others stay as they were recorded."""
    with safe_open(RECORDED, "pt") as recorded:
        metadata, recorded_tensors = recorded.metadata(), {name: recorded.get_tensor(name) for name in recorded.keys()}  # noqa: SIM118
    computed = {
        f"{make_prefix(method, seed, dtype)}/{name}": value.contiguous()
        for method in METHODS
        for seed in SEEDS
        for dtype in DTYPES
        for name, value in compute(method, seed, dtype).items()
    }
    save_file({**computed, **recorded_tensors}, RECORDED, metadata=metadata)


if __name__ == "__main__":
    record()
