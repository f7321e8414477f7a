"""Malformed input never gives a traceback: inputs that once did, and some hundred draws of every kind."""

import json
from pathlib import Path

import pytest

from analysis.data.frames import FRAME_NAMES, diff_frames
from analysis.data.load import read_study
from search_spaces.catalog import FAMILIES
from tests.fakes.command_line import read_files
from tests.fakes.lines import chain_lines
from tests.faults import malformed, malformed_folders
from tests.faults.malformed import assert_refused, check_any_line, check_settings
from tests.faults.malformed_folders import (
    RUN,
    STUDY,
    Damage,
    change_value,
    check_reading,
    drop_checksum,
    encode_document,
    write_valid_study,
)
from trainable.config.run_config import RunConfig
from trainable.families import Family
from trainable.files.json_lines import read_lines
from trainable.runs.run_files import read_rows
from trainable.runs.study_record import MAX_SEEDS

NESTED = "[" * 5000
FIRST = f"{RUN}/runs/sokoban_kl_sweep_nofilter_0-sokoban-tiny"

KNOWN_LINES = [
    ("kl", "--set", f"actor.lr={NESTED}"),
    ("kl", "--set", "actor.lr=" + "1" * 100_000 + "x"),
    ("kl", "--set", "a" * 100_000 + "=1"),
    ("kl", "--set", "trainer.logger=['\n\n']"),
    ("kl", "--set", "env.group_size=" + "9" * 400),
    ("entropy", "--set", "actor.use_kl_loss="),
    ("kl", "--preset", "laptop", "--model", ""),
    ("kl", "--preset", "laptop", "--model", "model-\udcff"),
    ("kl", "--preset", "laptop", "--output", "a/" * 2500),
    ("kl", "--preset", "laptop", "--output", "folder-\udcff"),
    ("kl", "--preset", "laptop", "--seeds", "9" * 18),
    ("kl", "--preset", "laptop", "--kl-values", "0." + "0" * 300 + "1"),
    ("kl", "--preset", "laptop", "--wandb", "\x1b[2J"),
    ("kl", "--preset", "paper", "--gpus-per-exp", "1e300"),
    ("kl", "--preset", "paper", "--gpus", "0,00"),
    ("a\n\nb",),
]


def make_id(line: object) -> str:
    return ascii(line)[:60]


@pytest.mark.parametrize("line", KNOWN_LINES, ids=make_id)
def test_lines_that_were_answered_badly_once(line: tuple[str, ...]) -> None:
    assert_refused(["run", "--dry-run", *line])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_there_are_as_many_seeds_as_the_settings_take(family: Family) -> None:
    assert check_settings((family.config_class, {"seed": MAX_SEEDS - 1})) == "a configuration"
    assert check_settings((family.config_class, {"seed": MAX_SEEDS})) == "ConfigError"


def test_a_home_folder_of_nobody_is_a_folder_of_that_name() -> None:
    assert check_any_line(("run", "kl", "--preset", "laptop", "--dry-run", "--output", "~nobody-here")) == "planned"


@pytest.mark.parametrize("model", ["~nobody-of-that-name", "a" * 300, "a/" * 500])
def test_a_model_that_cannot_be_a_folder_is_one_that_is_not_here(model: str) -> None:
    assert check_any_line(("run", "kl", "--preset", "laptop", "--dry-run", "--model", model)) in ("planned", "refused")
    assert_refused(["run", "kl", "--preset", "laptop", "--model", model])


def test_numbers_beyond_what_python_prints_are_refused() -> None:
    nested_list: list[object] = []
    for _ in range(5000):
        nested_list = [nested_list]
    for key in ("actor.kl_loss_coef", "actor.lr", "env.env_groups", "trainer.save_freq", "actor.betas", "model.path"):
        for value in (10**400, 10**5000, [10**5000], nested_list, {"a": nested_list}):
            assert check_settings((RunConfig, {key: value})) == "ConfigError"


@pytest.mark.long
@pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("check", "answers"),
    [
        (malformed.check_command_lines, {"refused by tune_study", "refused by the parser"}),
        (malformed.check_configurations, {"a configuration", "ConfigError"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_draw_is_answered(check: malformed.Check, answers: set[str], examples: int) -> None:
    tally = check(examples)
    assert tally.examples >= examples
    assert answers <= tally.answers.keys()


@pytest.mark.parametrize("examples", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_every_damaged_folder_is_answered(examples: int) -> None:
    tally = malformed_folders.check_folders(examples)
    assert tally.examples >= examples
    assert {"status 0, resume 0, replay 0", "status 2, resume 2, replay 2"} <= tally.answers.keys()


class ValidStudy:
    """A valid study, its plan, and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan = folder, write_valid_study(folder)
        self.files = read_files(folder)

    def make_damage(self, name: str, path: tuple[object, ...], value: object = None, is_lost: bool = False) -> Damage:
        document = change_value(drop_checksum(json.loads(self.files[name])), path, value, is_lost)
        return Damage(name, encode_document(document))


@pytest.fixture(scope="module")
def valid_study(tmp_path_factory: pytest.TempPathFactory) -> ValidStudy:
    return ValidStudy(tmp_path_factory.mktemp("good"))


LOST = object()
REFUSED, NOT_RESUMED = "status 2, resume 2, replay 2", "status 0, resume 2"


@pytest.mark.parametrize(
    ("name", "path", "value", "answer"),
    [
        (STUDY, ("runs", 0, "run_id"), "../..", REFUSED),
        (STUDY, ("settings", "trainer"), [], REFUSED),
        (STUDY, ("axis", "values"), "0", REFUSED),
        # What study.json says of its runs is not what they are.
        (STUDY, ("settings", "actor", "lr"), 0.5, NOT_RESUMED),
        (STUDY, ("axis", "values"), ["0"], NOT_RESUMED),
        (STUDY, ("stop_rules",), ["none such"], NOT_RESUMED),
        # A lost setting is not replaced by its default.
        (STUDY, ("settings", "actor", "lr"), LOST, NOT_RESUMED),
        (f"{FIRST}/run.json", ("config",), LOST, NOT_RESUMED),
    ],
)
def test_a_record_of_another_content_is_refused_or_not_resumed(
    valid_study: ValidStudy, name: str, path: tuple[object, ...], value: object, answer: str
) -> None:
    damage = valid_study.make_damage(name, path, value, is_lost=value is LOST)
    assert check_reading(valid_study.folder, valid_study.plan, damage).startswith(answer)


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        *((STUDY, content, REFUSED) for content in (NESTED.encode(), b"[]")),
        # Lost and empty files of a run stop nobody.
        (f"{FIRST}/metrics.jsonl", NESTED.encode(), "status 0, resume 0, replay 0"),
        (f"{FIRST}/levels.jsonl", None, "status 0, resume 0, replay 0"),
        (f"{FIRST}/status.json", b"", "status 0, resume 0, replay 0"),
    ],
    ids=make_id,
)
def test_a_file_without_its_content_is_refused_only_if_the_study_needs_it(
    valid_study: ValidStudy, name: str, content: bytes | None, answer: str
) -> None:
    assert check_reading(valid_study.folder, valid_study.plan, Damage(name, content)) == answer


ODD_LINES = [
    "7",
    "{}",
    '{"step": 2.5}',
    '{"step": true}',
    NESTED,
    '{"step": ' + "9" * 30 + "}",
    '{"step": 3, "split": [], "mode": {}}',
]


def test_odd_lines_are_left_out(tmp_path: Path, valid_study: ValidStudy) -> None:
    for name in ("metrics.jsonl", "levels.jsonl"):
        first, *rows = valid_study.files[f"{FIRST}/{name}"].splitlines()
        lines = [first, *(line.encode() for line in ODD_LINES), *rows]
        damage = Damage(f"{FIRST}/{name}", b"\n".join(lines))
        malformed_folders.write_damaged_copy(tmp_path / name, valid_study.folder, damage)
        valid_frames, damaged_frames = read_study(valid_study.folder / RUN), read_study(tmp_path / name / RUN)
        assert [diff_frames(getattr(valid_frames, frame), getattr(damaged_frames, frame)) for frame in FRAME_NAMES] == [
            []
        ] * len(FRAME_NAMES)
        assert read_rows(tmp_path / name / FIRST / "metrics.jsonl") == read_rows(
            valid_study.folder / FIRST / "metrics.jsonl"
        )


@pytest.mark.parametrize("values", [('"many"', "[]", "NaN"), ("9" * 400,) * 3], ids=["no numbers", "a huge number"])
def test_a_value_that_is_no_number_is_missing(
    tmp_path: Path, valid_study: ValidStudy, values: tuple[str, str, str]
) -> None:
    name = f"{FIRST}/metrics.jsonl"
    rows = read_lines(valid_study.folder / name).records
    texts = [json.dumps({**row, "val_success": "HERE"}) for row in rows]
    lines = [text.replace('"HERE"', value).encode() for text, value in zip(texts, values, strict=True)]
    damage = Damage(name, chain_lines(lines))
    malformed_folders.write_damaged_copy(tmp_path, valid_study.folder, damage)
    steps = read_study(tmp_path / RUN).steps
    assert steps["val_success"].isna().all()
    assert steps["entropy"].to_list() == [row["entropy"] for row in rows]
    assert check_reading(valid_study.folder, valid_study.plan, damage).startswith("status 0, resume 0")
