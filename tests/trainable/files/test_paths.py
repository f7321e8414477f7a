"""A run writes only into its folder: symbolic links in it are refused, and their targets stay unchanged."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fakes.lines import append_record
from trainable.files.paths import UnsafePathError, atomic_write, check_tree, make_folder, open_regular
from trainable.runs.checkpoint import write_rolling_checkpoint
from trainable.runs.run_files import acquire_lock


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the user, with a file, a folder, and a folder that is named like a rolling checkpoint."""
    home = tmp_path / "home"
    for name in ("letter.txt", "photos/cat.jpg", "step_9/mine.txt", ".notes.writing/draft.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    return home


def read_contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_rolling_checkpoint_is_not_written_through_a_link(tmp_path: Path, home: Path) -> None:
    contents_before = read_contents(home)
    (tmp_path / "state").symlink_to(home)
    with pytest.raises(UnsafePathError, match="state is a symbolic link"):
        write_rolling_checkpoint(tmp_path / "state", 1, {"w": torch.ones(1)}, {}, 2)
    assert read_contents(home) == contents_before


def test_only_rolling_checkpoints_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for name in ("documents", "step_x", ".git", "step_5", ".step_2.writing", ".step_2.old"):
        (folder / name).mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    write_rolling_checkpoint(folder, 1, {"w": torch.ones(1)}, {}, 2)
    assert sorted(path.name for path in folder.iterdir()) == [".git", "documents", "notes.txt", "step_1", "step_x"]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_record(path, {"step": 1}),
        lambda path: open_regular(path, "w"),
        lambda path: open_regular(path, "ab"),
        lambda path: acquire_lock(path.parent, 0),
    ],
)
def test_a_file_is_not_opened_through_a_link(tmp_path: Path, home: Path, write: Callable[[Path], object]) -> None:
    for name in ("metrics.jsonl", ".lock"):
        (tmp_path / name).symlink_to(home / "letter.txt")
    with pytest.raises(UnsafePathError, match=r"(metrics\.jsonl|\.lock) is a symbolic link"):
        write(tmp_path / "metrics.jsonl")
    assert (home / "letter.txt").read_text() == "letter.txt"


def test_an_atomic_write_replaces_a_link(tmp_path: Path, home: Path) -> None:
    target = tmp_path / "report.html"
    target.symlink_to(home / "letter.txt")
    target.with_name(f".report.html.{os.getpid()}.part").symlink_to(home / "photos" / "cat.jpg")
    contents_before = read_contents(home)
    with atomic_write(target) as partial_file:
        partial_file.write_text("<p>")
    assert not target.is_symlink()
    assert target.read_text() == "<p>"
    assert read_contents(home) == contents_before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail() -> None:
        with atomic_write(tmp_path / "a") as partial_file:
            partial_file.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert read_contents(tmp_path) == {"a": "old"}


def test_folders_are_created_one_by_one(tmp_path: Path, home: Path) -> None:
    assert make_folder(tmp_path, "figures", "gradients") == tmp_path / "figures" / "gradients"
    assert make_folder(tmp_path, "figures", "gradients").is_dir()
    (tmp_path / "figures" / "runs").symlink_to(home)
    with pytest.raises(UnsafePathError, match="runs is a symbolic link"):
        make_folder(tmp_path, "figures", "runs", "photos")


@pytest.mark.parametrize("linked", ["out/results", "out/results/run", "out/results/run/runs/a", "out/logs/run.log"])
def test_a_link_below_the_root_is_refused_at_any_depth(tmp_path: Path, home: Path, linked: str) -> None:
    root = tmp_path / "out"
    (tmp_path / linked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / linked).symlink_to(home)
    with pytest.raises(UnsafePathError, match=f"{linked} is a symbolic link"):
        check_tree(root, [root / "logs" / "run.log"], [root / "results" / "run"])


def test_the_path_to_the_root_may_have_links(tmp_path: Path) -> None:
    (tmp_path / "disk" / "results" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    check_tree(tmp_path / "out", [tmp_path / "out" / "logs"], [tmp_path / "out" / "results" / "run"])
    check_tree(tmp_path / "out", [], [tmp_path / "out"])
