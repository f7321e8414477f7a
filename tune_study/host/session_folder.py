"""The folder of Ray's own files while it runs here: only its owner may enter it, and it goes when Ray has ended.

Ray makes its session folders with mode 0777 in a folder `ray` that all users share, and its logs quote the environment
variables of workers, credentials among them, with mode 0644 (Ray 2.60). In a folder of mode 0700 nobody else reads
them, and nobody else reaches Ray's sockets.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

PREFIX = "ts-"
"""Of the folder's name, which ends in the id of the driver's process: paths of sockets must stay short."""

RAY = "r"
"""Of the folder in it that Ray is told."""

_LOCK = ".lock"


@contextmanager
def session_folder(base: Path) -> Iterator[Path]:
    """A folder for Ray in a new one of mode 0700 in `base`, which is removed after the body.

    Those that killed drivers left are removed before. Ray gives the folder that it is told mode 0777, hence the two.
    After an error in the body the folder stays, for its logs, until the next study of this user starts. OSError where
    no folder can be made.
    """
    remove_abandoned(base)
    base.mkdir(parents=True, exist_ok=True)
    # Locked before it has its name, so that nobody takes it for abandoned; mkdtemp makes it with mode 0700.
    unnamed = Path(tempfile.mkdtemp(prefix=".", dir=base))
    with (unnamed / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = _put_in_place(unnamed, base)
        yield folder / RAY
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(unnamed: Path, base: Path) -> Path:
    """Rename a folder to the first free name of this process."""
    for number in count(1):
        folder = base / f"{PREFIX}{os.getpid()}{f'.{number}' if number > 1 else ''}"
        with suppress(OSError):  # the name is taken by a folder that is not empty, or by a file
            return unnamed.rename(folder)
        if not os.path.lexists(folder):
            raise OSError(f"{unnamed} cannot be renamed to {folder}")
    raise AssertionError("count() never ends")


def remove_abandoned(base: Path) -> None:
    """Remove the folders in `base` whose driver is gone. Those of other users, and links, are left alone."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or not ours to open
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            handle = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as the driver lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
