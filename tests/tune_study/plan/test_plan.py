import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.catalog import STUDIES
from search_spaces.language_model.family import get_model_name
from trainable.config.run_config import apply_overrides
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import (
    StudyPlan,
    add_seeds,
    check_level_seeds,
    find_changed_settings,
    make_plan,
    set_max_seeds,
)
from tune_study.plan.typed_settings import collect_overrides, parse_values

# (experiment name, log, checkpoint folder) of every default value in the published scripts for Qwen2.5-3B.
SWEEP_RUNS = {
    study: [
        (
            f"sokoban_{study}_sweep_nofilter_{label}-Qwen2.5-3B",
            f"logs/{study}_sweep_Qwen2.5-3B/nofilter/{label}/sokoban_{study}_sweep_nofilter_{label}-Qwen2.5-3B.log",
            f"model_saving/{study}_sweep_Qwen2.5-3B/{label}/sokoban_{study}_sweep_nofilter_{label}-Qwen2.5-3B",
        )
        for label in ("0", "0001", "0003", "001", "003", "01")
    ]
    for study in ("kl", "entropy")
}
TOP_P_RUNS = [
    (
        f"sokoban_top_p_{label}-Qwen2.5-3B",
        f"logs/top_p_sweep_Qwen2.5-3B/{label}/sokoban_top_p_{label}-Qwen2.5-3B.log",
        f"model_saving/top_p_sweep_Qwen2.5-3B/{label}/sokoban_top_p_{label}-Qwen2.5-3B",
    )
    for label in ("10", "098", "095", "09", "08", "06", "04", "nofilter")
]
ANALYSIS_NAME = "sokoban-PPO-filter-topp09-Qwen2.5-3B-train8x16-analysis128x16-grad-every50"
ANALYSIS_RUNS = [
    (
        ANALYSIS_NAME,
        f"logs/gradient_analysis_sokoban_Qwen2.5-3B/{ANALYSIS_NAME}.log",
        f"model_saving/gradient_analysis/sokoban/PPO/filter/{ANALYSIS_NAME}",
    )
]
PUBLISHED_PATHS = {
    "kl": ("results/kl_sweep_Qwen2.5-3B", "logs/kl_sweep_Qwen2.5-3B.log", SWEEP_RUNS["kl"]),
    "entropy": ("results/entropy_sweep_Qwen2.5-3B", "logs/entropy_sweep_Qwen2.5-3B.log", SWEEP_RUNS["entropy"]),
    "top-p": ("results/top_p_sweep_Qwen2.5-3B", "logs/top_p_sweep_Qwen2.5-3B.log", TOP_P_RUNS),
    "gradient-analysis": (
        "results/gradient_analysis_sokoban_Qwen2.5-3B",
        "logs/gradient_analysis_sokoban_Qwen2.5-3B.log",
        ANALYSIS_RUNS,
    ),
}


def make_study_plan(
    name: str,
    values: str | None = None,
    seeds: int | None = 1,
    overrides: dict[str, object] | None = None,
    preset: str = "paper",
) -> StudyPlan:
    study = STUDIES[name]
    typed_values = None if values is None else parse_values(values, study.axis.option)
    return make_plan(study, preset, "a test", overrides or {}, typed_values, seeds, Path("/out"))


@pytest.mark.parametrize("name", PUBLISHED_PATHS)
def test_names_and_places_are_the_published_ones(name: str) -> None:
    plan = make_study_plan(name)
    results, summary, runs = PUBLISHED_PATHS[name]
    assert plan.folder == Path("/out") / results
    assert plan.summary_log == Path("/out") / summary
    assert [(spec.run_id, spec.log_path.as_posix(), spec.checkpoint_dir.as_posix()) for spec in plan.runs] == runs
    assert [spec.experiment_name for spec in plan.runs] == [run[0] for run in runs]
    assert {spec.steps for spec in plan.runs} == {101 if name == "gradient-analysis" else 400}


def test_leaving_zero_spread_groups_out_changes_the_tag() -> None:
    plan = make_study_plan("kl", "0.01", overrides={"filter.rollout_filter_include_zero": False})
    (run,) = plan.runs
    name = "sokoban_kl_sweep_filter_zero_001-Qwen2.5-3B"
    assert run.run_id == name
    assert run.log_path == Path(f"logs/kl_sweep_Qwen2.5-3B/filter_zero/001/{name}.log")
    assert run.checkpoint_dir == Path(f"model_saving/kl_sweep_Qwen2.5-3B/001/{name}")


def test_the_first_seed_of_every_arm_comes_first_and_later_ones_are_named() -> None:
    plan = make_study_plan("kl", "0,0.1", seeds=2)
    assert [(run.arm, run.seed) for run in plan.runs] == [("0", 0), ("0.1", 0), ("0", 1), ("0.1", 1)]
    last = plan.runs[-1]
    assert last.run_id == "sokoban_kl_sweep_nofilter_01-Qwen2.5-3B-seed1"
    assert last.experiment_name == "sokoban_kl_sweep_nofilter_01-Qwen2.5-3B"
    assert last.log_path.name == f"{last.run_id}.log"
    assert last.checkpoint_dir.name == last.run_id
    assert last.config.seed == 1
    assert last.config.compute_hash() == plan.runs[1].config.compute_hash()


@given(st.integers(1, 4), st.lists(st.sampled_from(["0", "0.1", "0.25", "1e-3", "3"]), min_size=1, unique=True))
def test_no_two_runs_share_a_name_or_a_place(seeds: int, values: list[str]) -> None:
    runs = make_study_plan("kl", ",".join(values), seeds).runs
    assert len(runs) == seeds * len(values)
    for name in ("run_id", "log_path", "checkpoint_dir"):
        assert len({getattr(spec, name) for spec in runs}) == len(runs)


def test_presets_bring_their_grid_seeds_and_settings() -> None:
    paper, laptop = make_study_plan("kl", seeds=None), make_study_plan("kl", seeds=None, preset="laptop")
    assert (len(paper.runs), paper.seeds) == (18, (0, 1, 2))
    assert (len(laptop.runs), laptop.seeds) == (18, (0, 1, 2))
    assert laptop.run == "kl_sweep_sokoban-tiny"
    assert laptop.base_config.actor.kl_loss_type == "low_var_kl"
    assert paper.base_config.actor.kl_loss_type == "kl"


def test_further_seeds_of_single_arms_are_runs_after_those_of_all_arms() -> None:
    plan = add_seeds(make_study_plan("kl", "0,0.1,0.3", seeds=2), {"0": (3, 2, 1), "0.3": (2,)})
    assert plan.extra_seeds == {"0": (2, 3), "0.3": (2,)}  # seed 1 is one of all arms
    assert [(spec.seed, spec.arm) for spec in plan.runs[6:]] == [(2, "0"), (2, "0.3"), (3, "0")]
    assert plan.num_baseline_seeds == 4
    assert plan.runs[6].run_id == make_study_plan("kl", "0", seeds=3).runs[2].run_id
    again = add_seeds(plan, {"0.1": (2,)})
    assert again.extra_seeds == {"0": (2, 3), "0.1": (2,), "0.3": (2,)}
    assert add_seeds(again, {}).runs == again.runs


def test_a_seed_that_no_run_can_have_is_refused() -> None:
    with pytest.raises(PlanError, match="not distinct numbers from 0 to 400"):
        add_seeds(make_study_plan("kl", "0,0.1", seeds=1), {"0": (401,)})


def test_a_baseline_has_at_least_its_own_number_of_seeds() -> None:
    kl = STUDIES["kl"]
    for count, further in ((1, (1, 2)), (3, ())):
        plan = make_plan(kl, "laptop", "a test", {}, ("0", "0.1"), count, Path("/out"), 3)
        assert plan.extra_seeds.get("0", ()) == further
    assert make_plan(kl, "laptop", "a test", {}, ("0.1",), 1, Path("/out"), 3).extra_seeds == {}
    with pytest.raises(PlanError, match="--baseline-seeds 402 is above the maximum: type --baseline-seeds 401"):
        make_plan(kl, "laptop", "a test", {}, ("0", "0.1"), 1, Path("/out"), 402)


def test_seeds_are_added_only_where_there_is_something_to_compare() -> None:
    plan = make_study_plan("kl", "0,0.1", seeds=3)
    assert set_max_seeds(plan, 4).max_seeds == 4
    for max_seeds in (3, 0, 402):
        with pytest.raises(PlanError, match=f"--max-seeds {max_seeds} is not a number from 4 to 401: all arms get 3"):
            set_max_seeds(plan, max_seeds)
    with pytest.raises(PlanError, match="not a number from 6 to 401: all arms get 3 seeds, and the test decides"):
        set_max_seeds(plan, 5, least_seeds=6)
    with pytest.raises(PlanError, match="the baseline 0, and the study has no other arm: choose other values of --kl"):
        set_max_seeds(make_study_plan("kl", "0"), 20)
    with pytest.raises(PlanError, match="the baseline 0, which is not among the study's arms"):
        set_max_seeds(make_study_plan("kl", "0.1,0.3"), 20)


def test_what_was_typed_wins_over_study_and_preset() -> None:
    plan = make_study_plan("kl", "0", overrides={"env.env_groups": "4", "model.path": "/models/tiny/"}, preset="laptop")
    assert plan.base_config.env.env_groups == 4
    assert plan.run == "kl_sweep_tiny"


def test_the_baseline_is_found_however_it_was_typed() -> None:
    assert make_study_plan("kl", "0.1,0.0").baseline == "0.0"
    assert make_study_plan("kl", "0.1,0.2").baseline is None
    assert make_study_plan("top-p", "0.9,nofilter").baseline == "nofilter"


@given(st.sampled_from(sorted(STUDIES)), st.sampled_from(["paper", "laptop"]))
def test_changed_settings_rebuild_the_configuration(name: str, preset: str) -> None:
    rates = {"ppo": {"actor.betas": "[0.8, 0.9]"}, "pedagogy": {"student_lr": "0.002"}}
    overrides = rates.get(STUDIES[name].family.name, {"lr": "0.002"})
    for run in make_study_plan(name, preset=preset, overrides=overrides).runs:
        settings = find_changed_settings(run.config)
        assert "seed" not in settings
        defaults = type(run.config).model_validate({"seed": run.seed})
        assert apply_overrides(defaults, settings) == run.config


def test_assignments_take_published_keys() -> None:
    overrides = collect_overrides(STUDIES["kl"], {"trainer.save_freq": 5}, ["es_manager.train.env_groups=4", "lam=1.0"])
    assert overrides == {"trainer.save_freq": 5, "env.env_groups": "4", "algorithm.lam": "1.0"}


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-3B", "/models/Qwen2.5-3B", "/models/Qwen2.5-3B/"])
def test_a_model_is_named_by_its_last_part(path: str) -> None:
    assert get_model_name(path) == "Qwen2.5-3B"


@given(
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 60),
    st.sampled_from([0, 1_000_000, 2_000_000]),
    st.integers(-50, 250),
    st.integers(1, 30),
)
def test_training_and_validation_share_no_seed(
    extra_seeds: int, steps: int, groups: int, first: int, block: int, offset: int, validated: int
) -> None:
    seed_val = max(0, first + block + offset)
    settings = {
        "trainer.total_training_steps": steps,
        "env.env_groups": groups,
        "env.seed_train": first,
        "env.seed_val": seed_val,
        "env.val_env_groups": validated,
    }
    plan = make_plan(STUDIES["kl"], "laptop", "a test", settings, ("0",), 1 + extra_seeds, Path("out"))
    counters = range(steps * groups)
    trained = {first + 1_000_000 * seed + counter for seed in range(1 + extra_seeds) for counter in counters}
    if trained & {*range(seed_val, seed_val + validated)}:
        with pytest.raises(PlanError, match=f"^env.seed_val={seed_val}: ") as refusal:
            check_level_seeds(plan)
        (free,) = re.findall(r"--set env\.seed_val=(\d+)\.$", str(refusal.value))
        settings["env.seed_val"] = int(free)
        plan = make_plan(STUDIES["kl"], "laptop", "a test", settings, ("0",), 1 + extra_seeds, Path("out"))
    check_level_seeds(plan)


def test_validation_shares_no_seed_with_further_batches() -> None:
    settings = {"filter.max_num_gen_batches": 2, "filter.rollout_filter_include_zero": False, "env.seed_val": 260_001}
    plan = make_plan(STUDIES["kl"], "laptop", "a test", settings, ("0",), 1, Path("out"))
    with pytest.raises(PlanError, match="those from 260000 to 26"):
        check_level_seeds(plan)
