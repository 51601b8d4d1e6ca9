"""Who does the work: the slow process and the slow worker are named, and those that died."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_folders import lines, write_run

from redline.cli.live import Seen, figures
from redline.cli.watch import _Notes
from redline.record.read import read_run
from redline.record.slowest import waited_for
from redline.record.words import told
from redline.report.crew import Crew, crew
from redline.report.page import page
from redline.report.terminal import print_report
from redline.report.view import RunView, event_rows
from redline.train.instruments import own_time, slowest
from redline.train.process import Process

HOSTS = {"node-a": 2, "node-b": 2}


def test_every_process_learns_the_time_of_all_from_one_sum() -> None:
    taken = (
        {"forward_s": 1.0, "communication_s": 9.0},
        {"forward_s": 2.0, "data_wait_s": 4.0},
        {"backward_s": 2.0},
    )
    places = [own_time(Process(rank, 3, torch.device("cpu")), line) for rank, line in enumerate(taken)]
    together = [sum(column) for column in zip(*places, strict=True)]
    assert together == [1.0, 6.0, 2.0]
    assert slowest(together) == {"slowest_rank": 1, "slowest_s": 6.0, "others_s": 1.5}


def test_one_process_and_a_first_update_have_no_slowest() -> None:
    assert own_time(Process(0, 1, torch.device("cpu")), {"forward_s": 1.0}) == []
    assert slowest([]) == {}
    assert slowest([0.0, 0.0]) == {}


def test_a_process_is_placed_on_its_host() -> None:
    known = [{"step_s": 1.0, "slowest_rank": rank, "slowest_s": 0.5, "others_s": 0.1} for rank in (1, 2)]
    assert [one.process for one in waited_for(known, HOSTS)] == ["process 1 on node-a", "process 2 on node-b"]
    for hosts in ({"here": 2}, {}):
        assert waited_for(known[:1], hosts)[0].process == "process 1"


def of_four(parent: Path, slow_s: float, *, workers: Sequence[dict[str, Any]] = ()) -> Path:
    """Updates of half a second; process 2 takes slow_s of it in every update but each fourth, the others 0.3 s."""
    found = lines()
    for line in found:
        rank = 0 if line["step"] % 4 == 0 else 2
        line |= {"slowest_rank": rank, "slowest_s": slow_s if rank else 0.301, "others_s": 0.3}
    begun = {"at": 1.0, "event": "start", "step": 0, "world_size": 4, "hosts": HOSTS}
    told_ = [{"at": 2.0, "event": "worker", **one} for one in workers]
    return write_run(parent / "run", metrics=found, events=[begun, *told_])


def crew_of(folder: Path) -> Crew:
    found = crew(read_run(folder))
    assert found is not None
    return found


def test_a_slow_process_is_named_with_the_time_that_the_others_waited(tmp_path: Path) -> None:
    """35 warm updates of 0.5 s: 26 or 27 of them wait 0.1 s for process 2."""
    run = read_run(of_four(tmp_path, 0.4))
    found, (first, second) = crew_of(run.path), waited_for(run.warm, HOSTS)
    assert (first.process, second.process) == ("process 2 on node-b", "process 0 on node-a")
    waits = sum(line["slowest_rank"] == 2 for line in run.warm)
    assert (first.often, first.waited) == pytest.approx((waits / 35, waits * 0.1 / (35 * 0.5)))
    assert found.said == [
        f"process 2 on node-b is slow: the others waited for it {100 * first.waited:.1f}% of the time"
    ]
    assert [(one.name, one.state, one.kind) for one in found.members] == [
        ("process 2 on node-b", "slow", "bad"),
        ("process 0 on node-a", "working", ""),
    ]


def test_processes_that_are_equally_fast_are_not_called_slow(tmp_path: Path) -> None:
    found = crew_of(of_four(tmp_path, 0.301))
    assert found.said == ["4 processes on 2 machines, none of them slow"]
    assert not any(one.kind for one in found.members)


def test_processes_that_died_and_runs_that_shrank_are_told(tmp_path: Path) -> None:
    begun = {"at": 1.0, "event": "start", "step": 0, "world_size": 2, "hosts": HOSTS}
    died = {"at": 2.0, "event": "process_died", "error": "process 1 was killed by SIGKILL on node-b"}
    shrunk = {"at": 3.0, "event": "resized", "step": 7, "world_size_before": 4, "world_size": 2}
    found = crew_of(write_run(tmp_path / "run", events=[begun, died, shrunk]))
    assert [(one.state, one.note) for one in found.members] == [("died", died["error"])]
    assert found.said == [
        died["error"],
        "the number of processes changed from 4 to 2 at update 7; the batch stays the same",
    ]


WORKERS = (
    {"name": "worker-1", "state": "joined", "samples": 0, "seconds": 0.0},
    {"name": "worker-2", "state": "joined", "samples": 0, "seconds": 0.0},
    {"name": "worker-3", "state": "joined", "samples": 0, "seconds": 0.0},
    {"name": "worker-2", "state": "died", "samples": 40, "seconds": 10.0, "why": "it was killed"},
    {"name": "worker-2", "state": "joined", "samples": 0, "seconds": 0.0},
    {"name": "worker-1", "state": "ended", "samples": 200, "seconds": 50.0},
    {"name": "worker-2", "state": "ended", "samples": 160, "seconds": 40.0},
    {"name": "worker-3", "state": "ended", "samples": 50, "seconds": 50.0},
)


def test_workers_have_their_samples_a_second_and_their_deaths(tmp_path: Path) -> None:
    found = {one.name: one for one in crew_of(of_four(tmp_path, 0.301, workers=WORKERS)).members}
    assert found["worker-1"][1:] == ("ended", "200 samples, 4 samples/s", "", "")
    assert found["worker-2"].work == "200 samples, 4 samples/s"
    assert (found["worker-2"].note, found["worker-2"].kind) == ("died once", "bad")
    assert found["worker-3"].note == "is slow: the median worker delivers 4 samples/s"


def test_workers_that_are_there_have_the_samples_a_second_of_the_last_minute_told(tmp_path: Path) -> None:
    minute = {"worker-1": {"samples": 240, "seconds": 60.0}, "worker-2": {"samples": 20, "seconds": 5.0}}
    told_of = {"event": "workers", "workers": 2, "samples_per_s": 8.0, "delivered": minute}
    later = {**told_of, "delivered": {"worker-1": {"samples": 480, "seconds": 120.0}, "worker-9": 3}}
    joined = [{"event": "worker", **event} for event in WORKERS[:5]]
    run = of_four(tmp_path, 0.301, workers=[*joined, told_of, later])
    found = {one.name: one for one in crew_of(run).members if one.name.startswith("worker")}
    assert found["worker-1"][1:3] == ("working", "480 samples, 4 samples/s")
    assert found["worker-2"][1:3] == ("working", "60 samples, 4 samples/s")
    assert found["worker-3"][1:3] == ("joined", "")
    assert "worker-9" not in found
    assert told("workers", told_of) == "samples from 2 workers: 8/s"


def test_the_events_of_workers_are_told_and_the_lost_ones_in_red(tmp_path: Path) -> None:
    assert told("worker", dict(WORKERS[0])) == "worker-1 joined"
    assert told("worker", dict(WORKERS[3])) == "worker-2 died after 10 s and 40 samples: it was killed"
    assert told("worker", dict(WORKERS[5])) == "worker-1 ended after 200 samples in 50 s"
    assert told("extended", {"changed": {"train.steps": [50, 80]}}) == "extended: train.steps 50 to 80"
    rows = event_rows(read_run(of_four(tmp_path, 0.4, workers=WORKERS)))
    assert [text for _, text, kind in rows if kind] == [
        "worker-2 died after 10 s and 40 samples: it was killed"
    ]


def test_page_terminal_and_watch_show_them(tmp_path: Path) -> None:
    shown = RunView(read_run(of_four(tmp_path, 0.4, workers=WORKERS)))
    console = Console(record=True, width=160, file=io.StringIO())
    print_report([shown], console)
    for text in (page([shown]), console.export_text()):
        for part in (
            "Processes and workers",
            "process 2 on node-b is slow",
            "worker-3",
            "4 samples/s",
            "died once",
        ):
            assert part in text
    notes: list[str] = []

    class View:
        def event(self, kind: str, facts: dict[str, Any]) -> None:
            notes.append(facts["text"]) if kind == "note" else None

        def metrics(self, line: dict[str, Any]) -> None: ...
        def close(self) -> None: ...

    told_ = _Notes(View())
    told_.tell(shown)
    told_.tell(shown)
    assert sum("process 2 on node-b is slow" in note for note in notes) == 1


def test_the_live_view_names_the_slow_process(tmp_path: Path) -> None:
    run, seen = read_run(of_four(tmp_path, 0.4)), Seen()
    seen.begin(run.events[0])
    for line in run.metrics:
        seen.add(line)
    (row,) = [row for row in figures(seen) if row[0] == "slowest"]
    assert row[1] == "process 2 on node-b"
    assert row[2].startswith("slow: the others wait for it")
