"""Tests of what a run_id may be."""

from trainable.runs.study_record import is_run_id

NO_NAMES = [
    *("", ".", "..", ".hidden", "a/b", "../a", "a\x00b", "a" * 300, "\ud800", "a\udfffb\ud800"),
    *("a\tb", "\x1b[2J", "\x7f", "\x85", "a\u202eb", "\u2066", "\u2028"),
]


def test_names_of_folders_are_accepted_and_what_cannot_name_one_is_refused() -> None:
    assert [is_run_id(name) for name in ("kl-0", "sokoban_kl_sweep_nofilter_0.1-café", "a" * 100)] == [True] * 3
    assert [text for text in NO_NAMES if is_run_id(text)] == []
