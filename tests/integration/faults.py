"""What can go wrong in a command, made to happen at a chosen moment. Called in the command's own process
before it starts."""

import importlib
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def instead(place: str, **given: Any) -> None:
    """No command, but a function of a test: `module:name`."""
    from warm import leave

    module, _, name = place.partition(":")
    getattr(importlib.import_module(module), name)(**given)
    leave(0)


def kill_at(call: int, under: str | None = None) -> None:
    """SIGKILL at the n-th call that makes something durable (fsync, rename, replace): in the middle of a
    commit, at every place. `under` a folder, whatever makes, opens for writing, cuts or removes a name counts too."""
    calls = itertools.count(1)  # a save's thread counts too

    def count() -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, given: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate")
        changes |= event == "open" and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(given[0]).startswith(str(under)):
            count()

    def counting(real: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            count()
            return real(*given, **named)

        return counted

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counting(getattr(os, name)))
    if under is not None:
        sys.addaudithook(hear)


def small_files(size_bytes: int) -> None:
    """No file may grow beyond this: the operating system refuses a write in the middle of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def out_of_memory(above: int, from_pass: int = 1, only_rank: int | None = None) -> None:
    """Running out of memory in a training pass over more than `above` sequences, from the n-th such pass
    on."""
    import torch

    from redline.model.transformer import Transformer

    if only_rank is not None and os.environ["RANK"] != str(only_rank):
        return
    forward, passes = Transformer.forward, 0

    def limited(model: Transformer, tokens_BT: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        nonlocal passes
        if len(tokens_BT) > above and torch.is_grad_enabled():
            passes += 1
            if passes >= from_pass:
                raise torch.OutOfMemoryError("injected")
        return forward(model, tokens_BT, *given, **named)

    Transformer.forward = limited  # type: ignore[method-assign]


def forked_members(fault: str = "", **given: Any) -> None:
    """The processes that the launcher starts are forks of it, which have torch already; each begins with the fault, if
    one is named."""
    from warm import leave

    from redline.cli.main import main
    from redline.launch import processes as launch

    class Fork:
        """What the launcher uses of a Popen."""

        def __init__(
            self, command: Sequence[str], *, env: Mapping[str, str], stdout: int | None = None, **_: Any
        ) -> None:
            reading, writing = os.pipe()
            self.returncode: int | None = None
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                if stdout is not None:
                    os.dup2(stdout, 1)
                os.dup2(writing, 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)  # that of the launcher is a file
                os.environ.clear()
                os.environ |= env
                if fault:
                    globals()[fault](**given)
                try:
                    code = main(command[3:])
                except BaseException:  # noqa: BLE001 - or it would go on as a second launcher
                    traceback.print_exc()
                    code = 1
                leave(code)
            os.close(writing)
            self.stderr = os.fdopen(reading, "rb")

        def poll(self) -> int | None:
            if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(found[1])
            return self.returncode

        def terminate(self) -> None:
            os.kill(self.pid, signal.SIGTERM)

        def kill(self) -> None:
            os.kill(self.pid, signal.SIGKILL)

    launch.subprocess = SimpleNamespace(Popen=Fork, PIPE=None)


def node(fault: str = "", patience_s: int = 600, later_s: float = 0.0, **given: Any) -> None:
    """An agent whose processes are forks. It waits so long for more nodes than it needs, and `later_s` where nodes have
    met before. There a node counts as lost after three seconds of silence; elsewhere a slow machine is no loss."""
    from datetime import timedelta

    from redline.launch import agent

    attempts = 3 if later_s else 600
    agent.TIMES_S |= {
        "last_call_timeout": patience_s,
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": attempts,
    }
    start = agent.Agent._start_workers

    def started(node: agent.Agent, group: Any) -> Any:
        group.spec.rdzv_handler.settings.timeout._set_timeouts(last_call=timedelta(seconds=later_s))
        return start(node, group)

    if later_s:
        agent.Agent._start_workers = started  # type: ignore[method-assign]
    forked_members(fault, **given)


def node_lost_at(update: int) -> None:
    """SIGKILL to the agent and to this process of it in the n-th update."""

    def hook(at: int, _learner: Any) -> None:
        if at == update:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    _at_each_update(hook)


def slow_network(block: int, tally: str, delay_s: float = 0.0, bytes_per_s: float = float("inf")) -> None:
    """Every gather and reduction takes this much longer, and its bytes over this bandwidth, in every second block of
    updates, so that both meet the same load. What the first process receives in each update goes into a file: bytes and
    number of gathers, of reductions to shards, and of reductions over replicas."""
    from torch import distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from redline.train import execution

    shard, received, updates = execution.shard, [0] * 6, []

    def count(place: int, size: int, members: int) -> None:
        received[place] += size
        received[place + 1] += members > 1
        if len(updates) // block % 2:
            time.sleep(delay_s + size / bytes_per_s)

    def slowed(base: type, place: int) -> Any:
        class Slow(base):  # type: ignore[misc]
            def __call__(self, *given: Any, **named: Any) -> Any:
                members = named["group"].size()
                parts = members if place else 1  # what is reduced holds the parts of all
                count(place, (members - 1) * named["input_tensor"].nbytes // parts, members)
                return super().__call__(*given, **named)

        return Slow()

    def all_reduce(tensor: Any, group: Any, **named: Any) -> Any:
        members = group.size()
        count(4, 2 * (members - 1) * tensor.nbytes // members, members)
        return dist.all_reduce(tensor, group=group, **named)

    def shard_slowly(model: Any, process: Any, dtype: Any) -> None:
        shard(model, process, dtype)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(slowed(collectives.DefaultAllGather, 0))
                module.set_custom_reduce_scatter(slowed(collectives.DefaultReduceScatter, 2))
        collectives.dist = SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce})

    def hook(_number: int, _learner: Any) -> None:
        updates.append(list(received))
        received[:] = [0] * len(received)
        if os.environ["RANK"] == "0":
            Path(tally).write_text(json.dumps(updates))

    execution.shard = shard_slowly
    _at_each_update(hook)


def counted_time(slow_rank: int, times: int) -> None:
    """The instruments' clock moves by a millisecond a look; on one process by so many: it is that many times as slow,
    whatever the machine does."""
    from redline.train import clock

    tick_s = 0.001 * (times if os.environ["RANK"] == str(slow_rank) else 1)
    ticks = itertools.count()
    clock.time = SimpleNamespace(perf_counter=lambda: next(ticks) * tick_s)


def waits_elsewhere() -> None:
    """A torch whose FSDP has no method that we know to wait."""
    from redline.train import process as communication

    communication.LAST_WAIT = "a method of another version"


def signalled_at(update: int, number: int = signal.SIGTERM, only_rank: int | None = None) -> None:
    """A signal to this process during its n-th update."""
    if only_rank is not None and os.environ["RANK"] != str(only_rank):
        return

    def hook(at: int, _learner: Any) -> None:
        if at == update:
            os.kill(os.getpid(), number)

    _at_each_update(hook)


def kill_after(update: int, calls: int) -> None:
    """SIGKILL when this many Python functions have been called or left since the n-th update: anywhere in the
    loop, and at the same place every time."""

    def hook(at: int, _learner: Any) -> None:
        if at == update:
            _kill_in(calls)

    _at_each_update(hook)


def kill_in_sampling(samples: int, calls: int) -> None:
    """The same, since this many samples were stored; at the latest when the next one is, because the thread whose calls
    are counted may have little left to do. On a slow machine many samples are ready together: the batch is split, so
    that enough are left for the next kill."""
    from redline.rft.store import Store

    add, left = Store.add, samples

    def counted(store: Store, source: Any, rows: Sequence[Any]) -> None:
        nonlocal left
        if left:
            add(store, source, rows[:left])
            left, rows = left - len(rows[:left]), rows[left:]
            if not left:
                _kill_in(calls)
        if rows:
            add(store, source, rows[:1])
            os.kill(os.getpid(), signal.SIGKILL)

    Store.add = counted  # type: ignore[method-assign]


def signalled_in_sampling(samples: int, number: int) -> None:
    """A signal to this process when it has stored this many samples."""
    from redline.rft.store import Store

    add, stored = Store.add, 0

    def counted(store: Store, source: Any, rows: Sequence[Any]) -> None:
        nonlocal stored
        add(store, source, rows)
        before, stored = stored, stored + len(rows)
        if before < samples <= stored:
            os.kill(os.getpid(), number)

    Store.add = counted  # type: ignore[method-assign]


def _kill_in(calls: int) -> None:
    def count(*_event: Any) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def clock_of_updates(update_s: float, killed_at: int = 0) -> None:
    """The loop's clock advances by this much with every update, and not otherwise. SIGKILL at the n-th."""
    from redline.train import loop

    now_s = 0.0

    def hook(number: int, _learner: Any) -> None:
        nonlocal now_s
        now_s += update_s
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.time = SimpleNamespace(monotonic=lambda: now_s, perf_counter=time.perf_counter)
    _at_each_update(hook)


def gradient_not_a_number(update: int) -> None:
    """The gradient of the n-th update is not a number, though its loss is."""

    def hook(number: int, learner: Any) -> None:
        if number == update:
            for parameter in learner.model.parameters():
                parameter.grad.fill_(float("nan"))

    _at_each_update(hook)


def out_of_memory_in_update(update: int) -> None:
    """Running out of memory in the second optimiser of the n-th update, when the first has changed its
    weights."""
    import torch

    def hook(number: int, learner: Any) -> None:
        if number == update:
            learner.optimizers[1].step = refuse

    def refuse() -> None:
        raise torch.OutOfMemoryError("injected")

    _at_each_update(hook)


def _at_each_update(hook: Callable[[int, Any], None]) -> None:
    """Call the hook with the number of the update in this process, when the gradients are there and before
    they are clipped."""
    from redline.train import step

    clip, updates = step.clip, 0

    def hooked(learner: Any, scale: float) -> Any:
        nonlocal updates
        updates += 1
        hook(updates, learner)
        return clip(learner, scale)

    step.clip = hooked
