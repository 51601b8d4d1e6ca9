"""A real S3 server on loopback: moto's, behind a gate that sees every request and can break connections.

with ObjectStore() as store:
    store.environment                   # what a client needs: AWS_ENDPOINT_URL, keys
    store.fetched("train-00001.bin")    # how often its content was asked for
    store.broken = {"train-00001.bin"}  # connections that ask for it break from now on
"""

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Self

import pytest
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


class _Silent(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Thousands of lines that nobody reads."""


class ObjectStore:
    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._gate, threaded=True, request_handler=_Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.requests: list[tuple[str, str]] = []
        self.broken: set[str] = set()
        """Names of objects whose connections break after the first byte; `*`: all."""
        self.broken_times: int | None = None
        """How often; None: always."""
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # s3fs tries again, too
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make it the store of this process; s3fs keeps clients, which know another address or other keys."""
        for name, value in self.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        if not s3fs.S3FileSystem().exists(BUCKET):
            s3fs.S3FileSystem().mkdir(BUCKET)

    def fetched(self, name: str) -> int:
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.requests)

    def _gate(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, name = environ["REQUEST_METHOD"], environ["PATH_INFO"].rpartition("/")[2]
        self.requests.append((method, environ["PATH_INFO"]))
        answer = self._app(environ, start_response)
        if method == "GET" and self.broken & {name, "*"} and self.broken_times != 0:
            if self.broken_times is not None:
                self.broken_times -= 1
            return self._break(answer, environ["werkzeug.socket"])
        return answer

    def _break(self, answer: Iterable[bytes], connection: socket.socket) -> Iterator[bytes]:
        yield b"".join(answer)[:1]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
