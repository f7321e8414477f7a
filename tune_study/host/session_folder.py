"""Make a private folder for Ray's session files, and remove it after Ray has ended.

Ray 2.60 creates its session folders with mode 0777 in a folder `ray` that all users share. Its logs have mode 0644 and
quote the environment variables of workers, including credentials. In a folder of mode 0700, nobody else can read the
logs or reach Ray's sockets.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainable.files.paths import lock_file

FOLDER_PREFIX = "ts-"
"""Prefix of the folder's name, to which eight characters are added. Short, since socket paths must be short."""

RAY_SUBFOLDER = "r"
"""Name of the folder for Ray inside the session folder."""

_LOCK_FILE = ".lock"


@contextmanager
def make_session_folder(base: Path) -> Iterator[Path]:
    """Yield a folder for Ray inside a new folder of mode 0700 in `base`, and remove both after the body.

    The outer folder is needed because Ray changes the mode of the folder that it gets to 0777. Folders that killed
    drivers left behind are removed first. After an error in the body the folder is kept for its logs until this user
    starts the next study. Raises OSError if no folder can be created.
    """
    remove_abandoned_folders(base)
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))  # of mode 0700
    with (folder / "lock").open("w") as lock:
        lock_file(lock)
        # Locked before it gets its name, so that no other driver considers the folder abandoned.
        Path(lock.name).rename(folder / _LOCK_FILE)
        yield folder / RAY_SUBFOLDER
        # Not in a `finally`: after an error the logs are needed.
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(base: Path) -> None:
    """Remove the folders in `base` whose driver has exited, except links and other users' folders."""
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # removed in the meantime, locked by a live driver, or not readable
            folder_stat = folder.lstat()
            if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
                continue
            lock_descriptor = os.open(folder / _LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                lock_file(lock_descriptor)  # fails while the driver lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_descriptor)
