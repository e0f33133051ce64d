"""What a member's workers write, on its way to node 0: whole within the rate, counted beyond it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from phalanx.control.messages import Log
from phalanx.launcher.output.filters import Std
from phalanx.launcher.output.log_forwarder import BURST, CHUNK, LogForwarder


class Sent:
    """What went out."""

    def __init__(self) -> None:
        self.logs: list[Log] = []

    @property
    def data(self) -> bytes:
        return b"".join(log.data for log in self.logs)

    @property
    def skipped(self) -> int:
        return sum(log.skipped for log in self.logs)


def relayed(
    path: Path, act: Callable[[LogForwarder, Callable[[bytes], None], Callable[[], None]], Awaitable[None]]
) -> Sent:
    sent = Sent()

    async def run() -> None:
        relay = LogForwarder(sent.logs.append, lambda: 0)
        log = os.open(path, os.O_RDWR | os.O_CREAT)
        thread = relay.follow(3, Std.OUT, log, 0)

        def write(data: bytes) -> None:
            os.write(log, data)
            thread.grew(os.fstat(log).st_size)

        await act(relay, write, thread.end)
        await relay.drained(20)
        relay.close()
        os.close(log)

    asyncio.run(run())
    return sent


def test_a_burst_within_the_rate_arrives_whole(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(50_000))

    async def act(_: LogForwarder, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        write(text)
        end()

    sent = relayed(tmp_path / "log", act)
    assert sent.data == text
    assert sent.skipped == 0
    assert [log.ended for log in sent.logs][-1]
    assert {(log.rank, log.stream) for log in sent.logs} == {(3, 1)}


def test_beyond_it_the_newest_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    text = b"".join(b"line %07d\n" % number for number in range(400_000))

    async def act(_: LogForwarder, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        write(text)
        end()

    sent = relayed(tmp_path / "log", act)
    assert len(text) > BURST
    assert text.endswith(sent.data)
    assert sent.data.startswith(b"line ")  # whole lines only
    assert sent.skipped + len(sent.data) == len(text)


def test_of_one_endless_line_at_least_its_end_is_kept(tmp_path: Path) -> None:
    text = b"x" * (2 * BURST) + b"\n"

    async def act(_: LogForwarder, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        write(text)
        end()

    sent = relayed(tmp_path / "log", act)
    assert len(sent.data) >= CHUNK - 1
    assert sent.skipped + len(sent.data) == len(text)


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    async def act(relay: LogForwarder, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        write(b"one\nhal")
        await relay.drained(5)
        write(b"f\n")
        await relay.drained(5)
        write(b"rest")
        end()

    sent = relayed(tmp_path / "log", act)
    assert [log.data for log in sent.logs] == [b"one\n", b"half\n", b"rest"]
