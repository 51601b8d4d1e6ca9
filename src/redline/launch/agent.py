"""Several machines: torch's elastic agent (what torchrun runs on every node) with our processes as its workers.

    run_on_nodes(Nodes(least=1, most=2, endpoint="10.0.0.1:29400", job="..."), nproc, arguments, run)

The agents meet at the endpoint, which one of them holds, and give every process its place. A lost node ends the step: the
processes of the others fail, their agents meet again without it, and the run resumes from the last checkpoint. When a
node comes, the processes save a checkpoint first. What processes.py says of failures, signals and running out of memory
holds on every node. The nodes share the run folder. Left out: a node that holds the endpoint and is lost; the same command
on all nodes resumes.
"""

import ipaddress
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server import api as elastic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from redline.errors import MachineError, RedlineError
from redline.launch import processes
from redline.record.run import RunFolder
from redline.train.places import step_folders
from redline.train.stop import handled_by

RESTARTS = 3
"""Most restarts without a new checkpoint between them."""
TIMES_S = {"join_timeout": 600}
"""How long to wait for enough nodes. Torch waits 30 s for more of them, and gives up one that is silent for 15 s."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    least: int
    most: int
    endpoint: str
    job: str
    """Nodes that give the same endpoint and job belong together."""


class Stopped(BaseException):
    """Somebody asked this node to stop, and its processes have. Not an Exception: torch would catch that."""


def run_on_nodes(nodes: Nodes, nproc: int, arguments: Sequence[str], run: Path) -> int:
    """Be this node's agent until the job ends. A user's error is raised here; any other is printed."""
    again = "run the same command on every node and it resumes from the last checkpoint"
    try:
        return _run_agent(_meet(nodes), nodes, nproc, arguments, run)
    except rendezvous.RendezvousClosedError:
        raise MachineError(f"another node ended the job, and what it printed says why; {again}") from None
    except rendezvous.RendezvousTimeoutError:
        few = f"fewer than {nodes.least} nodes came to {nodes.endpoint} within {TIMES_S['join_timeout']} s"
        raise MachineError(f"{few}: {again}") from None
    except (rendezvous.RendezvousConnectionError, DistError):  # the second where ranks are given out
        silent = f"nothing answers at {nodes.endpoint}, which the node of that name holds"
        raise MachineError(f"{silent}: check that it runs; {again}") from None


def _run_agent(
    handler: DynamicRendezvousHandler, nodes: Nodes, nproc: int, arguments: Sequence[str], run: Path
) -> int:
    agent = Agent(handler, nproc, arguments, run)
    try:
        with handled_by(agent.request_stop, *processes.STOPS):
            agent.run()
    except Stopped:
        if nodes.least < nodes.most:  # the others continue
            return agent.code
    except RedlineError:
        handler.shutdown()
        raise
    handler.shutdown()
    return agent.code


def own_address(host: str) -> str:
    """Where the other nodes reach this one: the address from which it reaches the host. The host itself may know its name
    as a loopback address (Debian writes that into /etc/hosts); there it is the name that the others know."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:  # sends nothing
        try:
            towards.connect((host, 1))
        except OSError as error:
            raise MachineError(f"--rdzv: there is no way to {host} from here: {error.strerror}") from error
        own = towards.getsockname()[0]
    return host if ipaddress.ip_address(own).is_loopback else own


def _meet(nodes: Nodes) -> DynamicRendezvousHandler:
    host, _, port = nodes.endpoint.rpartition(":")
    own = own_address(host)
    meeting = rendezvous.RendezvousParameters(
        "c10d", nodes.endpoint, nodes.job, nodes.least, nodes.most, own, **TIMES_S
    )
    backend, store = create_backend(meeting)
    count = str(nodes.least) if nodes.least == nodes.most else f"{nodes.least} to {nodes.most}"
    _say(f"waiting for {count} nodes at {host}:{getattr(store, 'port', port)}")
    return create_handler(store, backend, meeting)


class Agent(elastic.SimpleElasticAgent):
    """Starts, watches and stops this node's processes; the meeting and the order of things are torch's."""

    def __init__(
        self, handler: DynamicRendezvousHandler, nproc: int, arguments: Sequence[str], run: Path
    ) -> None:
        spec = elastic.WorkerSpec(
            role="redline",
            local_world_size=nproc,
            rdzv_handler=handler,
            entrypoint="redline",
            max_restarts=RESTARTS,
            monitor_interval=processes.LOOK_EVERY_S,
        )
        super().__init__(spec)
        self.arguments, self.run_folder = arguments, run
        self.members: list[processes.Member] = []
        self.code = 0
        self._stopping = False
        self._smaller: list[str] = []
        self._saved = -1

    def request_stop(self, _number: int, _frame: Any) -> None:
        """Ask the processes to save and leave; between two starts there is nothing to save."""
        self._stopping = True
        if not self._running():
            raise Stopped
        for member in self._running():
            member.process.terminate()

    def _running(self) -> list[processes.Member]:
        return [member for member in self.members if member.process.poll() is None]

    def _rendezvous(self, group: elastic.WorkerGroup) -> None:
        # torch 2.13 would give the address of the first node of the first meeting, which may be the one that was lost
        group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._rendezvous(group)

    def _start_workers(self, group: elastic.WorkerGroup) -> dict[int, Any]:
        step = max(step_folders(self.run_folder / "checkpoints"), default=0)
        if step > self._saved:
            self._saved, self._remaining_restarts = step, RESTARTS
        if override := processes.out_of_memory_override(self.run_folder / "events.jsonl"):
            self._smaller = ["--set", override]
        nproc = group.spec.local_world_size
        place = {
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # the agent of the first node holds it, one for every meeting
            "TORCHELASTIC_RESTART_COUNT": 0,
            processes.UNDER_AGENT: 1,
        }
        self.members = []
        for worker in group.workers:
            ranks = {"RANK": worker.global_rank, "LOCAL_RANK": worker.local_rank}
            environment = processes.environment_of(nproc, WORLD_SIZE=worker.world_size, **ranks, **place)
            arguments = [*self.arguments, *self._smaller]
            self.members.append(processes.Member(worker.global_rank, arguments, environment))
        if self._stopping:
            for member in self.members:
                member.process.terminate()
        return {local: member.process.pid for local, member in enumerate(self.members)}

    def _monitor_workers(self, group: elastic.WorkerGroup) -> elastic.RunResult:
        if self._running():
            if not any(member.process.returncode for member in self.members):
                return elastic.RunResult(state=elastic.WorkerState.HEALTHY)
            self._wait()
        if not (failed := processes.failures(self.members)):
            values = {worker.global_rank: 0 for worker in group.workers}
            return elastic.RunResult(state=elastic.WorkerState.SUCCEEDED, return_values=values)
        broken = [member for member in failed if member.process.returncode != processes.STOPPED_CODE]
        if self._stopping:
            # a process that the signal killed could not save yet, nor had one that failed with it anything to save
            if broken and all(member.process.returncode != -signal.SIGTERM for member in broken):
                self.code = broken[0].tell()
            raise Stopped
        if not broken:  # another node asked for it, and nothing is lost
            self._remaining_restarts += 1
            return elastic.RunResult(state=elastic.WorkerState.FAILED)
        if broken[0].process.returncode < 0 and self.run_folder.is_dir():
            error = f"{broken[0].summary} on {socket.gethostname()}"
            RunFolder(self.run_folder).event("process_died", error=error)
        smaller = processes.out_of_memory_override(self.run_folder / "events.jsonl")
        helps = smaller is not None and smaller not in self._smaller
        if self._remaining_restarts == 0 or (broken[0].has_said_why and not helps):
            self.code = broken[0].tell()
        else:
            _say(f"{broken[0].summary}; starting again from the last checkpoint with the nodes that remain")
        return elastic.RunResult(state=elastic.WorkerState.FAILED)

    def _wait(self) -> None:
        """Wait until all have ended. Those that were asked to stop save a checkpoint; if one fails, the others are given up."""
        while self._running():
            good = (None, 0, processes.STOPPED_CODE)
            if any(member.process.returncode not in good for member in self.members):
                processes.stop(self.members)
            time.sleep(processes.LOOK_EVERY_S)

    def _stop_workers(self, *_given: Any, **_named: Any) -> None:
        for member in self._running():
            member.process.terminate()
        self._wait()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_given: Any, **_named: Any) -> None:
        for member in self._running():
            member.process.kill()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
