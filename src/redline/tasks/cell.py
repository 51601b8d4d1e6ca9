"""The inside of the sandbox: what runs between `sandbox.run` and a program that nobody trusts.

    python -I -S cell.py SPEC        # SPEC: JSON (layer, limits, numbers of file descriptors)

This process stays outside of the sandbox and waits: for the program to end, for its wall clock to run out, or
for the control pipe to close, which also happens when the process that scores is killed. Then it kills the
program, and reports how it ended. The child that it forks builds the walls, and becomes the program. Neither
ever holds an expected answer. Standard library only: a fresh interpreter runs this file, without our package.
"""

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from typing import Any, NoReturn

NOBODY = 65534
PROGRAM_FD = 3
DEVICES = ("/dev/null", "/dev/urandom")
BOOT = f"exec(compile(open({PROGRAM_FD}, encoding='utf-8').read(), 'program', 'exec'), {{'__name__': '__main__'}})"

# mnt uts ipc user pid net
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _MOVE, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 8192, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)

# System calls that start processes, reach others, open sockets, or hold memory that no limit counts; the numbers
# are the kernel's, for x86-64 and arm64.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE, _CLONE3 = (56, 220), 435
_FORBIDDEN = {
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}


def main() -> None:
    spec = json.loads(sys.argv[1])
    report, control = (
        fcntl.fcntl(spec[name], fcntl.F_DUPFD_CLOEXEC, 50) for name in ("report_fd", "control_fd")
    )
    program = fcntl.fcntl(spec["program_fd"], fcntl.F_DUPFD_CLOEXEC, 50)
    os.closerange(PROGRAM_FD, 50)
    try:
        if spec["layer"] == "namespaces":
            if os.geteuid() == 0:
                os.setgroups([])
            _call("unshare", _NAMESPACES)
            # done by the scoring process, which has the right to; this one lost it
            _tell(report, {"map": os.getpid()})
            if not os.read(control, 1):
                return
        # PR_SET_CHILD_SUBREAPER: what loses its parent becomes a child of this process
        _call("prctl", 36, 1, 0, 0, 0)
        if (child := os.fork()) == 0:
            _become(spec, program, report)
        ended = _supervise(child, control, spec["wall_s"])
        if spec["layer"] == "bubblewrap":  # it exits with 128 + the signal, before it has the program's time
            ended |= {"cpu_s": None, "code": 128 - ended["code"] if ended["code"] > 128 else ended["code"]}
        _tell(report, ended)
    except OSError as error:
        _tell(report, {"walls": str(error)})


def _tell(report: int, said: dict[str, Any]) -> None:
    os.write(report, json.dumps(said).encode() + b"\n")


def _supervise(child: int, control: int, wall_s: float) -> dict[str, Any]:
    watched = os.pidfd_open(child)
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    poller.register(control, select.POLLIN)
    ended = dict(poller.poll(wall_s * 1000))
    if watched not in ended:
        os.kill(child, signal.SIGKILL)  # the first process of a pid namespace takes all others with it
    _, status, used = os.wait4(child, 0)
    _end_orphans()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu_s": used.ru_utime + used.ru_stime,
        "late": not ended,
    }


def _end_orphans() -> None:
    """Kill what bubblewrap leaves behind if it is killed before it has tied the program's life to its own."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(number) for number in file.read().split()]
    except OSError:  # a kernel without this file
        return
    for orphan in left:
        os.kill(orphan, signal.SIGKILL)
        os.waitpid(orphan, 0)


def _become(spec: dict[str, Any], program: int, report: int) -> NoReturn:
    """In the child: build the walls and become the program. An error reaches the report as its text."""
    try:
        command = [spec["python"], "-I", "-S", "-X", "utf8", "-c", BOOT]
        os.dup2(program, PROGRAM_FD)
        if spec["layer"] == "bubblewrap":  # it drops privileges as we would, and has to start processes first
            command = [*spec["bubblewrap"], *_handed_filter(), *command]
            _limit(spec["rlimits"])
        else:
            if spec["layer"] == "namespaces":
                _build_root(spec["roots"])
            _limit(spec["rlimits"])
            for capability in range(64):
                _libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: root loses its power after the exec
            _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            if spec["layer"] == "limits":
                _lock_files(spec["roots"])
            _filter_syscalls(syscall_filter())
        os.execve(command[0], command, {"LC_ALL": "C.UTF-8"})
    except OSError as error:
        _tell(report, {"walls": str(error)})
    finally:
        os._exit(127)


def _handed_filter() -> list[str]:
    if not (program := syscall_filter()):
        return []
    file = os.memfd_create("filter", 0)
    os.write(file, program)
    os.lseek(file, 0, os.SEEK_SET)
    return ["--seccomp", str(file)]


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def _build_root(roots: list[str]) -> None:
    """A read-only file system of Python and its libraries, and nothing else: no /proc, no /tmp, no home."""
    kinds = dict.fromkeys([*roots, *DEVICES], os.O_PATH | os.O_NOFOLLOW)
    opened = {path: os.open(path, kind) for path, kind in kinds.items() if not os.path.islink(path)}
    # From here on a different user than outside, even if that is root, whom no limit on processes holds.
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    new = "/tmp"
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", new, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in roots:
        if path not in opened:
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.symlink(os.readlink(path), new + path)
    for path, fd in opened.items():
        if path in roots:
            os.makedirs(new + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.close(os.open(new + path, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}", new + path, None, _BIND | _REC)
        if path in roots:
            kept = os.statvfs(new + path).f_flag & ~1  # flags of the mount below may not be taken away
            _mount(None, new + path, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | (kept & 0xC0E))
    _mount(None, new, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        pass  # read-only in many containers; the system calls that make namespaces are filtered as well
    os.chdir(new)
    _mount(new, "/", None, _MOVE)
    os.chroot(".")
    os.chdir("/")


def syscall_filter() -> bytes:
    """The filter as a BPF program; empty on a processor whose numbers are not known here."""
    if platform.machine() not in _ARCHITECTURES:
        return b""
    architecture, column = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    if column == 0:
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the numbers of the x32 ABI
    # its flags lie in memory; libc falls back to clone
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, unknown)]
    for numbers in _FORBIDDEN.values():
        if (number := numbers[column]) is not None:
            code += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    code += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, 16), (bits, 1, 0, 0x10000), (give, 0, 0, refuse)]
    code += [(give, 0, 0, allow), (give, 0, 0, allow)]  # a thread; anything else
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _filter_syscalls(program: bytes) -> None:
    if program:
        held = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
        _call("prctl", 22, 2, ctypes.c_char_p(head), 0, 0)  # PR_SET_SECCOMP


def landlock_version() -> int:
    """0: this kernel cannot restrict files for a process alone."""
    return max(0, _libc.syscall(444, None, 0, 1))


def _lock_files(roots: list[str]) -> None:
    """Restrict files by Landlock: only the roots can be read, nothing can be written, no other process signalled."""
    if not (version := landlock_version()):
        return
    read, access = 0b1101, (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call("syscall", 444, ctypes.c_char_p(struct.pack("QQQ", access, 3, 3)), size, 0)
    for path in [*roots, *DEVICES]:
        opened = os.open(path, os.O_PATH)
        allowed = read if os.path.isdir(path) else 0b110 if path == "/dev/null" else 0b100
        _call("syscall", 445, ruleset, 1, ctypes.c_char_p(struct.pack("=Qi", allowed, opened)), 0)
    _call("syscall", 446, ruleset, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: Any) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
