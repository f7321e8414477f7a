"""Tests of what a study of trees needs before it starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sandboxes.trees.repl import process
from sandboxes.trees.requirements import check_papers, explain_repl_shortage
from search_spaces.catalog import STUDIES
from trainable.config.run_config import ConfigError
from tune_study.commands.cli import app
from tune_study.host import machine_checks
from tune_study.placement.resources import load_game_requirements
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan, make_plan

ROW = '{"question": "?", "context": {"a": "b"}, "evidence": [{"selections": [{"text": "b"}]}]}'


def test_generated_questions_need_nothing_but_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    check_papers(plan_study())
    monkeypatch.setattr(process, "_find_library", lambda: None)
    assert load_game_requirements(plan_study("kl")) == []  # Sokoban runs no code
    with pytest.raises(PlanError, match="sudo apt-get install libseccomp2"):
        check_papers(plan_study())


def test_a_wrong_file_is_named_with_its_setting(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", "{", "line 1 is no JSON"),
        ("b.txt", "", "a data file ends in .jsonl or .parquet"),
        ("c.jsonl", '{"question": 1}', "line 1: field `question`"),
        ("d.jsonl", ROW, "20 are"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(PlanError, match=f"--set env.papers.file={tmp_path / name}: ") as caught:
            check_papers(plan_study(file=str(tmp_path / name)))
        assert message in str(caught.value)


def test_a_judge_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"needs an address: --set env.papers.judge_url=https://"):
        check_papers(plan_study(score="judge"))
    url = "http://127.0.0.1:8000/v1"
    plan = plan_study(score="judge", judge_key_variable="AN_API_KEY", judge_url=url)
    monkeypatch.delenv("AN_API_KEY", raising=False)
    with pytest.raises(PlanError, match=r"export AN_API_KEY=.*Or type --set env.papers.score=char_f1"):
        check_papers(plan)
    monkeypatch.setenv("AN_API_KEY", "k")
    check_papers(plan)


def plan_study(study: str = "tree-grpo", **papers_settings: object) -> StudyPlan:
    """A plan of trees, of a training step of twenty and no more at a validation."""
    settings = {"env.env_groups": 2, "env.group_size": 10, "env.val_env_groups": 8, "env.test_env_groups": 8}
    overrides = settings | {f"env.papers.{name}": value for name, value in papers_settings.items()}
    return make_plan(STUDIES[study], "laptop", "a test", overrides, None, 1, Path("/out"))


def test_a_tree_that_cannot_fit_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "measure_available_memory", lambda: 2_559 << 20)
    assert explain_repl_shortage(plan_study()) == (
        "DOES NOT FIT: a tree has up to 5 REPLs of 512 MiB, and 2559 MiB are available: type --set "
        "env.papers.execution_mib=511, or --set env.papers.max_children_per_call=1."
    )
    for setting, value in (("execution_mib", 511), ("max_children_per_call", 1)):
        assert explain_repl_shortage(plan_study(**{setting: value})) == ""
    # No code gets more than a machine has.
    for setting, value in (("execution_mib", 16_385), ("execution_seconds", 3_601.0)):
        with pytest.raises(ConfigError, match="must be less than or equal to"):
            plan_study(**{setting: value})


@pytest.mark.long
def test_a_command_for_a_tree_that_cannot_fit_says_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "measure_available_memory", lambda: 2_000 << 20)
    command = ["run", "tree-grpo", "--preset", "laptop", "--output", str(tmp_path)]
    answer = CliRunner().invoke(app, [*command, "--dry-run"])
    assert answer.exit_code == 3
    assert answer.stdout.startswith("DOES NOT FIT: a tree has up to 5 REPLs of 512 MiB, and 2000 MiB are available")
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 3
    assert "type --set env.papers.execution_mib=400" in answer.stderr
    assert list(tmp_path.iterdir()) == []
