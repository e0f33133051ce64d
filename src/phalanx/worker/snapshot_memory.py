"""The memory that this node's agent holds, as a worker sees it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection

import msgspec

from phalanx.contract import snapshot_messages as words
from phalanx.errors import LaunchError

_PATIENCE = 30.0  # seconds for the agent: it is on this machine, but may have much to do


class SnapshotMemoryClient:
    """Every memory that it hands out is a descriptor for the caller to close. Names are those on one `shelf`."""

    def __init__(self, name: str, shelf: str = "") -> None:
        self._shelf = f"{shelf}/"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_PATIENCE)
        self._asking = threading.Lock()  # one question at a time
        try:
            self._sock.connect(f"\0{name}")
        except OSError as error:
            self._sock.close()
            raise LaunchError(f"the memory that the agent of this run holds cannot be reached: {error}") from error

    def lend(self, name: str, size: int) -> int:
        """To write; at least of this size. Raises LaunchError where there is no room."""
        answer, fd = self._ask(words.Lend(f"{self._shelf}{name}", size))
        if fd is None:
            raise LaunchError(answer.refused)
        return fd

    def show(self, name: str) -> int:
        """To read. Raises LaunchError where there is none."""
        answer, fd = self._ask(words.Show(f"{self._shelf}{name}"))
        if fd is None:
            raise LaunchError(f"{name}: {answer.refused}")
        return fd

    def drop(self, name: str) -> None:
        self._ask(words.Drop(f"{self._shelf}{name}"))

    def names(self) -> list[str]:
        return [name.removeprefix(self._shelf) for name in self._all() if name.startswith(self._shelf)]

    def keep_only(self, names: Collection[str]) -> None:
        """Drops all others, on other shelves too."""
        for name in set(self._all()) - {f"{self._shelf}{name}" for name in names}:
            self._ask(words.Drop(name))

    def _all(self) -> list[str]:
        return self._ask(words.Count())[0].names

    def close(self) -> None:
        self._sock.close()

    def _ask(self, question: words.Question) -> tuple[words.Answer, int | None]:
        try:
            with self._asking:
                self._sock.send(words.encode(question))
                packet, fds, _, _ = socket.recv_fds(self._sock, words.LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
            return words.answer(packet), fds[0] if fds else None
        except (OSError, msgspec.MsgspecError) as error:
            self._sock.close()  # an answer that comes late would be taken for that to the next question
            raise LaunchError(f"the memory that the agent of this run holds cannot be reached: {error}") from error
