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

FOLDER_PREFIX = "ts-"
"""Of the folder's name, which ends in the id of the driver's process: paths of sockets must stay short."""

RAY_SUBFOLDER = "r"
"""Of the folder in it that Ray is told."""

_LOCK_FILE = ".lock"


@contextmanager
def make_session_folder(base: Path) -> Iterator[Path]:
    """A folder for Ray in a new one of mode 0700 in `base`, which is removed after the body.

    Those that killed drivers left are removed before. Ray gives the folder that it is told mode 0777, hence the two.
    After an error in the body the folder stays, for its logs, until the next study of this user starts. OSError where
    no folder can be made.
    """
    remove_abandoned_folders(base)
    base.mkdir(parents=True, exist_ok=True)
    # Locked before it has its name, so that nobody takes it for abandoned; mkdtemp makes it with mode 0700.
    unnamed_folder = Path(tempfile.mkdtemp(prefix=".", dir=base))
    with (unnamed_folder / _LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = _rename_to_free_name(unnamed_folder, base)
        yield folder / RAY_SUBFOLDER
        shutil.rmtree(folder, ignore_errors=True)


def _rename_to_free_name(unnamed_folder: Path, base: Path) -> Path:
    """Rename a folder to the first free name of this process."""
    for attempt in count(1):
        folder = base / f"{FOLDER_PREFIX}{os.getpid()}{f'.{attempt}' if attempt > 1 else ''}"
        with suppress(OSError):  # the name is taken by a folder that is not empty, or by a file
            return unnamed_folder.rename(folder)
        if not os.path.lexists(folder):
            raise OSError(f"{unnamed_folder} cannot be renamed to {folder}")
    raise AssertionError("count() never ends")


def remove_abandoned_folders(base: Path) -> None:
    """Remove the folders in `base` whose driver is gone. Those of other users, and links, are left alone."""
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or not ours to open
            folder_stat = folder.lstat()
            if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
                continue
            lock_descriptor = os.open(folder / _LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as the driver lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_descriptor)
