from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from search_spaces.catalog import STUDIES
from tests.fakes.lines import append_record
from tests.fakes.plans import plan_study, read_shape
from tests.fakes.scripted import SMALL_SETTINGS
from tests.fakes.trainers import make_quiet_trainer
from trainable.config.run_config import apply_overrides
from trainable.runs.checkpoint import write_checkpoint
from trainable.runs.run_files import METRICS_FILE, STATE_FOLDER
from trainable.runs.study_record import StatusRecord, write_record
from trainable.trial import PPO
from tune_study.placement.disk import (
    DiskBudget,
    check_budget,
    compute_checkpoint_bytes,
    count_folder_bytes,
    count_occurrences,
    estimate_disk_budget,
    estimate_row_bytes,
    format_disk_line,
)
from tune_study.placement.model_size import count_policy_parameters
from tune_study.placement.resources import preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan
from tune_study.plan.typed_settings import collect_overrides
from tune_study.tune.run import execute_study
from tune_study.tune.trials import make_trial_config

VARIANTS: dict[str, Mapping[str, object]] = {
    "gae": {},
    "gae, shared trunk": {"critic.shared_trunk": True},
    "grpo": {"algorithm.adv_estimator": "grpo"},
    "grpo, shared trunk": {"algorithm.adv_estimator": "grpo", "critic.shared_trunk": True},
    "adapters": {"model.lora_rank": 8, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "adapters of some layers, shared trunk": {
        "model.lora_rank": 128,
        "model.lora_target_modules": ["k_proj", "up_proj"],
        "critic.shared_trunk": True,
    },
    "rloo, KL loss": {"algorithm.adv_estimator": "rloo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
}
TINY = read_shape("sokoban-tiny")
EXAMPLE = DiskBudget(
    remaining_runs=6,
    concurrent_runs=2,
    checkpoint_bytes=1_800_000,
    saved_checkpoints=4,
    last_states=1,
    row_bytes=1_600_000,
    total_bytes=62_800_000,
    written_bytes=0,
    free_bytes=52_100_000_000,
    folder=Path("/out"),
)


def allocate_resources(plan: StudyPlan, limit: int | None = None) -> ResourcePlan:
    return preflight(plan, None, (), 2, limit, is_real=True)


def estimate_budget(plan: StudyPlan, limit: int | None = None) -> DiskBudget:
    return estimate_disk_budget(plan, allocate_resources(plan, limit), {})


def write_bytes(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def with_config(spec: RunSpec, changes: Mapping[str, object]) -> RunSpec:
    return replace(spec, config=apply_overrides(spec.config, changes))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_has_the_size_of_the_real_one(name: str, tmp_path: Path) -> None:
    trainer = make_quiet_trainer(**{key.replace(".", "__"): value for key, value in VARIANTS[name].items()})
    trainer.step()
    tensors, values = trainer.get_state()
    assert any(key.startswith("actor_optimizer/") for key in tensors), "without an update there are no moments"
    write_checkpoint(tmp_path / "state", tensors, values)
    checkpoint_bytes = sum(path.stat().st_size for path in (tmp_path / "state").iterdir())
    assert abs(compute_checkpoint_bytes(TINY, trainer.config) - checkpoint_bytes) < min(0.01 * checkpoint_bytes, 6_000)


@given(st.integers(1, 60), st.integers(-1, 70))
@example(60, 61)
@example(60, 60)
@example(60, 15)
@example(60, 16)
@example(60, -1)
@example(60, 0)
@example(60, 1)
@example(1, 1)
def test_kept_checkpoints_are_those_that_a_run_writes(steps: int, save_freq: int) -> None:
    saved_steps = [step for step in range(1, steps + 1) if save_freq > 0 and (step == steps or step % save_freq == 0)]
    assert count_occurrences(steps, save_freq) == len(saved_steps)


@given(st.integers(1, 30), st.integers(-1, 40), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_the_total_is_the_sum_of_what_it_is_made_of(
    steps: int, save_freq: int, arms: int, limit: int, keep_last: bool
) -> None:
    values = tuple(f"0.{number}" for number in range(1, arms + 1))
    settings = {"total_training_steps": steps, "save_freq": save_freq, "keep_last": keep_last}
    typed = {f"trainer.{name}": value for name, value in settings.items()}
    plan = plan_study(Path("/no/such/folder"), values, **typed)
    budget = estimate_budget(plan, limit)
    checkpoint_bytes, n_concurrent = (compute_checkpoint_bytes(TINY, plan.base_config), min(limit, arms))
    assert (budget.remaining_runs, budget.concurrent_runs, budget.saved_checkpoints, budget.checkpoint_bytes) == (
        arms,
        n_concurrent,
        count_occurrences(steps, save_freq),
        checkpoint_bytes,
    )
    # Three of every run that trains, and one of every other that keeps its last state.
    rolling_checkpoints = 3 * n_concurrent + keep_last * (arms - n_concurrent)
    num_checkpoints = arms * count_occurrences(steps, save_freq) + rolling_checkpoints
    assert budget.total_bytes == num_checkpoints * checkpoint_bytes + budget.row_bytes
    assert (budget.written_bytes, budget.folder) == (0, Path("/"))
    assert 0 < budget.free_bytes < 2**60


def test_rows_grow_with_steps_runs_and_levels() -> None:
    folder = Path("/no/such/folder")
    usual_bytes = estimate_budget(plan_study(folder)).row_bytes
    assert estimate_budget(plan_study(folder, trainer__total_training_steps=61)).row_bytes > usual_bytes
    assert estimate_budget(plan_study(folder, ("0", "0.1", "0.2"))).row_bytes > usual_bytes
    for smaller_settings in (
        {"env__val_env_groups": 16},
        {"env__test_env_groups": 0},
        {"trainer__val_before_train": False},
        {"trainer__log_val_generations": 3},
    ):
        assert estimate_budget(plan_study(folder, **smaller_settings)).row_bytes < usual_bytes
    assert estimate_budget(plan_study(folder, trainer__log_train_generations=1)).row_bytes > usual_bytes
    assert estimate_budget(plan_study(folder, trainer__test_freq=1)).row_bytes > usual_bytes
    assert estimate_budget(plan_study(folder, trainer__test_freq=0)).row_bytes < usual_bytes


def test_recorded_trees_have_room_for_their_children() -> None:
    def estimate(max_children: int) -> int:
        settings = {"env.papers.max_children": str(max_children), "trainer.log_train_generations": "2"}
        plan = plan_study(Path(), None, study="tree-grpo", **settings)
        return estimate_row_bytes(plan.runs[0].ppo_config)

    per_turn = 700 + 3_000 + 32 * 5
    # Seven validations in 60 steps record 4 trees each, and at most 2 that were trained on; a child has 3 turns and an
    # answer of at most 2,000 characters.
    assert estimate(2) - estimate(1) == 7 * (4 + 2) * (3 * per_turn + 2_000)


def test_arms_that_differ_are_added_up(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0", "0.1", "0.2"), trainer__save_freq=20)
    changes = ({}, {"algorithm.adv_estimator": "grpo"}, {"trainer.save_freq": -1})
    plan = replace(
        plan, runs=tuple(with_config(spec, arm_changes) for spec, arm_changes in zip(plan.runs, changes, strict=True))
    )
    budget = estimate_budget(plan)
    gae_bytes, grpo_bytes = (compute_checkpoint_bytes(TINY, spec.config) for spec in plan.runs[:2])
    state_bytes = budget.total_bytes - budget.row_bytes
    assert state_bytes == 4 * gae_bytes + 4 * grpo_bytes + gae_bytes + 2 * (gae_bytes + gae_bytes)
    assert (budget.checkpoint_bytes, budget.saved_checkpoints) == (gae_bytes, 3)


@pytest.mark.slow
def test_what_a_real_study_leaves_is_within_its_budget(ray_session: None, tmp_path: Path) -> None:
    study_settings = {key.replace(".", "__"): value for key, value in SMALL_SETTINGS.items()} | {
        "trainer__save_freq": 2
    }
    plan = plan_study(tmp_path, ("0",), **study_settings)
    budget_before = estimate_budget(plan)
    assert budget_before.checkpoint_bytes is not None
    assert budget_before.total_bytes is not None
    assert execute_study(plan, allocate_resources(plan), Console(quiet=True)) == 0
    state_bytes = sum(count_folder_bytes(path) for path in tmp_path.rglob("global_step_*"))
    state_bytes += sum(count_folder_bytes(plan.get_run_dir(spec.run_id) / STATE_FOLDER) for spec in plan.runs)
    assert state_bytes == pytest.approx((1 + 2) * budget_before.checkpoint_bytes, rel=1e-2)
    row_bytes = count_folder_bytes(tmp_path) - state_bytes
    assert 0.3 * budget_before.row_bytes < row_bytes < budget_before.row_bytes
    assert count_folder_bytes(tmp_path) < budget_before.total_bytes
    budget_after = estimate_budget(plan)
    assert (budget_after.remaining_runs, budget_after.total_bytes) == (0, 0)


def test_a_run_that_goes_on_needs_what_is_missing(tmp_path: Path) -> None:
    study_settings = {key.replace(".", "__"): value for key, value in SMALL_SETTINGS.items()} | {
        "trainer__save_freq": 1
    }
    plan = plan_study(tmp_path, **study_settings)
    budget_before = estimate_budget(plan)
    assert budget_before.checkpoint_bytes is not None
    trial = PPO(make_trial_config(plan, [plan.runs[0]]))
    trial.step()
    trial.stop()
    budget_after = estimate_budget(plan)
    assert budget_after.total_bytes is not None
    assert budget_after.total_bytes == budget_before.total_bytes
    assert budget_after.written_bytes == pytest.approx(2 * budget_before.checkpoint_bytes, rel=1e-2)
    check_budget(budget_after._replace(free_bytes=budget_after.missing_bytes))
    with pytest.raises(PlanError):
        check_budget(budget_after._replace(free_bytes=budget_after.missing_bytes - 1))


def test_ended_runs_need_nothing_more(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0", "0.1", "0.2", "0.3"))
    statuses = ("completed", "early_stopped", "failed", "interrupted")
    for index, (spec, status) in enumerate(zip(plan.runs, statuses, strict=True)):
        write_bytes(plan.get_run_dir(spec.run_id) / STATE_FOLDER / "state.safetensors", 1_000 * 10**index)
        write_record(plan.get_run_dir(spec.run_id), StatusRecord(spec.run_id, status))
    row_files = [plan.get_run_dir(spec.run_id) / METRICS_FILE for spec in plan.runs]
    append_record(row_files[0], {"step": plan.runs[0].steps})
    append_record(row_files[1], {"step": 3, "stop_rule": "empty_filtered_steps"})
    budget, fresh_budget = estimate_budget(plan), estimate_budget(plan_study(tmp_path / "other", ("0.2", "0.3")))
    for name in ("remaining_runs", "total_bytes", "row_bytes"):
        assert getattr(budget, name) == getattr(fresh_budget, name), name
    status_files = sum((plan.get_run_dir(spec.run_id) / "status.json").stat().st_size for spec in plan.runs[2:])
    assert budget.written_bytes == 1_100_000 + status_files
    write_record(plan.get_run_dir(plan.runs[2].run_id), StatusRecord(plan.runs[2].run_id, "completed"))
    append_record(row_files[2], {"step": plan.runs[2].steps})
    last_budget = estimate_budget(plan)
    assert (budget.concurrent_runs, last_budget.concurrent_runs) == (2, 1)
    assert last_budget.checkpoint_bytes is not None
    num_checkpoints = last_budget.saved_checkpoints + 3
    assert last_budget.total_bytes - last_budget.row_bytes == num_checkpoints * last_budget.checkpoint_bytes
    write_record(plan.get_run_dir(plan.runs[3].run_id), StatusRecord(plan.runs[3].run_id, "completed"))
    append_record(row_files[3], {"step": plan.runs[3].steps})
    check_budget(estimate_budget(plan)._replace(free_bytes=0))
    assert format_disk_line(estimate_budget(plan)).startswith("Disk: every run has ended, no more space is needed, ")


def test_a_run_counts_for_no_more_than_it_leaves(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0",), trainer__save_freq=60)
    (spec,) = plan.runs
    for path in (
        plan.get_run_dir(spec.run_id) / STATE_FOLDER / "step_2" / "state.safetensors",
        plan.get_run_dir(spec.run_id) / "core",
        plan.output / spec.checkpoint_dir / "global_step_60" / "state.safetensors",
        plan.folder / "huge",
    ):
        write_bytes(path, 4_000_000)
    budget = estimate_budget(plan, 1)
    # Those of the states in flight, and of what a study has besides its runs.
    assert budget.missing_bytes > 2 * budget.checkpoint_bytes
    assert 2 * budget.checkpoint_bytes < budget.written_bytes < 2 * budget.checkpoint_bytes + budget.row_bytes


def test_a_model_that_is_not_here_has_an_unknown_size(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, model__path="some/model", model__prompt_style="full")
    budget = estimate_disk_budget(plan, allocate_resources(plan), {"HF_HUB_CACHE": str(tmp_path)})
    assert (budget.checkpoint_bytes, budget.total_bytes, budget.written_bytes) == (None, None, 0)
    assert budget.unknown_models == ("some/model",)
    check_budget(budget._replace(free_bytes=0))
    assert format_disk_line(budget._replace(free_bytes=52_100_000_000)) == (
        "Disk: space unknown, because no config.json of a trainable model was found for some/model; 52.1 GB free."
    )


def test_a_condition_that_loads_a_model_has_states_of_its_size(tmp_path: Path) -> None:
    def estimate_task_budget(*assignments: str) -> DiskBudget:
        overrides = collect_overrides(STUDIES["sandbox"], {}, assignments)
        plan = plan_study(tmp_path, None, study="sandbox", **overrides)
        return estimate_disk_budget(plan, allocate_resources(plan), {"HF_HUB_CACHE": str(tmp_path)})

    checkpoint_bytes = estimate_task_budget("task=lm_bandit").checkpoint_bytes
    assert checkpoint_bytes > 12 * count_policy_parameters(TINY)
    larger_bytes = estimate_task_budget("task=lm_bandit", "model_name=Qwen/Qwen2.5-0.5B").checkpoint_bytes
    assert larger_bytes == pytest.approx(12 * 494e6, rel=0.01)
    assert (
        estimate_task_budget("model_name=Qwen/Qwen2.5-0.5B").checkpoint_bytes == estimate_task_budget().checkpoint_bytes
    )
    assert estimate_task_budget("task=lm_bandit", "model_name=some/model").unknown_models == ("some/model",)


def test_the_line() -> None:
    assert format_disk_line(EXAMPLE) == (
        "Disk: needs at most 62.8 MB, with checkpoints of up to 1.8 MB; 52.1 GB free. OK."
    )
    assert "needs at most 62.8 MB (3.0 MB already written)," in format_disk_line(
        EXAMPLE._replace(written_bytes=3_000_000)
    )
    assert format_disk_line(EXAMPLE._replace(free_bytes=62_800_000)).endswith("62.8 MB free. OK.")
    assert format_disk_line(EXAMPLE._replace(free_bytes=62_799_999)).endswith("62.8 MB free. NOT ENOUGH.")
    line = format_disk_line(EXAMPLE._replace(last_states=0))
    assert line.endswith(" The state of a run is removed when the run ends (--set trainer.keep_last=true keeps it).")


def test_exactly_enough_is_enough() -> None:
    for free_bytes, written_bytes in ((62_800_000, 0), (60_000_000, 2_800_000)):
        check_budget(EXAMPLE._replace(free_bytes=free_bytes, written_bytes=written_bytes))
        with pytest.raises(PlanError):
            check_budget(EXAMPLE._replace(free_bytes=free_bytes - 1, written_bytes=written_bytes))


def test_too_little_says_what_is_needed_what_is_free_and_what_to_type() -> None:
    with pytest.raises(PlanError) as error_info:
        check_budget(EXAMPLE._replace(free_bytes=12_000_000, written_bytes=10_000_000))
    text = str(error_info.value)
    assert "needs up to 52.8 MB more disk space, and /out has 12.0 MB free, 40.8 MB too little" in text
    assert "--save-freq with a larger number (-1 saves none)" in text
    for option in ("--set trainer.keep_last=false", "--max-concurrent 1", "--output"):
        assert option in text
    with pytest.raises(PlanError) as error_info:
        check_budget(EXAMPLE._replace(free_bytes=0, saved_checkpoints=0, concurrent_runs=1, last_states=0))
    assert "--save-freq" not in str(error_info.value)
    assert "trainer.keep_last=false" not in str(error_info.value)
    assert "--max-concurrent" not in str(error_info.value)
    assert "--output" in str(error_info.value)


def test_a_folder_has_the_bytes_of_its_files(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "one", 3)
    write_bytes(tmp_path / "a" / "b" / ".two", 4)
    write_bytes(tmp_path / "large", 5_000)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "large")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    assert count_folder_bytes(tmp_path / "a") < 5_000
    for name in ("link", "loop"):
        (tmp_path / "a" / name).unlink()
    assert count_folder_bytes(tmp_path / "a") == 3 + 4
    assert count_folder_bytes(tmp_path / "nothing") == 0


def test_a_trial_of_several_runs_writes_the_states_of_all_at_once(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, None, 3, study="influence")
    budget = estimate_disk_budget(plan, allocate_resources(plan, 1), {})
    assert (budget.remaining_runs, budget.concurrent_runs) == (9, 3)
    assert budget.total_bytes == 15 * budget.checkpoint_bytes + budget.row_bytes
