"""What a command line refuses that click alone would take in silence, and the files that stand for --set."""

import re
from pathlib import Path

import pytest

from tests.fakes.command_line import Answer, assert_refused, get_output, type_in
from trainable.config.aliases import SYNONYMS
from trainable.config.run_config import list_field_names
from tune_study.plan.typed_settings import merge_assignments

DRY_RUN = "run kl --preset laptop --seeds 1 --dry-run"


def test_the_advice_for_several_values_can_be_typed(work_dir: Path) -> None:
    answer = type_in(f"{DRY_RUN} --set actor.ppo_epochs=1,4")
    command = answer.err.partition("`python -m tune_study ")[2].partition("`")[0]
    assert type_in(command).code == 0
    assert type_in("run my_ppo_epochs.py --preset laptop --dry-run").code == 0


def test_every_synonym_names_a_setting() -> None:
    last_parts = {name.rsplit(".", 1)[-1] for name in list_field_names()}
    assert set(SYNONYMS.values()) <= last_parts


def test_the_version_is_printed() -> None:
    output = get_output("--version")
    assert output == "tune_study 0.2.0\n"


# ---------------------------------------------------------------------- files of settings


def plan_with_file(folder: Path, text: str, words: str = "") -> Answer:
    (folder / "my.conf").write_text(text)
    return type_in(f"{DRY_RUN} --config my.conf {words}")


def test_a_file_of_settings_stands_for_as_many_options(work_dir: Path) -> None:
    text = "# a comment\nactor.lr = 2e-4\n\ntrainer.total_training_steps=7  # short\n"
    typed = type_in(f"{DRY_RUN} --set actor.lr=2e-4 --set trainer.total_training_steps=7").out
    plans = [plan_with_file(work_dir, text).out, typed]
    # Other programs change the free space of the disk in between.
    first, second = (re.sub(r"[\d.]+ .B free", "", plan) for plan in plans)
    assert first == second
    assert "Steps per run: 7" in typed


def test_what_is_typed_comes_before_what_a_file_says(work_dir: Path) -> None:
    text = "trainer.total_training_steps=7\nactor.grad_clip=2\n"
    answer = plan_with_file(work_dir, text, "--set trainer.total_training_steps=8")
    assert "Steps per run: 8" in answer.out
    merged = merge_assignments([work_dir / "my.conf"], ["actor.grad_clip=3"])
    assert merged == ("trainer.total_training_steps=7", "actor.grad_clip=3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor.lr=1e-4\nactor.lr\n", "--config my.conf, line 2: actor.lr is not key=value, such as actor.lr=1e-5."),
        ("actor.lr=1e-4\nactor.lr=1e-5", "`actor.lr` is given twice (`actor.lr=1e-5` is the second): give it once."),
    ],
)
def test_a_file_of_another_form_is_refused(work_dir: Path, text: str, message: str) -> None:
    assert_refused(plan_with_file(work_dir, text), message)


@pytest.mark.parametrize("kind", ["missing", "a folder", "no text"])
def test_a_file_that_cannot_be_read_is_refused(work_dir: Path, kind: str) -> None:
    path = work_dir / "my.conf"
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"\xff\xfe=1")
    messages = ("--config my.conf cannot be read (", "type a text file with a line key=value per setting")
    assert_refused(f"{DRY_RUN} --config my.conf", *messages)


# ---------------------------------------------------------------------- models


def test_a_dry_run_plans_a_known_model_and_says_how_to_get_it(work_dir: Path) -> None:
    answer = type_in(f"{DRY_RUN} --model Qwen/Qwen2.5-0.5B")
    assert answer.code in (0, 3), answer.err  # 3 on a small disk
    assert "The model Qwen/Qwen2.5-0.5B was not found" in answer.out.partition("Study kl")[0]
    assert "`hf download Qwen/Qwen2.5-0.5B`" in answer.out
