"""A study of parts of the user, one of which fails in mid-run: rows, statuses, report, and how it continues."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import analysis
from tests.trainable.test_part_checks import SAVED_TEXTS
from tests.tune_study.studies.test_own_study import SMALL, train
from trainable.config import own_parts
from tune_study.commands.cli import app
from tune_study.commands.probe import restore

STUDY = '''"""Do parts of mine run?"""

from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import PPO

calls = 0


def fails_in_step_3(logprobs, old_logprobs, advantages):
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("the third call")
    return -(logprobs - old_logprobs).exp() * advantages


def after_two_steps(rows):
    return (len(rows), 2) if len(rows) == 2 else None


PARTS = {
    "env.name": "bandit.py:Bandit",
    "env.reward": "my_parts.py:brief",
    "filter.rollout_filter_strategy": "my_parts.py:better_half",
    "algorithm.adv_estimator": "my_parts.py:batch_baseline",
}
STUDY = Study(
    name="parts",
    family=PPO,
    question=__doc__,
    axis=Axis(
        "loss",
        {"laptop": ("plain", "failing", "stopped")},
        named_settings={
            "plain": {"actor.policy_loss": "my_parts.py:plain_ratio"},
            "failing": {"actor.policy_loss": "parts.py:fails_in_step_3"},
            "stopped": {"trainer.own_stop_rules": "[parts.py:after_two_steps]"},
        },
    ),
    fixed_settings={**PARTS, "actor.ppo_epochs": 1},
    baseline="plain",
)
'''
# tests/tune_study/plan/test_own_parts.py and tests/trainable/test_part_checks.py test parts without a study.
pytestmark = pytest.mark.slow
RUN = Path("results/parts_sokoban-tiny_Bandit")
NAMES = ("bandit.py", "my_parts.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and the study, which has run."""
    path: Path = tmp_path_factory.mktemp("parts")
    for name in NAMES:
        (path / name).write_text(SAVED_TEXTS[name])
    (path / "parts.py").write_text(STUDY)
    settings = [f"--set={name}={value}" for name, value in {**SMALL, "trainer.total_training_steps": 4}.items()]
    code, output, error = train(path, "parts.py", *settings)
    assert code == 1, output + error
    assert "ValueError: the third call" in output + error
    return path


@pytest.fixture(autouse=True)
def _without_files_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "_loaded_files", {})


def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    result = CliRunner(env={"CUDA_VISIBLE_DEVICES": ""}).invoke(app, list(words))
    return result.exit_code, " ".join(result.stderr.split())


def test_a_part_that_fails_ends_its_run_alone(folder: Path) -> None:
    trials = analysis.load(folder).trials.set_index("arm")
    assert dict(trials["status"]) == {"plain": "completed", "failing": "failed", "stopped": "early_stopped"}
    assert trials.loc["failing", "reason"].startswith("ValueError: the third call (parts.py, line 13: `")
    assert (trials.loc["stopped", "stop_rule"], trials.loc["stopped", "stop_step"]) == ("parts.py:after_two_steps", 2)


def test_the_report_has_the_texts(folder: Path) -> None:
    entries = json.loads((folder / RUN / "study.json").read_text())["code"]
    assert {entry["path"] for entry in entries} == {*NAMES, "parts.py"}
    page = (folder / RUN / "report.html").read_text()
    assert "<summary>Study: <code>parts.py</code>, SHA-256 <code>" in page
    assert "<summary>Parts: <code>" in page
    assert "A contextual bandit: each of four symbols" in page
    assert all(entry["sha256"] in page for entry in entries)


def test_with_its_files_a_run_is_restored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--study", "parts.py", *(word for name in NAMES for word in ("--code", name)))
    code, error = invoke(folder, monkeypatch, "resume", str(RUN), *options, "--dry-run")
    assert code == 0, error
    trainer = restore(folder / RUN, "plain", study="parts.py", code=NAMES)
    assert trainer.step_index == 4
    trainer.close()
