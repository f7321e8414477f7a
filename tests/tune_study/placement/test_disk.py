import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
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
    check_budgets,
    compute_checkpoint_bytes,
    count_folder_bytes,
    count_occurrences,
    estimate_disk_budget,
    estimate_row_bytes,
    format_disk_line,
)
from tune_study.placement.resources import preflight
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, RunSpec, StudyPlan
from tune_study.plan.typed_settings import collect_overrides
from tune_study.tune.run import execute_study
from tune_study.tune.trials import make_trial_config

VARIANTS: dict[str, Mapping[str, object]] = {
    "gae": {},
    "gae, shared trunk": {"critic.shared_trunk": True},
    "rloo, KL loss": {"algorithm.adv_estimator": "rloo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "adapters": {"model.lora_rank": 8, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "adapters of some layers, shared trunk": {
        "model.lora_rank": 128,
        "model.lora_target_modules": ["k_proj", "up_proj"],
        "critic.shared_trunk": True,
    },
}
TINY = read_shape("sokoban-tiny")
STUDY_BYTES = 2_050_000


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


def test_kept_checkpoints_are_those_that_a_run_writes() -> None:
    for steps, save_freq in itertools.product(range(1, 61), range(-1, 71)):
        saved_steps = [
            step for step in range(1, steps + 1) if save_freq > 0 and (step == steps or step % save_freq == 0)
        ]
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
    checkpoint_bytes, n_concurrent = compute_checkpoint_bytes(TINY, plan.base_config), min(limit, arms)
    # Three of every run that trains, and one of every other that keeps its last state.
    rolling_checkpoints = 3 * n_concurrent + keep_last * (arms - n_concurrent)
    num_checkpoints = arms * count_occurrences(steps, save_freq) + rolling_checkpoints
    row_bytes = STUDY_BYTES + arms * estimate_row_bytes(plan.base_config)
    assert budget.needed_bytes == num_checkpoints * checkpoint_bytes + row_bytes
    assert (budget.scratch_bytes, budget.folder) == (4 * checkpoint_bytes, Path("/"))
    assert 0 < budget.free_bytes < 2**60


@pytest.mark.parametrize(
    ("settings", "sign"),
    [
        ({"trainer__total_training_steps": 61}, 1),
        ({"trainer__test_freq": 0}, -1),
        ({"trainer__val_before_train": False}, -1),
        ({"trainer__log_train_generations": 1}, 1),
    ],
)
def test_rows_grow_with_steps_validations_and_episodes(settings: dict[str, object], sign: int) -> None:
    usual, changed = (plan_study(Path(), **changes).base_config for changes in ({}, settings))
    assert (estimate_row_bytes(changed) - estimate_row_bytes(usual)) * sign > 0


def test_recorded_trees_have_room_for_their_children() -> None:
    def estimate(max_children: int) -> int:
        settings = {"env.papers.max_children": str(max_children), "trainer.log_train_generations": "2"}
        plan = plan_study(Path(), None, study="tree-grpo", **settings)
        return estimate_row_bytes(plan.runs[0].ppo_config)

    per_turn = 700 + 3_000 + 32 * 5
    # Each of 7 validations in 60 steps, 2 before and 1 at the end records 4 trees, and at most 2 that were trained on;
    # a child has 3 turns and an answer of at most 2,000 characters.
    assert estimate(2) - estimate(1) == 9 * (4 + 2) * (3 * per_turn + 2_000)


def test_arms_that_differ_are_added_up(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0", "0.1", "0.2"), trainer__save_freq=20)
    changes = ({}, {"algorithm.adv_estimator": "grpo"}, {"trainer.save_freq": -1})
    plan = replace(
        plan, runs=tuple(with_config(spec, arm_changes) for spec, arm_changes in zip(plan.runs, changes, strict=True))
    )
    gae_bytes, grpo_bytes = (compute_checkpoint_bytes(TINY, spec.ppo_config) for spec in plan.runs[:2])
    state_bytes = 4 * gae_bytes + 4 * grpo_bytes + gae_bytes + 2 * (gae_bytes + gae_bytes)
    row_bytes = STUDY_BYTES + sum(estimate_row_bytes(spec.ppo_config) for spec in plan.runs)
    assert estimate_budget(plan).needed_bytes == state_bytes + row_bytes


@pytest.mark.slow
def test_what_a_real_study_leaves_is_within_its_budget(ray_session: None, tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0",), **SMALL_SETTINGS, trainer__save_freq=2)
    needed_bytes = estimate_budget(plan).needed_bytes
    checkpoint_bytes = compute_checkpoint_bytes(TINY, plan.base_config)
    assert execute_study(plan, allocate_resources(plan), Console(quiet=True)) == 0
    state_bytes = sum(count_folder_bytes(path) for path in tmp_path.rglob("global_step_*"))
    state_bytes += sum(count_folder_bytes(plan.get_run_dir(spec.run_id) / STATE_FOLDER) for spec in plan.runs)
    assert state_bytes == pytest.approx((1 + 2) * checkpoint_bytes, rel=1e-2)
    row_bytes = STUDY_BYTES + estimate_row_bytes(plan.base_config)
    assert 0.3 * row_bytes < count_folder_bytes(tmp_path) - state_bytes < row_bytes
    assert count_folder_bytes(tmp_path) < needed_bytes
    assert estimate_budget(plan).needed_bytes == 0


def test_a_run_that_goes_on_needs_what_is_missing(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, **SMALL_SETTINGS, trainer__save_freq=1)
    before = estimate_budget(plan).needed_bytes
    trial = PPO(make_trial_config(plan, [plan.runs[0]]))
    trial.step()
    trial.stop()
    checkpoint_bytes = compute_checkpoint_bytes(TINY, plan.base_config)
    assert before - estimate_budget(plan).needed_bytes == pytest.approx(2 * checkpoint_bytes, rel=1e-2)


def test_ended_runs_need_nothing_more(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0", "0.1", "0.2", "0.3"))

    def end_run(index: int, row: Mapping[str, object], status: str = "completed") -> None:
        run_dir = plan.get_run_dir(plan.runs[index].run_id)
        write_record(run_dir, StatusRecord(plan.runs[index].run_id, status))
        if row:
            append_record(run_dir / METRICS_FILE, row)

    end_run(0, {"step": plan.runs[0].steps})
    end_run(1, {"step": 3, "stop_rule": "empty_filtered_steps"}, "early_stopped")
    for index, status in ((2, "failed"), (3, "interrupted")):
        write_bytes(plan.get_run_dir(plan.runs[index].run_id) / STATE_FOLDER / "state.safetensors", 50_000 * index)
        end_run(index, {}, status)
    status_files = sum((plan.get_run_dir(spec.run_id) / "status.json").stat().st_size for spec in plan.runs[2:])
    fresh_bytes = estimate_budget(plan_study(tmp_path / "other", ("0.2", "0.3"))).needed_bytes
    assert estimate_budget(plan).needed_bytes == fresh_bytes - 250_000 - status_files
    for index in (2, 3):
        end_run(index, {"step": plan.runs[index].steps})
    assert estimate_budget(plan).needed_bytes == 0


def test_a_run_counts_for_no_more_than_it_leaves(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, ("0", "0.1"), trainer__save_freq=60)
    spec = plan.runs[0]
    for folder in (plan.get_run_dir(spec.run_id) / STATE_FOLDER, plan.output / spec.checkpoint_dir, plan.folder):
        write_bytes(folder / "huge", 20_000_000)
    state_bytes = compute_checkpoint_bytes(TINY, plan.base_config)
    # The states in flight, the second run, and what a study has besides its runs.
    row_bytes = STUDY_BYTES + estimate_row_bytes(plan.base_config)
    assert estimate_budget(plan, 1).needed_bytes == 2 * state_bytes + 2 * state_bytes + row_bytes


def test_a_model_that_is_not_here_has_an_unknown_size(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, model__path="some/model", model__prompt_style="full")
    budget = estimate_disk_budget(plan, allocate_resources(plan), {"HF_HUB_CACHE": str(tmp_path)})
    assert (budget.needed_bytes, budget.scratch_bytes) == (0, 0)
    check_budgets([budget._replace(free_bytes=0)])
    assert format_disk_line(budget._replace(free_bytes=52_100_000_000), None) == (
        "Disk: space unknown, because no config.json of a trainable model was found for some/model; 52.1 GB free."
    )


def test_a_condition_that_loads_a_model_has_states_of_its_size(tmp_path: Path) -> None:
    def estimate_task_budget(*assignments: str) -> DiskBudget:
        overrides = collect_overrides(STUDIES["sandbox"], {}, assignments)
        plan = plan_study(tmp_path, None, study="sandbox", **overrides)
        return estimate_disk_budget(plan, allocate_resources(plan), {"HF_HUB_CACHE": str(tmp_path)})

    assert estimate_task_budget("task=lm_bandit").scratch_bytes > 4 * 12 * TINY.parameters
    large = "model_name=Qwen/Qwen2.5-0.5B"
    assert estimate_task_budget("task=lm_bandit", large).scratch_bytes == pytest.approx(4 * 12 * 494e6, rel=0.01)
    assert estimate_task_budget(large).scratch_bytes == estimate_task_budget().scratch_bytes
    assert estimate_task_budget("task=lm_bandit", "model_name=some/model").unknown_models == ["some/model"]


def test_exactly_enough_is_enough_and_too_little_says_what_to_type() -> None:
    example = DiskBudget(62_800_000, 7_200_000, 52_100_000_000, Path("/out"))
    assert format_disk_line(example, None) == "Disk: needs at most 62.8 MB; 52.1 GB free. OK."
    assert format_disk_line(example, "s3://b/x") == "Storage: s3://b/x, needs at most 62.8 MB."
    exact = example._replace(free_bytes=62_800_000)
    assert format_disk_line(exact, None).endswith("62.8 MB free. OK.")
    check_budgets([exact])
    assert format_disk_line(exact._replace(free_bytes=62_799_999), None).endswith("62.8 MB free. NOT ENOUGH.")
    with pytest.raises(PlanError, match="1 byte too little"):
        check_budgets([exact._replace(free_bytes=62_799_999)])
    with pytest.raises(PlanError) as error_info:
        check_budgets([example._replace(free_bytes=12_000_000)])
    text = str(error_info.value)
    assert "needs up to 62.8 MB more disk space, and /out has 12.0 MB free, 50.8 MB too little" in text
    for option in ("--save-freq -1", "--set trainer.keep_last=false", "--max-concurrent 1", "--output with a folder"):
        assert option in text


def test_a_folder_has_the_bytes_of_its_files(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "one", 3)
    write_bytes(tmp_path / "a" / "b" / ".two", 4)
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    write_bytes(tmp_path / "large", 5_000)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "large")
    assert count_folder_bytes(tmp_path / "a") == 3 + 4 + (tmp_path / "a" / "link").lstat().st_size
    assert count_folder_bytes(tmp_path / "nothing") == 0


def test_a_trial_of_several_runs_writes_the_states_of_all_at_once(tmp_path: Path) -> None:
    plan = plan_study(tmp_path, None, 3, study="influence")
    one_trial, three_trials = (estimate_disk_budget(plan, allocate_resources(plan, limit), {}) for limit in (1, 3))
    # Two trials at once on two cores: three more runs have two states besides their last one.
    assert three_trials.needed_bytes - one_trial.needed_bytes == 3 * 2 * one_trial.scratch_bytes / 4
