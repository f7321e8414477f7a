"""The order in which the trials of a study start, and what their configs say of checkpoints."""

from pathlib import Path

import pytest

from search_spaces.catalog import STUDIES
from trainable.runs.study_record import StatusRecord
from trainable.trial import PPO
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan, make_plan
from tune_study.tune.trials import make_trial_configs


def list_starts(plan: StudyPlan, finished: dict[str, StatusRecord] | None = None) -> list[tuple[str, int]]:
    """Arm and seed of each trial, in the order in which they start."""
    configs = make_trial_configs(plan, finished or {}, make_interrupt(plan.folder))
    return [
        (config["run"]["arm"], config["seed"][0] if isinstance(config["seed"], list) else config["seed"])
        for config in configs
    ]


def plan_study(name: str, folder: Path, *values: str, **overrides: object) -> StudyPlan:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return make_plan(STUDIES[name], "laptop", "a test", settings, values or None, 2, folder)


def test_the_dearest_arms_of_a_seed_start_first(tmp_path: Path) -> None:
    # KL 0 has no passes of the reference; the other arms cost the same and keep their order.
    plan = plan_study("kl", tmp_path, "0", "0.01", "0.1")
    assert list_starts(plan) == [(arm, seed) for seed in (0, 1) for arm in ("0.01", "0.1", "0")]
    # A GRPO run trains no critic.
    arms = ("grpo-kl0-lr1e-3", "grpo-kl0.1-lr1e-3", "ppo-kl0-lr1e-3", "ppo-kl0.1-lr1e-3")
    starts = list_starts(plan_study("learning-rate", tmp_path, *arms))
    assert [arm for arm, seed in starts if seed == 1] == list(reversed(arms))


def test_trials_of_unknown_cost_keep_their_order(tmp_path: Path) -> None:
    for plan in (
        plan_study("kl", tmp_path, "0", "0.1", model__path="nobody/knows-it"),
        plan_study("influence", tmp_path),
    ):
        expected = list(dict.fromkeys((specs[0].arm, specs[0].seed) for specs in plan.trials))
        assert list_starts(plan) == expected


def test_a_trial_trains_what_remains_of_its_runs(tmp_path: Path) -> None:
    plan = plan_study("kl", tmp_path, "0.01", "0.1")
    finished = {plan.runs[0].run_id: StatusRecord(plan.runs[0].run_id, "completed")}
    assert list_starts(plan, finished) == [("0.1", 0), ("0.01", 1), ("0.1", 1)]
    toy_plan = plan_study("influence", tmp_path, "GRPO")
    (config,) = make_trial_configs(toy_plan, {}, make_interrupt(toy_plan.folder))
    assert config["seed"] == [0, 1]
    finished = {toy_plan.runs[0].run_id: StatusRecord(toy_plan.runs[0].run_id, "completed")}
    (config,) = make_trial_configs(toy_plan, finished, make_interrupt(toy_plan.folder))
    assert config["seed"] == [1]


@pytest.mark.parametrize(
    ("preset", "settings", "keeps_last"),
    [
        ("laptop", {}, True),
        ("laptop", {"trainer.keep_last": False}, False),
        ("paper", {}, False),
        ("paper", {"trainer.keep_last": True}, True),
    ],
)
def test_only_the_paper_preset_gives_up_the_last_states(
    preset: str, settings: dict[str, object], keeps_last: bool, tmp_path: Path
) -> None:
    plan = make_plan(STUDIES["kl"], preset, "a test", settings, ("0.1",), 1, tmp_path)
    (config,) = make_trial_configs(plan, {}, make_interrupt(plan.folder))
    assert PPO.make_config(config).trainer.keep_last == keeps_last
