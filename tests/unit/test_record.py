"""The run folder: torn lines, damaged files, the lock, metrics cut back to a checkpoint, events that stay."""

import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from redline.errors import DataError, StorageError
from redline.record.observe import Observers
from redline.record.run import LineWriter, RunFolder, read_lines


def test_lines_come_back_as_they_went_in(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 0.1 + 0.2, "name": "ä\n✓"}, {"step": 2, "loss": None}]
    writer = LineWriter(path)
    for line in lines:
        writer.append(line)
    assert read_lines(path) == lines, "whole before it is closed"
    writer.close()
    assert path.read_bytes().count(b"\n") == 2


def test_a_disk_that_takes_half_a_line_leaves_room_for_the_line_that_says_so(tmp_path: Path) -> None:
    """A limit on the size of files that falls inside the third line, and is lifted after it: the operating system takes
    a part of the line first and then refuses the rest."""
    path = tmp_path / "events.jsonl"
    lines = [{"event": "checkpoint", "step": step, "text": "x" * 50} for step in range(3)]
    length = len(json.dumps(lines[0])) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer, other = LineWriter(path), LineWriter(path)
    writer.append(lines[0])
    other.append(lines[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * length + 20, hard))
    try:
        with pytest.raises(StorageError, match=r"events\.jsonl cannot be written"):
            writer.append(lines[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == 2 * length
    other.append({"event": "failed"})
    assert read_lines(path) == [*lines[:2], {"event": "failed"}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_lines(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\xe2\x9c", b"{"])
@pytest.mark.parametrize("before", [b'{"step": 1, "event": "a"}\n', b""])
def test_a_torn_last_line_is_left_out_and_gone_when_the_folder_is_opened(tmp_path, before, torn):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for path in (folder.metrics_path, folder.events_path):
        path.write_bytes(before + torn)
    whole = [{"step": 1, "event": "a"}] if before else []
    assert read_lines(folder.metrics_path) == whole
    with folder:
        assert folder.metrics_path.read_bytes() == folder.events_path.read_bytes() == before
        writer = LineWriter(folder.metrics_path)
        writer.append({"step": 3, "again": True})
        writer.close()
        folder.event("resume")
    assert read_lines(folder.metrics_path) == [*whole, {"step": 3, "again": True}]
    assert [e["event"] for e in read_lines(folder.events_path)] == ["a"] * len(whole) + ["resume"]


def test_what_a_killed_process_was_writing_is_swept_away(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        (folder.path / ".plan.json.123.tmp").write_text("half")
        (folder.checkpoints_path / ".best.json.123.tmp").write_text("half")
        (folder.path / ".adapter.tmp").mkdir()
        (folder.path / ".adapter.tmp" / "adapter_config.json").write_text("half")
    with RunFolder(tmp_path / "run") as folder:
        assert not list(folder.path.rglob("*.tmp"))


@pytest.mark.parametrize(
    "damage", [b"{oops}\n", b"\xff\xff\n", b"3\n", b"[1]\n", b"null\n", b'{"step": 1}{"step": 2}\n']
)
def test_damage_before_the_last_line_is_said_not_skipped(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl( line 2)? is damaged.*move it away") as caught:
        read_lines(path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"), RunFolder(tmp_path / "file"):
        pass
    with pytest.raises(StorageError, match="cannot be written"):
        LineWriter(tmp_path)


def test_metrics_are_cut_back_to_the_step_and_stay_whole(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        assert folder.cut_metrics(0) == 0
        text = "".join(json.dumps({"step": step, "loss": step / 7}) + "\n" for step in range(1, 11))
        folder.metrics_path.write_text(text + '{"step": 11, "lo')
        assert folder.cut_metrics(6) == 4
        assert read_lines(folder.metrics_path) == [{"step": step, "loss": step / 7} for step in range(1, 7)]
        before = folder.metrics_path.read_bytes()
        assert folder.cut_metrics(6) == 0
        assert folder.metrics_path.read_bytes() == before
        assert folder.cut_metrics(0) == 6
        assert folder.metrics_path.read_bytes() == b""
        assert sorted(p.name for p in folder.path.iterdir()) == [".lock", "checkpoints", "metrics.jsonl"]


def test_events_are_stamped_in_order_and_never_cut(tmp_path):
    for attempt in range(2):
        with RunFolder(tmp_path / "run") as folder:
            folder.event("start", attempt=attempt)
            folder.event("checkpoint", step=5)
            folder.cut_metrics(0)
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert [(e["event"], e.get("attempt")) for e in events] == [
        ("start", 0),
        ("checkpoint", None),
        ("start", 1),
        ("checkpoint", None),
    ]
    assert [e["at"] for e in events] == sorted(e["at"] for e in events)


HOLD = """
import sys
from pathlib import Path
from redline.record.run import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_owner_is_refused_until_the_first_leaves_or_dies(tmp_path):
    with (
        RunFolder(tmp_path / "run"),
        pytest.raises(StorageError, match="in use by another process"),
        RunFolder(tmp_path / "run"),
    ):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match="give another folder with --run"), RunFolder(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with RunFolder(tmp_path / "run"):
        pass


def test_a_folder_has_begun_with_its_first_line_or_checkpoint(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.event("failed", error="no corpus")
        assert not folder.has_begun()
        LineWriter(folder.metrics_path).append({"step": 1})
        assert folder.has_begun()
    with RunFolder(tmp_path / "other") as folder:
        (folder.checkpoints_path / "step-00000001").mkdir()
        assert folder.has_begun()


def test_a_folder_with_other_files_is_not_taken(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("words")
    with pytest.raises(StorageError, match="holds files that are not a run's"), RunFolder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_folder_whose_owner_was_killed_while_it_made_it_is_taken(tmp_path: Path) -> None:
    """At every change to the disk, until none is left."""
    dying = (
        "import sys; sys.path.insert(0, sys.argv[1]); import faults; from pathlib import Path;"
        "from redline.record.run import RunFolder;"
        "faults.kill_at(int(sys.argv[2]), under=sys.argv[3]); RunFolder(Path(sys.argv[3])).__enter__()"
    )
    faults, codes = Path(__file__).parents[1] / "integration", []
    while not codes or codes[-1]:
        run = tmp_path / str(len(codes))
        codes.append(
            subprocess.run([sys.executable, "-c", dying, faults, str(len(codes) + 1), run]).returncode
        )
        with RunFolder(run) as folder:
            assert folder.checkpoints_path.is_dir()
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 3, "the folder, the lock, the folder of checkpoints"


def test_observers_are_called_by_one_thread_at_a_time():
    """Workers on Ray tell events from the thread that draws, while the trainer or the scorer writes lines. An observer may
    cause an event itself."""
    free: list[bool] = []
    own: list[bool] = []

    class Watching:
        def metrics(self, line):
            own.append(both._lock.acquire(blocking=False))
            if own[-1]:
                both._lock.release()
            other = threading.Thread(target=lambda: free.append(both._lock.acquire(blocking=False)))
            other.start()
            other.join()

        def event(self, kind, facts):
            self.metrics(facts)

    both = Observers([Watching()])
    both.metrics({})
    both.event("stage", {})
    assert free == [False, False]
    assert own == [True, True]
