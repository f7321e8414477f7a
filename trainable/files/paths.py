"""Open and write files in a folder of unknown origin without following links, and escape texts to be shown.

A link in a run folder may lead to a file or folder whose owner does not expect it to be read or written. So no
component of a path below the folder that the user gave may be a link. `check_tree` also checks whole trees before
anything starts, because Ray Tune's writers follow links.
"""

import errno
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LINE_CHARACTERS = "\n\t"
"""Unprintable characters that are allowed in multi-line texts."""


def is_printable(text: str, allowed: str = "") -> bool:
    """Check whether all characters of `text` are printable or in `allowed`.

    Unprintable are control characters, characters that change the writing direction, line separators, and lone
    surrogates.
    """
    for character in allowed:
        text = text.replace(character, " ")
    return text.isprintable()


def escape_controls(text: str, allowed: str = "") -> str:
    r"""Replace unprintable characters of `text`, except those in `allowed`, by backslash escapes.

    Texts in a results folder may contain characters that control a terminal: they move the cursor, set the title or the
    clipboard, or reverse the writing direction, also in a browser.

    Example:
        >>> print(escape_controls("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    if is_printable(text, allowed):
        return text
    return "".join(
        character if character.isprintable() or character in allowed else ascii(character)[1:-1] for character in text
    )


class UnsafePathError(OSError):
    """Raised if a path of a study leads through a symbolic link, or has a file that is too large."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.ELOOP, escape_controls(f"{path} {problem}"))

    def __str__(self) -> str:
        return str(self.strerror)


def _refuse_link(path: Path) -> UnsafePathError:
    return UnsafePathError(
        path,
        "is a symbolic link, and no link in the folder of a study is followed. Replace it by its target or remove it. "
        "To keep large files on another disk, run the study with --output on that disk: only the folder that you name "
        "may be reached through links",
    )


def check_tree(root: Path, paths: Iterable[Path] = (), trees: Iterable[Path] = ()) -> None:
    """Raise UnsafePathError if a study would read or write a link below `root`.

    root: the folder that the user gave, which may be reached through links. paths: every component below `root` is
    checked. trees: checked in the same way, with everything in them.
    """
    trees = tuple(trees)
    for path in (*paths, *trees):
        check_path(root, path)
    for tree in trees:
        for folder, folder_names, file_names in os.walk(tree):
            for name in (*folder_names, *file_names):
                if os.path.islink(os.path.join(folder, name)):
                    raise _refuse_link(Path(folder, name))


def check_path(root: Path, path: Path) -> None:
    """Raise UnsafePathError if a component of `path` below `root` is a symbolic link."""
    relative_path = path.relative_to(root)
    for part in (*reversed(relative_path.parents), relative_path):
        if part.name and (root / part).is_symlink():
            raise _refuse_link(root / part)


def make_folder(root: Path, *names: str) -> Path:
    """Create and return the folder `root`/names... Each component may exist as a folder, but not as a link."""
    folder = root.joinpath(*names)
    check_path(root, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_regular(path: Path, mode: str) -> IO[Any]:
    """Open a file like `open`, in UTF-8. Raise UnsafePathError if it is a link."""
    try:
        return open(
            path,
            mode,
            encoding=None if "b" in mode else "utf-8",
            opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666),
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refuse_link(path) from None
        raise


def lock_file(file: IO[Any] | int, patience_s: float = 0.0, *, is_shared: bool = False) -> None:
    """Lock an open file, so that no other process can. With `is_shared`, others may share the lock.

    Raises BlockingIOError if another process still holds the lock after `patience_s` seconds, and OSError if the file
    system has no locks. The operating system releases the lock when the file is closed or the process ends, even after
    SIGKILL.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.02)  # `flock` itself has no timeout


def read_bytes(path: Path, max_bytes: int = sys.maxsize) -> bytes:
    """Read a file. Raise UnsafePathError if it is a link, and ValueError if it has more than `max_bytes` bytes."""
    with open_regular(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"it has {size} bytes, and at most {max_bytes} are read")
        return bytes(file.read())


def compute_sha256(path: Path) -> str:
    """Compute the SHA-256 of a file, in hex digits. Raise UnsafePathError if it is a link."""
    with open_regular(path, "rb") as file:
        content: Any = file  # binary, although the type of `open_regular` also covers text
        return hashlib.file_digest(content, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a new empty file next to `path`. Rename it to `path` after the body, or remove it if the body fails.

    A reader sees either the old file or the new one, never a partial one. A link at `path` is replaced, without
    touching its target.
    """
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    temp_path.unlink(missing_ok=True)  # left by a process that died while writing, or planted
    temp_path.touch(exist_ok=False)
    try:
        yield temp_path
        os.replace(temp_path, path)
    except BaseException:
        temp_path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` atomically, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temp_path, temp_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)  # sync the renaming, too, so that a power cut cannot leave an empty file at `path`


def find_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Find the cache folder, for files that this project can make again: TUNE_STUDY_CACHE, or tune_study/ in the
    user's cache folder. It may not exist yet.

    environ: the environment variables. Relative paths are below the home folder, since runs have different working
    folders.
    """
    home = Path(environ.get("HOME", "~")).expanduser()
    if cache := environ.get("TUNE_STUDY_CACHE"):
        return home / Path(cache).expanduser()
    return home / (environ.get("XDG_CACHE_HOME") or ".cache") / "tune_study"
