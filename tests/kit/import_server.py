"""The process that has modules imported, and forks another for every command: see imported.py, which starts it.

python import_server.py torch|commands DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any


def _serve(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Serve until there are no more requests. Returns only in a child: its request, and its standard streams."""
    children: dict[int, int] = {}  # pid -> where to report its exit code
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([sock, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            for pid, code in _ended():
                if pid in children:
                    os.write(children[pid], str(code).encode())
                    os.close(children.pop(pid))
        if sock in ready:
            data, fds, _, _ = socket.recv_fds(sock, 1 << 18, 4)
            if not data:
                sys.exit()
            order = json.loads(data)
            pid = _fork_in(order["init"]) if order["init"] else os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for fd in (sock.detach(), woken, wake, fds.pop(), *children.values()):
                    os.close(fd)
                return order, fds
            children[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            sock.send(str(pid).encode())


def _fork_in(init: int) -> int:
    """Fork; the child is in all namespaces of this process."""
    inside = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in ("pid", "uts", "ipc", "net", "mnt")]
    outside = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _enter(inside[0])  # children only
    pid = os.fork()
    if pid:
        _enter(outside)
    else:
        for fd in inside[1:]:
            _enter(fd)
    for fd in (*inside, outside):
        os.close(fd)
    return pid


def _enter(namespace: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become(order: dict[str, Any], fds: list[int]) -> Any:
    """Do everything that precedes the first line of the script. Call the result to run it."""
    import functools
    import tempfile

    from phalanx.forkserver.child import main_module, setup

    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for name in signal.Signals:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # like Python
        signal.signal(name, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        setup._reopen(stream, mode)
    setup._reseed()
    script, *args = order["words"]
    if script == "-m":
        return _module(*args)
    if script != "-c":
        return main_module.prepare({"main": ("script", script), "args": args})
    main = main_module._fresh_main()
    text, *args = args
    sys.argv[:] = ["-c", *args]
    sys.path.insert(0, "")
    return functools.partial(exec, compile(text, "<string>", "exec", dont_inherit=True), main.__dict__)


def _module(name: str, *args: str) -> Any:
    import functools
    import runpy

    from phalanx.forkserver import linux

    sys.argv[:] = ["-m", *args]
    sys.orig_argv[:] = [sys.executable, "-m", name, *args]
    linux.set_command_line(sys.orig_argv)
    return functools.partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]


def _modules(what: str) -> list[str]:
    """What to import: of phalanx all that its commands import, or may."""
    import pkgutil

    import phalanx

    if what == "torch":
        from phalanx.forkserver import paths

        return [
            *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.checkpoint"),
            *("torch.distributed.fsdp", *paths.TRAINING),
        ]
    found = ["aiohttp"]
    for package in ("cli", "launcher", "control", "cluster", "recover", "diagnose"):
        path = [f"{phalanx.__path__[0]}/{package}"]
        found += [each.name for each in pkgutil.walk_packages(path, f"phalanx.{package}.")]
    return [name for name in found if "__main__" not in name]


if __name__ == "__main__":
    import ctypes
    import gc
    import importlib

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what children leave behind is found below this process
    del sys.path[0]  # this folder: torch must not find our modules where it looks for others
    _sock = socket.socket(fileno=int(sys.argv[2]))
    _sock.send(str(os.getpid()).encode())
    for _name in _modules(sys.argv[1]):
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # otherwise the exit of each child would scan everything that was ever imported
    _become(*_serve(_sock))()
