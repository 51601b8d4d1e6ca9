"""The page of a run against whoever asks: many in the same moment, those that go away, requests that are none."""

import http.client
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from run_folders import lines

from redline.record.run import LineWriter
from redline.report.serve import Server, make_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("run")
    writer = LineWriter(run / "metrics.jsonl")
    for line in lines():
        writer.append(line)
    server = make_server(run, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def connected(server: Server) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=60)


def test_500_requests_in_the_same_moment_are_answered(server):
    open_ones = [connected(server) for _ in range(500)]
    host = f"127.0.0.1:{server.server_address[1]}"
    request = f"GET /lines?generation=0&offset=39 HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()

    def ask(connection: socket.socket) -> bytes:
        with connection:
            connection.sendall(request)
            return connection.makefile("rb").readline()

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(ask, open_ones)) == {b"HTTP/1.0 200 OK\r\n"}


def test_those_who_go_away_are_not_talked_about(server, capfd):
    for send in (
        b"",
        b"GET / HTTP/1.0\r\n",
        f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{server.server_address[1]}\r\n\r\n".encode(),
    ):
        for _ in range(5):
            connection = connected(server)
            connection.sendall(send)
            # close with a reset, so that the answer meets a connection that is not there
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    assert http.client.HTTPConnection(*server.server_address[:2]).request("GET", "/") is None
    test_500_requests_in_the_same_moment_are_answered(server)  # whatever was to be said has been said by now
    assert capfd.readouterr() == ("", "")


@given(
    raw=st.binary(max_size=80)
    | st.text(st.characters(codec="ascii"), max_size=60).map(lambda t: f"GET {t} HTTP/1.0".encode())
)
def test_requests_of_anything_print_nothing(server, capfd, raw):
    for request in (raw, f"GET //[ HTTP/1.0\r\nHost: 127.0.0.1:{server.server_address[1]}".encode()):
        with connected(server) as connection:
            connection.sendall(request + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            connection.makefile("rb").read()
    assert capfd.readouterr() == ("", "")
