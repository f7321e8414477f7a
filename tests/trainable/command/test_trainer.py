"""Runs of a real command: its rows, how it continues, how it fails, and that nothing of it is left."""

import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes import command_trainer
from tests.fakes.command_trainer import compute_reward
from trainable.command.config import CommandConfig, make_config_class
from trainable.command.tail import LogTail
from trainable.command.trainer import make_family
from trainable.config.run_config import list_outside_settings
from trainable.runs.failures import classify_failure
from trainable.runs.orphans import MARK_ENV, find_orphans
from trainable.runs.training import StepReport, TrainingLoop
from trainable.sources.names import parse_name

SCRIPT = shlex.join([sys.executable, "-S", command_trainer.__file__])  # without packages it starts sooner
RUN = f"{SCRIPT} --beta {{beta}} --seed {{seed}} --steps {{steps}} --output {{output}}"


class Place:
    """The folder of a run, in which loops continue each other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "saved" / "output"
        self.loop: TrainingLoop | None = None

    def start(self, options: str = "", steps: int = 6, beta: float = 0.2, **settings: object) -> TrainingLoop:
        section = {
            "run": f"{RUN} {options}",
            "logs": "{output}/metrics.jsonl",
            "columns": ["val_success=accuracy", "train_reward=reward"],
            "checkpoints": "{output}/checkpoint-{step}",
            "resume": "--resume {checkpoint}",
            "stop_seconds": 5,
            **{key: value for key, value in settings.items() if key not in ("early_stop", "stop_rules")},
        }
        config = make_config_class({"beta": beta}, {}).model_validate(
            {
                "seed": 3,
                "command": section,
                "trainer": {"total_training_steps": steps},
                "early_stop": settings.get("early_stop", {}),
            }
        )
        run = {"run_id": "r", "seed": 3, "run_dir": str(self.folder), "checkpoint_dir": str(self.folder / "saved")}
        rules = settings.get("stop_rules", ())
        family = make_family(self.folder / "saved")
        self.loop = TrainingLoop(family, config, [run], {"arm": "a", "stop_rules": rules})
        return self.loop

    def read_consoles(self) -> list[str]:
        return [path.read_text() for path in sorted((self.folder / "saved").glob("console_*.log"))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv(MARK_ENV, str(tmp_path))
    monkeypatch.setenv("SLEEP", "0.05")
    place = Place(tmp_path)
    yield place
    if place.loop is not None:
        place.loop.close()


def take_reports(loop: TrainingLoop, last_step: int = 10**9) -> list[StepReport]:
    """Step until the run is over, or has a row of `last_step`."""
    reports = []
    while not loop.is_over and (not reports or reports[-1].last_step < last_step):
        reports.append(loop.step())
    return reports


def get_values(loop: TrainingLoop, *names: str) -> list[list[Any]]:
    return [[row.get(name) for name in names] for row in loop.runs[3].rows]


def expect_rows(last_step: int, beta: float = 0.2) -> list[list[float | None]]:
    rewards = [(step, compute_reward(3, step, beta)) for step in range(1, last_step + 1)]
    return [[step, reward, None if step % 2 else reward / 2] for step, reward in rewards]


COLUMNS = ("step", "train_reward", "val_success")


def test_rows_are_those_of_the_log(place: Place) -> None:
    loop = place.start()
    reports = take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)
    assert [report.last_step for report in reports if report.rows] == [1, 2, 3, 4, 5, 6]
    assert place.read_consoles() == ["beta 0.2 from step 0, no word\n"]
    (row,) = reports[-1].rows.values()
    assert (row["reward"], row["line"], row["arm"], row["run_id"]) == (row["train_reward"], 6, "a", "r")
    assert row["seconds_total"] > 0


@pytest.mark.parametrize("last_step", [1, 5])
def test_a_run_continues_from_the_newest_checkpoint_of_the_command(place: Place, last_step: int) -> None:
    """Rows beyond this checkpoint, and one of nobody, are in the log before the command repeats their steps."""
    take_reports(place.start(), last_step)
    assert place.loop is not None
    place.loop.close()
    with (place.output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "reward": -1.0}) + "\n")
    loop = place.start()
    newest = last_step // 2 * 2
    assert loop.notes[-1] == f"training continues after step {newest}"
    assert ("the command has no checkpoint up to this step" in loop.notes[0]) == (newest == 0)
    assert len(loop.runs[3].rows) == newest
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)
    assert place.read_consoles()[1] == f"beta 0.2 from step {newest}, no word\n"


def test_a_column_that_an_earlier_start_has_measured_is_not_missing(place: Place) -> None:
    """The last start begins after the last validation."""
    take_reports(place.start("--steps 7", steps=7), 7 - 1)
    assert place.loop is not None
    place.loop.close()
    loop = place.start("--steps 7", steps=7)
    assert len(loop.runs[3].rows) == 6
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(7)


def test_steps_that_count_from_0_do_so_after_a_restart(place: Place) -> None:
    take_reports(place.start("--first-step 0"), 5)
    assert place.loop is not None
    place.loop.close()
    loop = place.start("--first-step 0")
    assert len(loop.runs[3].rows) == 4
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)


def test_without_checkpoints_a_run_begins_anew(place: Place) -> None:
    take_reports(place.start(checkpoints="", resume=""), 3)
    assert place.loop is not None
    place.loop.close()
    loop = place.start(checkpoints="", resume="")
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)
    assert [text.split(",")[0] for text in place.read_consoles()] == ["beta 0.2 from step 0"] * 2


def test_a_command_that_continues_by_itself_keeps_its_rows(place: Place) -> None:
    options, settings = (
        "--resume-if-there {output}/checkpoint-2",
        {"checkpoints": "{output}/checkpoint-2", "resume": ""},
    )
    take_reports(place.start(options, **settings), 3)
    assert place.loop is not None
    place.loop.close()
    loop = place.start(options, **settings)
    assert [row["step"] for row in loop.runs[3].rows] == [1, 2, 3]
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)
    assert place.read_consoles()[1].startswith("beta 0.2 from step 2,")


def test_a_rule_stops_the_command_and_all_that_it_started(place: Place) -> None:
    loop = place.start("--daemon", steps=1000, early_stop={"alarm": "entropy < 0.3"})
    take_reports(loop)
    row = loop.runs[3].rows[-1]
    assert (row["step"], row["stop_rule"], row["stop_value"]) == (4, "alarm", 0.25)
    daemon = psutil.Process(int((place.output / "daemon").read_text()))
    assert daemon.is_running()
    loop.close()
    assert not daemon.is_running()
    assert find_orphans(place.folder) == []


def test_a_command_that_ignores_sigterm_is_killed(place: Place) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    loop = place.start(run=f"{shlex.join([sys.executable, '-c', script])} {{beta}}", stop_seconds=0.2)
    assert loop.trainer is not None
    assert not loop.trainer.step(lambda: None).rows
    (child,) = find_orphans(place.folder)
    loop.close()
    assert not child.is_running()


@pytest.mark.parametrize(
    ("options", "settings", "kind", "is_retried", "words"),
    [
        ("--fail-at 4", {}, "error", False, "ended with exit code 3: ValueError: a fault ("),
        ("--fail-at 4 --message 'NCCL error'", {"retry": "NCCL|died"}, "error", True, "exit code 3: NCCL error ("),
        ("--fail-at 4", {"retry": "exit code 3"}, "error", True, "exit code 3: ValueError: a fault ("),
        ("--fail-at 4", {"retry": "exit code 2"}, "error", False, "exit code 3: ValueError: a fault ("),
        ("--fail-at 4 --signal 9", {}, "error", True, "ended by SIGKILL; its last line: ValueError: a fault ("),
        ("--fail-at 4 --message 'CUDA out of memory'", {"retry": "CUDA"}, "out of memory", True, "CUDA out of memory"),
    ],
)
def test_failures(
    place: Place, options: str, settings: dict[str, str], kind: str, is_retried: bool, words: str
) -> None:
    loop = place.start(options, **settings)
    with pytest.raises(Exception, match="the command") as caught:
        take_reports(loop)
    assert [row["step"] for row in loop.runs[3].rows] == [1, 2, 3]
    failure = classify_failure(caught.value, has_rows=True)
    assert (failure.kind, failure.is_retried) == (kind, is_retried)
    assert words in failure.message


def test_a_run_continues_after_a_failure_that_quotes_no_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-1234")
    options = "--fail-at 4 --message 'bad key swordfish-1234'"
    loop = place.start(options)
    with pytest.raises(Exception, match="bad key <SOME_API_KEY>"):
        take_reports(loop)
    loop.close()
    loop = place.start(options)
    take_reports(loop)
    assert get_values(loop, *COLUMNS) == expect_rows(6)


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ("", {"logs": "{output}/other.jsonl"}, "after step 0 of 6: no file matches .*other.jsonl"),
        ("", {"logs": "{output}/checkpoint-2/state.json"}, "after step 0 of 6: .* has no training step in any format"),
        ("", {"columns": ["val_success=acuracy"]}, "no row has val_success, and the last one has .*accuracy, "),
        ("--steps 3", {}, "after step 3 of 6: if this is its length, set steps=3"),
    ],
)
def test_a_command_that_ends_early_has_failed(place: Place, options: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        take_reports(place.start(options, **settings))


@pytest.mark.parametrize(("options", "steps"), [("--steps 20", 5), ("--every 2", 5), ("--every 2 --steps 20", 5)])
def test_a_run_ends_at_its_last_step(place: Place, options: str, steps: int) -> None:
    """Where the command goes on, and where the log has no row of that step, which then has no measurements."""
    loop = place.start(options, steps=steps)
    take_reports(loop)
    assert loop.runs[3].rows[-1]["step"] == steps
    is_measured = "--every" not in options
    assert ("train_reward" in loop.runs[3].rows[-1]) == is_measured


def test_the_environment_of_a_command(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RAY_ADDRESS": "somewhere", "RAY_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "2,3"}.items():
        monkeypatch.setenv(name, value)
    script = "import os, sys; print([os.environ.get(n) for n in ('RAY_ADDRESS', 'RAY_JOB_ID', 'WORD')], *sys.argv[1:])"
    run = f"{shlex.join([sys.executable, '-c', script])} {{gpu_ids}} {{run}} {{attempt}}"
    loop = place.start(run=run, environment=["WORD=beta is {beta}"])
    with pytest.raises(Exception, match="exit code 0"):
        take_reports(loop)
    assert place.read_consoles() == ["['local', None, 'beta is 0.2'] 2,3 saved 1\n"]


def test_the_command_ends_with_the_process_of_its_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a process that is killed."""
    monkeypatch.setenv("SLEEP", "600")
    trial = multiprocessing.get_context("fork").Process(target=lambda: place.start().step())
    trial.start()
    deadline = time.monotonic() + 60
    while not "".join(place.read_consoles()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = psutil.Process(trial.pid).children()
    trial.kill()
    trial.join()
    child.wait(10)


def test_settings_go_into_words_and_a_file(place: Place) -> None:
    config = make_config_class({"beta": 0.1, "model.name": "m x", "n": 3, "flag": True, "other": None}, {})()
    assert config.fill_words("train {beta} 'a {model.name}' {flags} --s {seed}", {}) == [
        *("train", "0.1", "a m x", "--n", "3", "--flag", "True", "--s", "0"),
    ]
    assert config.fill_words("{overrides}", {}) == ["beta=0.1", "model.name='m x'", "n=3", "flag=True"]
    assert config.fill_words("x={other} {unknown: 1} []", {}) == ["x=null", "{unknown:", "1}", "[]"]
    take_reports(place.start())
    assert json.loads((place.output / "settings.json").read_text()) == {"beta": 0.2}
    assert isinstance(config, CommandConfig)


def test_texts_of_settings_may_be_programs() -> None:
    config_class = make_config_class({"beta": 0.1, "n": 2, "flag": True, "python": "python", "model.path": None}, {})
    assert {"args.python", "args.model.path", "command.run"} <= set(list_outside_settings(config_class))
    assert not {"args.beta", "args.n", "args.flag"} & set(list_outside_settings(config_class))


def test_rejected_settings() -> None:
    for section, words in [
        ({"run": "train {beta}", "logs": "shared/log.csv"}, "is the same file for all runs"),
        ({"run": "train"}, "the command does not use the setting beta"),
        ({"run": "train {gamma}"}, r"command.run has the field \{gamma\}: choose from .*beta"),
        ({"checkpoints": "{beta}-{step}"}, r"command.checkpoints has the field \{beta\}"),
        ({"environment": ["HF_TOKEN=abc"]}, "looks like a secret"),
        ({"environment": ["WORD"]}, "has no name and value"),
        ({"retry": "("}, "must be a regular expression"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_config_class({"beta": 0.0}, {}).model_validate({"command": section})
    with pytest.raises(ValueError, match="settings has seed, which is a field of every run"):
        make_config_class({"seed": 1}, {})


def test_files_that_vanish_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers delete old checkpoints, with the states in them."""
    names = [parse_name("val_success", "accuracy"), parse_name("train_reward", "reward")]
    tail = LogTail(str(tmp_path / "checkpoint-*" / "trainer_state.json"), names)
    assert tail.read() is None
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        rows = [{"step": number, "reward": number / 4, "accuracy": 0.5} for number in range(1, step + 1)]
        state = {"global_step": step, "log_history": rows}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    rows = tail.read(at_once=True)
    assert rows is not None
    assert [row["train_reward"] for row in rows] == [0.25, 0.5]
    files = tail._list_files()
    monkeypatch.setattr(tail, "_list_files", lambda: [tmp_path / "gone", *files])
    assert tail.read(at_once=True) is None
