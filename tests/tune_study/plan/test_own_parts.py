"""Files of parts: which are read, what the runs are called, and what study.json has of them."""

from pathlib import Path

import pytest

from search_spaces.catalog import STUDIES
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import PPO, as_run_config
from tests.fakes.command_line import assert_refused, type_words
from tests.fakes.plans import plan_study
from tests.trainable.test_part_checks import SAVED_TEXTS
from trainable.config.own_parts import PartFile
from trainable.runs.study_record import SourceFile
from tune_study.commands.requests import ChosenPreset, RunRequest, plan_from_options
from tune_study.folder.outputs import make_study_record
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import check_recorded_files, load_named_files, load_typed_files
from tune_study.tune.trials import make_trial_config

LOSS = "def loss(new, old, advantages):\n    return -(new - old).exp() * advantages\n"


@pytest.fixture(autouse=True)
def _write_loss(work_dir: Path) -> None:
    Path("my_loss.py").write_text(LOSS)


def make_study(*values: str) -> Study:
    return Study("losses", PPO, "?", Axis("actor.policy_loss", {"laptop": values}), {}, baseline="ppo_clip")


def test_an_arm_is_named_after_its_part_and_its_trial_has_the_text(tmp_path: Path) -> None:
    study = make_study("ppo_clip", "my_loss.py:loss")
    load_named_files(study, "", None, "laptop", [])
    plan = plan_study(tmp_path, None, study=study)
    file = PartFile("my_loss.py", LOSS)
    assert [entry.label for entry in make_study_record(plan).runs] == ["ppo_clip", "loss"]
    assert [as_run_config(spec.config).actor.policy_loss for spec in plan.runs] == [
        "ppo_clip",
        f"my_loss.py:loss#{file.digest}",
    ]
    assert ":" not in "".join(spec.run_id + str(spec.log_path) for spec in plan.runs)
    assert make_study_record(plan).code == (SourceFile("my_loss.py", file.sha256, LOSS),)
    assert [make_trial_config(plan, [spec])["run"]["code"] for spec in plan.runs] == [{}, {"my_loss.py": LOSS}]
    assert plan.resume_options == ("--code", "my_loss.py")


def test_paths_in_a_study_file_start_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other_loss.py").write_text(LOSS)
    study = make_study("ppo_clip", "other_loss.py:loss")
    with pytest.raises(PlanError, match=r"There is no file other_loss\.py: type the path of a Python file that has"):
        load_named_files(study, "", None, "laptop", [])
    load_named_files(study, "below/study.py", None, "laptop", [])
    plan = plan_study(tmp_path, None, study=study)
    assert plan.resume_options == ("--code", "below/other_loss.py")
    # Only the files of values that are used.
    load_named_files(make_study("ppo_clip", "missing.py:loss"), "", ("ppo_clip",), "laptop", [])
    for text in ("[my_loss.py:a, gone.py:b]", '["my_loss.py:a","gone.py:b"]', "['gone.py:b']"):
        with pytest.raises(PlanError, match=r"There is no file gone\.py"):
            load_named_files(study, "below/study.py", None, "laptop", [text])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "my_loss.py").write_text(LOSS)
    load_typed_files(["my_loss.py", "below/my_loss.py"])  # the same text
    (tmp_path / "below" / "my_loss.py").write_text(LOSS + "\n")
    with pytest.raises(PlanError, match="have the same name, which is how runs tell their parts apart: rename one"):
        load_typed_files(["my_loss.py", "below/my_loss.py"])


def test_a_study_continues_with_the_recorded_texts_only(tmp_path: Path) -> None:
    entry = SourceFile("elsewhere/kept_loss.py", PartFile("", LOSS).sha256, LOSS)
    with pytest.raises(PlanError, match=r"yourself with --code elsewhere/kept_loss\.py --code gone\.py, where"):
        check_recorded_files(tmp_path, [entry, SourceFile("gone.py", "0", "")])
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('opened')\n")
    words = r"uses parts of elsewhere/kept_loss\.py and .*\. For safety, no file that a folder names is executed: name"
    with pytest.raises(PlanError, match=words):
        check_recorded_files(tmp_path, [entry, SourceFile(str(trap), "0", "")])
    Path("kept_loss.py").write_text(LOSS.replace("-(", "-2 * ("))
    load_typed_files(["kept_loss.py"])
    with pytest.raises(
        PlanError, match=r"(?s)kept_loss\.py has changed since.*-    return -\(.*\+    return -2 \* \(.*restore"
    ):
        check_recorded_files(tmp_path, [entry])
    Path("kept_loss.py").write_text(LOSS)
    load_typed_files(["kept_loss.py"])
    check_recorded_files(tmp_path, [entry])


@pytest.mark.parametrize(
    ("text", "part", "message"),
    [
        (LOSS, ":other", "my_loss.py has no other: define it, or name something that the file has."),
        (LOSS, ":loss#0123456789abcdef", "needs the file my_loss.py, which was not typed"),
        ("def loss(new):\n    return new\n", ":loss", "raised TypeError: loss() takes 1 positional argument"),
        ("import sys\nsys.exit(0)\n", ":f", "executed: SystemExit: 0 (my_loss.py, line 2: `sys.exit(0)`)"),
    ],
)
def test_wrong_parts_end_a_dry_run_with_one_paragraph(text: str, part: str, message: str) -> None:
    Path("my_loss.py").write_text(text)
    assert_refused(f"run kl --preset laptop --dry-run --set actor.policy_loss=my_loss.py{part}", message)


def test_settings_list_that_a_part_is_allowed() -> None:
    lines = type_words("settings", "kl", "--all")[1].splitlines()
    (line,) = [line for line in lines if line.startswith("actor.policy_loss ")]
    assert "ppo_clip | gspo | cispo | cppo | tpo | FILE.py:NAME" in line


@pytest.mark.long
def test_a_game_brings_its_settings_and_typed_ones_take_precedence(tmp_path: Path) -> None:
    Path("bandit.py").write_text(SAVED_TEXTS["bandit.py"])
    options = RunRequest(env="bandit.py:Bandit", assignments=["env.max_turn=2"], seeds=1, output=tmp_path, dry_run=True)
    env = plan_from_options(STUDIES["kl"], ChosenPreset("laptop", "a test"), options).ppo_config.env
    assert (env.max_turn, env.max_actions_per_turn, env.max_actions_per_traj) == (2, 1, 1)
    words = ("run", "kl", "--preset", "laptop", "--output", str(tmp_path / "out"), "--dry-run", "--env")
    assert_refused(type_words(*words, "bandit.py"), "or a game of yours as FILE.py:NAME")
    Path("bandit.py").write_text("class Bandit:\n    settings = [1]\n")
    assert_refused(
        type_words(*words, "bandit.py:Bandit"), "has an attribute `settings` that is no mapping of settings to values"
    )
