"""Tests of what a study of trees needs before it starts."""

from pathlib import Path

import pytest

from tests.fakes.scripted import make_small_config
from trainable.config.run_config import RunConfig
from trainable.envs.repl import process
from trainable.tiny.papers import PAPERS_TINY
from tune_study.placement.papers import check_papers
from tune_study.plan.errors import PlanError

ROW = '{"question": "?", "context": {"a": "b"}, "evidence": [{"selections": [{"text": "b"}]}]}'
SETTINGS = {name.replace(".", "__"): value for name, value in PAPERS_TINY.settings.items()}


def make_config(**overrides: object) -> RunConfig:
    return make_small_config(env__name="papers", model__path="papers-tiny", **SETTINGS, **overrides)


def test_generated_questions_need_nothing_but_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    check_papers([make_small_config(), make_config()])
    monkeypatch.setattr(process, "_find_library", lambda: None)
    check_papers([make_small_config()])  # Sokoban runs no code
    with pytest.raises(PlanError, match="sudo apt-get install libseccomp2"):
        check_papers([make_small_config(), make_config()])


def test_a_wrong_file_is_named_with_its_setting(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.jsonl", "{", "line 1 is no JSON"),
        ("b.txt", "", "a file of questions ends in .jsonl or .parquet"),
        ("c.jsonl", '{"question": 1}', "line 1: field `question`"),
        (
            "d.jsonl",
            '{"question": "?", "context": {"a": "b"}, "evidence": [{"selections": [{"text": "b"}]}]}',
            "20 are",
        ),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(PlanError, match=f"--set env.papers.file={tmp_path / name}: ") as caught:
            check_papers([make_config(env__papers__file=str(tmp_path / name))])
        assert message in str(caught.value)


def test_a_judge_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"needs an address: --set env.papers.judge_url=https://"):
        check_papers([make_config(env__papers__score="judge")])
    url = "http://127.0.0.1:8000/v1"
    config = make_config(
        env__papers__score="judge", env__papers__judge_key_variable="AN_API_KEY", env__papers__judge_url=url
    )
    monkeypatch.delenv("AN_API_KEY", raising=False)
    with pytest.raises(PlanError, match=r"export AN_API_KEY=.*Or type --set env.papers.score=char_f1"):
        check_papers([config])
    monkeypatch.setenv("AN_API_KEY", "k")
    check_papers([config])
