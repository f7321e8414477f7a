"""Offline W&B runs, uploaded one by one as they end where the service can be reached; nothing ever waits for it."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

REACH_S = 2.0
"""Seconds in which a connection to the service must be made."""

UPLOAD_S = 300.0
"""Seconds that the upload of one run may take."""

_PORTS = {"http": 80, "https": 443}


class _Upload(NamedTuple):
    """One offline run's folder, and the address of the service that is to have it."""

    folder: Path
    service: str


class Uploads:
    """`wandb sync` of each folder that is handed in, in a thread of its own. left: the folders not uploaded so far.

    upload_s: seconds that one upload may take; it is ended then, and its folder is left.
    """

    def __init__(self, upload_s: float = UPLOAD_S) -> None:
        self.left: list[Path] = []
        self.problem = ""
        self._failed: list[_Upload] = []
        self._upload_s = upload_s
        self._waiting: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb-sync", daemon=True)
        self._thread.start()

    def add(self, folder: Path, service: str) -> None:
        """Upload the offline run in `folder` to the service at the address `service`, if that can be reached."""
        self.left.append(folder)
        self._waiting.put(_Upload(folder, service))

    def close(self, patience: float) -> bool:
        """Upload what waits, and try once more what failed, for at most `patience` seconds; whether nothing is left."""
        self._waiting.put(None)
        self._thread.join(patience)
        self._ending.set()
        self._thread.join(REACH_S + 1.0)  # it ends the upload under way
        return not self.left

    def _work(self) -> None:
        while (upload := self._waiting.get()) is not None and not self._ending.is_set():
            if not self._uploaded(upload):
                self._failed.append(upload)
        for upload in self._failed:
            if self._ending.is_set() or not self._uploaded(upload):
                return  # the service is not there: others would fail like it

    def _uploaded(self, upload: _Upload) -> bool:
        """Whether W&B's own command uploaded the run; why it did not is kept as the problem."""
        if not reachable(upload.service):
            self.problem = f"{upload.service} cannot be reached"
            return False
        process = subprocess.Popen(
            [sys.executable, "-m", "wandb", "sync", str(upload.folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "WANDB_BASE_URL": upload.service, "WANDB_SILENT": "false"}, start_new_session=True,
        )  # fmt: skip
        said = self._words(process)
        if process.returncode == 0 and any(upload.folder.glob("*.synced")):
            self.left.remove(upload.folder)
            return True
        self.problem = said or f"wandb sync ended with {process.returncode}"
        return False

    def _words(self, process: "subprocess.Popen[str]") -> str:
        """Wait for the command, or end it when its time is over or the study is; the last line that it said."""
        waited = 0.0
        while True:
            try:
                _, said = process.communicate(timeout=0.5)
                return (said.strip().splitlines() or [""])[-1]
            except subprocess.TimeoutExpired:
                waited += 0.5
            if waited >= self._upload_s or self._ending.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"the upload was ended after {waited:g} s"


def reachable(service: str) -> bool:
    """Whether a connection to the address `service`, such as https://api.wandb.ai, is made within REACH_S seconds."""
    parts = urlsplit(service)
    if parts.hostname is None:
        return False
    try:
        port = parts.port or _PORTS.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), timeout=REACH_S).close()
    except (OSError, ValueError):
        return False
    return True
