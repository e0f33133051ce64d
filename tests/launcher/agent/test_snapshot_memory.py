"""Memory that an agent holds and workers borrow: over a real socket, from a thread instead of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.contract import encoding, shared_memory
from phalanx.contract.messages import snapshot_messages as words
from phalanx.errors import LaunchError
from phalanx.launcher.agent.snapshot_memory import SnapshotMemory
from phalanx.launcher.telemetry import out_of_memory
from phalanx.worker import snapshot_memory as worker
from tests.launcher.telemetry.test_memory import tree

PLENTY = 1 << 20


def visit(call: Callable[[str], None], room: Callable[[], int] = lambda: PLENTY, *, known: bool = True) -> None:
    async def main() -> None:
        memory = SnapshotMemory(lambda pid: known and pid == os.getpid(), requested=True, room=room)
        try:
            await asyncio.wait_for(asyncio.to_thread(call, memory.name), 20)
        finally:
            memory.close()

    asyncio.run(main())


def borrowed(memory: worker.SnapshotMemoryClient, name: str, size: int, text: bytes = b"") -> int:
    """Borrow memory and write this text at its beginning; return its size."""
    fd = memory.lend(name, size)
    try:
        os.pwrite(fd, text, 0)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def seen(memory: worker.SnapshotMemoryClient, name: str) -> bytes:
    fd = memory.show(name)
    try:
        return os.pread(fd, 100, 0).rstrip(b"\0")
    finally:
        os.close(fd)


def test_what_one_has_written_the_next_reads() -> None:
    def call(name: str) -> None:
        first, other = worker.SnapshotMemoryClient(name, "0"), worker.SnapshotMemoryClient(name, "1")
        assert borrowed(first, "a", 10, b"one") == 10
        assert borrowed(other, "a", 20, b"two") == 20
        first.close()
        again = worker.SnapshotMemoryClient(name, "0")
        assert again.names() == ["a"]
        assert seen(again, "a") == b"one"
        assert borrowed(again, "a", 30) == 30  # larger, with its previous content
        assert borrowed(again, "a", 5) == 30
        assert seen(again, "a") == b"one"
        borrowed(again, "b", 1)
        again.keep_only(["b"])
        assert (again.names(), other.names()) == (["b"], [])
        with pytest.raises(LaunchError, match="there is none"):
            again.show("a")
        again.drop("b")
        assert again.names() == []
        again.close()
        other.close()

    visit(call)


def test_memory_is_lent_only_as_far_as_it_is_free() -> None:
    """Memory that is lent and not written yet counts as used."""

    def call(name: str) -> None:
        memory = worker.SnapshotMemoryClient(name)
        borrowed(memory, "a", 600_000)
        with pytest.raises(LaunchError, match=r"0\.4 MiB more are needed, and 0\.3 MiB may be used"):
            memory.lend("b", 400_000)
        assert memory.names() == ["a"]
        memory.drop("a")
        assert borrowed(memory, "b", 400_000) == 400_000
        memory.close()

    visit(call)


def test_a_foreign_process_gets_nothing() -> None:
    def call(name: str) -> None:
        with pytest.raises(LaunchError, match="cannot connect"):
            worker.SnapshotMemoryClient(name).names()

    visit(call, known=False)


def test_an_answer_that_comes_late_is_none_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PATIENCE", 0.1)
    name = f"phalanx-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        memory = worker.SnapshotMemoryClient(name)
        slow, _ = listener.accept()
        with slow:
            with pytest.raises(LaunchError, match="timed out"):
                memory.names()
            with contextlib.suppress(OSError):
                slow.send(encoding.encode(words.Answer(names=["/a"])))
            with pytest.raises(LaunchError, match="cannot connect"):
                memory.names()


def test_memory_that_can_shrink_is_not_used() -> None:
    """A mapping of it would end the worker with SIGBUS."""
    name = f"phalanx-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        memory = worker.SnapshotMemoryClient(name)
        agent, _ = listener.accept()
        with agent:
            unsealed = shared_memory.create_unsealed("phalanx-snapshot")
            socket.send_fds(agent, [encoding.encode(words.Answer())], [unsealed])
            os.close(unsealed)
            with pytest.raises(LaunchError, match="its size can change"):
                memory.show("a")


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("", {}, 4096),
        ("0::/\n", {}, 4096),
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/memory.current": "1000\n", "a/b/memory.max": "max\n"}, 2000),
        (
            "0::/a\n",
            {"a/memory.max": "3000", "a/memory.current": "2900", "a/memory.stat": "anon 1\ninactive_file 500\n"},
            600,
        ),
        ("0::/a\n", {"a/memory.max": "100", "a/memory.current": "300"}, 0),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "3000", "memory/a/memory.usage_in_bytes": "1000"},
            2000,
        ),
    ],
    ids=["machine", "no limit", "above", "files", "none", "version 1"],
)
def test_free_memory_within_the_cgroup(tmp_path: Path, cgroup: str, files: dict[str, str], free: int) -> None:
    proc, cgroups = tree(tmp_path, cgroup, files)
    Path(proc, "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:       4 kB\n")
    assert out_of_memory.free_memory(proc, cgroups) == free
    assert out_of_memory.free_memory() > 1 << 20
