"""Which process of a run is slow: who was the slowest in how many updates, and how long the others waited for it.

A process is slow if it was the slowest in most of the warm updates and the others waited for it for SLOW_SHARE of their
time.
"""

from typing import Any, NamedTuple

from redline.record.read import Line, Run, number, table, values

SLOW_SHARE = 0.05


class Slowest(NamedTuple):
    process: str
    """`process 9 on node-b`; without the host where there is one only."""
    often: float
    """Share of the updates in which it was the slowest."""
    waited: float
    """Share of the time that the others waited for it."""

    @property
    def slow(self) -> bool:
        return self.often > 0.5 and self.waited >= SLOW_SHARE


def slowest(run: Run) -> list[Slowest]:
    """The processes of the last attempt that were slowest in some of the updates, the longest wait first."""
    last = run.attempts[-1] if run.attempts else {}
    since, hosts = number(last.get("step")) or 0, table(last.get("hosts"))
    return waited_for([line for line in run.warm if line["step"] > since], hosts)


def waited_for(lines: list[Line], hosts: dict[str, Any]) -> list[Slowest]:
    known = [line for line in lines if number(line.get("slowest_rank")) is not None]
    total_s, lost_s = sum(values(known, "step_s")), dict[int, list[float]]()
    for line in known:
        waited = (number(line.get("slowest_s")) or 0.0) - (number(line.get("others_s")) or 0.0)
        lost_s.setdefault(int(line["slowest_rank"]), []).append(waited)
    longest = sorted(lost_s.items(), key=lambda one: -sum(one[1])) if total_s else []
    return [
        Slowest(_place(rank, hosts), len(waits) / len(known), sum(waits) / total_s) for rank, waits in longest
    ]


def _place(rank: int, hosts: dict[str, Any]) -> str:
    first = 0
    for host, count in hosts.items():
        first += int(number(count) or 0)
        if rank < first and len(hosts) > 1:
            return f"process {rank} on {host}"
    return f"process {rank}"
