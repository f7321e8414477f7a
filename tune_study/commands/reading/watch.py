"""The command `watch`: show the report of a running study in a browser, rebuilt as rows arrive."""

import html
import math
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

import waitress
from rich.console import Console

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.report.live import LivePage
from search_spaces.catalog import FAMILIES
from search_spaces.language_model.family import PPO
from trainable.files.json_values import DamageWarning
from trainable.runs.run_files import METRICS_FILE, is_locked
from trainable.runs.study_record import OPEN_STATUSES, STATUS_FILE
from tune_study.folder import locate
from tune_study.host.console import print_line
from tune_study.plan.errors import as_plan_error
from tune_study.plan.storage_uri import is_uri
from tune_study.tune.progress import estimate_run_seconds, estimate_study_seconds, format_duration

HOST = "127.0.0.1"
REFRESH_SECONDS = 4
"""Seconds after which the browser asks for the page again."""
_POLL_SECONDS = 2.0
_STORAGE_POLL_SECONDS = 30.0
"""Longer, since a study in a storage is fetched each time."""
_IDLE_FACTOR = 9.0
"""After a report was drawn in t seconds, the next one waits for 9 t, since the study needs the processor. The table of
runs does not wait, so it is within ten seconds of the rows."""
_STOP_SECONDS = 5.0
"""Seconds that Ctrl-C waits for a drawing to end."""

_HEADERS = [
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]

Signature = tuple[tuple[bool, ...], tuple[tuple[str, int, int], ...]]
Answer = tuple[str, str, tuple[tuple[str, str], ...]]
"""Status, body and further headers of an HTTP answer."""
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class LiveReport:
    """The page of a study. A thread rebuilds it when the study's rows, statuses or driver have changed.

    As a context, it follows the study until its end. run: the study as it was typed. Raises PlanError if there is none.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        with locate.open_for_reading(run):  # refuses what is no study before an address is printed
            pass
        self._signature: Signature | None = None
        self._problem = ""
        self._page: LivePage | None = None
        self._next_drawing = 0.0
        self._is_outdated = True
        """Whether the drawn report is older than the table of runs."""
        self._is_read, self._is_stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop following the study. A drawing that takes longer than _STOP_SECONDS ends with this process."""
        self._is_stopped.set()
        self._thread.join(_STOP_SECONDS)

    def render(self, refresh_seconds: int | None) -> str:
        """Render the newest page (see `LivePage.render`), once there is one."""
        self._is_read.wait()
        if self._page is None:
            refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
            return f"<!doctype html>{refresh}<p>{html.escape(self._problem)}</p>"
        return self._page.render(refresh_seconds, self._problem)

    def _follow(self) -> None:
        pause_seconds = 0.0
        while not self._is_stopped.wait(pause_seconds):
            started_at = time.monotonic()
            try:
                signature, is_due = self._make_signature(), started_at >= self._next_drawing
                if signature is None or signature != self._signature or (self._is_outdated and is_due):
                    self._page = self._read(None if is_due else self._page)
                    self._is_outdated = not is_due
                    if is_due:
                        now = time.monotonic()
                        self._next_drawing = now + _IDLE_FACTOR * (now - started_at)
                self._problem = ""
            except Exception as error:  # for example while a file is being replaced; the next attempt may succeed
                self._problem = f"Not rebuilt at {time.strftime('%H:%M:%S')}: {type(error).__name__}: {error}"
            self._is_read.set()
            pause_seconds = _STORAGE_POLL_SECONDS if is_uri(self._run) else _POLL_SECONDS

    def _make_signature(self) -> Signature | None:
        """Make a value that changes when the page does; None for a study in a storage, which is fetched each time."""
        if is_uri(self._run):
            return None
        folder = Path(self._run)
        paths = sorted([*folder.glob(f"runs/*/{METRICS_FILE}"), *folder.glob(f"runs/*/{STATUS_FILE}")])
        stats = [(str(path), path.lstat()) for path in paths]
        # The processes that write runs without a driver hold their locks.
        run_dirs = (path.parent for path in paths if path.name == STATUS_FILE)
        locks = tuple(map(is_locked, (folder, *run_dirs)))
        return locks, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)

    def _read(self, earlier: LivePage | None) -> LivePage:
        """Read the study, and draw its report unless `earlier` has one."""
        with locate.open_for_reading(self._run) as (folder, is_running), warnings.catch_warnings(record=True) as caught:
            # Made before the files are read, so that rows written meanwhile lead to a new page; kept only if the files
            # could be read.
            signature = self._make_signature()
            warnings.simplefilter("always", DamageWarning)
            with as_plan_error(ValueError):
                frames = load(folder, live=is_running)
            is_running |= "running" in frames.runs["status"].to_list()
            problems = [str(warning.message) for warning in caught if warning.category is DamageWarning]
            family = FAMILIES.get(frames.studies[0].family, PPO)
            metric = (family.progress_columns[0].column, family.progress_columns[0].name)
            time_left = estimate_time_left(frames) if is_running else {}
            page = LivePage(frames, metric, is_running, time.strftime("%H:%M:%S"), problems, time_left, earlier)
        self._signature = signature
        return page


def estimate_time_left(frames: StudyFrames) -> dict[str, str]:
    """Estimate how long the runs that have not ended and, under the empty name, their study take, as in the terminal.

    Which runs are trained together is known of started trials alone; the others count as trials of one run.
    """
    seconds = frames.steps.groupby("run_id")["seconds_total"].max() if "seconds_total" in frames.steps else {}
    runs = to_records(frames.runs)
    paces = {
        run["run_id"]: float(total) / run["steps_done"]
        for run in runs
        if run["steps_done"] and not math.isnan(total := seconds.get(run["run_id"], math.nan))
    }
    run_seconds: dict[str, float] = {}
    trials: dict[str, list[float]] = {}
    for run in runs:
        run_id = run["run_id"]
        if run["status"] in OPEN_STATUSES and run["steps_total"] is not None:
            num_steps = int(run["steps_total"] - run["steps_done"])
            run_seconds[run_id] = estimate_run_seconds(num_steps, paces.get(run_id), paces.values())
            trials.setdefault(run["trial_id"] or run_id, []).append(run_seconds[run_id])
    num_running = len({run["trial_id"] for run in runs if run["status"] == "running"})
    study_seconds = estimate_study_seconds(trials.values(), num_running)
    return {"": format_duration(study_seconds)} | {name: format_duration(value) for name, value in run_seconds.items()}


def make_app(render: Callable[[int | None], str], token: str, port: int) -> WsgiApp:
    """Make a WSGI application that shows one page to whoever has the token, and writes nothing.

    render: returns the page, given the seconds between two loads (see `LivePage.render`).
    """
    cookie_name = f"tune_study_{port}"  # browsers send a host's cookies to all its ports

    def answer(environ: dict[str, Any]) -> Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "This page can only be read.", (("Allow", "GET, HEAD"),)
        if environ["PATH_INFO"] != "/":
            return "404 Not Found", "There is only one page: /.", ()
        query = parse_qs(environ.get("QUERY_STRING", ""))
        if secrets.compare_digest(query.get("token", [""])[0].encode(), token.encode()):
            cookie = f"{cookie_name}={token}; HttpOnly; SameSite=Strict; Path=/"
            return "303 See Other", "", (("Location", "/"), ("Set-Cookie", cookie))
        # The standard library's SimpleCookie takes quadratic time on a text of backslashes.
        match = re.search(rf"(?:^|;) *{cookie_name}=([\w-]*)", environ.get("HTTP_COOKIE", ""))
        if not secrets.compare_digest(("" if match is None else match[1]).encode(), token.encode()):
            return "403 Forbidden", "Open the whole address that the command printed, with its token.", ()
        return "200 OK", render(None if "pause" in query else REFRESH_SECONDS), ()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, text, headers = answer(environ)
        body = text.encode()
        start_response(status, [*_HEADERS, *headers, ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return app


def watch(console: Console, run: str) -> None:
    """Serve the report of `run` on a free port of this machine until Ctrl-C. Raises PlanError if there is no study."""
    report, token = LiveReport(run), secrets.token_urlsafe(24)
    listener = socket.create_server((HOST, 0))
    app = make_app(report.render, token, listener.getsockname()[1])
    server = waitress.create_server(app, sockets=[listener], ident=None)
    print_line(console, f"Open http://{HOST}:{listener.getsockname()[1]}/?token={token}")
    print_line(console, "The page follows the study and changes nothing. Ctrl-C ends this command, not the study.")
    try:
        with report:
            server.run()  # returns after Ctrl-C
    finally:
        server.close()
