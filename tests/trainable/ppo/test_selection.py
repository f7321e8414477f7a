"""Which episodes a step trains on: groups that pass the filter, further batches of groups, and masked episodes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scripted import make_random_episodes
from tests.fakes.trainers import (
    Row,
    check_resumption,
    copy_weights,
    drop_times,
    has_changed,
    make_quiet_trainer,
    record_results,
    run_steps,
)
from tests.strategies.examples import draw_examples
from trainable.config.own_parts import PartFile, register_file
from trainable.config.run_config import ConfigError
from trainable.config.sections import FilterConfig
from trainable.ppo.targets import Selection, filter_episodes
from trainable.rollout.episode import Episode, collate

GRPO = {"algorithm__adv_estimator": "grpo"}
# The groups of equal scores are dropped: with 2 of 4 levels, some steps lack groups.
REFILL = {
    **GRPO,
    "env__group_size": 2,
    "env__env_groups": 3,
    "filter__rollout_filter_include_zero": False,
    "filter__max_num_gen_batches": 4,
}


def make_selection(kept_masks: list[bool], group_size: int = 2) -> Selection:
    """Make the result of a filter that kept the groups where the mask is True."""
    episodes = make_random_episodes(len(kept_masks) * group_size, group_size, seed=len(kept_masks))
    is_kept = torch.tensor(kept_masks, dtype=torch.bool)
    stds = torch.arange(len(kept_masks)) + 1.0
    return Selection([episode for episode in episodes if is_kept[episode.group]], stds, is_kept)


@draw_examples(50)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_further_batches_fill_a_step_up_to_its_groups_and_the_last_ones_are_dropped(batches: list[list[bool]]) -> None:
    selection = make_selection(batches[0])
    for kept_masks in batches[1:]:
        selection = selection.extend(make_selection(kept_masks), 3)
    expected = [number for number, is_kept in enumerate(kept for batch in batches for kept in batch) if is_kept][:3]
    assert selection.is_kept.nonzero().flatten().tolist() == expected
    assert [episode.group for episode in selection.episodes] == [number for number in expected for _ in range(2)]
    columns = selection.columns
    assert (columns["groups"], columns["groups_kept"]) == (3 * len(batches), len(expected))
    assert columns["kept_ratio"] == len(expected) / (3 * len(batches))
    assert columns["reward_std"] == pytest.approx(2)
    kept_stds = [number % 3 + 1 for number in expected]
    assert columns["reward_std_kept"] == pytest.approx(sum(kept_stds) / len(kept_stds) if kept_stds else 0)
    # The episodes of a group are those of the batch that it comes from.
    for episode in selection.episodes:
        first_episode = make_random_episodes(6, 2, seed=3)[2 * (episode.group % 3)]
        assert episode.level_seed == first_episode.level_seed


def test_a_step_samples_batches_until_enough_groups_passed() -> None:
    trainer = make_quiet_trainer(**REFILL)
    selections = record_results(trainer, "_refill")
    prepared = record_results(trainer, "_prepare_selected")
    rows = run_steps(trainer, 3)
    assert {row["gen_batches"] for row in rows} & {2, 3, 4}
    assert len(selections) == 3
    for step, row in enumerate(rows, 1):
        assert row["groups"] == 3 * row["gen_batches"]
        assert row["groups_kept"] == min(3, row["groups"] - row["zero_std_groups"])
        assert row["groups_kept"] == 3 or row["gen_batches"] == 4
        batches = trainer.refill_levels[3 * (step - 1) : 3 * step]
        seeds = {
            level.seed for levels in [trainer.levels[step - 1], *batches[: row["gen_batches"] - 1]] for level in levels
        }
        assert len(seeds) == row["groups"]
        # Each further level is new, and no level of validations.
        assert {level.seed for levels in batches for level in levels} == {
            10_000 + 250_000 + 9 * (step - 1) + number for number in range(9)
        }
    for row, (batch, _, _) in zip(rows, prepared, strict=True):
        assert len(batch.group_ids.unique()) == row["groups_kept"]
        assert row["reward_std_kept"] > 0
    # All samples count, also those of dropped groups.
    assert sum(row["sampled_tokens"] for row in rows) == rows[-1]["total_sampled_tokens"]
    assert rows[0]["sampled_tokens"] == round(rows[0]["train_response_tokens"] * 2 * rows[0]["groups"])


def test_the_first_batch_is_that_of_a_run_without_further_ones() -> None:
    """A step that needs no further batch has the same row."""
    plain, refill = (
        run_steps(make_quiet_trainer(**{**REFILL, "filter__max_num_gen_batches": count}), 1)[0] for count in (1, 4)
    )
    assert "gen_batches" not in plain
    assert refill["gen_batches"] > 1
    assert refill["collapse_first_turn_num_total"] == plain["collapse_first_turn_num_total"]
    settings = {**REFILL, "env__group_size": 16, "env__env_groups": 1}
    rows = [run_steps(make_quiet_trainer(**{**settings, "filter__max_num_gen_batches": n}), 1)[0] for n in (1, 4)]
    assert rows[1].pop("gen_batches") == 1
    assert rows[0] == rows[1]


def test_a_run_that_samples_further_batches_resumes_to_the_same_rows(tmp_path: Path) -> None:
    check_resumption(lambda: make_quiet_trainer(**REFILL), tmp_path)


def test_further_batches_draw_their_own_numbers_whatever_the_length_of_the_run() -> None:
    short, long = (make_quiet_trainer(**REFILL, trainer__total_training_steps=steps) for steps in (2, 5))
    assert [level.seed for levels in short.refill_levels for level in levels] == [
        level.seed for levels in long.refill_levels[:6] for level in levels
    ]
    levels = short.levels[0]
    first, again, second = (short.roll_out(levels, 2, "sampling", *indices) for indices in ((), (), (1,)))
    texts = [[episode.texts for episode in episodes] for episodes in (first, again, second)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor__filter_loss_scaling": "linear"}, "set actor.filter_loss_scaling=none"),
        ({"trainer__gradient_analysis_mode": True}, "trainer.gradient_analysis_mode=false"),
        ({"env__env_groups": 50_000, "actor__ppo_mini_batch_size": 50_000}, "a smaller env.env_groups"),
        ({"filter__max_num_gen_batches": 0}, "greater than or equal to 1"),
        ({"env__overlong_buffer_len": 10_000}, "set env.overlong_buffer_len="),
    ],
)
def test_what_does_not_fit_further_batches_is_refused(changes: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_quiet_trainer(**{**REFILL, **changes})


# ---------------------------------------------------------------------------- masked episodes


def make_marked_episodes() -> list[Episode]:
    """Make three groups of four: one void turn, one cut reply, and one episode that is both."""
    episodes = make_random_episodes(12, 4, seed=5)

    def void(episode: Episode) -> Episode:
        return episode._replace(turn_validity=(False, *episode.turn_validity[1:]))

    changes = {1: void(episodes[1]), 6: episodes[6]._replace(is_truncated=True)}
    changes[9] = void(episodes[9])._replace(is_truncated=True)
    return [changes.get(number, episode) for number, episode in enumerate(episodes)]


@pytest.mark.parametrize(
    ("settings", "masked"),
    [
        ({}, []),
        ({"mask_void_turns": True}, [1, 9]),
        ({"mask_truncated_completions": True}, [6, 9]),
        ({"mask_void_turns": True, "mask_truncated_completions": True}, [1, 6, 9]),
    ],
)
def test_masked_episodes_are_those_with_a_void_turn_or_a_cut_reply(settings: Row, masked: list[int]) -> None:
    episodes = make_marked_episodes()
    selection = filter_episodes(episodes, FilterConfig(**settings), 4)
    assert [number for number, episode in enumerate(selection.episodes) if episode.is_masked] == masked
    assert collate(selection.episodes).is_masked.any(1).nonzero().flatten().tolist() == masked
    assert not selection.is_empty
    # The filter of groups counts them.
    plain = filter_episodes(episodes, FilterConfig(), 4)
    assert selection.columns == plain.columns


VOID = {**GRPO, "rollout__temperature": 1.2, "env__env_groups": 4, "actor__ppo_mini_batch_size": 16}


def test_advantages_count_masked_episodes_and_losses_do_not() -> None:
    plain, masked = make_quiet_trainer(**VOID), make_quiet_trainer(**VOID, filter__mask_void_turns=True)
    plain_batches, masked_batches = (record_results(trainer, "_prepare_selected") for trainer in (plain, masked))
    (plain_row,), (masked_row,) = run_steps(plain, 1), run_steps(masked, 1)
    (plain_batch, plain_targets, _), (batch, targets, _) = plain_batches[0], masked_batches[0]
    assert 0 < masked_row["masked_episodes"] < 16
    assert "masked_episodes" not in plain_row
    assert torch.equal(targets.advantages, plain_targets.advantages)
    for row in range(len(batch.lengths)):
        expected = torch.zeros_like(batch.mask[row]) if batch.is_masked[row].any() else plain_batch.mask[row]
        assert torch.equal(batch.mask[row], expected)
    assert masked_row["trained_tokens"] == int(batch.mask.sum()) < plain_row["trained_tokens"]
    assert masked_row["sampled_tokens"] == plain_row["sampled_tokens"]


def test_only_void_turns_are_masked_if_the_other_turns_are_to_be_trained() -> None:
    settings = FilterConfig(mask_void_turns=True, mask_only_void_turns=True, mask_truncated_completions=True)
    episodes = make_marked_episodes()
    batch = collate(filter_episodes(episodes, settings, 4).episodes)
    assert [number for number, is_masked in enumerate(batch.is_masked) if is_masked.any()] == [1, 6, 9]
    length = batch.lengths[1]
    assert torch.equal(batch.is_masked[1, :length], batch.turns[1, :length] == 0)  # the turn without a valid answer
    for cut in (6, 9):  # a cut reply leaves out the whole episode
        assert bool((batch.is_masked | ~batch.mask)[cut].all())
    # On its own the setting does nothing.
    plain = filter_episodes(episodes, FilterConfig(mask_only_void_turns=True), 4)
    assert not collate(plain.episodes).is_masked.any()


@pytest.mark.parametrize(("estimator", "mode"), [("grpo", "token-mean-global"), ("gae", "seq-mean-token-mean")])
def test_the_gradient_is_that_of_the_batch_without_the_masked_episodes(estimator: str, mode: str) -> None:
    settings = {"algorithm__adv_estimator": estimator, "actor__loss_agg_mode": mode}
    common = {**VOID, **settings, "actor__ppo_micro_batch_size_per_gpu": 16}
    trainer = make_quiet_trainer(**common)
    episodes = trainer.roll_out(trainer.levels[0], 4, "sampling")
    masked_episodes = [
        e._replace(masked_turns=() if all(e.turn_validity) else tuple(range(len(e.turn_validity)))) for e in episodes
    ]
    batch, targets, order = trainer.prepare_batch(masked_episodes, 4, 4, np.random.default_rng(0))
    rest = (~batch.is_masked.any(1)).nonzero().flatten()
    assert 0 < len(rest) < len(episodes)

    def update(*rows: object) -> dict[str, torch.Tensor]:
        other = make_quiet_trainer(**common)
        other.make_actor_update().run(*rows)  # type: ignore[arg-type]
        return copy_weights(other)

    with_masked = update(batch, targets, order)
    smaller = batch.select_rows(rest)
    without = update(smaller, targets.select_rows(rest, smaller.mask.shape[1]), torch.arange(len(rest)))
    unmasked = update(*trainer.prepare_batch(episodes, 4, 4, np.random.default_rng(0)))
    assert with_masked.keys() == without.keys()
    for name, weight in with_masked.items():
        torch.testing.assert_close(weight, without[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(weight, unmasked[name]) for name, weight in with_masked.items())


def test_a_step_in_which_all_episodes_are_masked_is_empty(random_folder: Path) -> None:
    settings = {"model__path": str(random_folder), "filter__mask_void_turns": True}
    trainer = make_quiet_trainer(**settings)
    old_weights = copy_weights(trainer)
    rows = run_steps(trainer, 2)
    assert [row["consecutive_empty_steps"] for row in rows] == [1, 2]
    assert [(row["groups_kept"], row["masked_episodes"], row["trained_tokens"]) for row in rows] == [(2, 8, 0)] * 2
    assert not has_changed(trainer, old_weights, "actor/")
    assert not has_changed(trainer, old_weights, "critic/")


def test_masked_episodes_go_with_records_analyses_and_compiled_passes() -> None:
    settings = {
        **VOID,
        "algorithm__adv_estimator": "gae",
        "filter__mask_void_turns": True,
        "actor__use_kl_loss": True,
        "actor__ppo_mini_batch_size": 4,  # some mini-batches may have no trained token
        "trainer__test_freq": 1,
        "trainer__log_train_generations": 16,
        "trainer__gradient_analysis_mode": True,
        "trainer__gradient_analysis_log_prefilter": True,
    }
    trainer = make_quiet_trainer(**settings)
    output = trainer.step()
    row = drop_times(output.row)
    assert all(np.isfinite(value) for value in row.values())
    silent = [episode for episode in output.trained_episodes if all(t.advantage is None for t in episode.turns)]
    assert len(silent) == row["masked_episodes"] > 0
    prefilter, kept = output.gradients
    tokens = [
        next(line["token_count"] for line in lines["rows"] if line["bucket"] == "all") for lines in (prefilter, kept)
    ]
    assert tokens == [row["sampled_tokens"], row["trained_tokens"]]


def test_masks_are_refused_where_a_loss_compares_whole_groups() -> None:
    settings = {"actor__policy_loss": "tpo", "algorithm__adv_estimator": "group_skill"}
    with pytest.raises(ConfigError, match=r"set filter\.mask_void_turns=false"):
        make_quiet_trainer(**settings, filter__mask_void_turns=True)


# ---------------------------------------------------------------------------- your own filter

OWN_FILTERS = """
def longest(scores, value, largest, groups):
    import torch
    lengths = torch.tensor([sum(episode.response_tokens for episode in group) for group in groups])
    return lengths >= lengths.max()


def best(scores, value, largest):
    return scores >= scores.max()
"""


@pytest.mark.parametrize("include_zero", [True, False])
def test_your_own_filter_gets_the_episodes_of_its_candidates_if_it_asks_for_them(include_zero: bool) -> None:
    register_file(PartFile("own_filters.py", OWN_FILTERS))
    episodes = make_random_episodes(12, 3, seed=1)
    # The first group has equal scores, and the most tokens.
    episodes[:3] = [
        e._replace(turn_rewards=(1.0, *[0.0] * (len(e.texts) - 1)), mask=np.ones_like(e.mask))
        for e in make_random_episodes(3, 3, 8)
    ]
    lengths = [sum(e.response_tokens for e in episodes[first : first + 3]) for first in range(0, 12, 3)]
    assert lengths[0] == max(lengths)
    settings = {"rollout_filter_include_zero": include_zero}
    longest = filter_episodes(episodes, FilterConfig(**settings, rollout_filter_strategy="own_filters.py:longest"), 3)
    expected = lengths.index(max(lengths if include_zero else lengths[1:]))
    assert longest.is_kept.nonzero().flatten().tolist() == [expected]
    best = filter_episodes(episodes, FilterConfig(**settings, rollout_filter_strategy="own_filters.py:best"), 3)
    assert best.groups_kept == 1
