"""Upload offline W&B runs one by one as they end, without blocking the study if the service cannot be reached."""

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

OPEN_TIMEOUT_S = 30.0
"""Time limit in seconds for opening a run, and, at the end of a study, for what is the same for one run and for many.

W&B is a copy of rows that are on disk, so a study does not wait long for a service that does not answer.
"""

CONNECT_TIMEOUT_S = 2.0
"""Seconds to wait for a connection to the service.

`wandb sync` keeps trying to reach its service, so a connection is tried before every upload.
"""

UPLOAD_TIMEOUT_S = 300.0
"""Seconds that the upload of one run may take. Uploads run one after the other, so one that hangs blocks the others."""

_PORTS = {"http": 80, "https": 443}
"""Default ports, which urlsplit does not fill in."""


class _Upload(NamedTuple):
    """The folder of an offline run, and the address of the service to upload it to."""

    folder: Path
    service: str


class WandbUploader:
    """Runs `wandb sync` for each added folder, in a separate thread.

    upload_timeout_s: seconds after which an upload is killed.

    Attributes:
        pending_folders: folders that have not been uploaded.
        problem: why the last failed upload failed; empty if none has failed.
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
        """Queue the upload of the offline run in `folder` to the service at the address `service`."""
        self.pending_folders.append(folder)
        self._upload_queue.put(_Upload(folder, service))

    def close(self, timeout_s: float) -> bool:
        """Finish the queue and retry failed uploads, for at most `timeout_s` seconds; return whether all succeeded."""
        self._upload_queue.put(None)  # the end of the queue
        self._thread.join(timeout_s)
        self._stop_event.set()
        self._thread.join(CONNECT_TIMEOUT_S + 1.0)  # time for the thread to kill the current upload
        return not self.pending_folders

    def _run_uploads(self) -> None:
        """Body of the thread: upload until the end of the queue, then retry each failed upload once."""
        while (upload := self._upload_queue.get()) is not None and not self._stop_event.is_set():
            if not self._try_upload(upload):
                self._failed_uploads.append(upload)
        for upload in self._failed_uploads:
            if self._stop_event.is_set() or not self._try_upload(upload):
                return  # the service cannot be reached, so the others would fail too

    def _try_upload(self, upload: _Upload) -> bool:
        """Upload with W&B's own command; return whether it succeeded. If not, `problem` says why."""
        if not is_reachable(upload.service):
            self.problem = f"{upload.service} cannot be reached"
            return False
        process = subprocess.Popen(
            [sys.executable, "-m", "wandb", "sync", str(upload.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # The user's environment may set WANDB_SILENT, with which the command would not print why it failed.
            env={**os.environ, "WANDB_BASE_URL": upload.service, "WANDB_SILENT": "false"},
            # wandb starts processes of its own. In a new session they form one process group, which can be killed, and
            # Ctrl-C in the terminal does not reach them.
            start_new_session=True,
        )
        last_line = self._wait_for_exit(process)
        # `wandb sync` can end with exit code 0 without an upload. After one, there is a `.synced` file.
        if process.returncode == 0 and any(upload.folder.glob("*.synced")):
            self.pending_folders.remove(upload.folder)
            return True
        self.problem = last_line or f"wandb sync ended with exit code {process.returncode}"
        return False

    def _wait_for_exit(self, process: "subprocess.Popen[str]") -> str:
        """Wait for the command, or kill it after its timeout or at the end of the study; return its last error line."""
        waited_s = 0.0
        while True:
            try:
                # Half a second at a time, so that the end of the study is noticed. `communicate` empties the pipe: a
                # command that fills it would wait forever.
                _, error_output = process.communicate(timeout=0.5)
                return (error_output.strip().splitlines() or [""])[-1]
            except subprocess.TimeoutExpired:
                waited_s += 0.5
            if waited_s >= self._upload_timeout_s or self._stop_event.is_set():
                with contextlib.suppress(ProcessLookupError):  # it has exited in the meantime
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"the upload was stopped after {waited_s:g} s"


def is_reachable(service: str) -> bool:
    """Whether `service`, such as https://api.wandb.ai, accepts a connection within CONNECT_TIMEOUT_S seconds."""
    parts = urlsplit(service)
    if parts.hostname is None:
        return False
    try:
        port = parts.port or _PORTS.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):  # ValueError: a port that is not a number up to 65535
        return False
    return True
