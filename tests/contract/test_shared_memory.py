"""Which memory of another process a rank opens, and which it refuses."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.contract import shared_memory
from phalanx.contract.shared_memory import ForeignMemoryError
from phalanx.forkserver import linux
from tests.kit.users import as_root

SIZE = 8192
NOBODY = 65534


@contextmanager
def process_of(uid: int, do: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Call `do` in a process of another user. Return its pid and the result."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(uid, uid, uid)
        os.write(theirs, str(do()).encode())
        os.close(theirs)
        signal.alarm(120)
        signal.pause()
        os._exit(0)
    os.close(theirs)
    try:
        yield pid, int(os.read(ours, 64))
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_was_made_for_it_is_opened() -> None:
    fd = shared_memory.create("phalanx", SIZE)
    os.pwrite(fd, b"here", 0)
    other = shared_memory.open_of(os.getpid(), fd, "phalanx", size=SIZE, inode=os.fstat(fd).st_ino)
    assert os.pread(other, 4, 0) == b"here"
    os.close(other)
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        shared_memory.open_of(os.getpid(), fd, "phalanx", size=SIZE)


@as_root
def test_memory_of_another_user_is_not_opened_even_by_root() -> None:
    """Otherwise anyone who can write to the store could make a rank of root map and write to another user's memory."""
    with (
        process_of(NOBODY, lambda: shared_memory.create("phalanx", SIZE)) as (pid, fd),
        pytest.raises(ForeignMemoryError, match=f"it belongs to user {NOBODY}, and this process runs as user 0"),
    ):
        shared_memory.open_of(pid, fd, "phalanx", size=SIZE)


def test_memory_that_can_shrink_is_not_opened() -> None:
    """A mapping of it would end this process with SIGBUS."""
    fd = shared_memory.create_unsealed("phalanx")
    os.ftruncate(fd, SIZE)
    with pytest.raises(ForeignMemoryError, match="its size can change"):
        shared_memory.open_of(os.getpid(), fd, "phalanx", size=SIZE)
    shared_memory.seal(fd)
    os.close(shared_memory.open_of(os.getpid(), fd, "phalanx", size=SIZE))
    os.close(fd)


def test_another_name_size_or_inode_is_refused(tmp_path: Path) -> None:
    fd = shared_memory.create("phalanx-region", SIZE)
    node = os.fstat(fd).st_ino
    for name, size, inode in [("phalanx", SIZE, node), ("phalanx-region", 1, node), ("phalanx-region", SIZE, node + 1)]:
        with pytest.raises(ForeignMemoryError):
            shared_memory.open_of(os.getpid(), fd, name, size=size, inode=inode)
    os.close(fd)
    with open(tmp_path / "file", "wb") as file, pytest.raises(ForeignMemoryError, match="and not memory of phalanx"):
        shared_memory.open_of(os.getpid(), file.fileno(), "phalanx")


@as_root
def test_an_abstract_socket_of_another_user_is_not_used() -> None:
    name = f"phalanx-test-{os.urandom(8).hex()}"

    def listen() -> int:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(f"\0{name}")
        sock.listen()
        return sock.detach()

    with (
        process_of(NOBODY, listen) as (pid, _),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        pytest.raises(PermissionError, match=f"process {pid} of user {NOBODY} listens there"),
    ):
        linux.connect_to_own(sock, name)
