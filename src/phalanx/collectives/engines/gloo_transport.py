"""Point-to-point transfers between any two ranks of a group, over gloo."""

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
from phalanx.forkserver.signed_store import SignedStore

from .engine import ANY_SOURCE, as_bytes
from .gloo import GlooMessage, unprofiled
from .threaded import ENDED

LAZY_SIZE = 64  # ranks from which connections are made on first use: then a call waits for a rank that has exited
NO_TIMEOUT = timedelta(days=365)
_POLL = 0.02  # seconds
_creating = threading.Lock()


class GlooTransport:
    """Point-to-point transfers: transport.send(tensor, to, tag).wait(). transport.cut() from any thread makes waiting
    calls raise.

    gloo cannot cancel an operation that waits for a peer, but it gives up when a connection is closed. So `cut` closes
    the connections. It finds them by the ports on which the ranks listen.
    """

    def __init__(self, store: SignedStore, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1  # only for gloo's own collectives, which are not used
        options._timeout = within(timeout)
        with _creating:
            before = _listening()
            options._devices = [_device(size >= LAZY_SIZE)]
            addresses = [end for name, end in _listening().items() if name not in before]
        store.set(f"address of {rank}", " ".join(f"{host}|{port}" for host, port in addresses))
        self._gloo: Any = dist.ProcessGroupGloo(store.torch_prefix("gloo"), rank, size, options)
        keys = [f"address of {other}" for other in range(size)]
        store.wait(keys, within(timeout))
        published = [address for addresses in store.multi_get(keys) for address in addresses.decode().split()]
        self._addresses = {(host, int(port)) for host, _, port in (address.rpartition("|") for address in published)}

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Start to send a tensor's bytes."""
        part = [as_bytes(tensor)]
        return unprofiled(lambda: self._gloo.send(part, to, tag))

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive a tensor's bytes; `source` may be ANY_SOURCE."""
        part = [as_bytes(tensor)]
        if source == ANY_SOURCE:
            return unprofiled(lambda: self._gloo.recv_anysource(part, tag))
        return unprofiled(lambda: self._gloo.recv(part, source, tag))

    def cut(self) -> None:
        """Close all connections for reading, so that waiting calls raise. Thread-safe."""
        for fd, name in _sockets():
            with contextlib.suppress(OSError):
                copy = os.dup(fd)  # a copy refers to the same socket while we check it
                try:
                    if os.readlink(f"/proc/self/fd/{copy}") == name:
                        self._cut(copy)
                finally:
                    os.close(copy)

    def _cut(self, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and (
                _address(sock.getpeername()) in self._addresses or _address(sock.getsockname()) in self._addresses
            ):
                # Not for writing: gloo drops an operation whose write fails, and its caller would wait until the
                # timeout.
                sock.shutdown(socket.SHUT_RD)
        finally:
            sock.detach()

    def close(self) -> None:
        """Close the gloo group."""
        self._gloo = None


class AnySourceMessage(GlooMessage):
    """A receive from any source. gloo does not cancel it when connections are closed, so a thread waits for it and is
    abandoned.
    """

    def __init__(self, work: Any, errors: Callable[[], Any], timeout: float, ended: Callable[[], bool]) -> None:
        super().__init__(work, errors, timeout)
        self._ended = ended

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for the message; return whether it has arrived."""
        begun = time.monotonic()
        while not self.done():
            if self._ended():
                raise GroupAborted(ENDED)
            if timeout and time.monotonic() - begun > timeout:
                return False
            self._finished.wait(_POLL)
        return super().wait()


def within(timeout: float) -> timedelta:
    """Return the timeout as a timedelta; 0: a very long one."""
    return timedelta(seconds=timeout) if timeout else NO_TIMEOUT


def _device(lazy: bool) -> Any:
    # torch's own variable. torch does not read it if a device is passed.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]  # noqa: TID251
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=lazy)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)


def _listening() -> dict[str, tuple[str, int]]:
    """Return the listening sockets of this process: name -> address."""
    found = {}
    for fd, name in _sockets():
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=os.dup(fd))
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    found[name] = _address(sock.getsockname())
    return found


def _address(address: Any) -> tuple[str, int]:
    return address[0].partition("%")[0], address[1]


def _sockets() -> list[tuple[int, str]]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found.append((int(fd), name))
    return found
