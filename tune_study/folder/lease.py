"""A lease in storage that allows only one driver per study; it names its holder and is refreshed regularly.

Ages are differences between timestamps of the storage, so clocks need not agree. pyarrow offers no atomic "create if
absent": of two drivers that start within a second of each other, the one that wrote its lease last wins.
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
from tune_study.plan.errors import PlanError

LEASE_FILE = "driver.json"
STALE_S = 120.0
"""Seconds without a refresh after which the driver counts as gone: six refreshes that failed."""
REFRESH_S = 20.0
"""Seconds between refreshes, and between copies of rows and statuses."""
_SETTLING_S = 1.0
"""Seconds between writing the lease and reading it again. A driver that started at the same time writes in between."""


class Holder(NamedTuple):
    """The holder of a lease.

    Attributes:
        id: of the lease.
        machine, pid, start_time: machine and process of the driver; start_time tells reused process ids apart.
        description: user, host and process, for messages.
        age: seconds since the last refresh.
    """

    id: str
    machine: str
    pid: int
    start_time: float
    description: str
    age: float

    @property
    def is_gone(self) -> bool:
        """Whether the holder has ended, or has not refreshed its lease for STALE_S."""
        if self.age >= STALE_S:
            return True
        if self.machine != _make_machine_id():
            return False  # a process of another machine cannot be looked up
        try:
            # The system gives the id of a process that has ended to a new one, which started at another time.
            return psutil.Process(self.pid).create_time() != self.start_time
        except psutil.NoSuchProcess:
            return True


def read_holder(study_path: StoragePath) -> Holder | None:
    """The holder of the study in storage; None if there is none.

    A damaged lease counts as none: it would otherwise refuse every driver forever.
    """
    try:
        content: dict[str, Any] = json.loads(get_bytes(study_path.joinpath(LEASE_FILE)))
        # A negative age counts as 0: the servers of a storage may have slightly different clocks.
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
    """The storage's current time in seconds: the timestamp of a file that is written now, and then removed."""
    probe_path = study_path.joinpath(f"now-{uuid4().hex}")
    put_bytes(probe_path, b"0")
    try:
        return _read_mtime(probe_path)
    finally:
        with suppress(OSError):
            remove_file(probe_path)


def _make_machine_id() -> str:
    """An id of this machine or container, within which process ids are comparable.

    Two machines may have the same host name, so the id of the boot is added. Containers of one machine share the boot
    but count processes separately, so their process namespace is added.
    """
    id_parts = [socket.gethostname()]
    with suppress(OSError):  # neither file exists outside Linux
        id_parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with suppress(OSError):
        id_parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(id_parts)


class Lease:
    """This process's lease of the study in storage. study_path: the study's folder in the storage."""

    def __init__(self, study_path: StoragePath) -> None:
        self._study_path = study_path
        self.id = uuid4().hex

    def acquire(self, name: str) -> None:
        """Acquire the lease. Raise PlanError that names the holder if another driver has it.

        name: name of the study, for the message.
        """
        self._check_not_held(read_holder(self._study_path), name)
        self.refresh()
        # Another driver may have passed the same check at the same time. The driver that wrote last keeps the lease,
        # and the driver that wrote first is refused here.
        time.sleep(_SETTLING_S)
        self._check_not_held(read_holder(self._study_path), name)

    def _check_not_held(self, holder: Holder | None, name: str) -> None:
        if holder is None or holder.id == self.id or holder.is_gone:
            return
        raise PlanError(
            f"The study in {name} is being run by {holder.description}, last heard of {holder.age:.0f} s ago: wait for "
            f"it, or end it. If it was killed, the study can be continued {STALE_S:.0f} s after it was last heard of."
        )

    def refresh(self) -> None:
        """Write the lease again, which gives it a new timestamp in storage."""
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
        """Description of a driver that has taken over the study; None if this process still has the lease."""
        holder = read_holder(self._study_path)
        return None if holder is None or holder.id == self.id else holder.description

    def release(self) -> None:
        """Remove the lease, unless another driver has taken over."""
        holder = read_holder(self._study_path)
        if holder is not None and holder.id == self.id:
            remove_file(self._study_path.joinpath(LEASE_FILE))
