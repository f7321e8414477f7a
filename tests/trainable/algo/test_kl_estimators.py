"""KL estimators over a softmax of five actions, where every expectation is an explicit sum."""

import math

import pytest
import torch
from torch import Tensor

from tests.oracles import algo as oracle
from trainable.algo.losses import estimate_kl
from trainable.algo.names import KL_KINDS

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REF_LOGITS = torch.tensor([-0.5, 0.4, 0.9, -1.0, 0.2], dtype=torch.float64)
P, Q = LOGITS.softmax(dim=0).tolist(), REF_LOGITS.softmax(dim=0).tolist()
D = [math.log(a / b) for a, b in zip(P, Q, strict=True)]
SAME_AS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def compute_expectation(estimator: str, ref_logits: Tensor = REF_LOGITS) -> tuple[float, Tensor]:
    """Mean of the estimator and mean of its gradient as a loss, over actions drawn from the policy."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(dim=0)
    probabilities = logprobs.detach().exp()
    mean = (probabilities * estimate_kl(logprobs, ref_logits.log_softmax(dim=0), estimator)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.item(), gradient


VALUES = {
    "k1": oracle.kl(P, Q),
    "abs": sum(p * abs(d) for p, d in zip(P, D, strict=True)),
    "k2": sum(p * d * d / 2 for p, d in zip(P, D, strict=True)),
    "k3": oracle.kl(P, Q),
}
SIGNS = [math.copysign(1, d) for d in D]
MEAN_SIGN = sum(p * s for p, s in zip(P, SIGNS, strict=True))
GRADIENTS = {
    "k1": [0.0] * 5,
    "abs": [p * (s - MEAN_SIGN) for p, s in zip(P, SIGNS, strict=True)],
    "k2": oracle.kl_gradient(P, Q),
    "k3": oracle.reverse_kl_gradient(P, Q),
}


@pytest.mark.parametrize("estimator", KL_KINDS)
def test_value_and_gradient_of_each_estimator(estimator: str) -> None:
    value, gradient = compute_expectation(estimator)
    assert value == pytest.approx(VALUES[SAME_AS.get(estimator, estimator)])
    expected_gradient = torch.tensor(GRADIENTS[SAME_AS.get(estimator, estimator)], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected_gradient)
    # A plus keeps the value, and takes the gradient of k2.
    plus_value, plus_gradient = compute_expectation(estimator + "+")
    assert plus_value == pytest.approx(value)
    torch.testing.assert_close(plus_gradient, torch.tensor(oracle.kl_gradient(P, Q), dtype=torch.float64))


def test_k3_over_samples_of_the_reference_is_the_divergence_only_to_second_order() -> None:
    """Expectation over q of k3: E_q[q/p] − 1 − KL(q‖p)."""
    for scale, is_close in ((1.0, False), (1e-3, True)):
        logprobs = (REF_LOGITS + scale * (LOGITS - REF_LOGITS)).log_softmax(dim=0)
        ref_logprobs = REF_LOGITS.log_softmax(dim=0)
        p, q = logprobs.exp().tolist(), ref_logprobs.exp().tolist()
        expectation = (ref_logprobs.exp() * estimate_kl(logprobs, ref_logprobs, "k3", limit=math.inf)).sum().item()
        literal = sum(b * b / a for a, b in zip(p, q, strict=True)) - 1 - oracle.kl(q, p)
        assert expectation == pytest.approx(literal, rel=1e-6)
        assert (expectation == pytest.approx(oracle.kl(p, q), rel=0.01)) == is_close


def test_only_k3_has_a_limit_and_its_gradient_ends_there() -> None:
    d = torch.tensor([-3.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    unlimited_values = estimate_kl(d, torch.zeros(3), "k3", limit=math.inf)
    assert unlimited_values.tolist() == pytest.approx([math.exp(-x) + x - 1 for x in d.tolist()])
    limited_values = estimate_kl(d, torch.zeros(3), "low_var_kl", limit=2.0)
    torch.testing.assert_close(limited_values, unlimited_values.clamp(max=2))
    (slopes,) = torch.autograd.grad(limited_values.sum(), d)
    assert slopes[0] == 0
    assert slopes[1:].tolist() == pytest.approx([1 - math.e, 1 - math.exp(-0.5)])
    assert torch.equal(estimate_kl(d, torch.zeros(3), "k1", limit=0.1), d)


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("abs", 0.0), ("k2", 0.0), ("k3", 0.0), ("k1+", 0.0)])
def test_at_the_reference_only_k1_pushes(estimator: str, slope: float) -> None:
    logprobs = torch.tensor([-0.7, -2.0], requires_grad=True)
    loss = estimate_kl(logprobs, logprobs.detach(), estimator)
    assert loss.tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == [slope, slope]


def test_k3_clamps_the_log_ratio_and_is_precise_near_the_reference() -> None:
    d = torch.tensor([30.0, 15.0, 5.0, -2.0, -3.0, -30.0])
    result = estimate_kl(d, torch.zeros(6), "k3")
    expected = [10.0, 10.0, math.exp(-5) + 4, math.exp(2) - 3, 10.0, 10.0]
    torch.testing.assert_close(result, torch.tensor(expected))
    d = torch.tensor([1e-3, -1e-3, 1e-4, 1e-6, 0.0])
    exact = d.double().square() / 2 - d.double() ** 3 / 6
    torch.testing.assert_close(estimate_kl(d, torch.zeros(5), "k3").double(), exact, rtol=2e-3, atol=1e-13)
