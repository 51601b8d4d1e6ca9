"""Calls of an HTTP server that speaks JSON, from many threads: kept-open connections, new tries, one clear
line for each failure. No torch.

    line = Line(open_site("http://localhost:8000", key, timeout_s=600.0, progress=print))
    answer = line.ask("POST", "/completions", body)

Standard library alone. Left out: redirects (the key must not travel to another host) and proxies.
"""

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redline.errors import ConfigError, MachineError

KEY_VARIABLE = "REDLINE_API_KEY"
BACK_OFFS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before each new try of a call that the server turned away or lost; half a minute in all, enough for a
server's restart."""
LONGEST_WAIT_S = 60.0
"""The most that a server may ask for with Retry-After."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that a later try may not see."""
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the server is. Its key stays out of everything that is printed."""

    url: str
    secure: bool
    host: str
    port: int | None
    path: str
    key: str | None = field(repr=False)
    timeout_s: float
    progress: Callable[[str], None]

    def connect(self) -> http.client.HTTPConnection:
        if self.secure:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)

    def headers(self) -> dict[str, str]:
        shared = {"Content-Type": "application/json", "Accept": "application/json"}
        return shared | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


def open_site(url: str, key: str | None, timeout_s: float, progress: Callable[[str], None]) -> Site:
    """A server's address, checked; without a path it is OpenAI's own, /v1."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"a server's URL must read http://host:port, got {url!r} ({error})") from error
    if parts.username or parts.password:
        raise ConfigError(
            f"a server's URL must hold no key: put it into the environment variable {KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"a server's URL must read http://host:port or https://host/path, got {url!r}")
    if key and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"the key ({KEY_VARIABLE}) must be printable ASCII without spaces, and it is not")
    path = parts.path.rstrip("/") or "/v1"
    full, secure = f"{parts.scheme}://{parts.netloc}{path}", parts.scheme == "https"
    return Site(
        url=full,
        secure=secure,
        host=parts.hostname,
        port=port,
        path=path,
        key=key,
        timeout_s=timeout_s,
        progress=progress,
    )


class _Lost(Exception):
    """A call that a later try may bring through."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Line:
    """Kept-open connections of one run, used from many threads, and hung up all at once."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._idle: list[http.client.HTTPConnection] = []
        self._all: set[http.client.HTTPConnection] = set()
        self._told_at_s = 0.0

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None, *, patient: bool = True, root: bool = False
    ) -> Any:
        """The JSON that the server answers with. `patient`: a server that does not answer is tried again.
        `root`: outside of /v1."""
        data = None if body is None else json.dumps(body).encode()
        address = path if root else self.site.path + path
        waits_s = BACK_OFFS_S if patient else ()
        for wait_s in (*waits_s, None):
            try:
                return self._understood(*self._exchange(method, address, data), path)
            except _Lost as lost:
                if wait_s is None or self._ended.is_set():
                    kind = MachineError if patient else ConfigError
                    tries = f" in {len(waits_s) + 1} tries" if patient else ""
                    raise kind(
                        f"no answer from {self.site.url}{tries}: {lost}; is the server up, and is this its"
                        " address?"
                    ) from lost
                pause_s = min(lost.wait_s or wait_s * random.uniform(0.5, 1.0), LONGEST_WAIT_S)
                self._tell(f"{self.site.url}: {lost}; trying again in {pause_s:.1f} s")
                self._ended.wait(pause_s)
        raise AssertionError("the last try returns or raises")

    def hang_up(self) -> None:
        """End every call, those under way too."""
        with self._lock:
            self._ended.set()
            for connection in self._all:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        # Closing alone would leave a thread that is reading asleep until its timeout.
                        connection.sock.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._all.clear()
            self._idle.clear()

    def _exchange(
        self, method: str, address: str, data: bytes | None, *, fresh: bool = False
    ) -> tuple[int, str]:
        connection = self._take(fresh)
        reused = connection.sock is not None
        try:
            connection.request(method, address, data, self.site.headers())
            response = connection.getresponse()
            text = response.read().decode("utf-8", errors="replace")
        except TimeoutError as error:
            self._drop(connection)
            raise MachineError(
                f"{self.site.url} gave no answer within {self.site.timeout_s:g} s: raise timeout_s, or lower"
                " concurrency"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._drop(connection)
            # servers close connections that were idle for a while: that says nothing about the server
            if reused:
                return self._exchange(method, address, data, fresh=True)
            if isinstance(error, ssl.SSLError):
                raise ConfigError(
                    f"{self.site.url} cannot be reached over TLS: {error}; is it http://?"
                ) from error
            raise _Lost(f"the connection failed ({str(error) or type(error).__name__})") from error
        if response.will_close:
            self._drop(connection)
        else:
            with self._lock:
                self._idle.append(connection)
        if response.status in PASSING:
            raise _Lost(
                f"{response.status} {self._message(text)}", _seconds(response.getheader("Retry-After"))
            )
        return response.status, text

    def _take(self, fresh: bool) -> http.client.HTTPConnection:
        with self._lock:
            if self._ended.is_set():
                raise _Lost("hung up")
            connection = self._idle.pop() if self._idle and not fresh else self.site.connect()
            self._all.add(connection)
            return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def _tell(self, what: str) -> None:
        """At most a line a second: all calls fail together."""
        with self._lock:
            silent, now_s = time.monotonic() - self._told_at_s < 1.0, time.monotonic()
            self._told_at_s = self._told_at_s if silent else now_s
        if not silent:
            self.site.progress(what)

    def _understood(self, status: int, text: str, path: str) -> Any:
        where = self.site.url
        if status in (401, 403):
            raise ConfigError(
                f"{where} refused the key ({status} {self._message(text)}): set the environment variable"
                f" {KEY_VARIABLE}"
            )
        if status == 404 and '"error"' not in text:
            raise ConfigError(
                f"{where} has no {path}: it is no completion server, or its address has another path"
                " (http://host:port/v1)"
            )
        if status != 200:
            raise ConfigError(f"{where} refused the request: {status} {self._message(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{where} must answer {path} in JSON, got {shown(text)}: it is no completion server"
            ) from error

    def _message(self, text: str) -> str:
        """What the body of an error says, in one line; servers put it in three different places."""
        try:
            body = json.loads(text)
        except ValueError:
            body = text
        error = (
            body.get("error", body.get("detail", body.get("message", body)))
            if isinstance(body, dict)
            else body
        )
        said = str(error.get("message", error) if isinstance(error, dict) else error)
        # A server may repeat the key that it did not like.
        return shown(said.replace(self.site.key, "***") if self.site.key else said)


def shown(text: str) -> str:
    """A text cut to one short line."""
    line = " ".join(text.split())
    return line[:SHOWN_CHARACTERS] + ("…" if len(line) > SHOWN_CHARACTERS else "") or "an empty answer"


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is left to our own back-off."""
    return float(header) if header is not None and header.isdigit() else None
