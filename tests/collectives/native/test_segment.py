"""The shared memory of a group: how ranks find it, share it, and work without it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.collectives import _native, creation
from phalanx.collectives.engines import segment, shm
from phalanx.collectives.engines.engine import CallKind, EngineCall
from phalanx.collectives.engines.shm import ShmEngine
from phalanx.collectives.errors import CallRefused, CollectiveTimeout, PeerLost
from phalanx.contract import shared_memory
from phalanx.forkserver.signed_store import SignedStore
from tests.collectives.forked import LIMIT, ranks
from tests.collectives.native.calls import SUM, raised

pytestmark = pytest.mark.xdist_group("native")


def test_ranks_join_through_a_store_and_leave_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")

    def child(rank: int) -> int:
        store = dist.FileStore(path, 3)
        engine = shm.join(store, rank, [0, 2], [0, 2], LIMIT)
        engine.all_reduce(ones := torch.ones(2), SUM, LIMIT)
        named = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        engine.barrier(LIMIT)
        engine.close()
        mapped = "memfd:phalanx" in Path("/proc/self/maps").read_text()
        return 0 if ones.tolist() == [2, 2] and not any("memfd" in name for name in named) and not mapped else 1

    children = []
    for rank in (0, 2):
        if (pid := os.fork()) == 0:
            signal.alarm(int(LIMIT))
            os._exit(child(rank))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


def test_memory_that_can_shrink_is_not_mapped() -> None:
    """What the store says about the memory of a group is not trusted."""
    size = _native.memory(2, segment.SLOT)
    fd = shared_memory.create_unsealed("phalanx")
    os.ftruncate(fd, size)
    where = f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}"
    with pytest.raises(PeerLost, match="what rank 0 shares is not the memory of this group: its size can change"):
        segment._open(where, 0, size)
    shared_memory.seal(fd)
    os.close(segment._open(where, 0, size))
    os.close(fd)


def test_a_rank_that_cannot_join_fails_its_peers_at_once() -> None:
    memory = shared_memory.create("phalanx", _native.memory(2, segment.SLOT))

    def body(engine: ShmEngine, rank: int) -> object:
        pids = torch.zeros(2, dtype=torch.int64)
        engine.run(EngineCall(CallKind.ALL_GATHER, [torch.tensor([os.getpid()])], [pids], timeout=LIMIT))
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        files = []
        with contextlib.suppress(OSError):
            while rank == 1:
                files.append(os.open("/dev/null", os.O_RDONLY))
        answer = raised(lambda: ShmEngine(memory, rank, pids.tolist(), [0, 1], LIMIT))
        for file in files:
            os.close(file)
        return answer

    missed, refused = ranks(2, body)
    os.close(memory)
    assert missed == (PeerLost.__name__, "joining: peer lost, a rank of this host has ended")
    assert refused[0] == CallRefused.__name__
    assert "Too many open files" in refused[1]


# seccomp: instructions and results that the filter below uses.
_LOAD, _IS, _RETURN, _ALLOW, _NOT_PERMITTED = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
_PIDFD_OPEN = 434  # the same number on all architectures


def forbid(call: int) -> None:
    """Forbid a system call, as some containers do."""
    filters = [(_LOAD, 0, 0, 0), (_IS, 0, 1, call), (_RETURN, 0, 0, _NOT_PERMITTED), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
    program = struct.pack("H6xQ", len(filters), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0


@pytest.mark.parametrize("why", ["forbidden", "too many"])
def test_all_ranks_fall_back_to_gloo_where_memory_cannot_be_shared(tmp_path: Path, why: str) -> None:
    def child(rank: int) -> int:
        if why == "too many":
            segment.MAX_RANKS = 1
        elif rank == 1:
            forbid(_PIDFD_OPEN)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        group = creation.shm(store, rank, 2, timedelta(seconds=LIMIT))
        group.allreduce([ones := torch.ones(2)]).wait()
        return 0 if type(group._engine).__name__ == "GlooEngine" and ones.tolist() == [2, 2] else 1

    children = []
    for rank in (0, 1):
        if (pid := os.fork()) == 0:
            signal.alarm(int(LIMIT))
            os._exit(child(rank))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


def test_the_memory_of_another_group_is_refused() -> None:
    first, second = shared_memory.create("phalanx", 4096), shared_memory.create("phalanx", 4096)
    where = f"{os.getpid()}:{first}:{os.fstat(first).st_ino}"
    os.close(segment._open(where, 0, 4096))
    os.dup2(second, first)  # the number stays in use, as for a group whose creation failed
    with pytest.raises(PeerLost, match="what rank 0 shares is not the memory of this group"):
        segment._open(where, 0, 4096)
    os.close(first)
    os.close(second)


def test_a_file_that_is_not_shared_memory_is_refused(tmp_path: Path) -> None:
    """A pipe without a reader would block, and a file would be overwritten."""
    with open(tmp_path / "precious", "wb") as file:
        file.truncate(4096)
        where = f"{os.getpid()}:{file.fileno()}:{os.fstat(file.fileno()).st_ino}"
        with pytest.raises(PeerLost, match="what rank 0 shares is not the memory of this group"):
            segment._open(where, 0, 4096)


def test_ranks_that_do_not_reach_the_store_are_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(CollectiveTimeout, match=r"joining timed out: waited 0.3 s for ranks 1, 2 of this host"):
        segment.create(SignedStore(store, ""), 0, [0, 1, 2], 0.3)
