"""Output of a member's workers, forwarded to node 0: complete within the rate, counted beyond it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from phalanx.control.messages import Log
from phalanx.launcher.output.console import withheld
from phalanx.launcher.output.filters import Std
from phalanx.launcher.output.log_forwarder import BURST, CHUNK, LogForwarder


class Sent:
    """The forwarded output."""

    def __init__(self) -> None:
        self.logs: list[Log] = []

    @property
    def data(self) -> bytes:
        return b"".join(log.data for log in self.logs)

    @property
    def skipped(self) -> int:
        return sum(log.skipped for log in self.logs)


def relayed(
    path: Path,
    act: Callable[[LogForwarder, Callable[[bytes], None], Callable[[], None]], Awaitable[None]],
    *,
    traceback: str | None = None,
    arrived: asyncio.Event | None = None,
) -> Sent:
    sent = Sent()

    def send(log: Log) -> None:
        sent.logs.append(log)
        if arrived is not None and log.data:
            arrived.set()

    async def run() -> None:
        relay = LogForwarder(send, lambda: 0)
        log = os.open(path, os.O_RDWR | os.O_CREAT)
        thread = relay.follow(3, Std.OUT, log, 0, traceback=traceback)

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


def test_the_end_of_an_endless_line_is_kept(tmp_path: Path) -> None:
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


TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyError: 3\n'


@pytest.mark.parametrize(
    ("succeeded", "reported", "shown"),
    [
        ((), None, b""),
        ((3,), None, TRACEBACK),
        ((), lambda text: "KeyError" in text, b""),
        ((), lambda text: "KeyboardInterrupt" in text, TRACEBACK),
    ],
    ids=["failed", "succeeded", "after Ctrl-C", "another error after Ctrl-C"],
)
def test_a_traceback_is_sent_only_if_no_message_reports_it(
    tmp_path: Path, succeeded: tuple[int, ...], reported: Callable[[str], bool] | None, shown: bytes
) -> None:
    (tmp_path / "traceback.txt").write_bytes(TRACEBACK)

    async def act(relay: LogForwarder, write: Callable[[bytes], None], end: Callable[[], None]) -> None:
        write(b"one\n" + TRACEBACK + b"two\n")
        await relay.drained(5)
        end()
        await relay.settle(succeeded=succeeded, reported=reported, timeout=5.0)

    sent = relayed(tmp_path / "log", act, traceback=str(tmp_path / "traceback.txt"))
    assert sent.data == b"one\ntwo\n" + shown


def test_a_traceback_of_a_process_that_does_not_end_is_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withheld, "DELAY", 0.2)
    (tmp_path / "traceback.txt").write_bytes(TRACEBACK)

    async def act(relay: LogForwarder, write: Callable[[bytes], None], _: Callable[[], None]) -> None:
        write(TRACEBACK)
        await relay.drained(5)
        async with asyncio.timeout(60):
            await arrived.wait()

    arrived = asyncio.Event()
    sent = relayed(tmp_path / "log", act, traceback=str(tmp_path / "traceback.txt"), arrived=arrived)
    assert sent.data == TRACEBACK
