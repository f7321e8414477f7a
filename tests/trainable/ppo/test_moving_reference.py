"""A reference that becomes a later policy (trainer.ref_model_sync_steps)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.scripted import clone_tensors
from tests.fakes.trainers import check_resumption, has_same_weights, make_quiet_trainer, run_steps
from trainable.models.networks import move_reference
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.checkpoint import write_checkpoint
from tune_study.placement.disk import compute_checkpoint_bytes
from tune_study.placement.model_files import read_model_shape

KL = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "mse", "actor__lr": 3e-3}
SYNC = {**KL, "trainer__ref_model_sync_steps": 2}
LORA = {**SYNC, "model__lora_rank": 4}
RESET = {**KL, "trainer__ref_model_reset_kl": 1e-5, "trainer__ref_model_reset_optimizer": True}


def copy_reference(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    reference: Any = trainer.reference
    return clone_tensors(dict(reference.named_parameters()))


def test_each_weight_is_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = nn.Linear(3, 2), nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        for weight in (*policy.parameters(), *reference.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    expected = [
        (0.3 * new.double() + 0.7 * old.double()).to(torch.bfloat16)
        for old, new in zip(reference.parameters(), policy.parameters(), strict=True)
    ]
    move_reference(reference.parameters(), policy.parameters(), 0.3)
    for weight, mixture in zip(reference.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.detach(), mixture, rtol=2**-7, atol=0)
    move_reference(reference.parameters(), policy.parameters(), 1.0)
    for weight, copied in zip(reference.parameters(), policy.parameters(), strict=True):
        assert torch.equal(weight, copied.to(torch.bfloat16))


@pytest.mark.parametrize("settings", [KL, {**KL, "model__lora_rank": 4}], ids=["weights", "adapters"])
def test_the_reference_is_the_policy_of_the_last_sync(settings: dict[str, object]) -> None:
    settings = {**settings, "actor__ppo_epochs": 2}
    trainer, fixed = make_quiet_trainer(**settings, trainer__ref_model_sync_steps=1), make_quiet_trainer(**settings)
    initial = copy_reference(trainer)
    (row,), (fixed_row,) = run_steps(trainer, 1), run_steps(fixed, 1)
    assert row.pop("reference_step") == 0
    assert "reference_step" not in fixed_row
    # Until the first sync, the runs are equal: adapters that add nothing change no number.
    assert row == fixed_row
    for name, weight in copy_reference(trainer).items():
        policy_weight = dict(trainer.model.named_parameters())[name]
        assert torch.equal(weight, policy_weight)
    assert any(not torch.equal(weight, initial[name]) for name, weight in copy_reference(trainer).items())
    (row,), (fixed_row,) = run_steps(trainer, 1), run_steps(fixed, 1)
    assert row["reference_step"] == 1
    assert abs(row["kl_to_reference"]) < 1e-6 < fixed_row["kl_to_reference"]
    assert row["kl_loss"] < fixed_row["kl_loss"]


def test_a_reference_is_reset_after_a_step_whose_kl_is_above_the_threshold() -> None:
    plain, patient = make_quiet_trainer(**KL), make_quiet_trainer(**{**KL, "trainer__ref_model_reset_kl": 100})
    plain_rows, patient_rows = run_steps(plain, 3), run_steps(patient, 2)
    assert [row.pop("reference_step") for row in patient_rows] == [0, 0]
    assert patient_rows == plain_rows[:2]
    threshold = plain_rows[1]["kl_to_reference"]
    assert plain_rows[2]["kl_to_reference"] > threshold
    # A KL equal to the threshold is not above it.
    trainer = make_quiet_trainer(**{**KL, "trainer__ref_model_reset_kl": threshold, "trainer__total_training_steps": 4})
    assert [row["reference_step"] for row in run_steps(trainer, 3)] == [0, 0, 0]
    for name, weight in copy_reference(trainer).items():
        assert torch.equal(weight, dict(trainer.model.named_parameters())[name])
    (row,) = run_steps(trainer, 1)
    assert row["reference_step"] == 3
    assert abs(row["kl_to_reference"]) < 1e-6
    assert row["kl_loss"] < plain_rows[2]["kl_loss"]


@pytest.mark.parametrize("swaps", [False, True], ids=["plain", "swap"])
def test_a_reset_clears_the_moments_and_a_mixture_does_not(swaps: bool) -> None:
    mixed = {"trainer__ref_model_sync_steps": 1, "trainer__ref_model_mixup_alpha": 0.5, "trainer__swap_to_host": swaps}
    trainer = make_quiet_trainer(**{**RESET, **mixed})
    run_steps(trainer, 1)
    assert list_moments(trainer)
    run_steps(trainer, 1)
    assert not list_moments(trainer)
    # The next step is one with a new optimizer.
    fresh = make_quiet_trainer(**{**RESET, **mixed})
    tensors, values = trainer.get_state()
    fresh.load_state(clone_tensors(tensors), values)
    kept = make_quiet_trainer(**{**RESET, **mixed, "trainer__ref_model_reset_optimizer": False})
    run_steps(kept, 2)
    for other in (trainer, fresh, kept):
        run_steps(other, 1)
    assert has_same_weights(trainer, fresh)
    assert not has_same_weights(trainer, kept)


def list_moments(trainer: PPOTrainer) -> list[str]:
    return [name for name in trainer.get_state()[0] if name.endswith("exp_avg") and name.startswith("actor_")]


@pytest.mark.parametrize("settings", [SYNC, LORA, RESET], ids=["full", "lora", "reset"])
def test_a_resumed_run_equals_an_undisturbed_one(settings: dict[str, object], tmp_path: Path) -> None:
    # At stops before a sync, at one, and after it, when the reference is neither the first policy nor the newest.
    stops = (1, 2, 3) if settings is SYNC else (3,)
    check_resumption(lambda: make_quiet_trainer(**settings, trainer__total_training_steps=4), tmp_path, stops)


def test_a_reference_moves_also_in_a_step_without_a_batch(random_folder: Path) -> None:
    settings = {"model__path": str(random_folder), "filter__rollout_filter_include_zero": False}
    trainer = make_quiet_trainer(**SYNC, **settings)
    calls: list[int] = []
    for _ in range(2):
        assert trainer.step(lambda: calls.append(trainer.reference_step)).row["groups_kept"] == 0
    assert calls == [0]  # before the tensors of the last state change
    assert trainer.reference_step == 2


@pytest.mark.parametrize("settings", [SYNC, LORA], ids=["full", "lora"])
def test_the_plan_knows_the_size_of_a_checkpoint(settings: dict[str, object], tmp_path: Path) -> None:
    sizes, planned = [], []
    for is_moving in (False, True):
        names = settings if is_moving else {name: settings[name] for name in settings if "ref_model" not in name}
        trainer = make_quiet_trainer(**names)
        write_checkpoint(tmp_path / "state", *trainer.get_state())
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "state").iterdir()))
        shape = read_model_shape(trainer.config.model.path, {})
        assert shape is not None
        planned.append(compute_checkpoint_bytes(shape, trainer.config))
    assert planned[1] - planned[0] == pytest.approx(sizes[1] - sizes[0], rel=0.01)


def test_a_state_of_another_kind_is_refused() -> None:
    moving, fixed = make_quiet_trainer(**SYNC), make_quiet_trainer(**KL)
    tensors, values = moving.get_state()
    assert values["reference_step"] == 0
    assert json.loads(json.dumps(values)) == values
    with pytest.raises(ValueError, match="reference/"):
        fixed.load_state(tensors, values)
    moving.load_state(*fixed.get_state())  # the initial reference
    with pytest.raises(ValueError, match=r"reference/.*got nothing"):
        moving.load_state({name: value for name, value in tensors.items() if not name.startswith("reference/")}, values)
