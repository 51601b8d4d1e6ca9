"""Who does the work of a run: its processes and its workers, which of them are slow, and which died. No torch, no HTML.

record/slowest.py says which process is slow. Workers do not wait for each other: a slow one delivers less than SLOW_RATE
of the samples/s of the median one.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from redline.record.read import Line, Run, number, table
from redline.record.slowest import slowest
from redline.record.units import DASH, exact, format_share
from redline.record.words import LOST, told

SLOW_RATE = 0.7
LISTED = 8
"""Processes to show, those that the others waited for longest first."""


class Member(NamedTuple):
    name: str
    state: str
    work: str
    note: str
    kind: str = ""
    """`bad` for what died or is slow."""


@dataclass(frozen=True)
class Crew:
    members: list[Member]
    said: list[str]
    """What a reader should know, most important first."""


def crew(run: Run) -> Crew | None:
    """None for one process without workers."""
    processes, workers = _processes(run), _workers(run.events)
    found = Crew(processes.members + workers.members, processes.said + workers.said)
    return found if found.members or found.said else None


def _processes(run: Run) -> Crew:
    last = run.attempts[-1] if run.attempts else {}
    count, hosts = int(number(last.get("world_size")) or 1), table(last.get("hosts"))
    if count < 2:
        return Crew([], [])
    found = slowest(run)
    members, said = [], []
    for one in found[:LISTED]:
        waited = f"the others waited for it {format_share(one.waited)} of the time"
        note = f"slowest in {one.often:.0%} of the updates; {waited}"
        state = "slow" if one.slow else "working"
        members.append(Member(one.process, state, "", note, "bad" if one.slow else ""))
        if one.slow:
            said.append(f"{one.process} is slow: {waited}")
    for event in run.events:
        if event["event"] == "process_died":
            members.append(Member("a process", "died", "", told("process_died", event), "bad"))
        if event["event"] in ("process_died", "resized"):
            said.append(told(event["event"], event))
    where = f"{count} processes" + (f" on {len(hosts)} machines" if len(hosts) > 1 else "")
    return Crew(members, said or ([f"{where}, none of them slow"] if found else [where]))


def _workers(events: list[Line]) -> Crew:
    """The workers, from the events `worker` and `workers`: what each delivered over all its lives, and how it stands."""
    found: dict[str, list[Line]] = {}
    for event in events:
        if event["event"] == "worker" and isinstance(event.get("name"), str):
            found.setdefault(event["name"], []).append(event)
        elif event["event"] == "workers":  # progress of the workers that are there
            for name, done in table(event.get("delivered")).items():
                if (own := found.get(name)) and own[-1].get("state") in ("joined", "working"):
                    own[-1] = {**own[-1], **table(done), "state": "working"}
    rates = {name: rate for name, own in found.items() if (rate := _rate(own)) is not None}
    middle = median(rates.values()) if len(rates) > 1 else 0.0
    members, said = [], []
    for name, own in found.items():
        state, rate = str(own[-1].get("state", DASH)), rates.get(name)
        lost = Counter(str(event["state"]) for event in own if event.get("state") in LOST)
        slow = rate is not None and rate < SLOW_RATE * middle
        notes = [f"{state} {n} times" if n > 1 else f"{state} once" for state, n in lost.items()]
        notes += [f"is slow: the median worker delivers {exact(middle)} samples/s"] if slow else []
        notes += [str(own[-1]["why"])] if own[-1].get("why") else []
        work = f"{sum(number(e.get('samples')) or 0 for e in own):,.0f} samples"
        speed = f"{work}, {exact(rate)} samples/s" if rate is not None else ""
        members.append(Member(name, state, speed, "; ".join(notes), "bad" if lost or slow else ""))
        said += [f"{name} {note}" for note in notes if lost or slow][:1]
    return Crew(members, said)


def _rate(own: list[Line]) -> float | None:
    spent_s = sum(number(event.get("seconds")) or 0.0 for event in own)
    return sum(number(event.get("samples")) or 0.0 for event in own) / spent_s if spent_s else None
