"""A trainer follows the schedules of its settings, also after a restart."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted import clone_tensors, make_small_config
from tests.fakes.trainers import (
    QUIET_SETTINGS,
    check_resumption,
    has_same_weights,
    make_quiet_trainer,
    record_results,
    run_steps,
)
from trainable.ppo.trainer import PPOTrainer

# Each of these settings changes the rows of a run with these settings.
BASE: dict[str, object] = {
    "actor__use_kl_loss": True,
    "actor__kl_loss_coef": 0.1,
    "actor__kl_loss_type": "mse",
    "actor__ppo_epochs": 2,
    "actor__lr": 3e-3,
    "critic__ppo_epochs": 2,
    "critic__lr": 1e-2,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__kl_coef": 0.1,
    "algorithm__bi_level_gae": True,
    "filter__rollout_filter_value": 1.0,
}
CHANGES: dict[str, tuple[float, float]] = {
    "actor__lr": (3e-3, 1e-3),
    "critic__lr": (1e-2, 1e-3),
    "actor__kl_loss_coef": (0.1, 1.0),
    "algorithm__kl_ctrl__kl_coef": (0.1, 1.0),
    "actor__entropy_coeff": (0.0, 0.1),
    "actor__clip_ratio_low": (0.2, 0.0),
    "actor__clip_ratio_high": (0.28, 0.0),
    "actor__clip_ratio_c": (3.0, 1.001),
    "critic__cliprange_value": (0.5, 1e-3),
    "rollout__temperature": (1.0, 0.7),
    "filter__rollout_filter_value": (1.0, 0.4),
    "algorithm__gamma": (1.0, 0.5),
    "algorithm__lam": (1.0, 0.5),
    "algorithm__high_level_gamma": (0.95, 0.5),
}


def make_trainer(**settings: object) -> PPOTrainer:
    return make_quiet_trainer(**{**BASE, **settings})


def get_column(name: str) -> str:
    return f"scheduled_{name.replace('__', '_')}"


def drop_scheduled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("scheduled_")} for row in rows]


def test_a_step_equals_a_step_with_the_numbers() -> None:
    """A run whose settings jump to other values equals one that continues from a checkpoint with these values."""
    firsts = {name: first for name, (first, _) in CHANGES.items()}
    seconds = {name: second for name, (_, second) in CHANGES.items()}
    scheduled = make_trainer(**{name: f"steps({firsts[name]}, {seconds[name]}@2)" for name in CHANGES})
    constant = make_trainer(**firsts)
    rows, constant_rows = run_steps(scheduled, 1), run_steps(constant, 1)
    assert {name: rows[0][get_column(name)] for name in CHANGES} == firsts
    assert drop_scheduled(rows) == constant_rows
    assert has_same_weights(scheduled, constant)
    tensors, values = constant.get_state()
    tensors = clone_tensors(tensors)
    rows = run_steps(scheduled, 1)
    assert {name: rows[0][get_column(name)] for name in CHANGES} == seconds
    # Each of the values matters: without its jump, the weights are others.
    for unchanged in (None, *CHANGES):
        other = make_trainer(**{name: (firsts if name == unchanged else seconds)[name] for name in CHANGES})
        other.load_state(clone_tensors(tensors), values)
        other.kl_coef = other.config.algorithm.kl_ctrl.kl_coef
        other_rows = run_steps(other, 1)
        assert has_same_weights(scheduled, other) == (unchanged is None), unchanged
        assert (drop_scheduled(rows) == other_rows) == (unchanged is None), unchanged


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    schedules = {
        "actor__lr": "linear(3e-3, 1e-3@3)",
        "actor__kl_loss_coef": "cosine(0, 1@3)",
        "algorithm__kl_ctrl__kl_coef": "linear(0.1, 0.4@3)",
        "rollout__temperature": "linear(1, 0.7@3)",
        "critic__shared_trunk": True,
    }
    check_resumption(lambda: make_trainer(**schedules), tmp_path)


CONTROLLERS = {
    "actor__entropy_coeff": "target_entropy({entropy}, 0.25, 0.1, 0.5)",
    "actor__kl_loss_coef": "target_kl({kl}, 0.1, 40)",
}


def make_controlled_trainer(entropy: float, kl: float) -> PPOTrainer:
    controllers = {name: text.format(entropy=entropy, kl=kl) for name, text in CONTROLLERS.items()}
    return make_trainer(**controllers)


@pytest.mark.parametrize("entropy", [0.01, 9.0])
def test_coefficients_follow_the_entropy_and_the_kl_of_the_steps_before(entropy: float) -> None:
    trainer = make_controlled_trainer(entropy, kl=1e-3)
    rows = run_steps(trainer, 3)
    coef, applied, beta = 0.1, 0.0, 0.1
    for row in rows:
        assert row[get_column("actor__entropy_coeff")] == applied
        assert row[get_column("actor__kl_loss_coef")] == pytest.approx(beta, rel=1e-12)
        is_low = row["entropy"] <= entropy
        coef = min(0.5, coef + 0.25) if is_low else max(0.1, coef - 0.25)
        applied = coef if is_low else 0.0
        beta *= 1 + min(0.2, max(-0.2, row["kl_to_reference"] / 1e-3 - 1)) * row["batch_size"] / 40
    assert trainer.coefficients["actor.entropy_coeff"] == (coef, applied)


def test_a_controlled_step_equals_a_step_with_the_number() -> None:
    controlled = make_controlled_trainer(entropy=9.0, kl=1e-3)
    run_steps(controlled, 1)
    tensors, values = controlled.get_state()
    tensors = clone_tensors(tensors)
    rows = run_steps(controlled, 1)
    coefficients = {name: rows[0][get_column(name)] for name in CONTROLLERS}
    # A state of the step before, which may still be written, does not change.
    saved: Any = values["coefficients"]
    assert {name: pair[1] for name, pair in saved.items()} == {
        name.replace("__", "."): value for name, value in coefficients.items()
    }
    assert saved != controlled.coefficients
    assert coefficients["actor__entropy_coeff"] == 0.35
    for other_coefficients in ({}, {"actor__entropy_coeff": 0.0}, {"actor__kl_loss_coef": 0.1}):
        constant = make_trainer(**{**coefficients, **other_coefficients})
        constant.load_state(clone_tensors(tensors), values)
        other_rows = run_steps(constant, 1)
        assert has_same_weights(controlled, constant) == (not other_coefficients)
        assert (drop_scheduled(rows) == other_rows) == (not other_coefficients)


def test_a_resumed_run_with_controllers_equals_an_undisturbed_one(tmp_path: Path) -> None:
    check_resumption(lambda: make_controlled_trainer(entropy=9.0, kl=1e-3), tmp_path, stops=(2,))


def test_a_step_without_a_batch_adapts_nothing(random_folder: Path) -> None:
    settings = {"model__path": str(random_folder), "filter__rollout_filter_include_zero": False}
    trainer = make_trainer(**settings, actor__entropy_coeff="target_entropy(9, 0.25, 0.1, 0.5)")
    assert run_steps(trainer, 1)[0]["groups_kept"] == 0
    assert trainer.coefficients == {"actor.entropy_coeff": (0.1, 0.0)}


def test_a_group_of_the_optimizer_has_the_rate_of_its_network() -> None:
    trainer = make_trainer(critic__shared_trunk=True, actor__lr="steps(3e-3, 1e-3@2)", critic__lr="steps(1e-2, 2e-2@2)")
    optimizer: Any = trainer.backends["actor"].optimizer  # type: ignore[attr-defined]
    for rates in ([3e-3, 1e-2], [1e-3, 2e-2]):
        run_steps(trainer, 1)
        assert [group["lr"] for group in optimizer.param_groups] == rates


def test_validations_and_analyses_see_the_settings_of_their_step() -> None:
    settings = {"actor__entropy_coeff": "linear(0.1, 0.3@3)", "trainer__gradient_analysis_mode": True}
    analysis = {"trainer__gradient_analysis_every": 1, "actor__use_kl_loss": True}
    trainer = make_quiet_trainer(**settings, **analysis)
    results = record_results(trainer, "_analyze_gradients")
    run_steps(trainer, 2)
    coefficients = [
        {row["coefficient"] for row in lines[0]["rows"] if row["component"] == "entropy"} for lines in results
    ]
    assert coefficients == [{0.1}, {0.2}]


def test_a_run_without_schedules_has_no_columns_of_them() -> None:
    assert not any(name.startswith("scheduled_") for name in run_steps(make_quiet_trainer(), 1)[0])
    config = make_small_config(**QUIET_SETTINGS)
    assert config.at_step(3) is config
