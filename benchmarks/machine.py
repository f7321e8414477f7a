"""Describe the machine and the commit of a measurement."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "ray")


def read_cpu_model() -> str:
    """The processor's name; an empty or generic one if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def read_git_commit() -> str | None:
    """The commit that is checked out, or None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_version(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    """Entries to print with every measurement; None for values that this machine does not have or report."""
    return {
        "cpu_model": read_cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "commit": read_git_commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }
