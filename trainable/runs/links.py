"""Writing below a folder that may have come from anywhere: a symbolic link in it is refused and never followed.

A link in a run folder leads to a file or a folder of somebody who did not ask for it to be written. What a study
writes is therefore opened or made without following the last name of its path; `check_no_links` looks at whole trees
before anything starts, because Ray Tune's own writers do follow.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class LinkError(OSError):
    """A symbolic link where a study would write; the message names it and says what to do."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            errno.ELOOP,
            f"{path} is a symbolic link, and nothing is written or deleted through one: replace it by what it leads "
            f"to, or by an empty folder (the output folder itself may be a link)",
        )

    def __str__(self) -> str:
        return str(self.strerror)


def check_no_links(root: Path, paths: Iterable[Path] = (), trees: Iterable[Path] = ()) -> None:
    """Raise LinkError where something that would be written below `root` is a link.

    root: the folder that was given, which may itself be reached by links. paths: looked at name by name from `root`
    down. trees: the same, and everything in them.
    """
    trees = tuple(trees)
    for path in (*paths, *trees):
        for relative_path in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
            if relative_path.name and (root / relative_path).is_symlink():
                raise LinkError(root / relative_path)
    for tree in trees:
        for folder, folders, files in os.walk(tree):
            for name in (*folders, *files):
                if (path := Path(folder, name)).is_symlink():
                    raise LinkError(path)


def make_folder(root: Path, *names: str) -> Path:
    """Make the folder `root`/names..., each name of which may be there as a folder but not as a link; return it."""
    folder = root
    for name in names:
        folder = folder / name
        if folder.is_symlink():
            raise LinkError(folder)
        folder.mkdir(exist_ok=True)
    return folder


def open_no_link(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open` does, but raise LinkError where `path` is a link."""

    def open_nofollow(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_nofollow)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LinkError(path) from None
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A new empty file beside `path`, to be written in the body; renamed to `path` after it, or removed if it fails.

    A reader sees the old file or the new one and never half of it. A link at `path` is replaced, and what it leads to
    stays as it is.
    """
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(FileNotFoundError):
        temp_path.unlink()  # of a process that died while it wrote, or planted
    os.close(os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temp_path
        os.replace(temp_path, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temp_path.unlink()
        raise
