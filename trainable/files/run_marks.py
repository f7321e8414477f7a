"""Environment variables that mark a process as belonging to a run."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

MARK_ENV = "TUNE_STUDY_RUN_DIR"
"""Environment variable with the mark, which child processes inherit.

In the process of a run, the mark is the run's folder; in processes that Ray starts, it is from `make_ray_mark`.
"""
DIGESTS_ENV = "TUNE_STUDY_RUN_DIGESTS"
"""Environment variable of processes that must not know the run's folder, with the value of `make_digests`."""
_MAX_DIGESTS, _DIGEST_LENGTH = 24, 16


def make_digests(environ: Mapping[str, str]) -> str:
    """Compute digests of the run's folder in the mark, and of the folders above it. Blank without a single folder.

    The result always has the same length, since it affects the memory of the process.
    """
    folder = Path(environ.get(MARK_ENV, ""))
    folders = (folder, *folder.parents) if folder.is_absolute() else ()
    digests = " ".join(map(compute_digest, folders[:_MAX_DIGESTS]))
    return digests.ljust(_MAX_DIGESTS * (_DIGEST_LENGTH + 1))


def compute_digest(folder: Path) -> str:
    """Compute the digest of a folder for `make_digests`."""
    return hashlib.sha256(str(folder).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_LENGTH]
