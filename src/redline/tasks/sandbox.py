"""Run a program that nobody trusts: no network, no files, no other processes, bounded time, memory and output.

    ran = run("print(int(input()) * 2)", "21\n")
    ran.output == "42\n" and ran.reason is None

The program gets its text and its input, never the expected output: whoever called `run` compares. Three layers,
the strongest that works here is used (`in_force`): bubblewrap where it is installed; else namespaces of our own
(user, mount, pid, network, IPC); else limits alone, which lean on the kernel's Landlock and seccomp. Limits on
time, memory, files and output, and a filter on system calls, hold in every layer. What a layer leaves open is
in its `leaves_open`; none protects from a bug in the kernel. Linux only. The walls are built in `cell.py`.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from redline.errors import MachineError
from redline.tasks import cell

LAYERS = ("bubblewrap", "namespaces", "limits")


@dataclass(frozen=True, kw_only=True)
class Limits:
    cpu_s: int = 2
    wall_s: float = 4.0
    memory_bytes: int = 512 << 20
    """Address space of the program."""
    output_bytes: int = 1 << 20
    threads: int = 32
    open_files: int = 32


class Ran(NamedTuple):
    output: str
    reason: str | None
    """Why it did not end well; None: it ended with exit code 0."""


class Layer(NamedTuple):
    """One way to isolate, and what it is worth here."""

    name: str
    missing: str
    """Why it cannot be used here; empty: it can."""
    leaves_open: tuple[str, ...]


def run(program: str, given: str = "", *, limits: Limits | None = None, layer: str | None = None) -> Ran:
    """Run the program with `given` as its standard input. `layer`: one of LAYERS (None: the strongest here)."""
    limits = limits or Limits()
    spec = _spec(layer or in_force().name, limits)
    with contextlib.ExitStack() as stack:
        program_file, stdin_file = (stack.enter_context(_memory_file(text)) for text in (program, given))
        report, report_end = (stack.enter_context(end) for end in _pipe())
        control_end, control = (stack.enter_context(end) for end in _pipe())
        ends = {"program_fd": program_file, "report_fd": report_end, "control_fd": control_end}
        numbers = {name: end.fileno() for name, end in ends.items()}
        process = subprocess.Popen(
            [spec["python"], "-I", "-S", cell.__file__, json.dumps(spec | numbers)],
            stdin=stdin_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=list(numbers.values()),
            env={},
            cwd="/",
            start_new_session=True,
        )
        for end in ends.values():
            end.close()
        with process, control:  # the cell kills the program when control closes, should it still run
            output, told = _watch(process, report, control, limits.output_bytes)
    text = bytes(output[: limits.output_bytes]).decode("utf-8", "replace")
    return Ran(text, _reason(told, len(output) > limits.output_bytes, limits))


def weakness() -> str | None:
    """The warning where only limits hold generated code; None where a stronger layer does."""
    if (layer := in_force()).name != "limits":
        return None
    why = "; ".join(f"{other.name}: {other.missing}" for other in layers() if other.missing)
    return (
        f"generated code runs under limits alone ({why}). What that leaves open: {'; '.join(layer.leaves_open)}."
        " Install bubblewrap, or allow user namespaces"
    )


def in_force() -> Layer:
    """The strongest layer that works here."""
    layer = next((layer for layer in layers() if not layer.missing), None)
    if layer is None:
        said = "; ".join(f"{layer.name}: {layer.missing}" for layer in layers())
        raise MachineError(f"generated code needs a sandbox, but no layer of it works here: {said}")
    return layer


@functools.cache
def layers() -> list[Layer]:
    """Every layer, strongest first, tried with a small program."""
    return [Layer(name, _missing(name), _leaves_open(name)) for name in LAYERS]


def _missing(name: str) -> str:
    if sys.platform != "linux":
        return f"it needs Linux, but this is {sys.platform}"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        ran = run("print(6 * 7)", layer=name, limits=Limits(wall_s=30, cpu_s=10))
    except MachineError as error:
        return str(error)
    return "" if ran.output == "42\n" else f"a small program did not run: {ran.reason}"


def _leaves_open(name: str) -> tuple[str, ...]:
    filtered = bool(cell.syscall_filter())
    if name != "limits":
        unfiltered = "memory that is not address space (no system-call filter for this processor)"
        return () if filtered else (unfiltered,)
    files = "the program sees which files exist, though not what is in them"
    if not cell.landlock_version():
        files = "the program can read and write this user's files, and read the memory of its processes"
    return (files,) if filtered else (files, "the program can open sockets, and start and signal processes")


def _spec(layer: str, limits: Limits) -> dict[str, Any]:
    python = os.path.realpath(sys.executable)
    roots = _roots(python)
    sizes = {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
    }
    if layer == "namespaces" or not cell.syscall_filter():
        sizes["RLIMIT_NPROC"] = limits.threads  # elsewhere it would count what this user runs outside
    walls = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    for root in roots:
        walls += ["--symlink", os.readlink(root), root] if os.path.islink(root) else ["--ro-bind", root, root]
    for device in cell.DEVICES:
        walls += ["--dev-bind", device, device]
    walls += ["--remount-ro", "/", "--chdir", "/"]
    return {
        "layer": layer,
        "python": python,
        "roots": roots,
        "rlimits": sizes,
        "wall_s": limits.wall_s,
        "bubblewrap": walls,
    }


def _roots(python: str) -> list[str]:
    """What Python needs to start: its own folder, and the system's libraries (links among them as they are)."""
    wanted = ["/usr", "/lib", "/lib64", os.path.realpath(sys.base_prefix), os.path.dirname(python)]
    found: list[str] = []
    for path in wanted:
        if os.path.exists(path) and not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found


def _watch(
    process: "subprocess.Popen[bytes]", report: BinaryIO, control: BinaryIO, most: int
) -> tuple[bytearray, list[dict[str, Any]]]:
    """The program's output, a little more than `most` where there is more, and what the cell told."""
    assert process.stdout is not None
    out, output, told = process.stdout.fileno(), bytearray(), bytearray()
    poller = select.poll()
    for fd in (out, report.fileno()):
        poller.register(fd, select.POLLIN)
    mapped = over = False
    while not over:
        for fd, _ in poller.poll():
            data = os.read(fd, 1 << 16)
            if fd == report.fileno():
                told += data
                over = not data
                if b'"map"' in told and not mapped:
                    mapped = True
                    _map_user(process.pid)
                    control.write(b"g")
            else:
                output += data
                if not data or len(output) > most:
                    poller.unregister(out)
                if len(output) > most:
                    control.close()
    os.set_blocking(out, False)
    with contextlib.suppress(BlockingIOError):
        while len(output) <= most and (data := os.read(out, 1 << 16)):
            output += data
    return output, [json.loads(line) for line in told.splitlines()]


def _map_user(pid: int) -> None:
    """One user in the new namespace, nobody. Outside it is this one, or nobody where this one is root: the kernel
    holds root to no limit on processes."""
    user, group = (cell.NOBODY, cell.NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    # Refused in some containers: then the walls cannot be built, and the cell says so.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/uid_map").write_text(f"{cell.NOBODY} {user} 1")
        Path(f"/proc/{pid}/gid_map").write_text(f"{cell.NOBODY} {group} 1")


def _reason(told: list[dict[str, Any]], flooded: bool, limits: Limits) -> str | None:
    if walls := [said["walls"] for said in told if "walls" in said]:
        raise MachineError(f"the sandbox could not be built: {walls[0]}")
    if not told or "code" not in told[-1]:
        raise MachineError("the sandbox ended without a word: it was killed from outside")
    code, cpu_s = told[-1]["code"], told[-1]["cpu_s"]
    if flooded:
        return f"it wrote more than {limits.output_bytes:,} bytes"
    if told[-1]["late"]:
        return f"it took more than {limits.wall_s:g} s"
    # The kernel counts the limit in ticks and reports finer time, which may be less; little else kills this way.
    if code == -signal.SIGKILL and (cpu_s is None or cpu_s > limits.cpu_s / 2):
        return f"it took more than {limits.cpu_s} s of processor time"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else None


def _memory_file(text: str) -> BinaryIO:
    file = os.fdopen(os.memfd_create("redline-sandbox"), "w+b", 0)
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
