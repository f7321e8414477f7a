"""`watch`: who gets the page, that it follows the rows, and that it writes nothing."""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from analysis import load
from analysis.report import live
from analysis.sources.attach import AttachedRun
from tests.fakes.command_line import read_files
from tests.fakes.lines import append_record
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study
from tests.fakes.sandbox_folders import FakeRun as SandboxRun
from tests.fakes.sandbox_folders import write_sandbox
from tune_study.commands.reading import watch
from tune_study.folder.outputs import lock_folder
from tune_study.tune.progress import format_duration

PORT, TOKEN = 4321, "secret-token"


def call(**environ: Any) -> tuple[str, dict[str, str], str]:
    """Call the application; return status, headers and body."""
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", **environ}
    answers: list[tuple[str, list[tuple[str, str]]]] = []
    app = watch.make_app(lambda seconds: f"page, again after {seconds}", TOKEN, PORT)
    body = b"".join(app(request, lambda status, headers: answers.append((status, headers))))
    ((status, headers),) = answers
    assert len(body) == int(dict(headers)["Content-Length"]) or request["REQUEST_METHOD"] == "HEAD"
    return status, dict(headers), body.decode()


def test_the_address_with_its_token_opens_the_page() -> None:
    status, headers, _ = call(QUERY_STRING=f"token={TOKEN}")
    assert (status, headers["Location"]) == ("303 See Other", "/")
    cookie, _, attributes = headers["Set-Cookie"].partition("; ")
    assert attributes == "HttpOnly; SameSite=Strict; Path=/"
    assert call(HTTP_COOKIE=cookie)[::2] == ("200 OK", "page, again after 4")
    assert call(HTTP_COOKIE=f"other=1; {cookie}", QUERY_STRING="pause=1")[2] == "page, again after None"
    assert call(HTTP_COOKIE=cookie, REQUEST_METHOD="HEAD")[::2] == ("200 OK", "")


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, "403 Forbidden"),
        ({"QUERY_STRING": "token=wrong"}, "403 Forbidden"),
        ({"HTTP_COOKIE": f"tune_study_{PORT + 1}={TOKEN}"}, "403 Forbidden"),
        ({"HTTP_COOKIE": "\x00;;=;"}, "403 Forbidden"),
        ({"REQUEST_METHOD": "POST", "QUERY_STRING": f"token={TOKEN}"}, "405 Method Not Allowed"),
        ({"PATH_INFO": "/../study.json", "QUERY_STRING": f"token={TOKEN}"}, "404 Not Found"),
    ],
    ids=str,
)
def test_whoever_has_no_token_and_whatever_else_is_asked_gets_no_page(environ: dict[str, str], status: str) -> None:
    answer = call(**environ)
    assert answer[0] == status
    assert "page, again" not in answer[2]
    assert "Set-Cookie" not in answer[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of two runs, of which one has ended."""
    return write_study(tmp_path, [FakeRun("0"), FakeRun("0.1", status="running", steps=10)], FakeStudy(levels=20))


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at once, and draw no report below the table of runs."""
    monkeypatch.setattr(live, "view_sections", lambda *arguments, **options: [])
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_IDLE_FACTOR", 0.0)


def write_next_row(folder: Path) -> None:
    append_record(folder / "runs" / FakeRun("0.1").run_id / "metrics.jsonl", {"step": 11, "val_success": 0.5})


@pytest.mark.long
def test_the_page_has_the_report_and_the_state_of_each_run(folder: Path) -> None:
    before = read_files(folder)
    with watch.LiveReport(str(folder)) as report:
        page, paused = report.render(10), report.render(None)
    assert '<meta http-equiv="refresh" content="10">' in page
    assert "kl (laptop): not running, 1 of 2 runs have ended" in page
    assert "Verdict for each arm" in page
    assert "10 of 60" in page
    assert read_files(folder) == before
    assert 'http-equiv="refresh"' not in paused
    assert '<a href="/">continue</a>' in paused


@pytest.mark.long
def test_the_table_of_runs_does_not_wait_for_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_IDLE_FACTOR", 10_000.0)
    with watch.LiveReport(str(folder)) as report:
        assert "10 of 60" in report.render(10)
        write_next_row(folder)
        wait_for(lambda: "11 of 60" in report.render(10))
        assert "Verdict for each arm" in report.render(10)
        assert report._is_outdated


def test_the_time_left_is_that_of_the_terminal(tmp_path: Path) -> None:
    """One run has 10 of 60 steps, another waits: at the pace of the first, its 50 steps and 60 more."""
    folder = write_study(
        tmp_path, [FakeRun("0", status="running", steps=10), FakeRun("0.1", status="waiting", steps=0)]
    )
    frames = load(folder, live=True)
    total = frames.steps["seconds_total"].max()
    times = watch.estimate_time_left(frames)
    left = [format_duration(total / 10 * steps) for steps in (110, 50, 60)]
    assert times == dict(zip(("", FakeRun("0").run_id, FakeRun("0.1").run_id), left, strict=True))
    page = live.LivePage(frames, ("val_success", "success"), True, "12:00:00", [], times).render(10)
    assert f"running, 0 of 2 runs have ended, about {left[0]} left" in page
    assert f">{left[1]}</td>" in page


@pytest.mark.slow
@pytest.mark.usefixtures("quick_looks")
def test_a_driver_that_ends_makes_a_new_page(folder: Path) -> None:
    with ExitStack() as stack, ExitStack() as lock:
        lock.enter_context(lock_folder(folder))
        report = stack.enter_context(watch.LiveReport(str(folder)))
        assert "kl (laptop): running, 1 of 2" in report.render(10)
        lock.close()
        wait_for(lambda: "kl (laptop): not running, 1 of 2" in report.render(10))


@pytest.mark.long
@pytest.mark.usefixtures("quick_looks")
def test_a_run_that_its_trainer_writes_is_running_while_the_trainer_is(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    run = AttachedRun(folder, "a", 1, "", {}, "trl", {"max_steps": 9})
    with watch.LiveReport(str(folder)) as report:
        assert "study (): running, 0 of 1 runs have ended" in report.render(10)
        for step in (1, 2):
            run.log({"reward": 0.5, "eval_reward": 0.25}, step)
        wait_for(lambda: "1 of 9" in report.render(10))
        run._lock.close()  # as if its process were killed
        wait_for(lambda: "not running, 0 of 1 runs have ended" in report.render(10))


@pytest.mark.long
@pytest.mark.usefixtures("quick_looks")
def test_a_failed_look_is_said_and_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise KeyError("run_id")

    with watch.LiveReport(str(folder)) as report:
        assert "10 of 60" in report.render(10)
        with monkeypatch.context() as patched:
            patched.setattr(watch, "load", fail)
            write_next_row(folder)
            wait_for(lambda: "KeyError: " in report.render(10))
            assert "10 of 60" in report.render(10)
        wait_for(lambda: "11 of 60" in report.render(10) and "Not rebuilt" not in report.render(10))


def test_a_first_look_that_fails_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("<gone>")

    monkeypatch.setattr(watch, "load", fail)
    with watch.LiveReport(str(folder)) as report:
        assert "OSError: &lt;gone&gt;</p>" in report.render(10)


@pytest.mark.long
def test_the_measure_of_a_family_is_named(tmp_path: Path) -> None:
    folder = write_sandbox(tmp_path, [SandboxRun("DG", 0), SandboxRun("GRPO", 0)])
    page = live.LivePage(load(folder), ("test_error", "test error"), False, "12:00:00", ["a line is damaged"]).render(
        None
    )
    assert '<th scope="col" class="number">test error</th>' in page
    assert "<li>a line is damaged</li>" in page
    assert "2 of 2 runs have ended" in page


def wait_for(is_there: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_watching(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tune_study", "watch", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def read_address(process: "subprocess.Popen[str]") -> str:
    return process.stdout.readline().removeprefix("Open ").strip()


def end_well(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """The address that the command prints. At the end it gets Ctrl-C, and must end well."""
    process = start_watching(folder)
    yield read_address(process)
    end_well(process)


def read_page(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(address, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.processes
def test_a_client_reads_the_page_of_the_command(address: str) -> None:
    assert "Verdict for each arm" in read_page(address)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address.partition("?")[0], timeout=60)
    assert address.startswith("http://127.0.0.1:")
