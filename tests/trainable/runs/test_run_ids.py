"""Tests of what a run_id may be."""

import pytest

from trainable.runs.study_record import is_run_id


@pytest.mark.parametrize("text", ["kl-0", "sokoban_kl_sweep_nofilter_0.1-café", "a" * 100])
def test_names_of_folders_are_accepted(text: str) -> None:
    assert is_run_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "../a",
        "a\x00b",
        "a" * 300,
        "\ud800",
        "a\udfffb\ud800",
        "a\tb",
        "\x1b[2J",
        "\x7f",
        "\x85",
        "a\u202eb",
        "\u2066",
        "\u2028",
    ],
)
def test_what_cannot_name_a_folder_of_the_study_is_refused(text: str) -> None:
    assert not is_run_id(text)
