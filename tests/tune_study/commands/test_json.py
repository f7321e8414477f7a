"""Tests of --json: one object on standard output, with the documented keys, and of `report --fail-on`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.sweep.test_symptoms import write_collapse
from tests.fakes.command_line import Answer, assert_refused, get_output, read_files, type_words
from tests.fakes.plans import plan_study
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.test_architecture import ROOT
from tests.trainable.sources.logs import write_verl_run
from tune_study.commands.reading.results import describe_failures
from tune_study.folder import outputs
from tune_study.host.console import print_json

STUDY = FakeStudy(levels=40, total_steps=10, values=("0", "0.1", "0.2"))
STOP = ("low_validation_success", 0.002, 0.01)

NUMBER = (int, float)
MAYBE_NUMBER = (int, float, type(None))
MAYBE_TEXT = (str, type(None))
TEST = dict.fromkeys(("difference", "low", "high", "p", "p_holm", "p_equal_holm"), MAYBE_NUMBER)
RESULTS: Mapping[str, Any] = {
    "study": str,
    "baseline": str,
    "outcome": str,
    "arms": [{"arm": str, "verdict": str, **TEST, "margin": NUMBER}],
    "runs": [{"run": str, "arm": str, "seed": int, "status": str, "reason": str, "collapsed": (bool, type(None))}],
    "notes": [str],
    "folder": str,
    "page": str,
}
PLANS: Mapping[str, Any] = {
    "plans": [
        {
            "study": str,
            "preset": str,
            "model": MAYBE_TEXT,
            "setting": str,
            "arms": [str],
            "baseline": MAYBE_TEXT,
            "seeds": [int],
            "resolved_difference": MAYBE_NUMBER,
            "results": str,
            "cpus": int,
            "gpu_slots": [str],
            "max_concurrent": int,
            "disk": {"needed_bytes": int, "free_bytes": int},
            "memory": (dict, type(None)),
            "runs": [{"run": str, "arm": str, "seed": int, "steps": int, "log": str, "checkpoints": str}],
            "commands": {},
            "lines": [str],
            "fits": bool,
            "notes": [str],
        }
    ]
}
SCORE = {
    "rule": str,
    **dict.fromkeys(("collapsed", "detected", "healthy", "false_alarms"), int),
    **{
        f"{name}{end}": MAYBE_NUMBER
        for name in ("detected_fraction", "false_fraction", "lead")
        for end in ("", "_low", "_high")
    },
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "status": {
        "study": str,
        "preset": str,
        "state": str,
        "metric": str,
        "runs": [
            {
                **dict.fromkeys(("run", "arm", "status", "status_text", "reason"), str),
                **dict.fromkeys(("seed", "step", "steps"), int),
                "value": MAYBE_NUMBER,
                "collapse_step": MAYBE_NUMBER,
            }
        ],
        "notes": [str],
        "resume_command": MAYBE_TEXT,
    },
    "run": PLANS,
    "confirm": PLANS,
    "report": RESULTS,
    "import": RESULTS,
    "compare": {
        "reference": str,
        "outcome": str,
        "studies": [dict.fromkeys(("label", "name", "folder", "preset", "seeds", "statuses", "commit"), str)],
        "settings": [{"setting": str, "values": dict}],
        "arms": [
            {
                **dict.fromkeys(("study", "arm", "other_arm", "verdict"), str),
                **TEST,
                "reference": MAYBE_NUMBER,
                "other": MAYBE_NUMBER,
            }
        ],
        "arms_of_one_study": dict,
        "page": str,
    },
    "alarms": {
        **dict.fromkeys(("studies", "runs", "repeated_runs", "collapsed", "first_test_seed"), int),
        "forks": [str],
        "scored_on_other_seeds": bool,
        "alarms": [SCORE],
        "others": [{**dict.fromkeys(("detector", "source", "thresholds"), str), **SCORE}],
    },
    "noise-floor": {
        "arm": str,
        "outcome": str,
        "runs": [{"seed": int, "value": NUMBER}],
        **dict.fromkeys(("mean", "std", "std_low", "std_high", "power", "level"), NUMBER),
        "floors": [{"seeds": int, "difference": MAYBE_NUMBER, "low": MAYBE_NUMBER, "high": MAYBE_NUMBER}],
    },
}
"""Command -> the types of what it prints, without `schema` and `command`."""


def check(value: Any, schema: Any, path: str = "") -> None:
    """Assert that a value has exactly the keys of a schema, and values of its types."""
    if isinstance(schema, Mapping):
        assert value.keys() == schema.keys(), path
        for name, item in schema.items():
            check(value[name], item, f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for index, item in enumerate(value):
            check(item, schema[0], f"{path}[{index}]")
    else:
        assert isinstance(value, schema), (path, value)
        assert isinstance(value, bool) <= (schema is bool or bool in (schema if isinstance(schema, tuple) else ())), (
            path
        )


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def read_answer(answer: Answer, code: int = 0) -> dict[str, Any]:
    """Parse the only thing on standard output, and check it against the schema of its command."""
    assert answer.code == code, answer.err
    value: dict[str, Any] = json.loads(answer.out, parse_constant=refuse_constant)
    assert value.pop("schema") == 1
    check(value, SCHEMAS[value.pop("command")])
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with an arm that is worse, one of whose runs collapsed, and one whose only run failed."""
    runs = [FakeRun("0", seed, steps=10, success=(0.35, 0.9)) for seed in range(3)]
    runs += [FakeRun("0.1", seed, steps=10, success=(0.35, 0.2)) for seed in range(2)]
    runs.append(FakeRun("0.1", 2, status="early_stopped", steps=5, success=(0.35, 0.2), stop=STOP))
    runs.append(FakeRun("0.2", 0, status="failed", steps=5, reason="RuntimeError: x"))
    return write_study(tmp_path_factory.mktemp("json"), runs, STUDY)


@pytest.fixture(scope="module")
def report(folder: Path) -> tuple[dict[str, Any], str]:
    """What `report` prints with both conditions of --fail-on: the JSON, and standard error."""
    answer = type_words("report", folder, "--json", "--fail-on", "worse, collapsed")
    return read_answer(answer, 4), answer.err


def test_status_has_every_run(folder: Path) -> None:
    status = read_answer(type_words("status", folder, "--json"))
    assert (status["study"], status["state"], status["metric"]) == ("kl", "unfinished", "val_success")
    assert status["resume_command"].startswith("python -m tune_study resume ")
    runs = {(run["arm"], run["seed"]): run for run in status["runs"]}
    assert runs["0.1", 2]["collapse_step"] == 5
    assert runs["0", 0]["collapse_step"] is None
    assert (runs["0.2", 0]["status"], runs["0.2", 0]["reason"]) == ("failed", "RuntimeError: x")
    assert (runs["0", 0]["step"], runs["0", 0]["steps"]) == (10, 10)


@pytest.mark.long
def test_a_report_has_verdicts_collapses_and_its_page(report: tuple[dict[str, Any], str], folder: Path) -> None:
    results, _ = report
    arms = {arm["arm"]: arm for arm in results["arms"]}
    assert {name: arm["verdict"] for name, arm in arms.items()} == {
        "0": "baseline",
        "0.1": "worse",
        "0.2": "no verdict",
    }
    assert arms["0.1"]["low"] < arms["0.1"]["difference"] < arms["0.1"]["high"] < 0
    assert arms["0.1"]["p_holm"] < 0.05
    assert arms["0"]["difference"] is None
    assert [run["run"] for run in results["runs"] if run["collapsed"]] == ["arm01-seed2"]
    assert {run["status"] for run in results["runs"]} == {"completed", "early_stopped", "failed"}
    assert Path(results["page"]).is_file()
    assert Path(results["page"]).parent == folder == Path(results["folder"])


@pytest.mark.long
def test_a_report_fails_on_what_was_named(report: tuple[dict[str, Any], str]) -> None:
    results, error = report
    worse, collapsed = (
        "Worse than the baseline 0 (--fail-on worse): 0.1.",
        "Collapsed (--fail-on collapsed): arm01-seed2.",
    )
    assert error == f"tune_study: {worse} {collapsed}\n"
    assert [describe_failures(results, words) for words in (("worse",), ("collapsed",), ())] == [worse, collapsed, ""]


@pytest.mark.parametrize("words", ["worst", "", "worse,", "collapsed worse"])
def test_unknown_words_of_fail_on_are_refused_before_anything_is_written(words: str, folder: Path) -> None:
    before = read_files(folder)
    assert_refused(type_words("report", folder, "--fail-on", words), "--fail-on", "type worse", "or worse,collapsed")
    assert read_files(folder) == before


def test_a_dry_run_has_the_plan(work_dir: Path) -> None:
    words = ("run", "kl", "--preset", "laptop", "--kl-values", "0,0.1", "--seeds", "2", "--dry-run")
    answer = type_words(*words, "--json")
    (plan,) = read_answer(answer)["plans"]
    assert (plan["study"], plan["arms"], plan["seeds"], plan["baseline"]) == ("kl", ["0", "0.1"], [0, 1], "0")
    assert {(run["arm"], run["seed"]) for run in plan["runs"]} == {("0", 0), ("0", 1), ("0.1", 0), ("0.1", 1)}
    assert plan["fits"]
    assert plan["resolved_difference"] is None, "two seeds resolve nothing"
    text = get_output(type_words(*words))
    for line in plan["lines"]:
        assert line.partition(" GB")[0] in text  # the free disk space changes
    assert list(work_dir.iterdir()) == []


def test_a_confirmation_has_its_plan(work_dir: Path) -> None:
    study = plan_study(work_dir, ("0", "0.01"), 2)
    outputs.write_study(study)
    before = read_files(work_dir)
    words = ("confirm", study.folder, "--arm", "0.01", "--seeds", "3", "--dry-run", "--json")
    (plan,) = read_answer(type_words(*words))["plans"]
    assert (plan["arms"], plan["seeds"]) == (["0", "0.01"], [2, 3, 4])
    assert plan["results"] == f"{study.folder}-confirm-001"
    assert read_files(work_dir) == before


@pytest.mark.long
def test_a_comparison_has_arms_settings_and_its_page(folder: Path, tmp_path: Path) -> None:
    runs = [FakeRun("0", seed, steps=12, success=(0.35, 0.2)) for seed in range(3)]
    other = write_study(tmp_path, runs, FakeStudy(levels=40, total_steps=12, values=("0",)))
    words = ("compare", folder, other, "--to", tmp_path / "page.html", "--json")
    comparison = read_answer(type_words(*words))
    (arm,) = comparison["arms"]
    assert (arm["study"], arm["arm"], arm["other_arm"], arm["verdict"]) == ("B", "0", "0", "worse")
    assert arm["difference"] == pytest.approx(arm["other"] - arm["reference"])
    assert comparison["settings"] == [
        {"setting": "trainer.total_training_steps", "values": {"A": 10, "B": 12}},
    ]
    assert comparison["arms_of_one_study"] == {"A": ["0.1", "0.2"]}
    assert Path(comparison["page"]).is_file()


@pytest.mark.long
def test_alarms_have_their_scores(tmp_path: Path) -> None:
    write_collapse(tmp_path, (10, 12, 14, 9))
    answer = read_answer(type_words("alarms", tmp_path, "--first-test-seed", "2", "--others", "--json"))
    assert (answer["runs"], answer["collapsed"], answer["scored_on_other_seeds"]) == (5, 4, True)
    (spread,) = [row for row in answer["alarms"] if row["rule"].startswith("reward_std")]
    assert (spread["detected"], spread["collapsed"], spread["detected_fraction"]) == (2, 2, 1.0)
    stop_rule = next(row for row in answer["others"] if row["detector"] == "RAGEN reward_variance_collapse")
    assert (stop_rule["thresholds"], stop_rule["collapsed"], stop_rule["detected"]) == ("published", 2, 2)


@pytest.mark.long
def test_an_import_has_results_and_what_the_logs_do_not_say(tmp_path: Path, work_dir: Path) -> None:
    paths = [
        write_verl_run(tmp_path / f"{kl}-{seed}.log", [kl + seed / 100], seed, kl_loss_coef=kl)
        for kl in (0.2, 0.4)
        for seed in range(3)
    ]
    answer = type_words("import", *paths, "--output", "theirs", "--json")
    results = read_answer(answer)
    assert {arm["arm"]: arm["verdict"] for arm in results["arms"]}["0.2"] == "baseline"
    assert results["folder"] == str(work_dir / "theirs" / "results" / "imported")
    assert len(results["runs"]) == 6


def test_the_noise_floor_has_its_schema(tmp_path: Path) -> None:
    paths = [write_verl_run(tmp_path / f"{seed}.log", [0.2 + seed / 10], seed) for seed in range(3)]
    assert len(read_answer(type_words("noise-floor", *paths, "--json"))["floors"]) == 6


def test_missing_numbers_are_null_and_texts_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("status", {"numbers": (float("nan"), [float("inf")], 1.5, 2), "text": "\x1b[31mé"})
    output = capsys.readouterr().out
    assert json.loads(output, parse_constant=refuse_constant) == {
        "schema": 1,
        "command": "status",
        "numbers": [None, [None], 1.5, 2],
        "text": "\x1b[31mé",
    }
    assert output.isascii()
    assert "\x1b" not in output


def test_the_documented_keys_are_those_of_the_schemas() -> None:
    section = (ROOT / "docs/after_a_study.md").read_text(encoding="utf-8").partition("## Answers for programs")[2]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|$", section.partition("\n## ")[0], re.MULTILINE)
    documented = {
        command: set(re.findall("[a-z_]+", keys)) for commands, keys in rows for command in commands.split("`")[1::2]
    }
    plan, results = {"plans", *PLANS["plans"][0]}, RESULTS.keys()
    assert all(documented.pop(f"{command} --dry-run") == plan for command in ("run", "confirm", "fork"))
    assert documented.pop("confirm") == documented.pop("fork") == results
    assert documented == {name: SCHEMAS[name].keys() for name in SCHEMAS.keys() - {"run", "confirm"}}
