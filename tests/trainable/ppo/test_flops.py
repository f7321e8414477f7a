"""FLOP of a step against torch's FLOP counter, and MFU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.fakes.scripted import make_qwen2_shape, make_random_model
from tests.fakes.trainers import make_quiet_trainer
from trainable.config.seeds import make_rng
from trainable.ppo.flops import (
    compute_mfu,
    estimate_forward_flops,
    estimate_rollout_flops,
    estimate_training_flops,
    measure_peak_flops,
)


def test_estimated_flops_match_torchs_counter() -> None:
    """Matrix products by torch's counter; causal attention, which it does not halve, by a sum over pairs."""
    model = make_random_model(
        make_qwen2_shape(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    )
    tokens, where = torch.zeros(2, 11, dtype=torch.long), torch.tensor([3, 10, 15])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.lm_head(model.model.compute_hidden_states(tokens, where))
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counts.items() if "mm" in str(operation))
    lengths = [11, 5]  # a row is read up to its last position in `where`
    attention = 3 * sum(4 * 32 * (position + 1) for length in lengths for position in range(length))
    assert estimate_forward_flops(model.shape, lengths, 3, 23) == products + attention
    after_five = estimate_forward_flops(model.shape, lengths, 3, 23, cached_tokens=5)
    assert after_five == products + attention + 3 * sum(lengths) * 4 * 32 * 5


def test_rollout_flops_are_one_forward_pass_with_shared_prompts() -> None:
    trainer = make_quiet_trainer()
    episodes = trainer.roll_out(trainer.levels[0], 3, make_rng(0, "sampling", 1))
    sizes = trainer.model.shape
    each = sum(
        estimate_forward_flops(sizes, [len(episode.tokens)], episode.response_tokens, sizes.vocab_size)
        for episode in episodes
    )
    openings = {episode.group: int(episode.mask.argmax()) for episode in episodes}
    # Rollouts 2 and 3 of each group share the prefill of its prompt.
    again = 2 * sum(estimate_forward_flops(sizes, [length], 0, 0) for length in openings.values())
    assert estimate_rollout_flops(sizes, episodes) == pytest.approx(each - again)


def test_phases_that_are_off_have_no_flops() -> None:
    def phases(**overrides: object) -> dict[str, float]:
        trainer = make_quiet_trainer(**overrides)
        episodes = trainer.roll_out(trainer.levels[0], 4, make_rng(0, "sampling", 1))
        batch, _, _ = trainer.prepare_batch(episodes, 2, 2, make_rng(0, "duplicates", 1))
        return estimate_training_flops(trainer.model.shape, trainer.config, batch)

    assert set(phases(actor__use_kl_loss=False)) == {"values", "update_critic", "update_actor"}
    assert set(phases(algorithm__adv_estimator="grpo", actor__use_kl_loss=False)) == {"update_actor"}
    shared = phases(critic__shared_trunk=True, actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    assert set(shared) == {"values", "update_actor", "reference"}
    assert shared["update_actor"] == pytest.approx(3 * shared["reference"])
    adapters = phases(model__lora_rank=4, actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    assert adapters["update_actor"] == pytest.approx(2 * adapters["reference"])
    assert adapters["update_critic"] == pytest.approx(2 * adapters["values"])
    assert phases(actor__ppo_epochs=2)["update_actor"] == pytest.approx(2 * phases()["update_actor"])
    tpo = phases(actor__policy_loss="tpo", algorithm__adv_estimator="group_skill", actor__use_kl_loss=False)
    assert tpo["update_actor"] == pytest.approx(4 / 3 * phases()["update_actor"])


def test_mfu_is_flops_over_time_and_peak() -> None:
    seconds = {"values": 2.0, "update_actor": 0.0}
    assert compute_mfu({"values": 30.0, "update_actor": 5.0, "reference": 5.0}, seconds, 10.0) == {"values": 1.5}


def test_rows_have_the_mfu_of_each_phase() -> None:
    row = make_quiet_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.1).step().row
    assert row["peak_flops_per_s"] == measure_peak_flops("cpu", torch.float32) > 1e8
    for name in ("rollout", "values", "reference", "update_critic", "update_actor"):
        assert 0 < row[f"mfu_{name}"] < 1.5  # the peak of a shared machine varies
