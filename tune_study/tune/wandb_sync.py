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

CONNECT_TIMEOUT_S = 2.0
"""Seconds in which a connection to the service must be made."""

UPLOAD_TIMEOUT_S = 300.0
"""Seconds that the upload of one run may take."""

_PORTS = {"http": 80, "https": 443}


class _Upload(NamedTuple):
    """One offline run's folder, and the address of the service that is to have it."""

    folder: Path
    service: str


class WandbUploader:
    """`wandb sync` of each folder that is handed in, in a thread of its own. left: the folders not uploaded so far.

    upload_s: seconds that one upload may take; it is ended then, and its folder is left.
    """

    def __init__(self, upload_timeout_s: float = UPLOAD_TIMEOUT_S) -> None:
        self.pending_folders: list[Path] = []
        self.problem = ""
        self._failed_uploads: list[_Upload] = []
        self._upload_timeout_s = upload_timeout_s
        self._upload_queue: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_uploads, name="wandb-sync", daemon=True)
        self._thread.start()

    def add(self, folder: Path, service: str) -> None:
        """Upload the offline run in `folder` to the service at the address `service`, if that can be reached."""
        self.pending_folders.append(folder)
        self._upload_queue.put(_Upload(folder, service))

    def close(self, timeout_s: float) -> bool:
        """Upload what waits, and try once more what failed, for at most `patience` seconds; whether nothing is left."""
        self._upload_queue.put(None)
        self._thread.join(timeout_s)
        self._stop_event.set()
        self._thread.join(CONNECT_TIMEOUT_S + 1.0)  # it ends the upload under way
        return not self.pending_folders

    def _run_uploads(self) -> None:
        while (upload := self._upload_queue.get()) is not None and not self._stop_event.is_set():
            if not self._try_upload(upload):
                self._failed_uploads.append(upload)
        for upload in self._failed_uploads:
            if self._stop_event.is_set() or not self._try_upload(upload):
                return  # the service is not there: others would fail like it

    def _try_upload(self, upload: _Upload) -> bool:
        """Whether W&B's own command uploaded the run; why it did not is kept as the problem."""
        if not is_reachable(upload.service):
            self.problem = f"{upload.service} cannot be reached"
            return False
        process = subprocess.Popen(
            [sys.executable, "-m", "wandb", "sync", str(upload.folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "WANDB_BASE_URL": upload.service, "WANDB_SILENT": "false"}, start_new_session=True,
        )  # fmt: skip
        last_line = self._wait_for_exit(process)
        if process.returncode == 0 and any(upload.folder.glob("*.synced")):
            self.pending_folders.remove(upload.folder)
            return True
        self.problem = last_line or f"wandb sync ended with {process.returncode}"
        return False

    def _wait_for_exit(self, process: "subprocess.Popen[str]") -> str:
        """Wait for the command, or end it when its time is over or the study is; the last line that it said."""
        waited_s = 0.0
        while True:
            try:
                _, error_output = process.communicate(timeout=0.5)
                return (error_output.strip().splitlines() or [""])[-1]
            except subprocess.TimeoutExpired:
                waited_s += 0.5
            if waited_s >= self._upload_timeout_s or self._stop_event.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"the upload was ended after {waited_s:g} s"


def is_reachable(service: str) -> bool:
    """Whether a connection to the address `service`, such as https://api.wandb.ai, is made within REACH_S seconds."""
    parts = urlsplit(service)
    if parts.hostname is None:
        return False
    try:
        port = parts.port or _PORTS.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True
