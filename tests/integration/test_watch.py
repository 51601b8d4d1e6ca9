"""`redline watch`: the page's server is for this machine and reads one folder only; the terminal follows a
real run to its end."""

import contextlib
import fcntl
import http.client
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline import Nano
from warm import LIMIT_S as HUNG_S
from warm import Fault

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from run_folders import EVALUATIONS, EVENTS, jsonl, lines, write_rft, write_run

from redline.cli.main import main
from redline.cli.watch import in_order
from redline.report.serve import Server, make_server
from redline.report.view import samples_of
from redline.rft.store import Sample, Store
from redline.tasks.task import Question


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", metrics=lines()[:20], events=EVENTS[:1])


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with make_server(run, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: Server, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=HUNG_S)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def in_a_terminal(arguments: list[str], columns: int, rows: int) -> str:
    """What `redline watch` draws in a terminal of this size, without colours and without what moves the
    cursor."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES")
    } | {"TERM": "xterm"}
    program = [sys.executable, "-m", "redline", "watch", *arguments]
    with subprocess.Popen(program, stdin=slave, stdout=slave, stderr=slave, env=environment) as watching:
        os.close(slave)
        told = b""
        with contextlib.suppress(OSError):  # the other side has closed the terminal
            while piece := os.read(master, 65536):
                told += piece
        assert watching.wait(timeout=HUNG_S) == 0, told.decode()
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told.decode()).replace("\r", "")


class TestServer:
    def test_it_listens_on_this_machine_only(self, server: Server) -> None:
        assert server.server_address[0] == "127.0.0.1"
        outside = "127.0.0.1"
        with contextlib.suppress(socket.gaierror):  # a machine without a name
            outside = socket.gethostbyname(socket.gethostname())
        if not outside.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((outside, server.server_address[1]), timeout=2)

    def test_the_page_and_its_headers(self, server: Server) -> None:
        status, headers, body = ask(server, "/")
        assert (status, headers["Content-Type"], headers["Cache-Control"]) == (
            200,
            "text/html; charset=utf-8",
            "no-store",
        )
        assert "connect-src &#39;self&#39;;" in body
        assert "Access-Control-Allow-Origin" not in headers

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "[::1]:{port}", "127.0.0.1:1"],
    )
    def test_another_host_is_refused(self, server: Server, host: str) -> None:
        status, _, body = ask(
            server, "/lines?generation=0&offset=0", host=host.format(port=server.server_address[1])
        )
        assert (status, "loss" in body) == (421, False)

    def test_localhost_is_this_machine(self, server: Server) -> None:
        assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    def test_only_get(self, server: Server, method: str) -> None:
        assert ask(server, "/", method)[0] == 501

    @pytest.mark.parametrize(
        "path",
        ["/recipe.toml", "/../recipe.toml", "/%2e%2e/recipe.toml", "//etc/passwd", "/etc/passwd", "/?x=1", "/lines", "/lines?generation=0",
         "/lines?generation=0&offset=-1", "/lines?generation=0&offset=1e3", "/lines?generation=0&offset=²",
         "/lines?a=1&b=2&c=3"],
    )  # fmt: skip
    def test_there_is_nothing_else(self, server: Server, path: str) -> None:
        status, _, body = ask(server, path.replace("²", "%C2%B2"))
        assert (status, "num_layers" in body, "root:" in body) == (404, False, False)

    def test_news_are_what_came_since(self, run: Path, server: Server) -> None:
        first = self.news(server, 0, 0)
        assert (first["afresh"], first["offset"], len(first["points"]["axes"]["step"])) == (True, 20, 20)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(lines()[20]) + "\n" + '{"step": 22')
        more = self.news(server, first["generation"], 20)
        assert (more["afresh"], more["offset"], more["points"]["axes"]["step"]) == (False, 21, [21])
        assert self.news(server, first["generation"], 21)["points"]["axes"]["step"] == []
        # they are not made anew for every answer; where they never follow the run, pytest ends this
        while "21 of 40" not in self.news(server, first["generation"], 21)["parts"]["head"]:
            time.sleep(0.1)

    def test_a_run_that_was_cut_back_is_sent_afresh(self, run: Path, server: Server) -> None:
        first = self.news(server, 0, 0)
        jsonl(run / "new", lines()[:30])
        os.replace(run / "new", run / "metrics.jsonl")
        again = self.news(server, first["generation"], 20)
        assert (again["afresh"], len(again["points"]["axes"]["step"])) == (True, 30)
        assert again["generation"] != first["generation"]

    def test_a_damaged_file_is_said_and_does_not_end_the_server(self, run: Path, server: Server) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write("{\n")
        status, _, body = ask(server, "/")
        assert (status, "is damaged" in body) == (500, True)
        jsonl(run / "new", lines()[:30])
        os.replace(run / "new", run / "metrics.jsonl")
        assert ask(server, "/")[0] == 200

    def news(self, server: Server, generation: int, offset: int) -> dict[str, Any]:
        status, _, body = ask(server, f"/lines?generation={generation}&offset={offset}")
        assert status == 200
        found: dict[str, Any] = json.loads(body)
        return found


class TestRefusals:
    def test_a_port_that_is_taken(
        self, run: Path, server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["watch", str(run), "--web", "--port", str(server.server_address[1])]) == 6
        assert "--port, 0 for any" in capsys.readouterr().err

    def test_a_port_without_a_page(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["watch", str(run), "--port", "80"]) == 2
        assert "--web" in capsys.readouterr().err

    def test_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["watch", str(tmp_path / "none")]) == 3
        assert "not a run folder" in capsys.readouterr().err


class TestTerminal:
    def test_lines_and_events_are_told_as_they_happened(self) -> None:
        events = [{"event": "start", "step": 0}, {"event": "odd"}, {"event": "validation", "step": 2}]
        told = in_order([{"step": 1}, {"step": 2}, {"step": 3}], events)
        assert [record.get("event", record.get("step")) for record in told] == [
            "start",
            "odd",
            1,
            2,
            "validation",
            3,
        ]

    def test_a_loss_that_is_not_a_number_is_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_run(tmp_path / "a", metrics=[*lines()[:3], lines()[3] | {"loss": None}])
        assert main(["watch", str(path)]) == 0
        assert "step 4/40  loss nan" in capsys.readouterr().out

    def test_a_loop_that_tells_few_losses_and_no_end_is_followed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_run(
            tmp_path / "a", metrics=[{"step": 1, "step_s": 1.0, "loss": 2.0}, {"step": 2, "step_s": 1.0}]
        )
        (path / "recipe.toml").unlink()
        assert main(["watch", str(path)]) == 0
        assert "step 2  loss 2.000" in capsys.readouterr().out

    def test_the_panel_of_the_run_with_its_findings(self, tmp_path: Path) -> None:
        """Through a real terminal."""
        made = [
            line
            | {"data_wait_s": line["step_s"] / 3, "forward_s": 0.1, "backward_s": 0.1, "optimizer_s": 0.05}
            for line in lines()
        ]
        shown = in_a_terminal([str(write_run(tmp_path / "run", metrics=made))], 100, 40)
        last = shown[shown.rindex("╭") :]
        assert {len(line) for line in last.splitlines() if line.strip()} == {100}
        for part in ("100.0%  step 40/40", "MFU        40.0%", "2.0 GiB", "The step waits for data", "loader",
                     "finished at update 40"):  # fmt: skip
            assert part in last, part

    def test_a_failed_run_says_why(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        events = [EVENTS[0], {"event": "failed", "error": "the disk is full"}]
        assert main(["watch", str(write_run(tmp_path / "run", metrics=lines(), events=events))]) == 0
        assert "failed: the disk is full" in capsys.readouterr().out

    def test_a_killed_run_is_followed_no_further(self, nano: Nano, tmp_path: Path) -> None:
        recipe, run = nano.recipe(tmp_path), tmp_path / "run"
        nano.train(recipe, run, fault=Fault("kill_after", update=5, calls=0))
        watching = nano.warm.run("watch", run)
        assert watching.code == 0, watching.err
        assert "killed, or crashed; run its command again to resume it" in watching.out

    def test_an_rft_run_is_followed_round_by_round(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for place, name in enumerate(("round-1", "round-2")):
            path = tmp_path / "run" / name
            write_rft(path)
            shutil.rmtree(path / "train-samples")
            jsonl(
                path / "events.jsonl",
                [{"event": "training_on_samples", "at": 5.0, "why": "finished", "step": 9}],
            )
            jsonl(
                path / "evaluations.jsonl",
                [line | {"at": 6.0, "accuracy": line["accuracy"] + place / 10} for line in EVALUATIONS],
            )
            with Store(path / "samples.db") as store:
                source = store.open_source("model", {"seed": 0})
                store.put_questions([Question(id="q1", text="?", answer="1", meta={})])
                store.add(
                    source,
                    [
                        Sample(
                            "q1", n, "text", 5, None, None, "stop", n > 0, True, 1.0, "1", None, "key", 0, 0.0
                        )
                        for n in range(4)
                    ],
                )
            for file in (path, *path.iterdir()):
                os.utime(file, (1_700_000_000, 1_700_000_000))
        assert main(["watch", str(tmp_path / "run")]) == 0
        shown = capsys.readouterr().out
        for part in (
            "units, round-2",
            "accuracy of round-1 after RFT 63.0%",
            "1/1 questions  4 samples  75.0% correct",
            "accuracy after RFT 73.0%",
        ):
            assert part in shown

    def test_a_store_that_holds_no_samples_yet_is_no_error(self, tmp_path: Path) -> None:
        write_run(tmp_path / "run")
        with Store(tmp_path / "run" / "samples.db"):
            pass
        assert samples_of(tmp_path / "run") is None

    def test_it_follows_a_real_run_and_ends_with_it(self, nano: Nano, tmp_path: Path) -> None:
        recipe = nano.recipe(tmp_path, "train.steps=30")
        training = nano.start(recipe, tmp_path / "run")
        while not (tmp_path / "run" / "recipe.toml").exists():
            time.sleep(0.05)
        program = [sys.executable, "-m", "redline", "watch", str(tmp_path / "run")]
        watching = subprocess.run(program, capture_output=True, text=True, timeout=HUNG_S, check=False)
        assert training.wait().code == 0
        assert (watching.returncode, watching.stderr) == (0, "")
        steps = [int(step) for step in re.findall(r"^step (\d+)/30", watching.stdout, flags=re.M)]
        assert steps == sorted(set(steps))
        assert steps[-1] == 30
        assert "training begins" in watching.stdout
        assert "finished at update 30" in watching.stdout
