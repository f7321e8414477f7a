"""A run's folder in storage: what the run writes on its own node is copied there after every step, and fetched first.

In storage a file of lines is a folder of parts of `PART_BYTES`, since object stores cannot append: of a step only the
last part is written again. A checkpoint is a folder whose checksums are written last and removed first, so that one
without them is never taken for whole. Rows are copied before the state that follows them, as on a disk.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainable.runs.failures import StorageError
from trainable.runs.full_disk import Obstacle, until_written
from trainable.runs.run_files import PROBES, STATE, SUMS, hold
from trainable.storage.remote import (
    Place,
    exists,
    get_bytes,
    get_file,
    listing,
    open_place,
    plain,
    put_bytes,
    put_file,
    remove_file,
    remove_folder,
)

T = TypeVar("T")

KEPT, INTERRUPT = "kept", "interrupt"
"""In storage: a run's folder of global_step_<N>, and the file of a study whose existence asks its runs to stop."""
STUDYS = ("run.json", "status.json", PROBES)
"""Files of a run's folder that the study writes, not the run."""
PART_BYTES = 2**20
_HOLD_PATIENCE_S = 60.0
_SEAL = re.compile(rf"((?:{STATE}|{KEPT})/(?:global_)?step_(\d+))/{re.escape(SUMS)}")
_HOPELESS = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")

STORAGE = Obstacle(
    lambda error: (
        not isinstance(error, FileNotFoundError | PermissionError) and not any(word in str(error) for word in _HOPELESS)
    ),
    "for the storage to answer",
    "the storage answers again",
    "It did not answer well within {patience:g} s (trainer.disk_patience).",
)


def patiently(
    work: Callable[[], T],
    patience: float,
    say: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> T:
    """The result of `work` in a storage, tried again while that may pass; then StorageError (see `until_written`)."""
    try:
        return until_written(work, patience, say, is_over, STORAGE)
    except OSError as error:
        raise StorageError(" ".join([plain(error), *getattr(error, "__notes__", [])])) from error


def push_lines(place: Place, path: Path, pushed: int) -> int:
    """Copy what `path`, which only ever grows, has beyond its first `pushed` bytes; its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for index in range(pushed // PART_BYTES, -(-size // PART_BYTES)) if size > pushed else ():
            file.seek(index * PART_BYTES)
            put_bytes(place.at(f"{index:06}"), file.read(min(PART_BYTES, size - index * PART_BYTES)))
    return size


def line_files(files: Mapping[str, int]) -> dict[str, int]:
    """Size of each file of lines, by its path, among the files of a folder of runs and their sizes in bytes."""
    sizes: dict[str, int] = {}
    for name, size in files.items():
        folder, _, part = name.rpartition("/")
        if folder.endswith(".jsonl") and part.isdecimal():
            sizes[folder] = sizes.get(folder, 0) + size
    return sizes


def fetch_lines(place: Place, size: int, path: Path) -> None:
    """Make `path` the `size` bytes that the parts at `place` hold; `path` may hold the first of them already."""
    held = path.stat().st_size if path.exists() else 0
    if held == size:
        return
    first = held // PART_BYTES if held < size else 0
    content = path.read_bytes()[: first * PART_BYTES] if first else b""
    for index in range(first, -(-size // PART_BYTES)):
        content += get_bytes(place.at(f"{index:06}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.fetching")
    beside.write_bytes(content)
    beside.replace(path)


def sealed(files: Iterable[str]) -> list[tuple[int, str]]:
    """(step, path) of every whole checkpoint among the files of a run, the latest first; of two, the rolling one."""
    found = [(int(match[2]), match[1]) for name in files if (match := _SEAL.fullmatch(name))]
    return sorted(found, key=lambda pair: (pair[0], pair[1].startswith(STATE)), reverse=True)


def put_sealed(place: Place, folder: Path) -> None:
    """Copy the checkpoint in `folder`, its checksums last; another at `place` is not whole from the first moment."""
    with suppress(FileNotFoundError):
        if get_bytes(place.at(SUMS)) == (folder / SUMS).read_bytes():
            return
    remove_file(place.at(SUMS))
    for path in sorted(folder.iterdir()):
        if path.name != SUMS:
            put_file(place.at(path.name), path)
    put_file(place.at(SUMS), folder / SUMS)


def remove_sealed(place: Place) -> None:
    """Delete a checkpoint, its checksums first."""
    remove_file(place.at(SUMS))
    remove_folder(place)


def fetch_sealed(place: Place, folder: Path) -> bool:
    """Copy the checkpoint at `place` to `folder`, unless it is there and whole; whether it is whole then."""
    sums = get_bytes(place.at(SUMS))
    if (folder / SUMS).exists() and (folder / SUMS).read_bytes() == sums and is_whole(folder):
        return True
    beside = folder.with_name(f".{folder.name}.fetching")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name in listing(place):
        get_file(place.at(name), beside / name)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    return is_whole(folder)


def is_whole(folder: Path) -> bool:
    """Whether every file that a checkpoint's checksums name is there and has its sum."""
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        for name, wanted in sums.items():
            if _sum(folder / name) != wanted:
                return False
    except (OSError, ValueError, AttributeError):
        return False
    return bool(sums)


class Mirror:
    """Keeps a run's folder on its node and its folder in storage the same.

    place: the run's folder in storage. run_dir: where the run writes rows and rolling states. kept_dir: where it
    writes global_step_<N> folders, which are removed once they are in storage. patience: seconds that the storage is
    waited for, after which a StorageError says so. notes: what the study should be told. is_over: whether to stop
    waiting.
    """

    def __init__(
        self, place: Place, run_dir: Path, kept_dir: Path, patience: float, is_over: Callable[[], bool]
    ) -> None:
        self.place, self.run_dir, self.kept_dir = place, run_dir, kept_dir
        self.notes: list[str] = []
        self._patience = patience
        self._is_over = is_over
        self._lines: dict[str, int] = {}
        self._others: dict[str, str] = {}
        self._states: dict[str, bytes] = {}

    def fetch(self, with_state: bool) -> None:
        """Make the node's folder what storage holds: all rows, and with `with_state` the newest whole checkpoint.

        What the node has from an earlier attempt and storage has not is removed: the run goes back to what is safe.
        """
        files = self._do(partial(listing, self.place))
        self._clear()
        for name, size in line_files({name: info.size for name, info in files.items()}).items():
            self._do(partial(fetch_lines, self.place.at(name), size, self.run_dir / name))
            self._lines[name] = size
        for name in files:
            if "/" not in name and name not in STUDYS:
                self._do(partial(get_file, self.place.at(name), self.run_dir / name))
                self._others[name] = _sum(self.run_dir / name)
        if with_state:
            self._fetch_state(sealed(files))
        else:  # what is here would be pushed as if it were newer
            shutil.rmtree(self.run_dir / STATE, ignore_errors=True)

    def _clear(self) -> None:
        """Remove what may differ from storage: all but rolling states, whose checksums tell."""
        shutil.rmtree(self.kept_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for path in self.run_dir.iterdir():
            if path.is_file():
                path.unlink()

    def _fetch_state(self, found: list[tuple[int, str]]) -> None:
        """Fetch the newest checkpoint that is whole; every other one on the node goes."""
        chosen = None
        for _, name in found:
            parent, _, last = name.rpartition("/")
            folder = (self.run_dir / STATE if parent == STATE else self.kept_dir) / last
            if self._do(partial(fetch_sealed, self.place.at(name), folder)):
                chosen = folder
                break
            self.notes.append(f"{name} in storage is damaged and is not used")
        for folder in (self.run_dir / STATE, self.kept_dir):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path != chosen:
                    shutil.rmtree(path, ignore_errors=True)
        if chosen is not None and chosen.parent.name == STATE:
            self._states[chosen.name] = (chosen / SUMS).read_bytes()

    def push(self) -> None:
        """Copy what the run has written since: lines, then other files, then checkpoints; old rolling states go."""
        files = [path for path in sorted(self.run_dir.glob("[!.]*")) if path.is_file()]
        for path in files:
            if path.suffix == ".jsonl":
                pushed = self._lines.get(path.name, 0)
                self._lines[path.name] = self._do(partial(push_lines, self.place.at(path.name), path, pushed))
        for path in (path for path in files if path.suffix != ".jsonl"):
            found = _sum(path)
            if self._others.get(path.name) != found:
                self._do(partial(put_file, self.place.at(path.name), path))
                self._others[path.name] = found
        self._push_states()
        for folder in sorted(self.kept_dir.glob("[!.]*")):
            self._do(partial(put_sealed, self.place.at(f"{KEPT}/{folder.name}"), folder))
            shutil.rmtree(folder)

    def _push_states(self) -> None:
        """Copy the rolling states that storage has not, then remove those that the run has no more."""
        place, folder = self.place.at(STATE), self.run_dir / STATE
        here = {path.parent.name: path.read_bytes() for path in sorted(folder.glob(f"[!.]*/{SUMS}"))}
        new = [name for name, sums in here.items() if self._states.get(name) != sums]
        for name in new:
            self._do(partial(put_sealed, place.at(name), folder / name))
            self._states[name] = here[name]
        if new:
            there = {name.split("/")[0] for name in self._do(partial(listing, place))}
            for name in there - here.keys():
                self._do(partial(remove_sealed, place.at(name)))

    def _do(self, work: Callable[[], T]) -> T:
        return patiently(work, self._patience, self.notes.append, self._is_over)


def _sum(path: Path) -> str:
    """What tells a file from another: a file's time does not, where it is written twice within one tick."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scratch(uri: str, environ: Mapping[str, str]) -> Path:
    """The folder of a node in which runs of the study at `uri` write: below TUNE_STUDY_SCRATCH, else the temporary one.

    Each user has their own, and each study.
    """
    base = environ.get("TUNE_STUDY_SCRATCH") or Path(tempfile.gettempdir()) / f"tune_study_{os.getuid()}"
    return Path(base) / hashlib.sha256(uri.encode()).hexdigest()[:16]


class Mirrored:
    """One run on a node of its own, for as long as its process carries it: held, fetched, and copied after each step.

    config: what a trial of one run is given, with `storage`, the URI of the study. `config` of this object is the same
    with folders of this node. Raises BusyError where another process of the node carries the run, and StorageError.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        study = open_place(config["storage"])
        self.folder = scratch(config["storage"], os.environ) / config["run_id"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = hold(self.folder, _HOLD_PATIENCE_S)
        self._asked, self._interrupt = study.at(INTERRUPT), self.folder / INTERRUPT
        run_dir, kept_dir = self.folder / "run", self.folder / KEPT
        (run,) = config["runs"]
        run = {**run, "run_dir": str(run_dir), "checkpoint_dir": str(kept_dir)}
        self.config = {**config, "runs": [run], "interrupt": str(self._interrupt)}
        patience = config["storage_patience"]
        place = study.at(f"runs/{config['run_id']}")
        self.mirror = Mirror(place, run_dir, kept_dir, patience, self._interrupt.exists)
        self._interrupt.unlink(missing_ok=True)
        try:
            self.mirror.fetch(with_state=not config["finished"])
        except BaseException:
            self._held.close()
            raise

    def before_step(self) -> None:
        """Hand on the study's request to stop, if there is one: the run sees it as a file of its node."""
        with suppress(OSError):  # asked again before the next step
            if exists(self._asked):
                self._interrupt.touch()

    def after_step(self) -> str:
        """Copy what the step has written; what the study should be told."""
        self.mirror.push()
        notes, self.mirror.notes[:] = "; ".join(self.mirror.notes), []
        return notes

    def close(self) -> None:
        """Give the node its room back: all that counts is in storage."""
        for folder in (self.mirror.run_dir, self.mirror.kept_dir):
            shutil.rmtree(folder, ignore_errors=True)
        self._held.close()  # its file stays: another process may be waiting for it
