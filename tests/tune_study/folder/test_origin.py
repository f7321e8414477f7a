"""What a folder names outside of it is used only by whoever started the study there, or typed the value again."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from search_spaces.catalog import FAMILIES
from tests.fakes.command_line import assert_refused, type_in
from tests.fakes.plans import plan_study, write_started_study
from trainable.config.run_config import list_outside_settings
from trainable.config.setting_types import Outside, OutsideKind
from trainable.files.json_values import read_object, write_object
from trainable.runs.study_record import StudyRecord
from tune_study.folder.origin import find_state_folder, find_usable_storage, list_outside_values, list_typed_before
from tune_study.folder.outputs import make_run_entry, write_study
from tune_study.folder.study_file import plan_from_folder
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import join_uri
from tune_study.plan.study_plan import StudyPlan

NAME = "one of a list of names"
CODE = "a name of the package, or a file of the user, which is executed only if it is typed"

KINDS = get_args(OutsideKind)
SETTINGS = {
    "model.path": "model",
    "model.reference_path": "model",
    "env.dataset.file": "file",
    "env.dataset.digest": "compared with the digest of the file",
    "env.dataset.prompt": "the name of a field",
    "env.dataset.answer": "the name of a field",
    "env.dataset.pattern": "a regular expression, which is searched in replies",
    "env.dataset.instructions": "a text that the policy reads",
    "env.papers.file": "file",
    "env.papers.judge_url": "host",
    "env.papers.judge_key_variable": "variable",
    "env.papers.judge_model": "a name that is sent to the judge",
    "env.name": CODE,
    "env.reward": CODE,
    "filter.rollout_filter_strategy": CODE,
    "actor.policy_loss": CODE,
    "algorithm.adv_estimator": CODE,
    "trainer.own_stop_rules": CODE,
    "early_stop.alarm": "a comparison of a column, which is parsed",
    **{f"command.{name}": "program" for name in ("run", "resume", "checkpoints", "logs", "environment", "folder")},
    "command.columns": "names of measurements in a log",
    "command.retry": "a regular expression, which is searched in what a command printed",
    "mnist_folder": "file",
    "text_file": "file",
    "model_name": "model",
    "method": NAME,
}
"""Every setting that takes any text, by dotted name: what it names outside of a folder, or why it names nothing there.

A new one has to be added here, and marked as `Outside` if it can name a host, a file, a model or a variable.
"""

STUDY_TEXTS = {
    "outside: find_usable_storage decides": "storage",
    "outside: find_last_wandb decides": "starts.wandb.project",
    "outside: check_outside_values decides": "settings",
    "values of settings, which become part of the configurations that are checked": "axis.values points",
    "values of the axis": "extra_seeds",
    "the name of a folder below runs/, beside the study or in the storage, checked by is_run_id": "runs.run_id run "
    "forks.folder forks.parents.run_id",
    "part of the names of arms and runs, which are checked as those of any plan": "forks.arm forks.steps",
    "compared with the name of the folder": "forks.run",
    "a path below the folder of a study beside it, checked by _check_parents": "forks.parents.checkpoints",
    "not read: the plan says where a log is": "runs.log",
    "only looked at, below the output folder": "runs.checkpoints",
    "compared with what was typed or declared": "name preset family stop_rules runs.arm baseline contrasts.pairs "
    "declaration.path declaration.sha256 declaration.text code.path code.sha256 code.text search.space.setting "
    "search.space.values search.space.condition search.objectives",
    "shown as text": "axis.setting axis.option axis.dose axis.factors defaults runs.study runs.label "
    "runs.experiment_name runs.config_hash starts.at starts.command starts.declaration recorded preset_reason command "
    "question outcomes margins looks.at contrasts.name versions git.commit starts.versions starts.git.commit "
    "created_at model earlier_declarations.path earlier_declarations.sha256 earlier_declarations.text confirms.run "
    "forks.parents.arm forks.parents.study forks.parents.label forks.parents.log forks.parents.experiment_name "
    "forks.parents.config_hash",
}
RUN_TEXTS = {
    "compared with what was typed or declared": "config_hash",
    "not read: the plan says where logs and checkpoints are": "log checkpoints",
    "shown as text": "run_id study arm label seed experiment_name",
}
"""Why a text of a record leads nowhere -> the fields; `config` of run.json is read as settings are.

All texts of status.json are shown as text.
"""


def list_text_fields(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, field) of every field of a section of settings that takes any text."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from list_text_fields(annotation, f"{prefix}{name}.")
        elif contains_text(annotation):
            yield prefix + name, field


def contains_text(annotation: Any) -> bool:
    """Whether a type has a str in it that is no Literal."""
    arguments = get_args(annotation)
    return annotation is str or (
        "Literal" not in str(getattr(annotation, "__origin__", ""))
        and any(contains_text(argument) for argument in arguments if isinstance(argument, type) or get_args(argument))
    )


def list_record_texts(section: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields of a record with a text in them, also in lists, dictionaries and Any."""
    for name, field in section.__pydantic_fields__.items():
        sections = [part for part in iter_types(field.annotation) if hasattr(part, "__pydantic_fields__")]
        for inner in sections:
            yield from list_record_texts(inner, f"{prefix}{name}.")
        if not sections and any(part is str or part is Any for part in iter_types(field.annotation)):
            yield prefix + name


def iter_types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from iter_types(argument)


def test_every_text_of_a_configuration_is_in_the_table() -> None:
    texts = {name: field for family in FAMILIES.values() for name, field in list_text_fields(family.config_class)}
    # A list of layers, whose names are checked one by one.
    assert texts.keys() - {"model.lora_target_modules"} == SETTINGS.keys()
    kinds = {
        name: next((mark.kind for mark in field.metadata if isinstance(mark, Outside)), None)
        for name, field in texts.items()
    }
    outside = {name: kind for name, kind in kinds.items() if kind is not None}
    assert outside == {name: text for name, text in SETTINGS.items() if text in KINDS}
    listed = {name for family in FAMILIES.values() for name in list_outside_settings(family.config_class)}
    assert listed == outside.keys()


def test_every_text_of_a_record_is_in_the_table(tmp_path: Path) -> None:
    names = [name for name in list_record_texts(StudyRecord) if not name.startswith("settings.")]
    assert sorted(set(names)) == sorted(" ".join(STUDY_TEXTS.values()).split())
    plan = write_started_study(tmp_path)
    run_names = asdict(make_run_entry(plan, plan.runs[0]))
    assert sorted(run_names) == sorted(" ".join(RUN_TEXTS.values()).split())


def start_trees(output: Path, **settings: object) -> StudyPlan:
    """A started study of trees of rollouts whose judge is at a port that nobody listens on."""
    judge = {
        "env.papers.score": "judge",
        "env.papers.judge_url": "http://127.0.0.1:9/v1",
        "env.papers.judge_key_variable": "SOME_API_KEY",
    }
    plan = plan_study(output, None, study="tree-grpo", **{**judge, **settings})
    write_study(plan)
    return plan


COMMANDS = (
    "resume {}",
    "resume {} --dry-run",
    "confirm {} --arm {arm}",
    "export {} --arm {arm} --to exported",
    "probe {}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_copied_folder_sends_and_reads_nothing_until_it_is_typed(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (work_dir / "mine.jsonl").write_text("mine")
    plan = start_trees(work_dir / "out", **{"env.papers.file": str(work_dir / "mine.jsonl")})
    monkeypatch.setenv("SOME_API_KEY", "secret")
    copy = shutil.copytree(plan.folder, work_dir / "copy")
    answer = type_in(command.format(copy, arm=plan.values[-1]))
    text = " ".join(answer.err.split())
    assert answer.code == 2, answer.out
    assert "You did not start this study in this place" in text
    for value in (
        "env.papers.judge_url=http://127.0.0.1:9/v1",
        "env.papers.judge_key_variable=SOME_API_KEY",
        f"env.papers.file={work_dir / 'mine.jsonl'}",
    ):
        assert f"--allow {value}" in text
    assert "secret" not in text
    assert list((copy / "runs").rglob("metrics.jsonl")) == []


def test_values_that_are_typed_again_are_used(work_dir: Path) -> None:
    plan = start_trees(work_dir / "out")
    copy = shutil.copytree(plan.folder, work_dir / "copy")
    url, variable = "env.papers.judge_url=http://127.0.0.1:9/v1", "env.papers.judge_key_variable=SOME_API_KEY"
    with pytest.raises(PlanError, match="SOME_API_KEY") as caught:
        plan_from_folder(copy, allowed=frozenset({url}))
    assert "judge_url" not in str(caught.value)
    assert plan_from_folder(copy, allowed=frozenset({url, variable})).runs == plan.runs
    answer = type_in(f"resume {copy} --dry-run --allow {url} --allow {variable}")
    assert "export SOME_API_KEY=" in answer.err  # nothing is wrong but the key
    assert plan_from_folder(plan.folder).runs == plan.runs  # in its own place


def test_another_folder_in_the_place_of_a_study_has_only_what_was_typed_there(work_dir: Path) -> None:
    plan = start_trees(work_dir / "out")
    foreign = start_trees(work_dir / "other", **{"env.papers.judge_url": "https://elsewhere.example.org/v1"})
    shutil.rmtree(plan.folder)
    shutil.copytree(foreign.folder, plan.folder)
    with pytest.raises(PlanError, match=r"outside of it: env.papers.judge_url=https://elsewhere.example.org/v1\."):
        plan_from_folder(plan.folder)


def test_what_declares_a_value_need_not_be_typed(work_dir: Path) -> None:
    plan = write_started_study(work_dir / "out")
    assert list_outside_values([plan.base_config]) == {"env.papers.judge_key_variable=OPENAI_API_KEY"}
    assert plan_from_folder(shutil.copytree(plan.folder, work_dir / "copy")).runs == plan.runs
    assert list_typed_before(plan.folder) == frozenset()  # and nothing of it is recorded


@pytest.mark.parametrize(
    ("path", "is_outside"),
    [
        ("sokoban-tiny", False),
        ("Qwen/Qwen2.5-0.5B", False),
        ("/etc/model", True),
        ("~/model", True),
        ("../model", True),
        ("a/b/c", True),
        ("here", True),  # a folder of this name exists
        ("http://127.0.0.1/model", True),
    ],
)
def test_a_model_is_outside_unless_it_is_the_name_of_one(work_dir: Path, path: str, is_outside: bool) -> None:
    (work_dir / "here").mkdir()
    base = write_started_study(work_dir / "out").base_config
    config = base.model_copy(update={"model": base.model.model_copy(update={"path": path})})
    assert (f"model.path={path}" in list_outside_values([config])) == is_outside


def test_a_model_of_a_copied_folder_is_not_read(work_dir: Path) -> None:
    plan = write_started_study(work_dir / "out", model__path=str(work_dir / "my model"))
    copy = shutil.copytree(plan.folder, work_dir / "copy")
    answer = type_in(f"probe {copy}")
    assert (answer.code, "--allow 'model.path=" in answer.err.replace("\n", " ")) == (2, True)


def test_the_same_command_continues_a_study_wherever_it_lies(work_dir: Path) -> None:
    plan = start_trees(work_dir / "out")
    shutil.copytree(work_dir / "out", work_dir / "copy")
    line = (
        "run tree-grpo --preset laptop --seeds 1 --set env.papers.score=judge --output copy --dry-run "
        "--set env.papers.judge_url=http://127.0.0.1:9/v1 --set env.papers.judge_key_variable="
    )
    assert "export SOME_API_KEY=" in type_in(line + "SOME_API_KEY").err
    assert "judge_key_variable" in (answer := type_in(line + "OTHER_API_KEY")).err
    assert answer.code == 2
    assert plan.folder.exists()


@pytest.mark.parametrize("uri", ["file:///shared/studies", "s3://bucket/x?endpoint_override=127.0.0.1:9"])
def test_a_storage_is_used_where_the_study_was_started(work_dir: Path, uri: str) -> None:
    plan = plan_study(work_dir / "out", ("0",))
    write_study(plan)
    path = plan.folder / "study.json"
    write_object(path, {**read_object(path), "storage": uri})
    assert find_usable_storage(plan.folder, uri)[0] is None  # nobody typed it
    write_study(plan_with_storage := plan_from_folder(plan.folder, allowed=frozenset({f"storage={uri}"})))
    assert plan_with_storage.storage == uri
    assert find_usable_storage(plan.folder, uri) == (uri, "")
    assert find_usable_storage(plan.folder, f"{uri}0")[0] is None
    copy = shutil.copytree(plan.folder, work_dir / "copy")
    assert plan_from_folder(copy).storage is None
    assert_refused(f"resume {copy}", "cannot be continued without its storage")
    answer = type_in(f"status {copy}")
    assert answer.code == 0
    assert "The folder is read." in answer.err.replace("\n", " ")


def test_a_typed_storage_is_reached_as_it_was_typed(work_dir: Path) -> None:
    """The folder of a study may add another endpoint to the bucket that the user names."""
    plan = plan_study(work_dir / "out", ("0",))
    write_study(plan)
    path = plan.folder / "study.json"
    write_object(path, {**read_object(path), "storage": "s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http"})
    typed = frozenset({"storage=s3://bucket/x?region=eu-west-1"})
    assert plan_from_folder(plan.folder, allowed=typed).storage == "s3://bucket/x?region=eu-west-1"
    assert plan_from_folder(plan.folder, allowed=typed).study_uri == join_uri(
        "s3://bucket/x?region=eu-west-1", "kl_sweep_sokoban-tiny"
    )
    assert plan_from_folder(plan.folder, allowed=frozenset({"storage=s3://other/x"})).storage is None


def test_without_a_state_folder_values_are_typed_again(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work_dir / "a file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(work_dir / "a file"))
    plan = start_trees(work_dir / "out")
    with pytest.raises(PlanError, match="--allow"):
        plan_from_folder(plan.folder)
    assert find_state_folder({"HOME": "/h"}) == Path("/h/.local/state/tune_study")
    assert find_state_folder({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/tune_study")


@pytest.mark.parametrize("value", ["https://example.org/v1", "http://127.0.0.1:8000/v1", "http://[::1]:8000/v1"])
def test_addresses_of_judges_are_accepted(work_dir: Path, value: str) -> None:
    assert start_trees(work_dir, **{"env.papers.judge_url": value}).runs
