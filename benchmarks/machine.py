"""The machine and commit that a measurement belongs to."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "ray")


def read_cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def read_git_commit() -> str | None:
    """The commit this file belongs to, or None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_version(package: str) -> str | None:
    """The version of an installed package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_load_average() -> float | None:
    """Processes that ran or waited during the last minute, or None where the system does not tell."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def describe() -> dict[str, object]:
    """What to print beside every figure; None stands for what this machine lacks or does not tell."""
    return {
        "cpu_model": read_cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "commit": read_git_commit(),
        "load_average": read_load_average(),
    }
