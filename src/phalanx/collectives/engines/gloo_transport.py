"""Bytes between any two ranks of a group, wherever they are, over gloo."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.errors import GroupAborted

from .engine import ANYONE, as_bytes
from .gloo import GlooMessage
from .threaded import ENDED

MANY = 64  # ranks: from there on a connection is made when it is first used, and a rank that ended before is waited for
EVER = timedelta(days=365)
_LOOK = 0.02  # seconds
_one_at_a_time = threading.Lock()


class GlooTransport:
    """wires.send(tensor, to, tag).wait(); from any thread: wires.cut(), and whoever waits raises.

    gloo has no way to end an operation that waits for a peer which neither answers nor closes, but it gives up when a
    connection ends: so connections are ended. They are known by the ports on which ranks listen.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1  # for collectives of gloo's own, of which there are none
        options._timeout = within(timeout)
        with _one_at_a_time:
            before = _listening()
            options._devices = [_device(size >= MANY)]
            doors = [end for name, end in _listening().items() if name not in before]
        store.set(f"door of {rank}", " ".join(f"{host}|{port}" for host, port in doors))
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        keys = [f"door of {other}" for other in range(size)]
        store.wait(keys, within(timeout))
        told = [door for doors in store.multi_get(keys) for door in doors.decode().split()]
        self._doors = {(host, int(port)) for host, _, port in (door.rpartition("|") for door in told)}

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        return self._gloo.send([as_bytes(tensor)], to, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        part = [as_bytes(tensor)]
        return self._gloo.recv_anysource(part, tag) if source == ANYONE else self._gloo.recv(part, source, tag)

    def cut(self) -> None:
        for fd, name in _sockets():
            with contextlib.suppress(OSError):
                copy = os.dup(fd)  # what it refers to stays the same while we look
                try:
                    if os.readlink(f"/proc/self/fd/{copy}") == name:
                        self._cut(copy)
                finally:
                    os.close(copy)

    def _cut(self, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and (
                _end(sock.getpeername()) in self._doors or _end(sock.getsockname()) in self._doors
            ):
                # Not for writing: gloo forgets an operation whose write fails, and somebody waits until the timeout.
                sock.shutdown(socket.SHUT_RD)
        finally:
            sock.detach()

    def close(self) -> None:
        self._gloo = None


class AnySource(GlooMessage):
    """gloo does not give up such a message when connections end: its wait is left to a thread, and to itself."""

    def __init__(self, work: Any, trouble: Callable[[], Any], timeout: float, ended: Callable[[], bool]) -> None:
        super().__init__(work, trouble, timeout)
        self._ended = ended

    def wait(self, timeout: float = 0.0) -> bool:
        begun = time.monotonic()
        while not self.done():
            if self._ended():
                raise GroupAborted(ENDED)
            if timeout and time.monotonic() - begun > timeout:
                return False
            self._over.wait(_LOOK)
        return super().wait()


def within(timeout: float) -> timedelta:
    return timedelta(seconds=timeout) if timeout else EVER


def _device(lazy: bool) -> Any:
    # torch's own variable, which it reads itself only where it makes the device itself.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=lazy)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)


def _listening() -> dict[str, tuple[str, int]]:
    """Sockets of this process on which it listens: name and address."""
    found = {}
    for fd, name in _sockets():
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=os.dup(fd))
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    found[name] = _end(sock.getsockname())
    return found


def _end(address: Any) -> tuple[str, int]:
    return address[0].partition("%")[0], address[1]


def _sockets() -> list[tuple[int, str]]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found.append((int(fd), name))
    return found
