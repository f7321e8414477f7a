"""Tests of what a study of trees needs before it starts."""

from pathlib import Path

import pytest

from sandboxes.trees.repl import process
from sandboxes.trees.requirements import check_papers
from search_spaces.catalog import STUDIES
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
