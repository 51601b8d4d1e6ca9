"""Calls to an HTTP server that speaks JSON, many at a time: kept-open connections, retries, one clear line for each
failure. No torch.

    line = Line("http://localhost:8000", connections=64, timeout_s=600.0, progress=print)
    answer = line.submit("/completions", body).result()         # a future; cancel it to hang up

httpx does the work, in an event loop in a thread, so that a call nobody waits for any more can end immediately; a
thread that reads a socket cannot. Left out: redirects (the key must not travel to another host) and proxies.
"""

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redline.errors import ConfigError, MachineError, Say

T = TypeVar("T")

KEY_VARIABLE = "REDLINE_API_KEY"
BACK_OFFS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before each retry of a call that the server refused or lost: none at first, because servers close idle
connections; half a minute in all, enough for a server's restart."""
LONGEST_WAIT_S = 60.0
"""The most that a server may ask for with Retry-After."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a retry may succeed."""
SHOWN_CHARACTERS = 200


class _Lost(Exception):
    """A call that a retry may complete, and after how many seconds, if the server says so."""


class Line:
    """The connections to one server, for any thread. The key comes from the environment and is never printed."""

    def __init__(self, url: str, *, connections: int, timeout_s: float, progress: Say) -> None:
        self.url, key = _checked(url), os.environ.get(KEY_VARIABLE)
        if key and (not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError(f"the key ({KEY_VARIABLE}) must be printable ASCII without spaces")
        import httpx  # here: it takes a tenth of a second, and most runs call no server

        self._httpx = httpx
        self._key, self._timeout_s, self._progress, self._told_at_s = key, timeout_s, progress, 0.0
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redline-server", daemon=True)
        self._thread.start()

    def submit(self, path: str, body: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Ask for the JSON object that the server answers with; a call without an answer is retried."""
        return self._start(self._ask("POST", self.url + path, body, BACK_OFFS_S, self._timeout_s))

    def look(self, address: str, within_s: float) -> dict[str, Any]:
        """The answer to a call that generates nothing, without retries; `address` is a complete one."""
        return self._start(self._ask("GET", address, None, (), min(within_s, self._timeout_s))).result()

    def close(self) -> None:
        """End every call, including those in progress."""
        if self._thread.is_alive():
            self._start(self._hang_up()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _start(self, what: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _hang_up(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    async def _ask(
        self, method: str, address: str, body: Any, waits_s: tuple[float, ...], timeout_s: float
    ) -> dict[str, Any]:
        for wait_s in (*waits_s, None):
            try:
                return self._understood(await self._exchange(method, address, body, timeout_s))
            except _Lost as lost:
                why, asked_s = lost.args
                if wait_s is None:
                    tries = f" in {len(waits_s) + 1} tries" if waits_s else ""
                    raise (MachineError if waits_s else ConfigError)(
                        f"no answer from {self.url}{tries}: {why}; is the server up, and is this its address?"
                    ) from lost
                pause_s = min(asked_s or wait_s * random.uniform(0.5, 1.0), LONGEST_WAIT_S)
                # at most one line per second: all calls fail together
                if pause_s and time.monotonic() - self._told_at_s >= 1.0:
                    self._told_at_s = time.monotonic()
                    self._progress(f"{self.url}: {why}; trying again in {pause_s:.1f} s")
                await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _exchange(self, method: str, address: str, body: Any, timeout_s: float) -> Any:
        try:
            response = await self._client.request(method, address, json=body, timeout=timeout_s)
        except self._httpx.TimeoutException as error:
            raise MachineError(
                f"{self.url} gave no answer within {timeout_s:g} s: lower sample.max_new_tokens or, in Python, raise"
                " timeout_s or lower concurrency"
            ) from error
        except self._httpx.HTTPError as error:
            if "SSL" in str(error):
                raise ConfigError(
                    f"{self.url} cannot be reached over TLS: {error}; is it http://?"
                ) from error
            raise _Lost(f"the connection failed ({str(error) or type(error).__name__})", None) from error
        if response.status_code in PASSING:
            asked = response.headers.get("Retry-After", "")  # for its other form, a date, our own waits apply
            raise _Lost(self._said(response), float(asked) if asked.isdigit() else None)
        return response

    def _understood(self, response: Any) -> dict[str, Any]:
        path = str(response.url).removeprefix(self.url)
        if response.status_code in (401, 403):
            raise ConfigError(
                f"{self.url} refused the key ({self._said(response)}): set the environment variable {KEY_VARIABLE}"
            )
        if response.status_code != 200:
            raise ConfigError(
                f"{self.url} refused {path}: {self._said(response)}; if it has no such path, give the whole address"
                " (http://host:port/v1, or one that ends in /chat/completions)"
            )
        if (answer := _object(response.text)) is None:
            raise ConfigError(
                f"{self.url} must answer {path} with a JSON object, got {shown(response.text)}: it is not a completion"
                " server"
            )
        return answer

    def _said(self, response: Any) -> str:
        """Status and message of an error in one line; servers put the message in three different places."""
        said: Any = _object(response.text) or response.text
        for name in ("error", "detail", "message"):
            said = said.get(name, said) if isinstance(said, dict) else said
        # a server may repeat the key that it refused
        return f"{response.status_code} {shown(str(said).replace(self._key or ' ', '***' if self._key else ' '))}"


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None. Some servers cut a character in half, which our own files never contain."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _checked(url: str) -> str:
    """A server's address; without a path it gets OpenAI's, /v1."""
    form = "a server's URL must read http://host:port or https://host/path"
    try:
        parts = urlsplit(url)
        well = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{form}, got {url!r} ({error})") from error
    if parts.username or parts.password:
        raise ConfigError(f"{form} without a key: put that into the environment variable {KEY_VARIABLE}")
    if not well or parts.query or parts.fragment:
        raise ConfigError(f"{form}, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def shown(text: str) -> str:
    line = " ".join(text.split())
    return line[:SHOWN_CHARACTERS] + ("…" if len(line) > SHOWN_CHARACTERS else "") or "an empty answer"
