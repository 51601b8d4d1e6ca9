"""Hostile programs against every layer of the sandbox that works on this machine. None of them may reach
anything outside, and none may stay."""

import os
import secrets
import select
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from redline.errors import MachineError
from redline.tasks import cell, sandbox
from redline.tasks.sandbox import LAYERS, Limits, run

PATIENT = Limits(wall_s=600, cpu_s=60)
"""Limits that a busy machine does not reach: for programs that end for another reason."""


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> str:
    found = next(layer for layer in sandbox.layers() if layer.name == request.param)
    if found.missing:
        pytest.skip(f"{found.name}: {found.missing}")
    return found.name


def attempts(*statements: str) -> str:
    """A program that tries each statement and prints 'done' or the error's name, a line each."""
    lines = ["import ctypes, glob, mmap, os, re, signal, socket, subprocess, sys, threading"]
    for statement in statements:
        lines += [f"try:\n    {statement}\nexcept BaseException as error:\n    print(type(error).__name__)"]
        lines += ["else:\n    print('done')"]
    return "\n".join(lines)


def tried(layer: str, *statements: str) -> list[str]:
    ran = run(attempts(*statements), layer=layer, limits=PATIENT)
    assert ran.reason is None, ran
    return ran.output.split()


def test_a_program_gets_its_input_and_gives_its_output(layer):
    ran = run(
        "import math, sys\nprint(math.prod(map(int, sys.stdin)), 'é')", "6\n7\n", layer=layer, limits=PATIENT
    )
    assert ran == ("42 é\n", None)
    assert run("raise SystemExit(3)", layer=layer, limits=PATIENT).reason == "it ended with exit code 3"
    assert run("1 +", layer=layer, limits=PATIENT).reason == "it ended with exit code 1"
    threads = "import threading\nt = threading.Thread(target=print, args=('hello',))\nt.start()\nt.join()"
    assert run(threads, layer=layer, limits=PATIENT) == ("hello\n", None)


def test_a_fork_bomb_does_not_go_off(layer):
    # One fork first: should it work, the bomb had better stay unlit.
    assert (
        tried(layer, "os.fork()", "subprocess.run(['/bin/sh'])", "os.posix_spawn('/bin/sh', ['sh'], {})")
        == ["PermissionError"] * 3
    )
    ran = run("import os\nwhile True:\n    os.fork()", layer=layer, limits=PATIENT)
    assert ran.reason == "it ended with exit code 1"


def test_threads_without_end_run_into_a_limit(layer):
    program = "import threading\nwhile True:\n    threading.Thread(target=threading.Event().wait).start()"
    # The main thread dies of the error and waits for the others: the wall clock ends it.
    ran = run(program, layer=layer, limits=Limits(wall_s=1, cpu_s=60))
    assert ran.reason is not None


def test_an_endless_loop_ends_with_its_processor_time(layer):
    ran = run("while True: pass", layer=layer, limits=Limits(wall_s=600, cpu_s=1))
    assert ran.reason == "it took more than 1 s of processor time"


def test_who_waits_for_ever_ends_with_the_wall_clock_whatever_it_ignores(layer):
    program = """
import ctypes, signal, threading
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
print("waiting", flush=True)
threading.Event().wait()
"""
    ran = run(program, layer=layer, limits=Limits(wall_s=1, cpu_s=60))
    assert ran.reason == "it took more than 1 s"


def test_a_memory_bomb_runs_into_its_limit(layer):
    program = "kept = []\nwhile True:\n    kept.append(bytearray(1 << 24))"
    assert run(program, layer=layer, limits=PATIENT).reason == "it ended with exit code 1"
    hidden = tried(layer, "mmap.mmap(-1, 1 << 31)", "os.memfd_create('m')", "bytearray(1 << 40)")
    assert hidden == ["OSError", "PermissionError", "MemoryError"]


def test_no_file_can_be_written(layer, tmp_path):
    os.chmod(tmp_path, 0o777)
    held = tmp_path / "held"
    held.write_text("mine")
    held.chmod(0o666)
    places = (
        held,
        tmp_path / "new",
        "/tmp/redline-hostile",
        "hostile",
        "/dev/shm/redline-hostile",
        sys.prefix + "/x",
    )
    said = tried(layer, *(f"open({str(place)!r}, 'w').write('theirs')" for place in places))
    said += tried(
        layer, f"os.truncate({str(held)!r}, 0)", f"os.unlink({str(held)!r})", "os.mkdir('/tmp/hostile')"
    )
    assert "done" not in said
    assert held.read_text() == "mine"
    assert [path for path in tmp_path.iterdir() if path != held] == []
    assert not [path for path in map(Path, places[2:]) if path.exists()]


def test_a_symlink_leads_nowhere(layer, tmp_path):
    os.chmod(tmp_path, 0o777)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    linked = [
        f"os.symlink({str(secret)!r}, {place!r})" for place in ("link", f"{tmp_path}/link", "/tmp/link")
    ]
    assert "done" not in tried(layer, *linked, f"print(open({str(secret)!r}).read())")
    assert not (tmp_path / "link").exists()


def test_no_other_process_can_be_signalled(layer):
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        targets = (bystander.pid, os.getpid(), "os.getppid()")
        said = tried(
            layer,
            *(f"os.kill({target}, 15)" for target in targets[:1]),
            *(f"os.kill({target}, 0)" for target in (*targets[1:], -1)),
            "os.killpg(os.getpgid(0), 0)",
            f"signal.pidfd_send_signal(os.pidfd_open({bystander.pid}), 15)",
            f"ctypes.CDLL(None, use_errno=True).ptrace(16, {bystander.pid}, 0, 0) == 0 or sys.exit(1)",
        )
        assert "done" not in said, said
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.communicate()


READER = r"""
import glob, os, re, sys
found = set()
def look(data):
    found.update(re.findall(rb"redline-secret-[0-9a-f]{32}", data))
def read(path, start=0, size=-1):
    try:
        with open(path, "rb") as file:
            file.seek(start)
            look(file.read(size))
    except (OSError, OverflowError, ValueError):
        pass
for name in ("environ", "cmdline"):
    read(f"/proc/PARENT/{name}")
for path in glob.glob("/proc/PARENT/fd/*"):
    if os.path.isfile(path):  # a pipe might hold what somebody else waits for
        read(path, 0, 1 << 20)
try:
    ranges = [line.split()[0].split("-") for line in open("/proc/PARENT/maps") if " rw" in line]
except OSError:
    ranges = []
for first, last in ranges:
    first, last = int(first, 16), int(last, 16)
    if last - first < 1 << 26:
        read("/proc/PARENT/mem", first, last - first)
for path in [SECRET_FILE, *glob.glob(os.path.dirname(SECRET_FILE) + "/*")]:
    read(path)
look(repr((os.environ, sys.argv)).encode())
for fd in range(3, 100):
    try:
        look(os.pread(fd, 1 << 20, 0))
    except OSError:
        pass
print(sorted(found))
"""


def test_an_expected_answer_cannot_be_read_from_memory_files_or_the_environment(layer, tmp_path, monkeypatch):
    secret = f"redline-secret-{secrets.token_hex(16)}"
    monkeypatch.setenv("SECRET", secret)
    file = tmp_path / "expected"
    file.write_text(secret)
    program = READER.replace("PARENT", str(os.getpid())).replace("SECRET_FILE", repr(str(file)))
    free = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert secret in free.stdout, "outside of the sandbox the reader finds it"
    ran = run(program, layer=layer, limits=PATIENT)
    assert ran == ("[]\n", None)


def test_no_socket_opens(layer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        said = tried(
            layer,
            f"socket.create_connection(('127.0.0.1', {port}))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
            "socket.socket(socket.AF_UNIX).connect('\\0redline')",
            "socket.getaddrinfo('localhost', 80) and socket.socket(socket.AF_NETLINK)",
        )
        assert "done" not in said
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_huge_output_is_cut_and_its_writer_killed(layer):
    limits = Limits(wall_s=600, cpu_s=60, output_bytes=100_000)
    ran = run("while True:\n    print('x' * 65536)", layer=layer, limits=limits)
    assert ran.reason == "it wrote more than 100,000 bytes"
    assert len(ran.output) == 100_000


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nos.close(1)\nraise SystemExit(3)", "it ended with exit code 3"),
        ("import os\nos.closerange(0, 100)\nos._exit(3)", "it ended with exit code 3"),
        ("import os\nos.dup2(0, 1)\nos._exit(0)", None),
        (
            "import os\nfor fd in range(3, 200):\n    try:\n        os.write(fd, b'{\"code\": 0}\\n')\n"
            "    except OSError:\n        pass\nos._exit(3)",
            "it ended with exit code 3",
        ),
        ("import sys\nsys.stdout.buffer.write(bytes(range(256)))", None),
    ],
)
def test_an_abused_output_changes_nothing_but_the_output(layer, program, reason):
    assert run(program, layer=layer, limits=PATIENT).reason == reason


def test_the_program_dies_with_the_process_that_scores(layer):
    code = f"from redline.tasks.sandbox import *\nrun('import time\\ntime.sleep(1e6)', layer={layer!r}, limits=Limits(wall_s=1e6))"
    scorer = psutil.Popen([sys.executable, "-c", code])
    try:
        while len(inside := scorer.children(recursive=True)) < 2:
            assert scorer.poll() is None
            select.select([], [], [], 0.01)
        watched = [os.pidfd_open(process.pid) for process in inside]
    finally:
        scorer.kill()
        scorer.wait()
    for fd in watched:
        assert select.select([fd], [], [], 120)[0], "still there"
        os.close(fd)


def test_what_a_killed_wrapper_leaves_behind_is_killed(monkeypatch):
    """A stand-in for bubblewrap, killed before it has tied its child to itself."""
    mark = f"600.{secrets.randbelow(10**9):09}"
    made = sandbox._spec("limits", PATIENT)
    walls = ["/bin/sh", "-c", f"setsid sleep {mark} & exec yes"]
    monkeypatch.setattr(
        sandbox, "_spec", lambda layer, limits: made | {"layer": "bubblewrap", "bubblewrap": walls}
    )
    assert (
        run("", layer="bubblewrap", limits=Limits(wall_s=600)).reason == "it wrote more than 1,048,576 bytes"
    )
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])
    ]


def test_the_layer_in_force_is_named_with_what_it_leaves_open(monkeypatch):
    assert [layer.name for layer in sandbox.layers()] == list(LAYERS)
    strongest = sandbox.in_force()
    assert not strongest.missing
    weak = sandbox.layers()[-1]
    assert weak.leaves_open, "limits alone never close everything"
    nothing = [layer._replace(missing="no") for layer in sandbox.layers()]
    monkeypatch.setattr(sandbox, "layers", lambda: nothing)
    with pytest.raises(
        MachineError, match="no layer of it works here: bubblewrap: no; namespaces: no; limits: no"
    ):
        sandbox.in_force()


def test_without_the_kernels_help_the_weak_layer_says_more(monkeypatch):
    monkeypatch.setattr(cell, "landlock_version", lambda: 0)
    monkeypatch.setattr(cell, "syscall_filter", lambda: b"")
    sandbox.layers.cache_clear()
    try:
        *_, weak = sandbox.layers()
    finally:
        sandbox.layers.cache_clear()
    assert [said for said in weak.leaves_open if "files" in said]
    assert [said for said in weak.leaves_open if "sockets" in said]
