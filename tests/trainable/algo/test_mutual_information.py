import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import mutual_information as oracles
from tests.strategies.algo import examples, matrix
from trainable.algo.mutual_information import (
    compute_information_metrics,
    compute_mixture_scores,
    compute_retrieval_metrics,
    compute_shuffled_accuracy,
    smooth_zscores,
)


class ScoredThoughts(NamedTuple):
    """Summed log-probs L (N, M), lengths (N,), own columns (N,) and the classes of the columns (M,)."""

    sums: Tensor
    lengths: Tensor
    own_columns: Tensor
    classes: Tensor


# Ties are frequent, and a sum may be far from the others.
log_probs = st.one_of(st.sampled_from([-1.0, -1.0, -2.0, -3.5, -80.0]), st.floats(-60, 0, allow_subnormal=False))


@st.composite
def scored_thoughts(draw: st.DrawFn, most_rows: int = 7) -> ScoredThoughts:
    """Draw scores in which the columns of identical prompts are identical."""
    rows, columns = draw(st.integers(1, most_rows)), draw(st.integers(2, 10))
    classes = torch.tensor(draw(st.lists(st.integers(0, columns - 1), min_size=columns, max_size=columns)))
    return ScoredThoughts(
        torch.tensor(draw(matrix(log_probs, rows, columns)), dtype=torch.float64)[:, classes],
        torch.tensor(draw(st.lists(st.integers(1, 30), min_size=rows, max_size=rows))),
        torch.tensor(draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows))),
        classes,
    )


def make_separable_thoughts(rows: int, own_logprob: float = -1.0, other_logprob: float = -9.0) -> ScoredThoughts:
    """Scores of thoughts that each have their own prompt and are more likely after it than after any other."""
    sums = torch.full((rows, rows), other_logprob, dtype=torch.float64).fill_diagonal_(own_logprob)
    return ScoredThoughts(sums, torch.ones(rows, dtype=torch.long), torch.arange(rows), torch.arange(rows))


def measure_information(thoughts: ScoredThoughts) -> dict[str, float]:
    return compute_information_metrics(*thoughts[:3])


def measure_retrieval(thoughts: ScoredThoughts) -> dict[str, float]:
    return compute_retrieval_metrics(thoughts.sums, thoughts.own_columns, thoughts.classes)


def measure_control(thoughts: ScoredThoughts, num_shuffles: int = 100, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    return compute_shuffled_accuracy(thoughts.sums, thoughts.own_columns, thoughts.classes, generator, num_shuffles)


# ---------------------------------------------------------------------------- mutual information


@examples
@given(scored_thoughts())
def test_information_equals_the_literal_formulas(thoughts: ScoredThoughts) -> None:
    metrics = measure_information(thoughts)
    expected = oracles.mutual_information(
        thoughts.sums.tolist(), thoughts.lengths.tolist(), thoughts.own_columns.tolist()
    )
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_two_thoughts_of_one_token_by_hand() -> None:
    sums = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
    own_columns, ones = torch.tensor([0, 1]), torch.tensor([1, 1])
    matched, marginal = compute_mixture_scores(sums, own_columns)
    assert matched.exp().tolist() == pytest.approx([0.8, 0.6])
    assert marginal.exp().tolist() == pytest.approx([0.5, 0.5])
    metrics = compute_information_metrics(sums, ones, own_columns)
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper"):
        assert metrics[name] == pytest.approx(0.5 * math.log(1.6 * 1.2))
    assert metrics["conditional_entropy_est"] == pytest.approx(-0.5 * math.log(0.48))
    assert metrics["reasoning_entropy_est"] == pytest.approx(math.log(2))
    assert metrics["mi_upper_bound"] == metrics["mi_upper_bound_paper"] == pytest.approx(math.log(2))
    assert metrics["marginal_std"] == pytest.approx(0, abs=1e-7)
    assert metrics["mi_zscore"] == pytest.approx(metrics["mi_estimate"] / 1e-3, rel=1e-3)
    # The two normalizations differ where thoughts have two tokens.
    sums = torch.tensor([[0.64, 0.04], [0.16, 0.36]]).log()
    metrics = compute_information_metrics(sums, torch.tensor([2, 2]), torch.tensor([0, 1]))
    # Published: mixtures of the square roots 0.8, 0.2 and 0.4, 0.6. Paper: the root of the mixtures 0.34 and 0.26.
    assert metrics["mi_estimate"] == pytest.approx(0.5 * math.log(1.6 * 1.2))
    assert metrics["mi_estimate_paper"] == pytest.approx(0.5 * math.log(0.8 / 0.34**0.5 * 0.6 / 0.26**0.5))
    assert metrics["mi_seq_estimate"] == pytest.approx(2 * metrics["mi_estimate_paper"])


# ---------------------------------------------------------------------------- moving averages


@examples
@given(st.lists(scored_thoughts(), min_size=1, max_size=4))
def test_the_moving_average_starts_at_the_first_std_and_keeps_nine_tenths(steps: list[ScoredThoughts]) -> None:
    metrics = [measure_information(step) for step in steps]
    state, smoothed = None, []
    for step in metrics:
        row, state = smooth_zscores(step, state)
        smoothed.append(row)
    for variant, information in (("", "mi_estimate"), ("_seq", "mi_seq_estimate"), ("_paper", "mi_estimate_paper")):
        expected_stds = oracles.moving_average([step[f"marginal_std{variant}"] for step in metrics])
        for row, step, std in zip(smoothed, metrics, expected_stds, strict=True):
            assert row[f"marginal_std_ema{variant}"] == pytest.approx(std)
            assert row[f"mi_zscore_ema{variant}"] == pytest.approx(step[information] / (std + 1e-3))
    assert len(smoothed[0]) == 6


# ---------------------------------------------------------------------------- retrieval


@examples
@given(scored_thoughts())
def test_retrieval_equals_the_literal_count(thoughts: ScoredThoughts) -> None:
    metrics = measure_retrieval(thoughts)
    expected = oracles.retrieval(thoughts.sums.tolist(), thoughts.own_columns.tolist(), thoughts.classes.tolist())
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, abs=1e-12)
    # It grows with k and is certain among all columns.
    for name in ("retrieval_accuracy", "retrieval_chance_level"):
        levels = [metrics[name + suffix] for suffix in ("", "@2", "@4", "@8")]
        assert all(low <= high + 1e-12 for low, high in pairwise(levels))
        if len(thoughts.classes) <= 8:
            assert levels[-1] == pytest.approx(1)
    mean_logprobs = thoughts.sums / thoughts.lengths[:, None]  # rounding may make different scores equal
    if [len(set(row)) for row in mean_logprobs.tolist()] == [len(set(row)) for row in thoughts.sums.tolist()]:
        assert compute_retrieval_metrics(mean_logprobs, thoughts.own_columns, thoughts.classes) == metrics


# ---------------------------------------------------------------------------- the control


@examples
@given(scored_thoughts(most_rows=5))
def test_the_control_approaches_the_mean_over_all_permutations(thoughts: ScoredThoughts) -> None:
    expected_accuracy = oracles.mean_shuffled_accuracy(
        thoughts.sums.tolist(), thoughts.own_columns.tolist(), thoughts.classes.tolist()
    )
    accuracy = measure_control(thoughts, num_shuffles=2000)
    # Five standard errors of a share among 2,000 permutations, at most 0.5 each.
    assert accuracy == pytest.approx(expected_accuracy, abs=5 * 0.5 / 2000**0.5)


def test_the_control_is_reproduced_by_its_generator_and_moves_nothing() -> None:
    thoughts = make_separable_thoughts(6)
    original_columns = thoughts.own_columns.clone()
    accuracies = [measure_control(thoughts, 7, seed=3) for _ in range(2)]
    assert accuracies[0] == accuracies[1]
    assert torch.equal(thoughts.own_columns, original_columns)
    single_thought = ScoredThoughts(thoughts.sums[:1], thoughts.lengths[:1], thoughts.own_columns[:1], thoughts.classes)
    assert measure_control(single_thought) == 1
