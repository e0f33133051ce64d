"""Linux features. Parent-death signal, sub-reaper and process trees keep processes from outliving their run; socket
credentials identify a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import time
from typing import NamedTuple

_PF_EXITING = 4  # of a process, in /proc/PID/stat
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM = 35
_PR_SET_MM_ARG_END = 9

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
GRACE = 1.0  # seconds between SIGTERM and SIGKILL

_CAPTURE_THREAD_LOCAL = 1  # of CUDA

# torch_shm_manager, in the length to which the kernel cuts the name. It exits two seconds after the last process that
# used it and then removes its files, but not if it is killed.
_TIDIES_UP = "torch_shm_manag"
_TIME_TO_TIDY = 4.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class SocketPeer(NamedTuple):
    """The process at the other end of a Unix socket."""

    pid: int
    uid: int

    @property
    def is_same_user(self) -> bool:
        """Whether it runs as the user of this process."""
        return self.uid == os.getuid()


def peer(sock: socket.socket) -> SocketPeer:
    """Return the process that called `connect`, or on the caller's side the one that called `listen`. The kernel
    reports it, not the peer.
    """
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return SocketPeer(pid, uid)


def connect_to_own(sock: socket.socket, name: str) -> None:
    """Connect to an abstract Unix socket, if a process of this user listens there.

    Once the listener has ended, any user can take its name.
    """
    sock.connect(f"\0{name}")
    other = peer(sock)
    if not other.is_same_user:
        raise PermissionError(f"process {other.pid} of user {other.uid} listens there")


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Have the kernel send `sig` when the thread that started this process ends. If it has already ended, exit now."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    if sig and os.getppid() != parent:
        os._exit(128 + sig)


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def skip_destructors() -> None:
    """At exit, skip the destructors of libraries that are loaded now.

    For torch that saves half a second with eight workers, because each had to copy the pages first. Python has
    finished by then, libraries that are loaded later are torn down normally, and C's streams are flushed.
    """
    _libc.on_exit(_libc._exit, None)
    _libc.__cxa_atexit(_libc.fflush, None, None)


def set_command_line(words: list[str]) -> None:
    """Set the command line that `ps` shows. The kernel reads it from the memory of the original arguments.

    Without permission to move the end of that memory, trailing blanks remain.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words) + b"\0"
    if start and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
        _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_ARG_END), ctypes.c_ulong(start + len(text)), 0, 0)
        ctypes.set_errno(0)  # leave no error for the script to find


def shared(fd: int) -> memoryview:
    """Map a file in shared memory. Python's mmap would keep a descriptor open in the user's process."""
    size = os.fstat(fd).st_size
    address = _libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def relax_capture_mode() -> None:
    """Keep CUDA calls of this thread from invalidating a graph that another thread is capturing."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    with contextlib.suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{cuda.partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_THREAD_LOCAL)))


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot: with the pid it identifies a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def parent(pid: int) -> int:
    """Return the pid of the parent of a process. 0: the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def holds(path: str) -> bool:
    """Return whether this process has a file open."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                return True
        except OSError:
            continue
    return False


_STATES = {"T": "stopped", "t": "traced", "D": "waits for a device", "R": "computes", "S": "sleeps", "Z": "dead"}


def state(pid: int) -> str:
    """Return the state of a process, in words."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(letter, letter)


def thread(pid: int) -> tuple[bool, float] | None:
    """Return whether the main thread of a process sleeps, and the CPU seconds it has used."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] == b"S", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _parents() -> dict[int, tuple[int, bool]]:
    """Return pid -> (parent, zombie?) of every process."""
    table: dict[int, tuple[int, bool]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            table[int(entry)] = (int(fields[1]), fields[0] == b"Z")
    return table


def descendants(root: int, *, besides: frozenset[int] = frozenset()) -> list[int]:
    """Return the living processes below `root`, nearest first, without the subtrees of `besides`."""
    return families([root], besides=besides)[root]


def is_being_killed(pid: int) -> bool:
    """Return whether SIGKILL has ended a process, although the kernel may still be freeing its resources.

    With a CUDA context that takes 0.1 s and more. Its parent can reap it only afterwards.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        flags, exit_code = int(fields[6]), int(fields[49])
    except (OSError, IndexError):  # the process has ended, or this is not a Linux kernel
        return False
    return bool(flags & _PF_EXITING) and exit_code == signal.SIGKILL


def families(roots: list[int], *, besides: frozenset[int] = frozenset()) -> dict[int, list[int]]:
    """Return `descendants` of several roots, with one scan of all processes."""
    table = _parents()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    families: dict[int, list[int]] = {}
    for root in roots:
        found = families[root] = list[int]()
        level = [root] if root else []  # 0 is a process that has not started, and the parent of init
        while level:
            level = [pid for parent in level for pid in children.get(parent, []) if pid not in besides]
            found.extend(pid for pid in level if not table[pid][1])
    return families


def childless() -> bool:
    """Return whether this process has no child, not even a zombie. A sub-reaper then has no descendants."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def end_descendants(
    *, besides: frozenset[int] = frozenset(), patience: float = 0.0, grace: float = GRACE, limit: float = 10.0
) -> list[int]:
    """Terminate all descendants of this process, kill them after `grace` seconds, and reap them. Return those that did
    not end.

    With `patience`, first wait these seconds for processes to end by themselves, and longer for torch's shared memory
    manager, which then removes its files. Only for a sub-reaper: it adopts orphans, so none is missed.
    """
    start = time.monotonic()
    terminated: set[int] = set()
    while not childless():
        _reap(besides)
        alive = descendants(os.getpid(), besides=besides)
        waited = time.monotonic() - start - patience
        if not alive or waited > limit:
            return alive
        for pid in alive if waited >= 0 else ():
            if patience and waited < _TIME_TO_TIDY and _name(pid) == _TIDIES_UP:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if waited > grace:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in terminated:
                    terminated.add(pid)
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # a stopped process would not handle SIGTERM
        time.sleep(0.005)
    return []


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().rstrip("\n")
    return ""


def _reap(besides: frozenset[int]) -> None:
    """Reap children that have exited, except those that another part of the program waits for."""
    for pid, (parent, zombie) in _parents().items():
        if zombie and parent == os.getpid() and pid not in besides:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def handles(pid: int, number: int) -> bool:
    """Return whether a process handles this signal: most signals kill it by default."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False
