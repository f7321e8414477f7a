"""The order in which the trials of a study start, and what their configs say of checkpoints."""

from pathlib import Path

import pytest

from tests.fakes.plans import plan_study
from trainable.runs.study_record import StatusRecord
from trainable.trial import PPO
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.trials import make_trial_configs


def list_starts(plan: StudyPlan, finished: dict[str, StatusRecord] | None = None) -> list[tuple[str, int]]:
    """Arm and seed of each trial, in the order in which they start."""
    configs = make_trial_configs(plan, finished or {}, make_interrupt(plan.folder))
    return [
        (config["run"]["arm"], config["seed"][0] if isinstance(config["seed"], list) else config["seed"])
        for config in configs
    ]


def plan_two_seeds(name: str, folder: Path, *values: str, **overrides: object) -> StudyPlan:
    return plan_study(folder, values or None, 2, study=name, **overrides)


def test_a_trial_trains_what_remains_of_its_runs(tmp_path: Path) -> None:
    plan = plan_two_seeds("kl", tmp_path, "0.01", "0.1")
    finished = {plan.runs[0].run_id: StatusRecord(plan.runs[0].run_id, "completed")}
    assert list_starts(plan, finished) == [("0.1", 0), ("0.01", 1), ("0.1", 1)]
    toy_plan = plan_two_seeds("influence", tmp_path, "GRPO")
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
    plan = plan_study(tmp_path, ("0.1",), preset=preset, **settings)
    (config,) = make_trial_configs(plan, {}, make_interrupt(plan.folder))
    assert PPO.make_config(config).trainer.keep_last == keeps_last
