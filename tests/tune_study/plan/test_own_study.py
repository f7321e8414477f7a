"""Studies in files of the user: what `new` writes, what is loaded, and what is refused."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.sweep import findings
from search_spaces.declaration.study import Axis, Study
from search_spaces.language_model.family import PPO, as_run_config
from tests.fakes.command_line import assert_refused, get_output, type_words
from tests.fakes.plans import plan_study
from trainable.config.own_parts import PartFile
from trainable.runs.study_record import StudyRecord, read_record, write_record
from tune_study.folder.outputs import make_study_record, write_study
from tune_study.folder.study_file import plan_from_folder, read_study
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import OwnStudy, format_study, load_own_study

pytestmark = pytest.mark.usefixtures("work_dir")


def test_new_writes_a_study_that_runs_as_printed(tmp_path: Path) -> None:
    output = get_output(type_words("new", "my-lr", "--vary", "actor.lr=1e-4,3e-4,1e-3"))
    assert output.splitlines() == ["Wrote my_lr.py. Run it with:", "  python -m tune_study run my_lr.py"]
    assert len((tmp_path / "my_lr.py").read_text().splitlines()) <= 20
    own_study = load_own_study("my_lr.py")
    assert own_study.study.axis.grids["laptop"] == ("1e-4", "3e-4", "1e-3")
    plan = plan_study(tmp_path, None, 2, study=own_study.study)
    assert [as_run_config(spec.config).actor.lr for spec in plan.runs] == [1e-4, 3e-4, 1e-3] * 2
    assert plan.baseline == "1e-4"
    output = get_output(type_words("run", "my_lr.py", "--preset", "laptop", "--values", "1e-4,2e-4", "--dry-run"))
    assert "6 runs: actor.lr in 1e-4,2e-4; seeds 0,1,2" in output


def test_several_settings_make_a_grid_of_named_arms(tmp_path: Path) -> None:
    words = ["new", "my-grid", "--vary", "actor.lr=1e-4,1e-3", "--vary", "algorithm.adv_estimator=gae,grpo"]
    assert type_words(*words, "--to", "other.py")[0] == 0
    study = load_own_study("other.py").study
    points = [(rate, estimator) for rate in ("1e-4", "1e-3") for estimator in ("gae", "grpo")]
    assert study.axis.grids["paper"] == tuple(f"lr{rate}-adv_estimator{estimator}" for rate, estimator in points)
    plan = plan_study(tmp_path, None, study=study)
    configs = [as_run_config(spec.config) for spec in plan.runs]
    settings = [(config.actor.lr, config.algorithm.adv_estimator) for config in configs]
    assert settings == [(float(rate), estimator) for rate, estimator in points]
    assert (plan.baseline, study.axis.setting) == ("lr1e-4-adv_estimatorgae", "actor.lr x algorithm.adv_estimator")


def test_new_never_writes_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_lr.py").write_text("mine\n")
    assert_refused(type_words("new", "my-lr", "--vary", "actor.lr=1e-4,1e-3"), "exists and is left unchanged")
    assert (tmp_path / "my_lr.py").read_text() == "mine\n"


GOOD = format_study("my-lr", {"actor.lr": ("1e-4", "1e-3")})


@pytest.mark.parametrize(
    ("text", "typed", "message"),
    [
        (None, "s.py", "There is no file s.py"),
        ("x = 1\n", "s.py", "has no Study called STUDY"),
        ("x = 1\ny = 1 / 0\n", "s.py", "ZeroDivisionError: division by zero (s.py, line 2: `y = 1 / 0`)"),
        (GOOD.replace('"my-lr"', '"kl"'), "s.py", "kl is a study of this package: set another name= in s.py"),
        (
            GOOD.replace('"my-lr"', '"My LR"'),
            "s.py",
            "My LR is no name of a study: set another name= in s.py",
        ),
        (
            GOOD.replace('"laptop"', '"desktop"'),
            "s.py",
            "needs values under one of the presets paper, laptop, small, stress",
        ),
        ("\0", "s.py", "s.py"),
        (b"\xff\xfe", "s.py", "can't decode byte 0xff"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(
    tmp_path: Path, text: str | bytes | None, typed: str, message: str
) -> None:
    if text is not None:
        (tmp_path / "s.py").write_bytes(text.encode() if isinstance(text, str) else text)
    code, output, error = type_words("run", typed, "--preset", "laptop", "--dry-run")
    assert (code, output) == (2, "")
    assert message in error
    assert "Traceback" not in error


NAMED = (
    "from search_spaces.declaration.study import Axis, Study\n"
    "from search_spaces.language_model.family import PPO\n"
    "ARMS = {'w-o KL': {}, 'with KL': {'actor.use_kl_loss': True}}\n"
    "AXIS = Axis('KL', {'laptop': tuple(ARMS)}, '--arms', named_settings=ARMS)\n"
    "CONTRASTS = {'the KL': (('with KL', 'w-o KL'),)}\n"
    "STUDY = Study('my-kl', PPO, 'Does it help?', AXIS, {}, baseline='w-o KL', contrasts=CONTRASTS, margins={})\n"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("w-o KL", "w/o KL", "has no `/`, no character that cannot be shown, and no `.` at its start"),
        ("w-o KL", "w/o KL", "type another name, such as w-o KL."),
        ("w-o KL", r"a\x00b", "no character that cannot be shown"),
        ("w-o KL", r"a\ud800b", "no character that cannot be shown"),
        ("w-o KL", "", "has the value ``, which cannot name an arm"),
        ("the KL", r"\ud800", "cannot be recorded in study.json: 0=\\ud800: must be a valid string"),
        ("baseline='w-o KL'", "baseline='{arm}'", "declares '{arm}', which is a template here and may have the fields"),
        ("margins={}", "margins={'final_val_success': '0.1'}", "margins.final_val_success=0.1"),
    ],
)
def test_what_study_json_could_not_hold_is_refused_before_anything_is_written(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    (tmp_path / "s.py").write_text(NAMED.replace(old, new))
    assert_refused(type_words("run", "s.py", "--preset", "laptop", "--dry-run", "--output", "out"), message)
    assert not (tmp_path / "out").exists()


@given(st.text(max_size=8), st.text("a/.\x00\n\x1b\x85\u202e\u2028\ud800 {}é", max_size=4))
def test_the_names_that_a_plan_accepts_can_be_read_again(text: str, special: str) -> None:
    arms = (text + special, "b")
    axis = Axis("KL", {"laptop": arms}, named_settings={arm: {} for arm in arms})
    study = Study("my-kl", PPO, "?", axis, {}, baseline="b")
    try:
        plan = plan_study(Path("out"), None, study=study)
    except PlanError:
        return
    with tempfile.TemporaryDirectory() as folder:
        write_record(Path(folder), make_study_record(plan))
        assert read_record(StudyRecord, Path(folder)) == make_study_record(plan)
    assert plan.runs[0].log_path.parts[0] == "logs"
    assert len(plan.runs[0].checkpoint_dir.parts) == len(plan.runs[1].checkpoint_dir.parts)


def test_a_study_of_one_preset_names_it(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(GOOD.replace('"paper": ("1e-4", "1e-3"), ', ""))
    assert_refused(
        type_words("run", "s.py", "--preset", "paper", "--dry-run"),
        "has no values of actor.lr under preset paper: type --preset laptop",
    )
    assert type_words("run", "s.py", "--preset", "stress", "--dry-run")[0] == 0


def test_what_is_tested_stays_that_of_the_first_start(tmp_path: Path) -> None:
    def make_own_study(text: str, contrast: str, baseline: str = "1e-4") -> OwnStudy:
        contrasts = {contrast: (("3e-4", "1e-4"),)}
        axis = Axis("actor.lr", {"laptop": ("1e-4", "3e-4")})
        study = Study("my-lr", PPO, "?", axis, {}, baseline=baseline, contrasts=contrasts)
        return OwnStudy(study, PartFile("lr.py", text))

    def start(own_study: OwnStudy) -> Path:
        plan = plan_study(tmp_path, None, study=own_study.study)
        write_study(replace(plan, source=own_study.source))
        return plan.folder

    start(make_own_study("first", "before the runs"))
    start(make_own_study("first", "before the runs"))
    folder = start(make_own_study("second", "after a look"))
    content = read_study(folder)
    assert [contrast.name for contrast in content.contrasts] == ["before the runs"]
    assert content.declaration.text == "second"
    assert [entry.text for entry in content.earlier_declarations] == ["first"]
    assert plan_from_folder(folder, own_study=make_own_study("third", "x")).baseline == "1e-4"
    with pytest.raises(
        PlanError, match=r"its baseline 1e-4 was declared before the runs, and lr\.py now declares 3e-4"
    ):
        plan_from_folder(folder, own_study=make_own_study("third", "x", baseline="3e-4"))
    # To declare no contrasts is a declaration, too.
    own_study, output = make_own_study("first", "after a look"), tmp_path / "other"
    for study in (replace(own_study.study, contrasts={}), own_study.study):
        plan = plan_study(output, None, study=study)
        write_study(replace(plan, source=own_study.source))
        assert read_study(plan.folder).contrasts == ()
    (caveat,) = findings._describe_changes(content)
    assert caveat.startswith("The file that declares this study was changed once after the study had started;")
