"""Remarks about settings with which nothing is left to learn: where they appear, and the arithmetic behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from search_spaces.catalog import STUDIES
from search_spaces.command_study import REMARKS as COMMAND_REMARKS
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import PPO
from tests.fakes.command_line import get_output
from tests.fakes.plans import plan_study
from trainable.algo.advantages import group_skill, grpo, prefix_tree_grpo, reinforce_plus_plus_baseline, rloo
from trainable.algo.filters import compute_group_scores, parse_rule, select_groups
from trainable.config.choices import ADVANTAGE_ESTIMATORS, FILTER_METRICS
from trainable.families import Remark, list_families
from tune_study.plan import remarks
from tune_study.plan.remarks import PPO_REMARKS
from tune_study.plan.study_plan import StudyPlan, check_level_seeds, make_plan
from tune_study.plan.typed_settings import collect_overrides

# For each remark a study, settings, and what is set in addition with the remark, and nearest to it without.
CASES = [
    ("top-p", "env.max_turn=5 rollout.response_length=24", "rollout.max_model_len=120", "rollout.max_model_len=121"),
    ("top-p", "env.group_size=1", "algorithm.adv_estimator=grpo", "algorithm.adv_estimator=gae"),
    (
        "entropy",
        "env.group_size=1 filter.rollout_filter_include_zero=False",
        "filter.rollout_filter_metric=reward_std",
        "filter.rollout_filter_metric=entropy",
    ),
    ("top-p", "", "trainer.critic_warmup=61", "trainer.critic_warmup=60"),
    ("top-p", "", "actor.ppo_mini_batch_size=256", "actor.ppo_mini_batch_size=128"),
    ("top-p", "rollout.name=torch model.compiled_passes=false", "model.dtype=bfloat16", "model.dtype=float32"),
]


def test_every_remark_has_a_case() -> None:
    tables = [resolve_name(name) for name in {family.remarks for family in list_families()} if name]
    # That of commands is in test_command_study.py.
    assert sum(map(len, tables)) - len(COMMAND_REMARKS) == len(PPO_REMARKS) == len(CASES)


def find_remarks(plan: StudyPlan) -> tuple[str, ...]:
    """The lines of a plan's remarks."""
    return tuple(remarks.find_remarks(plan))


@pytest.fixture(autouse=True)
def _new_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remarks, "_read_cpu_info", lambda: "flags: fma avx2 amx_bf16")


def test_processors_with_bfloat16() -> None:
    assert remarks.has_bfloat16("flags: avx2 avx512_bf16 fma")
    assert remarks.has_bfloat16("flags: avx2 amx_bf16")
    assert remarks.has_bfloat16("Features: asimd")
    assert not remarks.has_bfloat16("flags: fma avx2 avx512f")


@pytest.mark.parametrize(("remark", "case"), list(zip(PPO_REMARKS, CASES, strict=True)))
def test_a_remark_is_of_its_settings_and_not_of_the_nearest_others(
    remark: Remark, case: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, common, settings, harmless = case
    monkeypatch.setattr(remarks, "_read_cpu_info", lambda: "flags: fma avx2")
    ending = remark.sentence.rpartition("}")[2]
    typed, nearest = (
        collect_overrides(STUDIES[study], {}, f"{common} {text}".split()) for text in (settings, harmless)
    )
    (line,) = [line for line in find_remarks(plan_study(Path("out"), None, study=study, **typed)) if ending in line]
    assert any(setting in line for setting in typed)
    assert "{" not in line
    assert not any(ending in line for line in find_remarks(plan_study(Path("out"), None, study=study, **nearest)))


@pytest.mark.long
def test_a_setting_without_effect_is_in_the_printed_plan() -> None:
    line = "run entropy --preset laptop --dry-run --set trainer.zero_stage=1"
    text = "Remark: trainer.zero_stage=1 has no effect: torch updates on one device. To use DeepSpeed, "
    assert text in " ".join(get_output(line).split())
    assert "Remark" not in get_output(f"{line} --set trainer.strategy=deepspeed")


def make_axis_plan(setting: str, values: Sequence[str], settings: Mapping[str, object]) -> StudyPlan:
    """Plan arms of a GRPO study that differ in a setting; the first is the baseline."""
    study = replace(STUDIES["kl"], axis=Axis(setting, {"laptop": tuple(values)}), baseline=values[0])
    changes = {"algorithm.adv_estimator": "grpo", **settings}
    return make_plan(study, "laptop", "a test", changes, None, 2, Path("out"), n_baseline_seeds=3)


BATCH = {"actor.ppo_mini_batch_size": 128, "actor.ppo_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("setting", "values", "settings", "beginning"),
    [
        ("algorithm.lam", ("1", "0.9"), {}, "arm 0.9 differs from the baseline 1 in algorithm.lam alone, so the rows "),
        # The warm-up of an arm begins with step 2.
        ("trainer.critic_warmup", ("0", "1", "2"), {}, "arm 1 differs from the baseline 0 in trainer.critic_warmup "),
        (
            "actor.clip_ratio_high",
            ("0.28", "0.3", "0.4", "0"),
            BATCH,
            "the arms 0.3, 0.4 differ from the baseline 0.28 ",
        ),
        ("actor.ppo_mini_batch_size", ("32", "256", "64", "512"), {}, "actor.ppo_mini_batch_size=256 does not divide "),
    ],
)
def test_arms_that_cannot_differ_from_the_baseline_or_cannot_learn_are_in_the_plan(
    setting: str, values: Sequence[str], settings: Mapping[str, object], beginning: str
) -> None:
    (line,) = find_remarks(make_axis_plan(setting, values, settings))
    assert line.startswith(f"Remark: {beginning}")
    if setting == "algorithm.lam":
        assert line.endswith("equal the baseline's. algorithm.lam has no effect: it needs algorithm.adv_estimator=gae.")
        assert find_remarks(make_axis_plan(setting, values, {"algorithm.adv_estimator": "gae"})) == ()
    if setting == "actor.ppo_mini_batch_size":
        assert line.endswith("(in 2 of 4 arms, such as 256).")


def test_arms_with_the_settings_of_the_baseline_are_in_the_plan() -> None:
    settings: Mapping[str, object] = {"actor.lr": "1e-4"}
    axis = Axis("arms", {"laptop": ("a", "b")}, named_settings={"a": settings, "b": settings})
    plan = plan_study(Path("out"), None, study=replace(STUDIES["kl"], axis=axis, baseline="a"))
    (line,) = find_remarks(plan)
    assert line == ("Remark: arm b differs from the baseline a in no setting, so the rows will equal the baseline's.")


def test_a_setting_without_effect_is_found_in_a_declaration_too() -> None:
    study = STUDIES["kl"]
    declared = replace(study, fixed_settings={**study.fixed_settings, "algorithm.kl_ctrl.kl_coef": "0.1"})
    (remark,) = find_remarks(plan_study(Path("out"), None, study=declared))
    assert remark.startswith("Remark: algorithm.kl_ctrl.kl_coef=0.1 has no effect: ")


def test_settings_that_a_game_brings_along_have_no_remark() -> None:
    # Countdown has learning rates of its own, also of the critic, which a study of GRPO does not train.
    settings = {**PPO.make_game_settings("countdown", "laptop"), "algorithm.adv_estimator": "grpo"}
    plan = plan_study(Path("out"), None, **settings)
    assert find_remarks(plan) == ()


def list_shipped_studies() -> list[Study]:
    return [variant for study in STUDIES.values() for variant in (study, *map(study.get_variant, study.variants))]


@pytest.mark.parametrize(
    "study",
    # Every third in CI, but for the grids of many arms.
    [
        pytest.param(study, marks=[pytest.mark.slow] * (number % 3 > 0 or len(study.get_grid("laptop")) > 60))
        for number, study in enumerate(list_shipped_studies())
    ],
    ids=lambda study: study.name,
)
def test_no_shipped_study_has_a_remark_in_any_arm_of_any_preset_or_is_validated_on_its_levels(study: Study) -> None:
    for preset in study.family.presets:
        plan = plan_study(Path("out"), None, None, study=study, preset=preset)
        check_level_seeds(plan)
        assert find_remarks(plan) == ()
        assert find_remarks(make_plan(study, preset, "a test", study.smoke_settings, None, None, Path("out"))) == ()


# The arithmetic that the remarks state.


def test_an_estimator_compares_a_group_if_and_only_if_a_group_of_one_has_no_advantage() -> None:
    scores, group_ids, mask = torch.tensor([3.0, 1.0]), torch.tensor([0, 1]), torch.ones(2, 1, dtype=torch.bool)
    advantages = {
        "grpo": grpo(scores, group_ids, mask, norm_by_std=True),
        "tree": prefix_tree_grpo(scores, group_ids, torch.zeros_like(group_ids), mask, norm_by_std=True),
        "rloo": rloo(scores, group_ids, mask),
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline(scores, group_ids, mask),
        "group_skill": group_skill(scores, group_ids, mask),
    }
    assert advantages.keys() == {name for name, estimator in ADVANTAGE_ESTIMATORS.items() if estimator.compares_group}
    assert all(not advantage.any() for advantage in advantages.values())


def test_a_plan_without_its_baseline_says_what_to_type(tmp_path: Path) -> None:
    def list_remarks(name: str, values: Sequence[str]) -> list[str]:
        plan = plan_study(tmp_path, values, study=name)
        return [remark for remark in find_remarks(plan) if "baseline" in remark]

    assert list_remarks("kl", ("0.1", "0.3")) == [
        "Remark: the baseline 0 is not among the arms, so no arm is compared with it: type --kl-values 0,0.1,0.3."
    ]
    assert list_remarks("influence", ("TPO",)) == [
        "Remark: the baseline GRPO is not among the arms, so no arm is compared with it: type --arms GRPO,TPO."
    ]
    assert list_remarks("kl", ("0.0", "0.3")) == []
    # The groups of a grid are started one by one, and the baseline is in one of them.
    smoke = STUDIES["smoke"]
    assert list_remarks("smoke", [arm for arm in smoke.get_grid("laptop") if arm != smoke.baseline][:2]) == []


def test_a_baseline_whose_name_depends_on_settings_is_named_as_it_is_typed(tmp_path: Path) -> None:
    study = STUDIES["learning-rate"]
    grid = study.get_grid("laptop")
    baseline = plan_study(tmp_path, grid, study=study).baseline
    assert baseline is not None
    others = [arm for arm in grid if arm != baseline][:2]
    (remark,) = find_remarks(plan_study(tmp_path, others, study=study))
    assert remark.endswith(f"so no arm is compared with it: type --arms {','.join((baseline, *others))}.")
    # With another learning rate no arm of the study is its baseline.
    elsewhere = plan_study(tmp_path, grid, study=study, actor__lr="1e-5")
    assert elsewhere.baseline is None
    assert [line for line in find_remarks(elsewhere) if line.endswith("so no arm is compared with it.")]


@pytest.mark.parametrize("metric", FILTER_METRICS)
def test_a_spread_is_0_in_a_group_of_one(metric: str) -> None:
    scores = compute_group_scores(metric, *(torch.tensor([[3.0], [1.0]]) for _ in range(3)))
    is_dropped = not select_groups(scores, parse_rule("top_p", 0.9), include_zero=False).any()
    assert is_dropped == FILTER_METRICS[metric].is_spread
