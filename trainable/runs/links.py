"""Write inside a folder of unknown origin without following symbolic links.

A link in a run folder may lead to a file or folder whose owner does not expect it to be written. Therefore a study
never follows the last component of a path that it opens or creates. `check_no_links` also checks whole trees before
anything starts, because Ray Tune's own writers do follow links.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


class LinkError(OSError):
    """There is a symbolic link where a study would write. The message names it and says what to do."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            errno.ELOOP,
            f"{path} is a symbolic link, and nothing is written or deleted through links. Replace it by its target or "
            f"by an empty folder (only the output folder itself may be a link)",
        )

    def __str__(self) -> str:
        return str(self.strerror)  # without the "[Errno 40]" that an OSError puts in front


def check_no_links(root: Path, paths: Iterable[Path] = (), trees: Iterable[Path] = ()) -> None:
    """Raise LinkError if anything that would be written below `root` is a symbolic link.

    root: the folder that the user gave; it may itself be reached through links. paths: every component of each path
    below `root` is checked. trees: folders that are checked in the same way, together with everything in them.
    """
    trees = tuple(trees)  # iterated twice
    for path in (*paths, *trees):
        # From the outside in, so that the message names the outermost link. The first parent is ".", which is `root`.
        for relative_path in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
            if relative_path.name and (root / relative_path).is_symlink():
                raise LinkError(root / relative_path)
    for tree in trees:
        for folder, folders, files in os.walk(tree):  # does not enter links to folders, so it cannot loop
            for name in (*folders, *files):
                if (path := Path(folder, name)).is_symlink():
                    raise LinkError(path)


def make_folder(root: Path, *names: str) -> Path:
    """Create and return the folder `root`/names...; each component may exist as a folder but not as a link.

    `Path.mkdir(parents=True)` would create the last folder in the target of a link further up.
    """
    folder = root
    for name in names:
        folder = folder / name
        if folder.is_symlink():
            raise LinkError(folder)
        folder.mkdir(exist_ok=True)
    return folder


def open_no_link(path: Path, mode: str) -> IO[Any]:
    """Open a file like `open`, but raise LinkError if `path` is a symbolic link."""

    def open_nofollow(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)  # 0o666 less the umask, as `open` does

    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=open_nofollow)
    except OSError as error:
        if error.errno == errno.ELOOP:  # Linux's error if O_NOFOLLOW meets a link
            raise LinkError(path) from None
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a new empty file next to `path`, and rename it to `path` after the body. If the body fails, remove it.

    A reader of `path` sees either the old file or the new one, never a partial one. If `path` is a link, the link is
    replaced and its target stays unchanged.

    Example::

        with atomic_write(folder / "report.html") as temp_path:
            temp_path.write_text(page, encoding="utf-8")
    """
    temp_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(FileNotFoundError):
        # A process that died while writing may have left it, or someone else may have put a link there.
        temp_path.unlink()
    # O_EXCL refuses a link that someone puts there after the unlink.
    os.close(os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temp_path
        os.replace(temp_path, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temp_path.unlink()
        raise
