"""W&B's own client and command against a fake service on the loopback address."""

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from tests.tune_study.tune.test_wandb_logging import end_run, log_study, make_plan_in, write_rows
from tune_study.tune import wandb_logging
from tune_study.tune.wandb_logging import WandbLog


class FakeService(http.server.ThreadingHTTPServer):
    """A service that creates runs and accepts files, as `wandb sync` needs. requests: path and body of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def list_history(self) -> list[str]:
        """The rows that were sent, each as JSON."""
        bodies = [json.loads(body) for path, body in self.requests if path.endswith("file_stream")]
        files = [body["files"] for body in bodies if body.get("files")]
        return [line for part in files for line in part.get("wandb-history.jsonl", {}).get("content", [])]


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeService

    def log_message(self, format: str, *args: Any) -> None:
        """Do not print a line for each request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        self.server.requests.append((self.path, body))
        self._answer({"data": self._make_response_data(json.loads(body))} if self.path == "/graphql" else {})

    def do_PUT(self) -> None:
        self.server.requests.append((self.path, ""))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer({})

    def _make_response_data(self, request: dict[str, Any]) -> dict[str, Any]:
        variables = request["variables"]
        if "RunResumeStatus" in request["query"]:
            return {"model": self._make_resume_status()}
        if "createRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": f"{self.server.address}/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        project = {"id": "x", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": variables.get("name"), "displayName": "n", "config": "{}", "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def _make_resume_status(self) -> dict[str, Any] | None:
        """What the service knows of a run: its last row; nothing before the first one."""
        rows = self.server.list_history()
        if not rows:
            return None
        bucket = {
            **dict.fromkeys(("config", "summaryMetrics"), "{}"),
            "wandbConfig": json.dumps({"t": 1}),  # the run has begun
            "id": "b",
            "name": "r",
            "displayName": "n",
            "historyLineCount": len(rows),
            "historyTail": json.dumps(rows),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "tags": [],
        }
        return {"id": "x", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}

    def _answer(self, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture(autouse=True)
def _no_address_is_kept() -> Iterator[None]:
    """Reset W&B, which reads its address only once per process."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    server = FakeService()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_second_upload_replaces_the_first_one(service: FakeService, tmp_path: Path) -> None:
    plan = make_plan_in(tmp_path)
    for last_step in (3, 4):
        log_study(plan, range(1, last_step + 1))
        (folder,) = tmp_path.glob("wandb/offline-run-*")
        subprocess.run([sys.executable, "-m", "wandb", "sync", str(folder)], check=True, capture_output=True)
    assert not any("RunResumeStatus" in body for _, body in service.requests)  # it would be appended
    offsets = [
        part["wandb-history.jsonl"]["offset"]
        for body in (json.loads(body) for path, body in service.requests if path.endswith("file_stream"))
        if "wandb-history.jsonl" in (part := body.get("files") or {})
    ]
    assert offsets == [0, 0]
    assert [json.loads(row)["_step"] for row in service.list_history()] == [1, 2, 3, 1, 2, 3, 4]


def test_a_study_does_not_wait_for_a_service_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free_socket.getsockname()[1]}"  # no listener: every connection is refused
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr(wandb_logging, "OPEN_TIMEOUT_S", 2.0)
        monkeypatch.setattr(wandb_logging, "RUN_TIMEOUT_S", -1.5)
        plan = make_plan_in(tmp_path, mode="online")
        write_rows(plan, [1])
        log = WandbLog(plan)
        end_run(log, plan)
        assert log.close() == "it took too long"
        monkeypatch.setattr(wandb_logging, "RUN_TIMEOUT_S", 20.0)
        assert "connection refused" in log.close()  # W&B's client gives up


def test_online_goes_on_behind_the_last_row_that_the_service_has(
    service: FakeService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan_in(tmp_path, mode="online")
    write_rows(plan, range(4))
    for last_step in (3, 6):
        # The second start has the rows of the first one, some of which it trained again, and further ones.
        write_rows(plan, range(max(last_step - 4, 0), last_step + 1))
        log = WandbLog(plan)
        log.send_rows([plan.runs[0].run_id])
        log.conclude({plan.runs[0].run_id: {"status": "completed", "verdict": "open"}})
        assert log.close() == ""
        assert [json.loads(row)["_step"] for row in service.list_history()] == list(range(last_step + 1))
    assert any('\\"verdict\\":\\"open\\"' in body for path, body in service.requests if path.endswith("file_stream"))
    assert "less than the current step" not in capfd.readouterr().err
