"""Ray as a study starts it, seen from inside: where it listens, who can join it and who can read its files.

Runs as a separate process, because Ray reads its environment only once. Prints one JSON object.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from trainable.backend.gpus import make_bundles
from tune_study.plan.study_plan import ResourcePlan
from tune_study.tune.local_ray import prepare_environment

STRANGER = """
import logging, os, sys
os.environ.update(
    RAY_AUTH_MODE=sys.argv[2], RAY_USAGE_STATS_ENABLED="0", HOME=sys.argv[3], RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0"
)
if sys.argv[4]:
    os.environ["RAY_AUTH_TOKEN"] = sys.argv[4]
import argparse, ray, ray._private.runtime_env.uv_runtime_env_hook  # nobody may not read them later
if len(sys.argv) > 5:
    os.setgid(int(sys.argv[5]))
    os.setuid(int(sys.argv[5]))
    print("user", os.getuid())
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
print("ran as", ray.get(ray.remote(lambda: os.getuid()).remote(), timeout=30))
"""


def list_listening_addresses() -> list[str]:
    """Return the addresses on which this process and its children listen."""
    this_process = psutil.Process()
    addresses = []
    for process in (this_process, *this_process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="tcp")
            addresses += [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
    return addresses


def start_stranger(*arguments: str) -> "subprocess.Popen[str]":
    """Start a process that is not one of Ray's and tries to join it. arguments: those of STRANGER."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", STRANGER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd="/",
    )


def observe_ray(base: Path, home: str) -> dict[str, Any]:
    """Start Ray with its files in `base` and observe it. home: a folder in which no `.ray` may appear."""
    import ray

    from tune_study.tune.local_ray import start_local_ray

    with start_local_ray(ResourcePlan(make_bundles(0), 1, (), (), 1, ""), Console(quiet=True)):
        address = ray.get_runtime_context().gcs_address
        (folder,) = base.iterdir()
        prestarted_workers = [
            process.pid for process in psutil.Process().children(recursive=True) if is_worker(process)
        ]
        token = ray.get(ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"]).remote(), timeout=60)
        strangers = {
            "without a token": start_stranger(address, "disabled", home, ""),
            "with a wrong token": start_stranger(address, "token", home, "0" * 64),
            "with its token": start_stranger(address, "token", home, token),
        }
        if os.geteuid() == 0:
            strangers["another user"] = start_stranger(address, "disabled", home, "", "65534")
        answers = {name: stranger.communicate(timeout=120)[0].strip()[-2500:] for name, stranger in strangers.items()}
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return {
            "address": address,
            "listeners": list_listening_addresses(),
            "answers": answers,
            "mode": f"{folder.stat().st_mode & 0o777:o}",
            "workers in advance": prestarted_workers,
            "driver has the token": "RAY_AUTH_TOKEN" in os.environ,
            "token in files": [path.name for path in files if token.encode() in path.read_bytes()],
        }


def is_worker(process: psutil.Process) -> bool:
    """Return whether Ray runs tasks and actors in the process."""
    words = process.cmdline()
    return any(word.endswith("default_worker.py") for word in words[1:3]) or words[:1] == ["ray::IDLE"]


def start_again() -> int:
    """Start Ray a second time in the same process and return the result of a task."""
    import ray

    from tune_study.tune.local_ray import start_local_ray

    with start_local_ray(ResourcePlan(make_bundles(0), 1, (), (), 1, ""), Console(quiet=True)):
        return int(ray.get(ray.remote(lambda: 7).remote(), timeout=60))


if __name__ == "__main__":
    base, home = Path(sys.argv[1]), sys.argv[2]
    os.environ.update(RAY_TMPDIR=str(base), HOME=home)
    prepare_environment(())
    observations = observe_ray(base, home)
    print(json.dumps({**observations, "again": start_again(), "after": [path.name for path in base.iterdir()]}))
