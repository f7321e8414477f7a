"""The options of `run` for studies of other families and for suites."""

from dataclasses import fields
from pathlib import Path

import pytest

import search_spaces.catalog
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.common import SWEEP_SETTINGS
from search_spaces.language_model.family import PPO, as_run_config
from tests.fakes.command_line import Answer, assert_refused, get_output, type_in
from tune_study.commands.requests import ChosenPreset, RunRequest, plan_from_options


def dry_run(folder: Path, words: str) -> Answer:
    """Type `run ... --dry-run`. Nothing may be written to `folder`."""
    answer = type_in(f"run {words} --output {folder} --dry-run", CUDA_VISIBLE_DEVICES="", HOME=str(folder))
    assert not list(folder.iterdir())
    return answer


def test_a_suite_plans_each_of_its_studies(tmp_path: Path) -> None:
    assert {name for name, study in STUDIES.items() if study.smoke_settings} == {
        *SUITES["sandbox-all"],
        *SUITES["sandbox-companions"],
        "opd",
        "distill",
        "tree-grpo",
    }
    output = get_output(dry_run(tmp_path, "sandbox_evidence --seeds 10"))
    for number, name in enumerate(SUITES["sandbox-evidence"], 1):
        assert f"Study {number} of 6: {name}" in output
        arms = STUDIES[name].axis.grids["laptop"]
        assert f"{10 * len(arms)} runs: {STUDIES[name].axis.setting} in {','.join(arms)}" in output


def test_a_smoke_form_changes_what_it_says_and_can_be_changed(tmp_path: Path) -> None:
    assert "Steps per run: 4, validation every 4 steps" in dry_run(tmp_path, "influence --smoke")[1]
    assert "Steps per run: 6, validation every 4 steps" in dry_run(tmp_path, "influence --smoke --steps 6")[1]
    assert "seeds 0\n" in dry_run(tmp_path, "influence --smoke")[1]
    assert "seeds 0,1\n" in dry_run(tmp_path, "influence --smoke --seeds 2")[1]


def make_rate_study(setting: str, option: str) -> Study:
    """Make a sweep over a setting that no shipped study sweeps."""
    grid = {"paper": ("1e-6", "3e-6"), "laptop": ("1e-4", "3e-4")}
    return Study("rate", PPO, "Which rate?", Axis(setting, grid, option=option), SWEEP_SETTINGS, "1e-4")


@pytest.mark.parametrize("option", ["--values", "--lr-values"])
def test_a_study_of_another_setting_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setitem(search_spaces.catalog.STUDIES, "rate", make_rate_study("actor.lr", option))
    output = get_output(dry_run(tmp_path, "rate --preset laptop --seeds 1"))
    assert "2 runs: actor.lr in 1e-4,3e-4" in output
    assert f"Results: {tmp_path}/results/rate_sokoban-tiny" in output
    assert "logs/rate_sokoban-tiny/3e-4/rate_3e-4_sokoban-tiny.log" in output
    output = get_output(dry_run(tmp_path, "rate --preset laptop --seeds 1 --values 1e-3,2e-3,1e-4"))
    assert "3 runs: actor.lr in 1e-3,2e-3,1e-4" in output
    assert_refused(
        dry_run(tmp_path, "rate --preset laptop --kl-values 0.1"),
        f"--kl-values does not belong to study rate, whose axis is actor.lr: type {option}.",
    )


def test_every_flag_that_a_study_declares_is_an_option() -> None:
    flags = {study.axis.option.replace("_", "-") for study in STUDIES.values()}
    assert flags <= {f"--{field.name.replace('_', '-')}" for field in fields(RunRequest)}


def test_values_are_typed_for_any_axis_and_once(tmp_path: Path) -> None:
    for study, values in (("kl", "0,0.2"), ("top-p", "0.9,nofilter"), ("influence", "DG")):
        output = get_output(dry_run(tmp_path, f"{study} --values {values} --preset laptop"))
        assert f" in {values}" in output
    assert_refused(
        dry_run(tmp_path, "kl --values 0 --kl-values 0.1"),
        "--values and --kl-values are two names for one option of study kl: type one of them.",
    )


def test_files_here_are_found_from_the_folders_of_workers(work_dir: Path) -> None:
    (work_dir / "digits").mkdir()
    (work_dir / "lines.txt").touch()
    assignments = ["mnist_folder=digits", "text_file=lines.txt", "model_name=some/model"]
    options = RunRequest(assignments=assignments, output=work_dir / "out", dry_run=True)
    base_config = plan_from_options(STUDIES["sandbox"], ChosenPreset("laptop", "a test"), options).base_config
    assert isinstance(base_config, UpdateRuleConfig)
    assert (base_config.mnist_folder, base_config.text_file) == (str(work_dir / "digits"), str(work_dir / "lines.txt"))
    assert base_config.model_name == "some/model"


@pytest.mark.parametrize(
    ("game", "preset"),
    [
        ("sokoban", "stress"),
        ("sokoban", "paper"),
        ("frozenlake", "paper"),
        ("mastermind", "laptop"),
        ("countdown", "laptop"),
    ],
)
def test_a_game_brings_its_settings_and_typed_ones_win(tmp_path: Path, game: str, preset: str) -> None:
    options = RunRequest(env=game, assignments=["env.max_turn=3"], output=tmp_path / "out", dry_run=True)
    plan = plan_from_options(STUDIES["kl"], ChosenPreset(preset, "a test"), options)
    config = as_run_config(plan.base_config)
    assert (config.env.name, config.env.max_turn) == (game, 3)
    one_action = game in ("mastermind", "countdown")
    assert config.env.max_actions_per_turn == (1 if one_action else 2)
    tiny_names = {"sokoban": "sokoban-tiny", "frozenlake": "frozenlake-tiny", "mastermind": "mastermind-tiny"}
    hub_name = "Qwen/Qwen2.5-3B" if preset == "paper" else "Qwen/Qwen2.5-0.5B-Instruct"
    expected_name = hub_name if preset == "paper" else tiny_names.get(game, hub_name)
    assert config.model.path == expected_name
    # Two games never share a folder, and those of Sokoban have their published names.
    suffix = f"_{game}" if expected_name == hub_name and game != "sokoban" else ""
    assert plan.folder.name == f"kl_sweep_{expected_name.rsplit('/', 1)[-1]}{suffix}"
    assert {spec.run_id.split("_kl_sweep_")[0] for spec in plan.runs} == {game}
