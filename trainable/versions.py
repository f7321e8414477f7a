"""What a machine must have in common with the driver of a study: our sources, and the packages that results depend on.

Imports neither torch nor Ray.
"""

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from trainable.runs.failures import NodeError

_PACKAGES = (
    "tune_study",
    "torch",
    "ray",
    "transformers",
    "numpy",
    "numba",
    "llvmlite",
    "pandas",
    "pydantic",
    "safetensors",
    "tokenizers",
)
_SOURCES = ("tune_study", "trainable", "search_spaces", "sandboxes", "analysis")
"""The folders whose modules `compute_code_hash` reads."""


def read_versions() -> dict[str, str]:
    """Read the versions of Python and of the installed packages that results depend on."""
    package_versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            package_versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return package_versions


@cache
def compute_code_hash() -> str:
    """Compute twelve hex digits that identify our sources, from the relative path and content of every module.

    A commit has the same digits on every machine, whether it was installed or checked out.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def read_driver_versions() -> dict[str, str]:
    """Read what a driver gives to its nodes: the versions of packages, and the hash of our sources as `code`."""
    return {**read_versions(), "code": compute_code_hash()}


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise NodeError if a package of this machine has another version than the driver's.

    expected: see `read_driver_versions`. Builds of one version, such as 2.13.0+cpu and 2.13.0+cu130, count as equal,
    since the driver computes nothing.
    """
    versions = read_driver_versions()
    for package, version in expected.items():
        own_version = versions.get(package, "none")
        if own_version.partition("+")[0] != version.partition("+")[0]:
            raise NodeError(
                f"it has {package} {own_version}, and the driver {version}: install the same versions on all nodes"
            )
