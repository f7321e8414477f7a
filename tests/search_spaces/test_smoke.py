"""The published grid, listed as the loops of the published scripts do, against the grid that the study declares."""

from pathlib import Path

import pytest

from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Study
from search_spaces.language_model.smoke import SMOKE_STUDY
from tests.fakes.plans import plan_study
from tune_study.folder.outputs import write_study
from tune_study.folder.study_file import merge_with_folder, plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.plan.typed_settings import expand_groups, find_study, format_values

COEFFICIENTS = ["0001", "0003", "001", "003"]
FILTERS = ["topk100", "topk80", "topk60", "topk40"]
COEFFICIENT_VALUES = {"0": 0.0, "0001": 0.001, "0003": 0.003, "001": 0.01, "003": 0.03}


def list_names(group: int, kl_type: str, tag: str = "ftmt") -> list[str]:
    """List the names of one group as the published scripts do."""
    suffix = f"{kl_type}-{tag}"
    if group == 1:
        return [f"g1-smoke-ppo-sokoban-{top}-kl{kl}-ent0-{suffix}" for top in FILTERS for kl in COEFFICIENTS]
    if group == 2:
        return [f"g2-smoke-ppo-sokoban-{top}-kl0-ent{entropy}-{suffix}" for top in FILTERS for entropy in COEFFICIENTS]
    if group == 3:
        return [f"g3-smoke-ppo-sokoban-{filter_label}-kl0-ent0-{suffix}" for filter_label in FILTERS]
    prefix = "g4-smoke-ppo-sokoban-ta-topk100" if group == 4 else "g5-smoke-ppo-sokoban-nofilter"
    return [f"{prefix}-kl{kl}-ent{entropy}-{suffix}" for kl in COEFFICIENTS for entropy in COEFFICIENTS]


def make_study_plan(
    study: Study, preset: str = "paper", values: tuple[str, ...] | None = None, **settings: object
) -> StudyPlan:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return make_plan(study, preset, "a test", overrides, values, None, Path("/out"), n_baseline_seeds=1)


@pytest.mark.parametrize("kl_type", ["low_var_kl", "kl", "mse"])
def test_the_68_names(kl_type: str) -> None:
    names = [name for group in (1, 2, 3, 4, 5) for name in list_names(group, kl_type)]
    assert [spec.run_id for spec in make_study_plan(SMOKE_STUDY.variants[kl_type]).runs] == names
    assert (len(names), len(set(names))) == (68, 68)


def test_the_164_names() -> None:
    names = [name for kl_type in ("kl", "mse") for group in (1, 4, 5) for name in list_names(group, kl_type)]
    names += [name for group in (1, 2, 3, 4, 5) for name in list_names(group, "low_var_kl")]
    assert [spec.run_id for spec in make_study_plan(STUDIES["smoke-all"]).runs] == names
    assert (len(names), len(set(names))) == (164, 164)
    # On a laptop, too.
    for study in (SMOKE_STUDY, STUDIES["smoke-all"]):
        assert study.get_grid("laptop") == study.get_grid("paper")


def test_every_run_has_the_settings_that_its_name_says() -> None:
    filter_values = {"topk100": 1.0, "topk80": 0.8, "topk60": 0.6, "topk40": 0.4, "nofilter": 1.0}
    for spec in make_study_plan(STUDIES["smoke-all"]).runs:
        group, _, _, _, *words, kl, entropy, kl_type, tag = spec.run_id.split("-")
        config = spec.config
        kl_coefficient = COEFFICIENT_VALUES[kl.removeprefix("kl")]
        entropy_coefficient = COEFFICIENT_VALUES[entropy.removeprefix("ent")]
        assert (config.actor.use_kl_loss, config.actor.kl_loss_coef) == (kl_coefficient > 0, kl_coefficient)
        assert (config.actor.entropy_coeff, config.actor.kl_loss_type, tag) == (entropy_coefficient, kl_type, "ftmt")
        assert config.filter.rollout_filter_value == filter_values[words[-1]]
        assert config.algorithm.zero_task_advantage == (group == "g4") == (words[0] == "ta")
        assert config.filter.rollout_filter_include_zero


def test_what_all_runs_share() -> None:
    config = make_study_plan(find_study("smoke")).base_config
    assert (config.model.path, config.trainer.total_training_steps) == ("Qwen/Qwen2.5-3B-Instruct", 50)
    assert (config.trainer.test_freq, config.trainer.save_freq, config.trainer.val_before_train) == (10, -1, False)
    assert (config.actor.filter_loss_scaling, config.algorithm.adv_estimator) == ("sqrt", "gae")
    assert (config.env.env_groups, config.env.group_size, config.trainer.n_gpus_per_node) == (8, 16, 1)
    detection = config.collapse_detection
    assert (detection.first_turn_enabled, detection.multi_turn_enabled, detection.num_samples) == (True, True, 64)
    assert config.filter.rollout_filter_top_p_prob_mode == "linear"
    assert len(make_study_plan(find_study("smoke")).seeds) == 1


def test_all_arms_are_compared_with_five_runs_of_the_baseline() -> None:
    plan = plan_study(Path("/out"), None, None, study=find_study("smoke"))
    assert plan.extra_seeds == {plan.baseline: (1, 2, 3, 4)}
    assert plan.num_baseline_seeds == 5
    assert [(spec.arm, spec.seed) for spec in plan.runs[68:]] == [(plan.baseline, seed) for seed in (1, 2, 3, 4)]
    # A group without the baseline has no further runs.
    group = find_study("smoke").axis.value_groups["1"]
    assert plan_study(Path("/out"), group, None, study=find_study("smoke")).extra_seeds == {}


def test_places_and_project_are_the_published_ones() -> None:
    plan = make_study_plan(SMOKE_STUDY.variants["mse"], filter__rollout_filter_strategy="min_p")
    assert plan.summary_log == Path("/out/logs/smoke_test_min_p/smoke_test_results_3B_mse_ftmt.log")
    assert plan.runs[0].log_path == Path(f"logs/smoke_test_min_p_details/{list_names(1, 'mse')[0]}.log")
    assert plan.wandb_project == "ragen-smoke_test_min_p"
    assert plan.folder == Path("/out/results/smoke_test_min_p_3B_mse_ftmt")
    assert plan.baseline == "g3-smoke-ppo-sokoban-topk100-kl0-ent0-mse"
    assert make_study_plan(find_study("smoke"), "laptop").run == "smoke_test_top_p_sokoban-tiny_low_var_kl_ftmt"
    assert make_study_plan(STUDIES["smoke-all"]).run == "smoke_test_top_p_3B_all_ftmt"


@pytest.mark.parametrize(
    ("first", "multi", "tag"), [(True, True, "ftmt"), (True, False, "ft"), (False, True, "mt"), (False, False, "nocd")]
)
def test_the_tag_says_which_diagnostics_are_on(first: bool, multi: bool, tag: str) -> None:
    overrides = {"collapse_detection__first_turn_enabled": first, "collapse_detection__multi_turn_enabled": multi}
    plan = make_study_plan(find_study("smoke"), **overrides)
    assert [spec.run_id for spec in plan.runs][:16] == list_names(1, "low_var_kl", tag)
    assert plan.summary_log.stem.endswith(f"_{tag}")


@pytest.mark.parametrize(
    ("groups", "counts"), [(8, [8, 6, 4, 3]), (4, [4, 3, 2, 1]), (16, [16, 12, 9, 6]), (2, [2, 1, 1, 1])]
)
def test_top_k_takes_a_count_of_groups(groups: int, counts: list[int]) -> None:
    study = find_study("smoke")
    overrides = {"filter__rollout_filter_strategy": "top_k_abs", "env__env_groups": groups}
    plan = make_study_plan(study, values=expand_groups(study, ["3"]), **overrides)
    assert [spec.config.filter.rollout_filter_value for spec in plan.runs] == counts
    assert plan.run.startswith("smoke_test_top_k_3B")


def test_a_folder_knows_its_groups_whatever_its_loss(tmp_path: Path) -> None:
    study = SMOKE_STUDY.variants["mse"]
    plan = plan_study(tmp_path, expand_groups(study, ["3"]), study=study)
    write_study(plan)
    reloaded_plan = plan_from_folder(plan.folder)
    assert format_values(reloaded_plan.study, reloaded_plan.values) == "group 3 (4 arms)"
    assert reloaded_plan.baseline == plan.baseline == "g3-smoke-ppo-sokoban-topk100-kl0-ent0-mse"
    merged_plan = merge_with_folder(plan_study(tmp_path, expand_groups(study, ["2"]), study=study), extend=False)
    assert format_values(merged_plan.study, merged_plan.values) == "group 2 (16 arms), group 3 (4 arms)"
    with pytest.raises(PlanError, match="--seeds: 1 -> 2"):
        merge_with_folder(plan_study(tmp_path, expand_groups(study, ["2"]), 2, study=study), extend=False)
    plan_without_baseline = plan_study(tmp_path / "other", expand_groups(study, ["1"]), study=study)
    assert plan_without_baseline.baseline is None


def test_words_that_name_no_group_are_refused() -> None:
    study = find_study("smoke")
    single = "g3-smoke-ppo-sokoban-topk80-kl0-ent0-low_var_kl"
    assert expand_groups(study, [single, "3"]) == expand_groups(study, ["3"])
    assert expand_groups(study, ["3", "1", "3"]) == expand_groups(study, ["1", "3"])
    assert expand_groups(study, [single]) == (single,)
    with pytest.raises(PlanError, match=r"is not a group: type one or more of 1,2,3,4,5, or names"):
        expand_groups(study, ["g3-smoke-ppo-sokoban-topk80-kl0-ent0-mse"])
