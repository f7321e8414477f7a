"""The command `watch`: show the report of a running study in a browser, rebuilt as rows arrive."""

import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import waitress
from rich.console import Console

from analysis.data.load import load
from analysis.report.live import LivePage
from search_spaces.catalog import FAMILIES
from search_spaces.language_model.family import PPO
from trainable.files.json_values import DamageWarning
from trainable.runs.run_files import METRICS_FILE
from tune_study.folder import locate, outputs
from tune_study.host.console import print_line
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.storage_uri import is_uri

HOST = "127.0.0.1"
REFRESH_SECONDS = 10
"""Seconds after which the browser asks for the page again."""
_POLL_SECONDS = 2.0
_STORAGE_POLL_SECONDS = 30.0
"""Longer, since a study in a storage is fetched each time."""
_IDLE_FACTOR = 9.0
"""After a rendering of t seconds, the next one waits for 9 t, since the study needs the processor."""
_STOP_SECONDS = 5.0
"""Seconds that Ctrl-C waits for a rendering to end."""

SERVER_LIMITS = {
    "max_request_header_size": 2**13,
    "connection_limit": 32,
    "channel_timeout": 20,
    "cleanup_interval": 5,
}
"""Limits of Waitress, since any user of this machine can connect: bytes of a request's headers, concurrent connections,
seconds until a connection counts as idle, and seconds between two searches for idle ones."""

_HEADERS = [
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]

Signature = tuple[bool, tuple[tuple[str, int, int], ...]]
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Answer(NamedTuple):
    """An HTTP answer. headers: those added to the headers that every answer has."""

    status: str
    body: str
    headers: tuple[tuple[str, str], ...] = ()


class LiveReport:
    """The page of a study. A thread rebuilds it when the study's rows, statuses or driver have changed.

    run: the study as it was typed. Raises PlanError if there is none.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._signature: Signature | None = None
        self._problem = ""
        self._page = self._read()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Start following the study."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following the study. A rendering that takes longer than _STOP_SECONDS ends with this process."""
        self._is_stopped.set()
        self._thread.join(_STOP_SECONDS)

    def render(self, refresh_seconds: int | None) -> str:
        """Render the newest page (see `LivePage.render`)."""
        return self._page.render(refresh_seconds, self._problem)

    def _follow(self) -> None:
        pause_seconds = _POLL_SECONDS
        while not self._is_stopped.wait(pause_seconds):
            started_at = time.monotonic()
            try:
                signature = self._make_signature()
                if signature is None or signature != self._signature:
                    self._page = self._read()
                self._problem = ""
            except Exception as error:  # for example while a file is being replaced; the next attempt may succeed
                self._problem = f"Not rebuilt at {time.strftime('%H:%M:%S')}: {type(error).__name__}: {error}"
            least_seconds = _POLL_SECONDS if self._signature is not None else _STORAGE_POLL_SECONDS
            pause_seconds = max(least_seconds, _IDLE_FACTOR * (time.monotonic() - started_at))

    def _make_signature(self) -> Signature | None:
        """Make a value that changes when the page does; None for a study in a storage, which is fetched each time."""
        if is_uri(self._run):
            return None
        folder = Path(self._run)
        paths = sorted([*folder.glob(f"runs/*/{METRICS_FILE}"), *folder.glob("runs/*/status.json")])
        stats = [(str(path), path.lstat()) for path in paths]
        return outputs.is_running(folder), tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)

    def _read(self) -> LivePage:
        with locate.open_for_reading(self._run) as (folder, is_running), warnings.catch_warnings(record=True) as caught:
            # Made before the files are read, so that rows written meanwhile lead to a new page; kept only if the files
            # could be read.
            signature = self._make_signature()
            warnings.simplefilter("always", DamageWarning)
            with as_plan_error(ValueError):
                frames = load(folder, live=is_running)
            problems = [str(warning.message) for warning in caught if warning.category is DamageWarning]
            family = FAMILIES.get(frames.studies[0].family, PPO)
            metric = (family.progress_columns[0].column, family.progress_columns[0].name)
            page = LivePage(frames, metric, is_running, time.strftime("%H:%M:%S"), problems)
        self._signature = signature
        return page


def make_app(render: Callable[[int | None], str], token: str, port: int) -> WsgiApp:
    """Make a WSGI application that shows one page to whoever has the token, and writes nothing.

    render: returns the page, given the seconds between two loads (see `LivePage.render`).
    """
    cookie_name = f"tune_study_{port}"  # browsers send a host's cookies to all its ports
    hosts = [f"{name}:{port}" for name in (HOST, "localhost")]
    if port == 80:  # browsers leave it out
        hosts += [HOST, "localhost"]

    def answer(environ: dict[str, Any]) -> Answer:
        # A foreign page whose name resolves to this address (DNS rebinding) sends its own name.
        if environ.get("HTTP_HOST") not in hosts:
            return Answer("403 Forbidden", "This address is not the one that the command printed.")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return Answer("405 Method Not Allowed", "This page can only be read.", (("Allow", "GET, HEAD"),))
        if environ["PATH_INFO"] != "/":
            return Answer("404 Not Found", "There is only one page: /.")
        query = parse_qs(environ.get("QUERY_STRING", ""))
        if secrets.compare_digest(query.get("token", [""])[0].encode(), token.encode()):
            cookie = f"{cookie_name}={token}; HttpOnly; SameSite=Strict; Path=/"
            return Answer("303 See Other", "", (("Location", "/"), ("Set-Cookie", cookie)))
        # The standard library's SimpleCookie takes quadratic time on a text of backslashes.
        match = re.search(rf"(?:^|;) *{cookie_name}=([\w-]*)", environ.get("HTTP_COOKIE", ""))
        if not secrets.compare_digest(("" if match is None else match[1]).encode(), token.encode()):
            return Answer("403 Forbidden", "Open the whole address that the command printed, with its token.")
        return Answer("200 OK", render(None if "pause" in query else REFRESH_SECONDS))

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, text, headers = answer(environ)
        body = text.encode()
        start_response(status, [*_HEADERS, *headers, ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return app


def make_server(render: Callable[[int | None], str], token: str, listener: socket.socket) -> Any:
    """Make a server that answers with `make_app` on a listening socket, once its method `run` is called."""
    app = make_app(render, token, listener.getsockname()[1])
    return waitress.create_server(app, sockets=[listener], threads=4, ident=None, **SERVER_LIMITS)


def watch(console: Console, run: str, port: int) -> None:
    """Serve the report of `run` on this machine until Ctrl-C.

    port: 0 takes a free one. Raises PlanError if there is no such study, or if the port is taken.
    """
    report, token = LiveReport(run), secrets.token_urlsafe(24)
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise PlanError(f"--port {port} cannot be used ({error.strerror}): leave it out for a free one.") from None
    server = make_server(report.render, token, listener)
    print_line(console, f"Open http://{HOST}:{listener.getsockname()[1]}/?token={token}")
    print_line(console, "The page follows the study and changes nothing. Ctrl-C ends this command, not the study.")
    report.start()
    try:
        server.run()  # returns after Ctrl-C
    finally:
        server.close()
        report.stop()
