"""The client of the snapshot memory of this node's agent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection

import msgspec

from phalanx.contract import encoding, shared_memory
from phalanx.contract.messages import snapshot_messages as messages
from phalanx.errors import LaunchError
from phalanx.forkserver import linux

_PATIENCE = 30.0  # seconds: the agent is on this host, but may be busy


class SnapshotMemoryClient:
    """Requests memory from the agent. It returns descriptors, which the caller must close.

    shelf  the prefix of all names; one per training
    """

    def __init__(self, name: str, shelf: str = "") -> None:
        self._shelf = f"{shelf}/"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_PATIENCE)
        self._asking = threading.Lock()  # one request at a time
        try:
            linux.connect_to_own(self._sock, name)
        except OSError as error:
            self._sock.close()
            raise LaunchError(f"cannot connect to the snapshot memory of the agent: {error}") from error

    def lend(self, name: str, size: int) -> int:
        """Return memory of at least this size, to write. Raises LaunchError if there is no memory."""
        answer, fd = self._ask(messages.Lend(f"{self._shelf}{name}", size))
        if fd is None:
            raise LaunchError(answer.refused)
        return fd

    def show(self, name: str) -> int:
        """Return memory of this name, to read. Raises LaunchError if there is none."""
        answer, fd = self._ask(messages.Show(f"{self._shelf}{name}"))
        if fd is None:
            raise LaunchError(f"{name}: {answer.refused}")
        return fd

    def drop(self, name: str) -> None:
        """Free the memory of this name."""
        self._ask(messages.Drop(f"{self._shelf}{name}"))

    def names(self) -> list[str]:
        """Return the names of all memories on this shelf."""
        return [name.removeprefix(self._shelf) for name in self._all() if name.startswith(self._shelf)]

    def keep_only(self, names: Collection[str]) -> None:
        """Free all other memories, also on other shelves."""
        for name in set(self._all()) - {f"{self._shelf}{name}" for name in names}:
            self._ask(messages.Drop(name))

    def _all(self) -> list[str]:
        return self._ask(messages.Count())[0].names

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _ask(self, question: messages.Question) -> tuple[messages.Answer, int | None]:
        try:
            with self._asking:
                self._sock.send(encoding.encode(question))
                packet, fds, _, _ = socket.recv_fds(self._sock, encoding.PACKET_LIMIT, 1, socket.MSG_CMSG_CLOEXEC)
            fd = fds[0] if fds else None
            if fd is not None:
                _check(fd)
            return messages.answer.decode(packet), fd
        except (OSError, msgspec.MsgspecError) as error:
            self._sock.close()  # a late answer would be mistaken for the answer to the next request
            raise LaunchError(f"cannot connect to the snapshot memory of the agent: {error}") from error


def _check(fd: int) -> None:
    try:
        shared_memory.check(fd, shared_memory.GROWING)
    except OSError:
        os.close(fd)
        raise
