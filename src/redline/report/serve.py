"""The page of a run under way, read-only and on 127.0.0.1 alone. No torch.

Two paths: `/` is the report's page, `/lines?generation=G&offset=N` what came after the first N updates, with the
current figures. Only the run folder given at the start is read: no path comes from a request. Only GET; a request
whose Host is not this machine's is refused, so that a web site that points its own name at 127.0.0.1 reads nothing.
"""

import json
import re
import sys
import threading
import time
from copy import copy
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from redline.errors import MachineError, RedlineError
from redline.record.follow import Followed
from redline.record.read import Run
from redline.report import page
from redline.report.series import broken, curves
from redline.report.view import RunView

LINES = re.compile(r"/lines\?generation=([0-9]{1,18})&offset=([0-9]{1,18})")


class Watched(Followed):
    """A followed run with its figures and its page."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._figures = threading.Lock()
        self._shown: RunView | None = None
        self._shown_until = 0.0

    def shown(self, run: Run) -> RunView:
        """The figures of the run. They cost time in proportion to its length on cores that training may share, so
        at most a twentieth of the time goes into them: those of a long run are some seconds old."""
        with self._figures:
            began_s = time.monotonic()
            ended = self._shown is not None and self._shown.run.state.over != run.state.over
            if self._shown is None or ended or began_s >= self._shown_until:
                self._shown = RunView(run)
                self._shown_until = time.monotonic() + 19 * (time.monotonic() - began_s)
            return self._shown

    def page(self) -> str:
        run, generation = self.now()
        shown = copy(self.shown(run))
        shown.run = run
        return page.page([shown], live={"generation": generation, "offset": len(run.metrics)})

    def news(self, generation: int, offset: int) -> dict[str, Any]:
        """What is new to a page that has drawn `offset` updates of a generation."""
        run, now = self.now()
        shown = self.shown(run)
        fresh = generation == now and offset <= len(run.metrics)
        points = curves(run.metrics[offset:], len(run.metrics) + 1) if fresh else curves(run.metrics)
        points["broken"] = broken(run.metrics)  # it may begin long before what is new
        return {
            "generation": now,
            "offset": len(run.metrics),
            "points": points,
            "parts": page.parts([shown]),
            "afresh": not fresh,
            "state": str(run.state),
            "over": run.state.over,
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    """Connections that may wait: browsers and scripts open many at the same moment."""

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, *place: Any) -> None:
        """A client that left before the answer is not our error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*place)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10
    server_version, sys_version = "redline", ""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._answer(HTTPStatus.MISDIRECTED_REQUEST, "this page is for 127.0.0.1 only\n")
        try:
            if self.path == "/":
                return self._answer(HTTPStatus.OK, self.server.watched.page(), "text/html")
            if place := LINES.fullmatch(self.path):
                news = json.dumps(self.server.watched.news(*map(int, place.groups())), allow_nan=False)
                return self._answer(HTTPStatus.OK, news, "application/json")
        except RedlineError as error:  # a damaged file of the run: say it on the page, not in this terminal
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n")
        return self._answer(HTTPStatus.NOT_FOUND, "this server has / and /lines?generation=G&offset=N\n")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The page asks every second: nothing worth a line."""


def make_server(path: Path, port: int) -> Server:
    """A server for this run folder, on a port of 127.0.0.1 (0: any free one)."""
    watched = Watched(path)
    if not 0 <= port < 2**16:
        raise MachineError(f"a port is a number from 0 to 65535, got {port}: give another with --port")
    try:
        return Server(watched, port)
    except OSError as error:
        reason = f"port {port} of 127.0.0.1 is not available ({error.strerror})"
        raise MachineError(f"{reason}: give another with --port, 0 for any") from error
