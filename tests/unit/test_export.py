"""Exporters: what TensorBoard and W&B read back, what a resume does to it, and that a run never feels
them."""

import errno
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rft_model import planned

from redline.errors import ConfigError, MissingExtra, TrainingError
from redline.record import export
from redline.record.export import ExportedRun, Exporter, exported_name, make_exporters
from redline.train.open_run import open_run
from redline.train.process import Process


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 / step, "tokens_per_s": 1000.0 * step, "mfu": None, **more}


def make(name: str, folder: Path, said: list[str], resume_step: int = 0) -> Exporter:
    run = ExportedRun(folder, "nano", {"lr": 0.1}, said.append, resume_step)
    return make_exporters([name], run)[0]


class FakeSink:
    """Keeps lines; waits for `gate` before the first, and raises at step `fails_at`."""

    title = "Fake"

    def __init__(self, fails_at: int = 0, gate: threading.Event | None = None) -> None:
        self.fails_at, self.gate, self.steps, self.closed = fails_at, gate, [], False

    def open(self) -> None:
        if self.gate:
            self.gate.wait()

    def write(self, at: float, line: dict[str, Any]) -> None:
        if line["step"] == self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.steps.append(line["step"])

    def close(self) -> None:
        self.closed = True


def until_dead(exporter: Exporter) -> None:
    exporter._thread.join()


def test_names() -> None:
    assert exported_name("loss") == "train/loss"
    assert exported_name("valid_bits_per_byte") == "valid/bits_per_byte"


def test_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        make("tensorbord", tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"redline\[wandb\]"):
        make("wandb", tmp_path, [])


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _needs_it(self) -> None:
        pytest.importorskip("tensorboard")

    @staticmethod
    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        accumulator.Reload()
        return {
            tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }

    def test_round_trip(self, tmp_path: Path) -> None:
        said: list[str] = []
        exporter = make("tensorboard", tmp_path, said)
        before = time.time()
        exporter.metrics(line(1))
        exporter.event("checkpoint", {"step": 1})
        exporter.metrics(line(2, valid_loss=4.5, valid_perplexity=90.0, skipped=True))
        exporter.close()
        assert said == []
        assert self.read(tmp_path) == {
            "train/loss": [(1, 10.0), (2, 5.0)],
            "train/tokens_per_s": [(1, 1000.0), (2, 2000.0)],
            "train/skipped": [(2, 1.0)],
            "valid/loss": [(2, 4.5)],
            "valid/perplexity": [(2, 90.0)],
        }
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        events = list(EventFileLoader(str(next((tmp_path / "tensorboard").iterdir()))).Load())
        assert all(before - 1 <= event.wall_time <= time.time() for event in events)

    def test_resume_replaces_the_orphaned_steps(self, tmp_path: Path) -> None:
        first = make("tensorboard", tmp_path, [])
        for step in range(1, 8):
            first.metrics(line(step))
        first.close()
        resumed = make("tensorboard", tmp_path, [], resume_step=4)
        for step in range(5, 7):  # a shorter attempt: step 7 of the first one must go as well
            resumed.metrics(line(step, loss=1.0))
        resumed.close()
        assert len(list((tmp_path / "tensorboard").iterdir())) == 2
        read = self.read(tmp_path)
        assert [step for step, _ in read["train/loss"]] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in read["train/loss"]][3:] == [2.5, 1.0, 1.0]

    def test_unwritable_folder_is_said_once(self, tmp_path: Path) -> None:
        (tmp_path / "tensorboard").write_text("in the way")
        said: list[str] = []
        exporter = make("tensorboard", tmp_path, said)
        until_dead(exporter)
        exporter.metrics(line(1))
        exporter.close()
        assert len(said) == 1
        assert "TensorBoard export stopped (FileExistsError" in said[0]


class TestMLflow:
    @pytest.fixture
    def client(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # without its server and its database
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
        return mlflow.MlflowClient()

    def test_round_trip_and_resume(self, tmp_path: Path, client: Any) -> None:
        said: list[str] = []
        for step, resume_step in ((1, 0), (2, 1)):
            exporter = make("mlflow", tmp_path, said, resume_step=resume_step)
            exporter.metrics(line(step))
            exporter.close()
        assert said == []
        run = client.get_run((tmp_path / "mlflow_id").read_text())
        assert (run.info.run_name, run.info.status) == ("nano", "FINISHED")
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(m.step, m.value) for m in history] == [(1, 10.0), (2, 5.0)]


class TestWandb:
    @pytest.fixture(autouse=True)
    def _alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """No key, no settings of the person who runs the tests, and nothing that would report home."""
        wandb = pytest.importorskip("wandb")
        for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
        monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        # were anything sent, it would not leave this machine
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        yield
        wandb.teardown()

    def test_offline_run_and_its_resume(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setattr(export, "CLOSE_LIMIT_S", 300.0)  # a busy machine starts W&B slowly
        said: list[str] = []
        for resume_step in (0, 3):
            exporter = make("wandb", tmp_path, said, resume_step)
            for step in range(resume_step + 1, resume_step + 4):
                exporter.metrics(line(step))
            exporter.close()
        assert said == []
        run_id = (tmp_path / "wandb_id").read_text()
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        assert files
        assert {path.name for path in files} == {f"run-{run_id}.wandb"}
        assert any(b"train/loss" in path.read_bytes() for path in files)

    def test_without_a_key_it_goes_offline_and_says_so(self, tmp_path: Path) -> None:
        said: list[str] = []
        exporter = make("wandb", tmp_path, said)
        exporter.metrics(line(1))
        exporter.close()
        assert len(said) == 1
        assert said[0].startswith("W&B has no API key: writing offline")
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

    def test_steps_that_the_server_holds_are_not_logged_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stand-in for the server's answer: this run already has steps up to 6."""
        logged: list[int] = []

        class Run:
            starting_step = 7

            def log(self, values: dict[str, float], step: int) -> None:
                assert values == {"train/loss": 10.0 / step, "train/tokens_per_s": 1000.0 * step}
                logged.append(step)

            def finish(self) -> None:
                logged.append(-1)

        given: dict[str, Any] = {}
        monkeypatch.setattr("wandb.init", lambda **options: given.update(options) or Run())
        monkeypatch.setenv("WANDB_MODE", "offline")
        said: list[str] = []
        exporter = make("wandb", tmp_path, said, resume_step=4)
        for step in range(5, 10):
            exporter.metrics(line(step))
        exporter.close()
        assert logged == [7, 8, 9, -1]
        assert said == ["W&B has steps 5 to 6 from before the resume: they are not logged again"]
        assert (given["project"], given["resume"], given["mode"], given["config"]) == (
            "redline",
            "allow",
            "offline",
            {"lr": 0.1},
        )
        assert given["id"] == (tmp_path / "wandb_id").read_text()


class TestExporter:
    def test_failure_is_said_once_and_drops_the_exporter(self) -> None:
        said: list[str] = []
        sink = FakeSink(fails_at=3)
        exporter = Exporter(sink, said.append)
        for step in range(1, 4):
            exporter.metrics(line(step))
        until_dead(exporter)
        for step in range(4, 50):
            exporter.metrics(line(step))
        exporter.close()
        assert sink.steps == [1, 2]
        assert len(said) == 1
        assert "Fake export stopped (OSError: [Errno 28] No space left on device)" in said[0]

    def test_failure_with_a_full_queue_is_not_called_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export, "QUEUE_LINES", 3)
        said: list[str] = []
        gate = threading.Event()
        exporter = Exporter(FakeSink(fails_at=1, gate=gate), said.append)
        for step in range(1, 4):
            exporter.metrics(line(step))
        gate.set()
        until_dead(exporter)
        exporter.metrics(line(4))
        exporter.close()
        assert ["export stopped" in text for text in said] == [True]

    def test_close_drains(self) -> None:
        said: list[str] = []
        gate = threading.Event()
        sink = FakeSink(gate=gate)
        exporter = Exporter(sink, said.append)
        for step in range(1, 2001):
            exporter.metrics(line(step))
        gate.set()
        exporter.close()
        assert sink.steps == list(range(1, 2001))
        assert sink.closed
        assert said == []

    def test_a_slow_target_loses_lines_and_that_is_said_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export, "QUEUE_LINES", 10)
        said: list[str] = []
        gate = threading.Event()
        sink = FakeSink(gate=gate)
        exporter = Exporter(sink, said.append)
        for step in range(1, 26):
            exporter.metrics(line(step))
        gate.set()
        exporter.close()
        assert sink.steps == list(range(1, 11))
        (warned,) = said
        assert warned.startswith("Fake is slower than the run: 10 lines are waiting, so some are left out")

    def test_close_gives_up_after_its_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(export, "CLOSE_LIMIT_S", 0.2)
        said: list[str] = []
        gate = threading.Event()
        exporter = Exporter(FakeSink(fails_at=1, gate=gate), said.append)
        exporter.metrics(line(1))
        exporter.close()
        gate.set()
        until_dead(exporter)  # its late failure is not said a second time
        assert len(said) == 1
        assert "Fake did not finish within 0 s of the end" in said[0]

    @pytest.mark.timing
    def test_metrics_returns_in_microseconds(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        exporter = make("tensorboard", tmp_path, [])
        took_s = []
        for step in range(1, 1001):
            given = line(step)
            started = time.perf_counter()
            exporter.metrics(given)
            took_s.append(time.perf_counter() - started)
        exporter.close()
        assert statistics.median(took_s) < 50e-6


def test_what_watches_a_run_is_closed_when_the_run_ends_even_if_it_fails(tmp_path: Path) -> None:
    """An exporter has lines to send, and the live view a terminal to leave."""
    seen: list[str] = []

    class Watching:
        def metrics(self, line: dict[str, Any]) -> None: ...
        def event(self, kind: str, facts: dict[str, Any]) -> None:
            seen.append(kind)

        def close(self) -> None:
            seen.append("closed")

    recipe, plan, _ = planned("nano")
    alone = Process(0, 1, torch.device("cpu"))

    def run() -> None:
        with open_run(recipe, plan, tmp_path / "run", alone, observers=lambda step: [Watching()]) as opened:
            opened.event("told")
            raise TrainingError("lost")

    with pytest.raises(TrainingError, match="lost"):
        run()
    assert seen == ["told", "closed"]
