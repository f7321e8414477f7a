"""One driver a study: a lock in storage, which says who holds it and is refreshed while they do.

Ages are differences of the storage's own times, so that no clocks need to agree. Storages have no atomic "create if
absent" that pyarrow offers: of two drivers that start within a second of each other, the one whose lock stays wins.
"""

import getpass
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil

from trainable.storage.remote import StoragePath, get_bytes, put_bytes, remove_file
from tune_study.plan.study_plan import PlanError

LEASE_FILE = "driver.json"
STALE_S = 120.0
"""Seconds after which a lock that nobody refreshed counts as left by a driver that is gone."""
REFRESH_S = 20.0
_SETTLING_S = 1.0


class Holder(NamedTuple):
    """Who holds a study: an id of the hold, machine and process, in words who that is; age in seconds."""

    id: str
    machine: str
    pid: int
    start_time: float
    description: str
    age: float

    @property
    def is_gone(self) -> bool:
        """Whether the holder is known to have ended, or has not been heard of for STALE_S."""
        if self.age >= STALE_S:
            return True
        if self.machine != _make_machine_id():
            return False
        try:
            return psutil.Process(self.pid).create_time() != self.start_time
        except psutil.NoSuchProcess:
            return True


def read_holder(study_path: StoragePath) -> Holder | None:
    """Who holds the study in storage; None where nobody does, or the lock cannot be read."""
    try:
        content: dict[str, Any] = json.loads(get_bytes(study_path.joinpath(LEASE_FILE)))
        age = max(0.0, _read_storage_time(study_path) - _read_mtime(study_path.joinpath(LEASE_FILE)))
        return Holder(
            str(content["id"]),
            str(content["machine"]),
            int(content["pid"]),
            float(content["started"]),
            str(content["words"]),
            age,
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _read_mtime(storage_path: StoragePath) -> float:
    return float(storage_path.filesystem.get_file_info(storage_path.path).mtime_ns or 0) / 1e9


def _read_storage_time(study_path: StoragePath) -> float:
    """The storage's time now, in seconds: that of a file written now."""
    probe_path = study_path.joinpath(f"now-{uuid4().hex}")
    put_bytes(probe_path, b"0")
    try:
        return _read_mtime(probe_path)
    finally:
        with suppress(OSError):
            remove_file(probe_path)


def _make_machine_id() -> str:
    """This machine, a container being one of its own: names alone are not different enough."""
    id_parts = [socket.gethostname()]
    with suppress(OSError):
        id_parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with suppress(OSError):
        id_parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(id_parts)


class Lease:
    """This process's hold of the study in storage."""

    def __init__(self, study_path: StoragePath) -> None:
        self._study_path = study_path
        self.id = uuid4().hex

    def acquire(self, name: str) -> None:
        """Hold the study, or PlanError that says who does. name: of the study, for the message."""
        self._check_not_held(read_holder(self._study_path), name)
        self.refresh()
        time.sleep(_SETTLING_S)
        self._check_not_held(read_holder(self._study_path), name)

    def _check_not_held(self, holder: Holder | None, name: str) -> None:
        if holder is None or holder.id == self.id or holder.is_gone:
            return
        raise PlanError(
            f"The study in {name} is being run by {holder.description}, which said so {holder.age:.0f} s ago: wait for it, "
            f"or end it. Where it was killed, that is seen {STALE_S:.0f} s after its last word."
        )

    def refresh(self) -> None:
        """Say that the study is still held."""
        process = psutil.Process()
        description = f"{getpass.getuser()} on {socket.gethostname()} (pid {process.pid})"
        content = {
            "id": self.id,
            "machine": _make_machine_id(),
            "pid": process.pid,
            "started": process.create_time(),
            "words": description,
        }
        put_bytes(self._study_path.joinpath(LEASE_FILE), json.dumps(content).encode())

    def find_new_holder(self) -> str | None:
        """In words, who has taken the study over since; None where it is still this process's."""
        holder = read_holder(self._study_path)
        return None if holder is None or holder.id == self.id else holder.description

    def release(self) -> None:
        """Let others hold the study, unless one does already."""
        holder = read_holder(self._study_path)
        if holder is not None and holder.id == self.id:
            remove_file(self._study_path.joinpath(LEASE_FILE))
