"""The times of the phases of a step, and their FLOPs, which equal those of torch's counter."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.fakes.scripted import (
    make_episode,
    make_qwen2_shape,
    make_random_episodes,
    make_random_model,
    make_small_config,
)
from tests.fakes.trainers import QUIET_SETTINGS, make_quiet_trainer
from trainable.ppo import phases
from trainable.ppo.phases import (
    PhaseTimer,
    estimate_forward_flops,
    estimate_rollout_flops,
    estimate_training_flops,
    measure_peak_flops,
)
from trainable.rollout.episode import collate


def test_estimated_flops_match_torchs_counter() -> None:
    """Torch counts the matrix products; a sum over pairs gives causal attention, which torch does not halve."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = make_random_model(make_qwen2_shape(**sizes))
    tokens, positions = torch.zeros(2, 11, dtype=torch.long), torch.tensor([3, 10, 15])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.lm_head(model.model.compute_hidden_states(tokens, positions))
    counts = counter.get_flop_counts()["Global"]
    matrix_flops = sum(count for operation, count in counts.items() if "mm" in str(operation))
    lengths = [11, 5]  # a row is processed up to its last position in `positions`
    attention_flops = 3 * sum(4 * 32 * (position + 1) for length in lengths for position in range(length))
    assert estimate_forward_flops(model.shape, lengths, 3, 23) == matrix_flops + attention_flops
    cached_flops = estimate_forward_flops(model.shape, lengths, 3, 23, cached_tokens=5)
    assert cached_flops == matrix_flops + attention_flops + 3 * sum(lengths) * 4 * 32 * 5


def test_rollout_flops_are_one_forward_pass_with_shared_prompts() -> None:
    trainer = make_quiet_trainer()
    episodes = trainer.roll_out(trainer.levels[0], 3, "sampling")
    sizes = trainer.model.shape
    lengths = [(len(episode.tokens), episode.response_tokens) for episode in episodes]
    separate_flops = sum(estimate_forward_flops(sizes, [one], sampled, sizes.vocab_size) for one, sampled in lengths)
    prompt_lengths = {episode.group: int(episode.mask.argmax()) for episode in episodes}
    # Rollouts 2 and 3 of each group share the prefill of its prompt.
    shared_flops = 2 * sum(estimate_forward_flops(sizes, [length], 0, 0) for length in prompt_lengths.values())
    assert estimate_rollout_flops(sizes, episodes) == pytest.approx(separate_flops - shared_flops)


def test_a_child_of_a_tree_has_a_prompt_of_its_own() -> None:
    sizes = make_qwen2_shape()
    root, child, other_child = (
        make_episode([(length, 32, 0.0)], 0, np.random.default_rng(length)) for length in (200, 100, 2000)
    )
    single_flops = [estimate_rollout_flops(sizes, [episode]) for episode in (root, child, other_child)]
    assert min(single_flops) > 0
    assert estimate_rollout_flops(sizes, [root, child, other_child]) == pytest.approx(sum(single_flops))
    # A prompt is filled once for a group, and again for the next one.
    prefill_flops = estimate_forward_flops(sizes, [100], 0, 0)
    assert estimate_rollout_flops(sizes, [child, child]) == pytest.approx(2 * single_flops[1] - prefill_flops)
    assert estimate_rollout_flops(sizes, [child, child._replace(group=1)]) == pytest.approx(2 * single_flops[1])


def test_a_branch_samples_what_comes_after_its_node_alone() -> None:
    sizes = make_qwen2_shape()
    episode = make_episode([(20, 8, 0.0), (5, 8, 0.0)])
    prefill_flops = estimate_forward_flops(sizes, [20 + 8 + 5], 0, 0)
    expected = prefill_flops + estimate_forward_flops(sizes, [8], 8, sizes.vocab_size, cached_tokens=33)
    assert estimate_rollout_flops(sizes, [episode._replace(prefix_turns=1)]) == pytest.approx(expected)


def test_phases_that_are_off_have_no_flops() -> None:
    shape, batch = make_qwen2_shape(), collate(make_random_episodes(8, 4))

    def estimate_phases(**overrides: object) -> dict[str, float]:
        return estimate_training_flops(shape, make_small_config(**{**QUIET_SETTINGS, **overrides}), batch)

    assert set(estimate_phases(actor__use_kl_loss=False)) == {"values", "update_critic", "update_actor"}
    assert set(estimate_phases(algorithm__adv_estimator="grpo", actor__use_kl_loss=False)) == {"update_actor"}
    shared_trunk = estimate_phases(critic__shared_trunk=True, actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    assert set(shared_trunk) == {"values", "update_actor", "reference"}
    assert shared_trunk["update_actor"] == pytest.approx(3 * shared_trunk["reference"])
    adapted = estimate_phases(model__lora_rank=4, actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    assert adapted["update_actor"] == pytest.approx(2 * adapted["reference"])
    assert adapted["update_critic"] == pytest.approx(2 * adapted["values"])
    assert estimate_phases(actor__ppo_epochs=2)["update_actor"] == pytest.approx(2 * estimate_phases()["update_actor"])
    tpo = estimate_phases(actor__policy_loss="tpo", algorithm__adv_estimator="group_skill", actor__use_kl_loss=False)
    assert tpo["update_actor"] == pytest.approx(4 / 3 * estimate_phases()["update_actor"])


def test_rows_have_the_mfu_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    flops: dict[str, float] = {}

    def record_rollout(*args: Any) -> float:
        flops["rollout"] = estimate_rollout_flops(*args)
        return flops["rollout"]

    def record_training(*args: Any) -> dict[str, float]:
        flops.update(estimate_training_flops(*args))
        return estimate_training_flops(*args)

    monkeypatch.setattr(phases, "estimate_rollout_flops", record_rollout)
    monkeypatch.setattr(phases, "estimate_training_flops", record_training)
    row = make_quiet_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.1).step().row
    peak = row["peak_flops_per_s"]
    assert peak == measure_peak_flops("cpu", torch.float32) > 1e8
    # Not below 1: other processes may have had the core while the peak was measured.
    for name in ("rollout", "values", "reference", "update_critic", "update_actor"):
        assert row[f"mfu_{name}"] * row[f"seconds_{name}"] * peak == pytest.approx(flops[name], rel=1e-9)
        assert flops[name] > 0


def test_a_phase_that_comes_twice_adds_up_and_is_counted_when_it_fails() -> None:
    phases = PhaseTimer(torch.device("cpu"))
    with phases.measure("values"):
        pass
    first_seconds = phases.seconds["values"]
    with pytest.raises(ZeroDivisionError), phases.measure("values"):
        1 / 0  # noqa: B018 - raises on purpose
    assert phases.seconds["values"] > first_seconds > 0
    assert set(phases.seconds) == {"values"}
