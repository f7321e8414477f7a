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


class Scored(NamedTuple):
    """L (N, M), lengths (N,), own columns (N,), classes of the columns (M,)."""

    sums: Tensor
    lengths: Tensor
    own: Tensor
    classes: Tensor


# Ties come often; a sum may be far from the others.
log_probs = st.one_of(st.sampled_from([-1.0, -1.0, -2.0, -3.5, -80.0]), st.floats(-60, 0, allow_subnormal=False))


@st.composite
def scored(draw: st.DrawFn, most_rows: int = 7) -> Scored:
    """Columns that stand for identical prompts hold identical scores."""
    rows, columns = draw(st.integers(1, most_rows)), draw(st.integers(2, 10))
    classes = torch.tensor(draw(st.lists(st.integers(0, columns - 1), min_size=columns, max_size=columns)))
    return Scored(
        torch.tensor(draw(matrix(log_probs, rows, columns)), dtype=torch.float64)[:, classes],
        torch.tensor(draw(st.lists(st.integers(1, 30), min_size=rows, max_size=rows))),
        torch.tensor(draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows))),
        classes,
    )


def told_apart(rows: int, own: float = -1.0, other: float = -9.0) -> Scored:
    """Every thought has a prompt of its own and is likelier after it."""
    sums = torch.full((rows, rows), other, dtype=torch.float64).fill_diagonal_(own)
    return Scored(sums, torch.ones(rows, dtype=torch.long), torch.arange(rows), torch.arange(rows))


# ---------------------------------------------------------------------------- mutual information


@examples
@given(scored())
def test_information_equals_the_literal_formulas(given_: Scored) -> None:
    found = compute_information_metrics(given_.sums, given_.lengths, given_.own)
    wanted = oracles.mutual_information(given_.sums.tolist(), given_.lengths.tolist(), given_.own.tolist())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_two_thoughts_of_one_token_by_hand() -> None:
    sums = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
    own, ones = torch.tensor([0, 1]), torch.tensor([1, 1])
    matched, marginal = compute_mixture_scores(sums, own)
    assert matched.exp().tolist() == pytest.approx([0.8, 0.6])
    assert marginal.exp().tolist() == pytest.approx([0.5, 0.5])
    found = compute_information_metrics(sums, ones, own)
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper"):
        assert found[name] == pytest.approx(0.5 * math.log(1.6 * 1.2))
    assert found["conditional_entropy_est"] == pytest.approx(-0.5 * math.log(0.48))
    assert found["reasoning_entropy_est"] == pytest.approx(math.log(2))
    assert found["mi_upper_bound"] == found["mi_upper_bound_paper"] == pytest.approx(math.log(2))
    assert found["marginal_std"] == pytest.approx(0, abs=1e-7)
    assert found["mi_zscore"] == pytest.approx(found["mi_estimate"] / 1e-3, rel=1e-3)


def test_the_two_normalizations_differ_where_thoughts_have_two_tokens() -> None:
    sums = torch.tensor([[0.64, 0.04], [0.16, 0.36]]).log()
    found = compute_information_metrics(sums, torch.tensor([2, 2]), torch.tensor([0, 1]))
    # Published: mixtures of the square roots 0.8, 0.2 and 0.4, 0.6. Paper: the root of the mixtures 0.34 and 0.26.
    assert found["mi_estimate"] == pytest.approx(0.5 * math.log(1.6 * 1.2))
    assert found["mi_estimate_paper"] == pytest.approx(0.5 * math.log(0.8 / 0.34**0.5 * 0.6 / 0.26**0.5))
    assert found["mi_seq_estimate"] == pytest.approx(2 * found["mi_estimate_paper"])


@examples
@given(scored())
def test_entropy_is_conditional_entropy_plus_information(given_: Scored) -> None:
    found = compute_information_metrics(given_.sums, given_.lengths, given_.own)
    for information, kind in (("mi_estimate", "est"), ("mi_seq_estimate", "seq_est")):
        total = found[f"conditional_entropy_{kind}"] + found[information]
        assert found[f"reasoning_entropy_{kind}"] == pytest.approx(total, abs=1e-9)
    total = found["conditional_entropy_est"] + found["mi_estimate_paper"]
    assert found["reasoning_entropy_est_paper"] == pytest.approx(total, abs=1e-9)


@examples
@given(scored())
def test_information_stays_below_its_bounds_and_the_papers_below_the_published(given_: Scored) -> None:
    found = compute_information_metrics(given_.sums, given_.lengths, given_.own)
    bound = math.log(given_.sums.shape[1]) + 1e-9
    assert max(found["mi_estimate"], found["mi_seq_estimate"]) <= bound
    assert found["mi_estimate_paper"] <= found["mi_upper_bound_paper"] + 1e-9 <= bound
    assert found["mi_estimate_paper"] <= found["mi_estimate"] + 1e-9
    assert found["mi_upper_bound_paper"] <= bound / int(given_.lengths.min())


def test_thoughts_that_only_one_prompt_allows_reach_the_bound() -> None:
    found = compute_information_metrics(*told_apart(5, other=-500.0)[:3])
    assert found["mi_estimate"] == pytest.approx(math.log(5))
    assert found["mi_estimate_paper"] == pytest.approx(found["mi_upper_bound_paper"])


def test_thoughts_that_ignore_their_prompt_carry_no_information() -> None:
    sums = torch.tensor([[-3.0], [-7.0], [-4.0]]).expand(3, 4)
    found = compute_information_metrics(sums, torch.tensor([2, 3, 1]), torch.tensor([0, 1, 3]))
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper", "mi_zscore", "mi_zscore_seq"):
        assert found[name] == pytest.approx(0, abs=1e-12)


def test_information_has_the_sign_of_the_own_prompts_advantage() -> None:
    right, wrong = told_apart(4), told_apart(4, own=-9.0, other=-1.0)
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper", "mi_zscore", "mi_zscore_seq"):
        assert compute_information_metrics(*right[:3])[name] > 0 > compute_information_metrics(*wrong[:3])[name]
    found = compute_information_metrics(*right[:3])
    assert 0 < found["conditional_entropy_est"] < found["reasoning_entropy_est"]
    assert found["matched_log_prob_mean"] == -1.0


@examples
@given(scored(), st.randoms(use_true_random=False))
def test_the_order_of_thoughts_and_of_prompts_does_not_matter(given_: Scored, random: object) -> None:
    rows, columns = list(range(len(given_.own))), list(range(len(given_.classes)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    random.shuffle(columns)  # type: ignore[attr-defined]
    place = torch.tensor(columns).argsort()
    moved = Scored(
        given_.sums[rows][:, columns], given_.lengths[rows], place[given_.own[rows]], given_.classes[columns]
    )
    before, after = (compute_information_metrics(*those[:3]) for those in (given_, moved))
    assert after == pytest.approx(before, rel=1e-9, abs=1e-9)  # with abs alone, rel is not looked at
    if all(len(set(row)) == len(set(given_.classes.tolist())) for row in given_.sums.tolist()):  # ties rank by column
        found = [
            compute_retrieval_metrics(those.sums, those.own, those.classes)["retrieval_accuracy"]
            for those in (given_, moved)
        ]
        assert found[0] == pytest.approx(found[1])


@examples
@given(scored())
def test_showing_every_prompt_twice_changes_no_information(given_: Scored) -> None:
    twice = given_.sums.repeat(1, 2)
    before = compute_information_metrics(given_.sums, given_.lengths, given_.own)
    after = compute_information_metrics(twice, given_.lengths, given_.own)
    for name in before.keys() - {"mi_upper_bound", "mi_upper_bound_paper"}:
        assert after[name] == pytest.approx(before[name], abs=1e-9)


# ---------------------------------------------------------------------------- moving averages


@examples
@given(st.lists(scored(), min_size=1, max_size=4))
def test_the_moving_average_starts_at_the_first_std_and_keeps_nine_tenths(steps: list[Scored]) -> None:
    metrics = [compute_information_metrics(*step[:3]) for step in steps]
    state, found = None, []
    for step in metrics:
        smooth, state = smooth_zscores(step, state)
        found.append(smooth)
    for variant, information in (("", "mi_estimate"), ("_seq", "mi_seq_estimate"), ("_paper", "mi_estimate_paper")):
        wanted = oracles.moving_average([step[f"marginal_std{variant}"] for step in metrics])
        for smooth, step, std in zip(found, metrics, wanted, strict=True):
            assert smooth[f"marginal_std_ema{variant}"] == pytest.approx(std)
            assert smooth[f"mi_zscore_ema{variant}"] == pytest.approx(step[information] / (std + 1e-3))
    assert len(found[0]) == 6


def test_a_step_of_the_moving_average_leaves_the_old_state_alone() -> None:
    metrics = compute_information_metrics(*told_apart(3)[:3])
    first, state = smooth_zscores(metrics, None)
    assert first["mi_zscore_ema"] == metrics["mi_zscore"]
    kept = dict(state)
    changed = {name: value + 1.0 for name, value in metrics.items()}
    second, following = smooth_zscores(changed, state)
    assert state == kept
    assert following["marginal_std"] == pytest.approx(kept["marginal_std"] + 0.1)
    assert second["marginal_std_ema"] == following["marginal_std"]


# ---------------------------------------------------------------------------- retrieval


@examples
@given(scored())
def test_retrieval_equals_the_literal_count(given_: Scored) -> None:
    found = compute_retrieval_metrics(given_.sums, given_.own, given_.classes)
    wanted = oracles.retrieval(given_.sums.tolist(), given_.own.tolist(), given_.classes.tolist())
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, abs=1e-12)


@examples
@given(scored())
def test_retrieval_grows_with_k_and_is_certain_among_all_columns(given_: Scored) -> None:
    found = compute_retrieval_metrics(given_.sums, given_.own, given_.classes)
    for name in ("retrieval_accuracy", "retrieval_chance_level"):
        levels = [found[name + suffix] for suffix in ("", "@2", "@4", "@8")]
        assert all(low <= high + 1e-12 for low, high in pairwise(levels))
        if len(given_.classes) <= 8:
            assert levels[-1] == pytest.approx(1)
    scaled = given_.sums / given_.lengths[:, None]  # may merge what rounding cannot keep apart
    if [len(set(row)) for row in scaled.tolist()] == [len(set(row)) for row in given_.sums.tolist()]:
        assert compute_retrieval_metrics(scaled, given_.own, given_.classes) == found


def test_retrieval_of_thoughts_that_are_told_apart_and_of_their_opposite() -> None:
    right, wrong = told_apart(10), told_apart(10, own=-9.0, other=-1.0)
    found = compute_retrieval_metrics(right.sums, right.own, right.classes)
    assert [found[f"retrieval_accuracy{k}"] for k in ("", "@2", "@4", "@8")] == [1, 1, 1, 1]
    assert [found[f"retrieval_chance_level{k}"] for k in ("", "@2", "@4", "@8")] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert [found[f"retrieval_above_chance{k}"] for k in ("", "@2")] == pytest.approx([0.9, 0.8])
    found = compute_retrieval_metrics(wrong.sums, wrong.own, wrong.classes)
    assert [found[f"retrieval_accuracy{k}"] for k in ("", "@2", "@4", "@8")] == [0, 0, 0, 0]
    assert found["retrieval_above_chance"] == pytest.approx(-0.1)


def test_an_identical_prompt_is_as_right_as_the_own_one() -> None:
    sums = torch.tensor([[-1.0, -2.0, -1.0], [-1.0, -2.0, -1.0], [-5.0, -2.0, -5.0]])
    own, twins = torch.tensor([0, 2, 1]), torch.tensor([0, 1, 0])
    found = compute_retrieval_metrics(sums, own, twins)
    assert found["retrieval_accuracy"] == 1
    assert found["retrieval_chance_level"] == pytest.approx((2 / 3 + 2 / 3 + 1 / 3) / 3)
    assert found["retrieval_chance_level@2"] == 1
    assert compute_retrieval_metrics(sums, own, torch.arange(3))["retrieval_accuracy"] == pytest.approx(2 / 3)


def test_equal_scores_rank_by_column() -> None:
    level, own = torch.zeros(3, 3), torch.arange(3)
    found = compute_retrieval_metrics(level, own, torch.arange(3))
    assert found["retrieval_accuracy"] == pytest.approx(1 / 3)
    assert found["retrieval_accuracy@2"] == pytest.approx(2 / 3)
    assert (
        compute_retrieval_metrics(level, torch.zeros(3, dtype=torch.long), torch.arange(3))["retrieval_accuracy"] == 1
    )


# ---------------------------------------------------------------------------- the control


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@examples
@given(scored(most_rows=5))
def test_the_control_approaches_the_mean_over_all_permutations(given_: Scored) -> None:
    wanted = oracles.mean_shuffled_accuracy(given_.sums.tolist(), given_.own.tolist(), given_.classes.tolist())
    found = compute_shuffled_accuracy(given_.sums, given_.own, given_.classes, seeded(), num_shuffles=2000)
    # Five standard errors of a share among 2,000 permutations, at most 0.5 each.
    assert found == pytest.approx(wanted, abs=5 * 0.5 / 2000**0.5)


@pytest.mark.parametrize("own", [-1.0, -17.0])
def test_the_control_sits_at_chance_however_well_thoughts_are_told_apart(own: float) -> None:
    those = told_apart(64, own=own)
    chance = compute_retrieval_metrics(those.sums, those.own, those.classes)["retrieval_chance_level"]
    found = compute_shuffled_accuracy(those.sums, those.own, those.classes, seeded(), num_shuffles=400)
    # Hits of one permutation are nearly Poisson(1): five standard errors are 5 / 64 / sqrt(400).
    assert found == pytest.approx(chance, abs=5 / 64 / 20)


def test_the_control_is_reproduced_by_its_generator_and_moves_nothing() -> None:
    those = told_apart(6)
    own = those.own.clone()
    found = [compute_shuffled_accuracy(those.sums, those.own, those.classes, seeded(3), 7) for _ in range(2)]
    assert found[0] == found[1]
    assert torch.equal(those.own, own)
    alone = Scored(those.sums[:1], those.lengths[:1], those.own[:1], those.classes)
    assert compute_shuffled_accuracy(alone.sums, alone.own, alone.classes, seeded()) == 1


# ---------------------------------------------------------------------------- refusals


def test_one_prompt_or_no_thought_is_refused() -> None:
    none = torch.zeros(0, dtype=torch.long)
    one = torch.zeros(1, dtype=torch.long)
    for sums, own in ((torch.zeros(1, 1), one), (torch.zeros(0, 2), none), (torch.zeros(0, 0), none)):
        classes = torch.arange(sums.shape[1])
        for call in (
            lambda sums=sums, own=own: compute_information_metrics(sums, torch.ones(len(own)), own),
            lambda sums=sums, own=own, classes=classes: compute_retrieval_metrics(sums, own, classes),
            lambda sums=sums, own=own, classes=classes: compute_shuffled_accuracy(sums, own, classes, seeded()),
        ):
            with pytest.raises(ValueError, match=r"at least 1 thought and 2 prompts.*Leave the diagnostics"):
                call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    those = told_apart(3)
    those.sums[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        compute_information_metrics(*those[:3])
    with pytest.raises(ValueError, match="not finite"):
        compute_retrieval_metrics(those.sums, those.own, those.classes)
