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

from trainable.storage.remote import Place, get_bytes, put_bytes, remove_file
from tune_study.plan.study_plan import PlanError

LOCK = "driver.json"
STALE_S = 120.0
"""Seconds after which a lock that nobody refreshed counts as left by a driver that is gone."""
REFRESH_S = 20.0
_SETTLING_S = 1.0


class Holder(NamedTuple):
    """Who holds a study: an id of the hold, machine and process, in words who that is; age in seconds."""

    id: str
    machine: str
    pid: int
    started: float
    words: str
    age: float

    @property
    def is_gone(self) -> bool:
        """Whether the holder is known to have ended, or has not been heard of for STALE_S."""
        if self.age >= STALE_S:
            return True
        if self.machine != _machine():
            return False
        try:
            return psutil.Process(self.pid).create_time() != self.started
        except psutil.NoSuchProcess:
            return True


def read_holder(study: Place) -> Holder | None:
    """Who holds the study in storage; None where nobody does, or the lock cannot be read."""
    try:
        data: dict[str, Any] = json.loads(get_bytes(study.at(LOCK)))
        age = max(0.0, _storage_time(study) - _mtime(study.at(LOCK)))
        return Holder(
            str(data["id"]), str(data["machine"]), int(data["pid"]), float(data["started"]), str(data["words"]), age
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _mtime(place: Place) -> float:
    return float(place.files.get_file_info(place.path).mtime_ns or 0) / 1e9


def _storage_time(study: Place) -> float:
    """The storage's time now, in seconds: that of a file written now."""
    probe = study.at(f"now-{uuid4().hex}")
    put_bytes(probe, b"0")
    try:
        return _mtime(probe)
    finally:
        with suppress(OSError):
            remove_file(probe)


def _machine() -> str:
    """This machine, a container being one of its own: names alone are not different enough."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(parts)


class Hold:
    """This process's hold of the study in storage."""

    def __init__(self, study: Place) -> None:
        self._study = study
        self.id = uuid4().hex

    def take(self, name: str) -> None:
        """Hold the study, or PlanError that says who does. name: of the study, for the message."""
        self._refuse(read_holder(self._study), name)
        self.refresh()
        time.sleep(_SETTLING_S)
        self._refuse(read_holder(self._study), name)

    def _refuse(self, holder: Holder | None, name: str) -> None:
        if holder is None or holder.id == self.id or holder.is_gone:
            return
        raise PlanError(
            f"The study in {name} is being run by {holder.words}, which said so {holder.age:.0f} s ago: wait for it, "
            f"or end it. Where it was killed, that is seen {STALE_S:.0f} s after its last word."
        )

    def refresh(self) -> None:
        """Say that the study is still held."""
        me = psutil.Process()
        words = f"{getpass.getuser()} on {socket.gethostname()} (pid {me.pid})"
        data = {"id": self.id, "machine": _machine(), "pid": me.pid, "started": me.create_time(), "words": words}
        put_bytes(self._study.at(LOCK), json.dumps(data).encode())

    def taken_by(self) -> str | None:
        """In words, who has taken the study over since; None where it is still this process's."""
        holder = read_holder(self._study)
        return None if holder is None or holder.id == self.id else holder.words

    def release(self) -> None:
        """Let others hold the study, unless one does already."""
        holder = read_holder(self._study)
        if holder is not None and holder.id == self.id:
            remove_file(self._study.at(LOCK))
