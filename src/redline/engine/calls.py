"""Calls of an HTTP server that speaks JSON, from many threads: httpx, with new tries, one clear line for each failure,
and an end to all calls when their results are no longer wanted. No torch.

    line = Line(open_site("http://localhost:8000", key, timeout_s=600.0, progress=print))
    answer = line.ask("POST", "/completions", body)

Left out: redirects (the key must not travel to another host) and proxies.
"""

import contextlib
import json
import random
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from redline.errors import ConfigError, MachineError

KEY_VARIABLE = "REDLINE_API_KEY"
BACK_OFFS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before each new try of a call that the server turned away or lost; half a minute in all, enough for a
server's restart."""
LONGEST_WAIT_S = 60.0
"""The most that a server may ask for with Retry-After."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that a later try may not see."""
HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the server is. Its key stays out of everything that is printed."""

    root: str
    """http://host:port"""
    url: str
    """The same with its path."""
    key: str | None = field(repr=False)
    timeout_s: float
    progress: Callable[[str], None]


def open_site(url: str, key: str | None, timeout_s: float, progress: Callable[[str], None]) -> Site:
    """A server's address, checked; without a path it is OpenAI's own, /v1."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"a server's URL must read http://host:port, got {url!r} ({error})") from error
    if parts.userinfo:
        raise ConfigError(
            f"a server's URL must hold no key: put it into the environment variable {KEY_VARIABLE}"
        )
    whole = parts.scheme in ("http", "https") and parts.host and (parts.port or 80) < 2**16
    if not whole or parts.query or parts.fragment:
        raise ConfigError(f"a server's URL must read http://host:port or https://host/path, got {url!r}")
    if key and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"the key ({KEY_VARIABLE}) must be printable ASCII without spaces, and it is not")
    root = f"{parts.scheme}://{parts.netloc.decode()}"
    path = parts.path.rstrip("/") or "/v1"
    return Site(root=root, url=root + path, key=key, timeout_s=timeout_s, progress=progress)


class _Lost(Exception):
    """A call that a later try may bring through."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Line:
    """The calls of one run: from many threads, over connections that are kept open, and hung up together."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._client = httpx.Client(
            headers=HEADERS | ({"Authorization": f"Bearer {site.key}"} if site.key else {}),
            timeout=httpx.Timeout(site.timeout_s, pool=None),
            limits=httpx.Limits(),  # as many connections as there are threads
            verify=ssl.create_default_context(),
            trust_env=False,
        )
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._told_at_s = 0.0

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None, *, patient: bool = True, root: bool = False
    ) -> Any:
        """The JSON that the server answers with. `patient`: a server that does not answer is tried again.
        `root`: outside of /v1."""
        data = None if body is None else json.dumps(body).encode()
        address = (self.site.root if root else self.site.url) + path
        waits_s = BACK_OFFS_S if patient else ()
        for wait_s in (*waits_s, None):
            try:
                return self._understood(self._exchange(method, address, data), path)
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
            for connected in self._sockets:
                _shut(connected)
        self._client.close()

    def _watch(self, event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            connected = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(connected)
                if self._ended.is_set():
                    _shut(connected)

    def _exchange(self, method: str, address: str, data: bytes | None) -> httpx.Response:
        if self._ended.is_set():
            raise _Lost("hung up")
        try:
            response = self._client.request(method, address, content=data, extensions={"trace": self._watch})
        except httpx.TimeoutException as error:
            raise MachineError(
                f"{self.site.url} gave no answer within {self.site.timeout_s:g} s: raise timeout_s, or lower"
                " concurrency"
            ) from error
        except httpx.RequestError as error:
            if "[SSL" in str(error):
                raise ConfigError(
                    f"{self.site.url} cannot be reached over TLS: {error}; is it http://?"
                ) from error
            raise _Lost(f"the connection failed ({str(error) or type(error).__name__})") from error
        if response.status_code in PASSING:
            said = f"{response.status_code} {self._message(response.text)}"
            raise _Lost(said, _seconds(response.headers.get("Retry-After")))
        return response

    def _tell(self, what: str) -> None:
        """At most a line a second: all calls fail together."""
        with self._lock:
            silent, now_s = time.monotonic() - self._told_at_s < 1.0, time.monotonic()
            self._told_at_s = self._told_at_s if silent else now_s
        if not silent:
            self.site.progress(what)

    def _understood(self, response: httpx.Response, path: str) -> Any:
        where, status, text = self.site.url, response.status_code, response.text
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
        for place in ("error", "detail", "message"):
            body = body.get(place, body) if isinstance(body, dict) else body
        said = str(body)
        # A server may repeat the key that it did not like.
        return shown(said.replace(self.site.key, "***") if self.site.key else said)


def _shut(connected: socket.socket) -> None:
    """Wake whoever reads from the connection: closing it would leave them asleep until their timeout."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def shown(text: str) -> str:
    """A text cut to one short line."""
    line = " ".join(text.split())
    return line[:SHOWN_CHARACTERS] + ("…" if len(line) > SHOWN_CHARACTERS else "") or "an empty answer"


def _seconds(header: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is left to our own back-off."""
    return float(header) if header is not None and header.isdigit() else None
