"""Links in the place of files and folders of a study."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.attack.damaged_files import FILES, RARE_FILES, FilePattern, find_file
from tests.attack.hostile.contents import Change, HostileCopy

# Where a link points.


def point_nowhere(copy: HostileCopy, path: Path) -> str:
    return str(copy.home / "no-such-file")


def point_to_file(copy: HostileCopy, path: Path) -> str:
    return str(copy.home / ".bashrc")


def point_to_folder(copy: HostileCopy, path: Path) -> str:
    return str(copy.home)


def point_to_itself(copy: HostileCopy, path: Path) -> str:
    return path.name


def point_to_copy(copy: HostileCopy, path: Path) -> str:
    """Outside lies what was there, so that a command that follows the link notices nothing."""
    target = copy.home / f"copy-of-{path.name}"
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)
    return str(target)


TARGETS: dict[str, Callable[[HostileCopy, Path], str]] = {
    "nowhere": point_nowhere,
    "file-outside": point_to_file,
    "folder-outside": point_to_folder,
    "itself": point_to_itself,
    "copy-outside": point_to_copy,
}

FOLDERS = {
    "runs": "runs",
    "run-folder": "runs/*PPO*",
    "rolling-checkpoints": "runs/*PPO*/state",
    "rolling-checkpoint": "runs/*PPO*/state/step_3",
    "figures": "figures",
    "all-logs": "../../logs",
    "logs": "../../logs/gradient_analysis_sokoban_sokoban-tiny",
    "all-saved-checkpoints": "../../model_saving",
    "saved-checkpoints": "../../model_saving/*/*/PPO/*/*PPO*",
    "saved-checkpoint": "../../model_saving/*/*/PPO/*/*PPO*/global_step_3",
}
"""The folders of a study, relative to results/<run>."""

TEMPORARY_FILES = ("report.html.tmp", ".study.json.part", "trials.parquet.tmp", "runs/new-run", "figures/entropy.png")
"""Names that a command may write, some of which no finished study has."""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_link(path: Path, copy: HostileCopy, target: str) -> None:
    pointed = TARGETS[target](copy, path)
    _remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(pointed)


def _link_file(file: FilePattern, target: str) -> Change:
    return lambda copy: _make_link(find_file(copy.output, file), copy, target)


def _link_path(pattern: str, target: str) -> Change:
    def change(copy: HostileCopy) -> None:
        _make_link(next(copy.folder.glob(pattern), copy.folder / pattern), copy, target)

    return change


def _make_links() -> dict[str, Change]:
    """Every file with a link of some kind, and every folder with some."""
    target_names = list(TARGETS)
    files = [file for file in FILES if file.name not in RARE_FILES]
    changes: dict[str, Change] = {}
    for number, file in enumerate(files):
        target = target_names[number % len(target_names)]
        changes[f"link/{file.name}/{target}"] = _link_file(file, target)
    for name, pattern in FOLDERS.items():
        for target in ("folder-outside", "copy-outside", "itself"):
            changes[f"link/{name}/{target}"] = _link_path(pattern, target)
    for number, name in enumerate(TEMPORARY_FILES):
        target = ("file-outside", "folder-outside")[number % 2]
        changes[f"link/{name}/{target}"] = _link_path(name, target)
    return changes


LINKS = _make_links()
