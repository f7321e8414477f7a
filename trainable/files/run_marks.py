"""What a process shows of the run that it belongs to, in its environment."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

MARK_ENV = "TUNE_STUDY_RUN_DIR"
"""Environment variable with the mark, which child processes inherit.

The mark is the run's folder in the process of a run, and the value of `make_ray_mark` in the processes that Ray starts.
"""
DIGESTS_ENV = "TUNE_STUDY_RUN_DIGESTS"
"""Environment variable of a process that may not know the run's folder: the value of `make_digests`."""
_MAX_DIGESTS, _DIGEST_LENGTH = 24, 16


def make_digests(environ: Mapping[str, str]) -> str:
    """Digests of the run's folder that the mark names, and of the folders above it.

    It always has the same length, since the memory of the process depends on that; a mark that names no single folder
    has none.
    """
    folder = Path(environ.get(MARK_ENV, ""))
    folders = (folder, *folder.parents) if folder.is_absolute() else ()
    digests = " ".join(map(compute_digest, folders[:_MAX_DIGESTS]))
    return digests.ljust(_MAX_DIGESTS * (_DIGEST_LENGTH + 1))


def compute_digest(folder: Path) -> str:
    """What stands for a folder in `make_digests`."""
    return hashlib.sha256(str(folder).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_LENGTH]
