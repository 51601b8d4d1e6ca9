"""Who does the work of a run: its processes and its workers, which of them are slow, and which died. No torch, no HTML.

A process is slow if it was the slowest in most of the warm updates and the others waited for it for SLOW_SHARE of their
time. Workers do not wait for each other: a slow one delivers less than SLOW_RATE of the samples/s of the middle one.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from redline.record.read import Line, Run, number, table, values
from redline.record.units import DASH, exact, format_share
from redline.record.words import LOST, told

SLOW_SHARE = 0.05
SLOW_RATE = 0.7
LISTED = 8
"""Processes that are shown, those first that the others waited for longest."""


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
    found = [part for part in (_processes(run), _workers(run.events)) if part is not None]
    if not found:
        return None
    return Crew(
        [one for part in found for one in part.members], [text for part in found for text in part.said]
    )


def place(rank: int, hosts: dict[str, Any]) -> str:
    """`process 9 on node-b`; without the host where there is one only."""
    first = 0
    for host, count in hosts.items():
        first += int(number(count) or 0)
        if rank < first:
            return f"process {rank} on {host}" if len(hosts) > 1 else f"process {rank}"
    return f"process {rank}"


def waited_for(lines: list[Line]) -> dict[int, tuple[float, float]]:
    """Of each process that was slowest in some of the updates: the share of them, and of the time that the others waited
    for it; the longest wait first."""
    known = [line for line in lines if number(line.get("slowest_rank")) is not None]
    total_s, lost_s = sum(values(known, "step_s")), dict[int, list[float]]()
    for line in known:
        waited = (number(line.get("slowest_s")) or 0.0) - (number(line.get("others_s")) or 0.0)
        lost_s.setdefault(int(line["slowest_rank"]), []).append(waited)
    longest = sorted(lost_s.items(), key=lambda one: -sum(one[1])) if total_s else []
    return {rank: (len(waits) / len(known), sum(waits) / total_s) for rank, waits in longest}


def is_slow(share_of_updates: float, share_waited: float) -> bool:
    return share_of_updates > 0.5 and share_waited >= SLOW_SHARE


def _processes(run: Run) -> Crew | None:
    last = run.attempts[-1] if run.attempts else {}
    count, hosts = int(number(last.get("world_size")) or 1), table(last.get("hosts"))
    if count < 2:
        return None
    since = number(last.get("step")) or 0
    found = waited_for([line for line in run.warm if line["step"] > since])
    members, said = [], []
    for rank, (often, waited) in list(found.items())[:LISTED]:
        slow = is_slow(often, waited)
        note = f"slowest in {often:.0%} of the updates; the others waited for it {format_share(waited)} of the time"
        members.append(
            Member(place(rank, hosts), "slow" if slow else "working", "", note, "bad" if slow else "")
        )
        if slow:
            said.append(
                f"{place(rank, hosts)} is slow: the others waited for it {format_share(waited)} of the time"
            )
    for event in run.events:
        if event["event"] == "process_died":
            members.append(Member("a process", "died", "", told("process_died", event), "bad"))
        if event["event"] in ("process_died", "resized"):
            said.append(told(event["event"], event))
    where = f"{count} processes" + (f" on {len(hosts)} machines" if len(hosts) > 1 else "")
    return Crew(members, said or ([f"{where}, none of them slow"] if found else [where]))


def _workers(events: list[Line]) -> Crew | None:
    """From the events `worker` and `workers`: what each delivered over all its lives, and how it stands."""
    found: dict[str, list[Line]] = {}
    for event in events:
        if event["event"] == "worker" and isinstance(event.get("name"), str):
            found.setdefault(event["name"], []).append(event)
        elif event["event"] == "workers":  # how far those have come that are there
            for name, done in table(event.get("delivered")).items():
                if (own := found.get(name)) and own[-1].get("state") in ("joined", "working"):
                    own[-1] = {**own[-1], **table(done), "state": "working"}
    if not found:
        return None
    rates = {name: rate for name, own in found.items() if (rate := _rate(own)) is not None}
    middle = median(rates.values()) if len(rates) > 1 else 0.0
    members, said = [], []
    for name, own in found.items():
        state, rate = str(own[-1].get("state", DASH)), rates.get(name)
        lost = Counter(str(event["state"]) for event in own if event.get("state") in LOST)
        slow = rate is not None and rate < SLOW_RATE * middle
        notes = [f"{state} {n} times" if n > 1 else f"{state} once" for state, n in lost.items()]
        notes += [f"is slow: the middle worker delivers {exact(middle)} samples/s"] if slow else []
        notes += [str(own[-1]["why"])] if own[-1].get("why") else []
        work = f"{sum(number(e.get('samples')) or 0 for e in own):,.0f} samples"
        speed = f"{work}, {exact(rate)} samples/s" if rate is not None else ""
        members.append(Member(name, state, speed, "; ".join(notes), "bad" if lost or slow else ""))
        said += [f"{name} {note}" for note in notes if lost or slow][:1]
    return Crew(members, said)


def _rate(own: list[Line]) -> float | None:
    """Samples a second over all lives of a worker, as far as they are told."""
    spent_s = sum(number(event.get("seconds")) or 0.0 for event in own)
    return sum(number(event.get("samples")) or 0.0 for event in own) / spent_s if spent_s else None
