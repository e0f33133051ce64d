"""Output of real processes through real pipes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.launcher.output.captured_stream import TAIL_SIZE
from phalanx.launcher.output.filters import Std
from tests.launcher.output.captured_run import PATIENCE, SPEED, Run, running, written


class Reader(threading.Thread):
    """Reads the shown output, and keeps a digest of the output of each rank."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self.digests: defaultdict[int, hashlib._Hash] = defaultdict(hashlib.sha1)

    def run(self) -> None:
        rest = b""
        while data := os.read(self.fd, 1 << 22):
            whole, _, rest = (rest + data).rpartition(b"\n")
            lines: defaultdict[bytes, list[bytes]] = defaultdict(list)
            for line in whole.split(b"\n") if whole else ():
                lines[line[:4]].append(line[4:])
            for prefix, of_rank in lines.items():
                self.digests[int(prefix[1:2])].update(b"\n".join(of_rank) + b"\n")
        assert not rest


@pytest.mark.alone
def test_eight_ranks_at_full_speed_lose_nothing(tmp_path: Path) -> None:
    size = 50_000_000
    reader, writer = os.pipe()
    watcher = Reader(reader)
    watcher.start()

    async def body(run: Run) -> None:
        start = time.process_time()  # of all threads, the reader's included
        processes = [run.start(rank, SPEED, rank, size) for rank in range(8)]
        assert await run.output.drained(PATIENCE * 4) == []
        rate = 8 * size / (time.process_time() - start) / 1e6
        print(f"{rate:.0f} MB per second of CPU time")
        assert rate > 100
        assert [process.wait() for process in processes] == [0] * 8
        await run.close()

    try:
        running(tmp_path, 8, body, out=writer)
    finally:
        os.close(writer)
        watcher.join(PATIENCE)
        os.close(reader)
    for rank in range(8):
        expected = written(rank, size)
        assert (tmp_path / str(rank) / "stdout.log").read_bytes() == expected
        assert watcher.digests[rank].digest() == hashlib.sha1(expected + b"\n").digest()
        (tmp_path / str(rank) / "stdout.log").unlink()


def test_a_console_without_a_reader_does_not_delay_ranks(tmp_path: Path) -> None:
    size = 8_000_000
    reader, writer = os.pipe()
    watcher = Reader(reader)

    async def body(run: Run) -> None:
        processes = [run.start(rank, SPEED, rank, size) for rank in range(8)]
        assert await run.output.drained(PATIENCE) == []
        assert [process.wait() for process in processes] == [0] * 8
        watcher.start()  # there was no reader before
        await run.close()

    try:
        running(tmp_path, 8, body, out=writer)
    finally:
        os.close(writer)
        watcher.join(PATIENCE)
        os.close(reader)
    for rank in range(8):
        expected = written(rank, size)
        assert (tmp_path / str(rank) / "stdout.log").read_bytes() == expected
        assert watcher.digests[rank].digest() == hashlib.sha1(expected + b"\n").digest()


def test_a_console_without_a_reader_uses_no_memory(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    async def body(run: Run) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = peak_memory()
        process = run.start(1, SPEED, 1, 200_000_000)
        assert await run.output.drained(PATIENCE * 2) == []
        assert process.wait() == 0
        assert peak_memory() - before < 30_000_000
        run.console.abandon()
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(reader, 1 << 20)

    try:
        running(tmp_path, 2, body, out=writer)
    finally:
        os.close(writer)
        os.close(reader)
        (tmp_path / "1" / "stdout.log").unlink()


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_both_streams_are_kept_and_what_is_not_shown_too(tmp_path: Path) -> None:
    code = "import os; os.write(1, b'out\\n\\0\\xff'); os.write(2, b'err\\r\\n')"

    async def body(run: Run) -> None:
        for rank, show in enumerate((Std.ALL, Std.OUT, Std.ERR, Std.NONE)):
            run.start(rank, code, show=show).wait()
        assert await run.output.drained(PATIENCE) == []
        await run.close()
        for rank in range(4):
            assert (run.log(rank), run.log(rank, "stderr")) == (b"out\n\0\xff", b"err\r\n")
        assert sorted(run.shown.splitlines()) == [b"[0] \0\xff", b"[0] out", b"[1] \0\xff", b"[1] out"]
        assert sorted(run.messages.splitlines()) == ["[0] err", "[2] err"]

    running(tmp_path, 4, body)


def test_logs_are_appended_to(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        for attempt in ("first", "second"):
            run.start(0, f"print({attempt!r})").wait()
            assert await run.output.drained(PATIENCE, [0]) == []
        await run.close()
        assert run.log(0) == b"first\nsecond\n"
        assert run.shown == b"[0] first\n[0] second\n"

    running(tmp_path, 2, body)


def test_a_process_that_is_left_behind_does_not_keep_us(tmp_path: Path) -> None:
    code = """
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
"""

    async def body(run: Run) -> None:
        run.start(1, code).wait()
        run.start(0, "print('done')").wait()
        began = time.monotonic()
        assert await run.output.drained(0.2) == [1]
        assert 0.2 <= time.monotonic() - began < PATIENCE
        child = int(run.log(1))
        os.kill(child, 9)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        assert run.log(0) == b"done\n"
        await run.close()
        assert sorted(run.shown.splitlines()) == sorted([b"[0] done", b"[1] %d" % child])

    running(tmp_path, 2, body)


def test_a_rank_opened_again_while_its_streams_are_held(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        out, _ = run.open(0)
        held = os.dup(out)
        os.write(held, b"old\n")
        run.output.handed_over(0)
        run.start(0, "print('new')").wait()
        assert await run.output.drained(PATIENCE) == []
        with pytest.raises(BrokenPipeError):
            os.write(held, b"nobody reads this\n")
        os.close(held)
        assert run.log(0) == b"old\nnew\n"

    running(tmp_path, 2, body)


# -- a full disk


def test_a_full_disk_stops_neither_the_worker_nor_what_is_shown(tmp_path: Path) -> None:
    code = "import sys\nfor n in range(3): print('line', n, flush=True)\nprint('reason', file=sys.stderr)"

    async def body(run: Run) -> None:
        (tmp_path / "0").mkdir()
        for name in ("stdout", "stderr"):
            (tmp_path / "0" / f"{name}.log").symlink_to("/dev/full")
        assert run.start(0, code).wait() == 0
        assert await run.output.drained(PATIENCE) == []
        assert run.output.tail(0, "stderr", 5) == ["reason"]
        await run.close()
        assert run.shown == b"[0] line 0\n[0] line 1\n[0] line 2\n"
        assert run.messages.count("No space left on device") == 1
        assert "28 bytes of output could not be written to logs" in run.messages

    running(tmp_path, 2, body)


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    limit = 100_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    reader, writer = os.pipe()
    watcher = Reader(reader)
    watcher.start()

    async def body(run: Run) -> None:
        out, err = run.open(1)
        process = subprocess.Popen([sys.executable, "-S", "-c", SPEED, "1", "1000000"], stdout=out, stderr=err)
        run.output.handed_over(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            assert await run.output.drained(PATIENCE) == []
            assert process.wait() == 0
            assert run.output.tail(1, "stdout", 1) == [written(1, 1_000_000).splitlines()[-1].decode()]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await run.close()
        assert run.log(1) == written(1, limit)
        assert run.messages.count("cannot be written: File too large") == 1
        assert "900000 bytes of output could not be written to logs" in run.messages

    try:
        running(tmp_path, 2, body, out=writer)
    finally:
        os.close(writer)
        watcher.join(PATIENCE)
        os.close(reader)
    assert watcher.digests[1].digest() == hashlib.sha1(written(1, 1_000_000) + b"\n").digest()


def test_what_is_neither_kept_nor_shown_is_counted(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # not read
    size = 12_000_000
    watcher = Reader(reader)

    async def body(run: Run) -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "stdout.log").symlink_to("/dev/full")
        assert run.start(1, SPEED, 1, size)
        assert await run.output.drained(PATIENCE) == []
        watcher.start()
        await run.close()
        assert f"{size} bytes of output could not be written to logs" in run.messages
        assert "were neither logged nor shown" in run.messages

    try:
        running(tmp_path, 2, body, out=writer)
    finally:
        os.close(writer)
        watcher.join(PATIENCE)
        os.close(reader)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """For example a deleted one: the output is shown and not kept."""

    async def body(run: Run) -> None:
        run.output.open(0, str(tmp_path / "nowhere"), show=Std.ALL)
        run.output.handed_over(0)
        assert await run.output.drained(PATIENCE) == []
        await run.close()
        assert run.messages.count("stdout.log cannot be written: No such file or directory. The run continues") == 1
        assert run.messages.count("cannot be written") == 1

    running(tmp_path, 2, body)


# -- the tail


@pytest.mark.parametrize(
    ("data", "lines", "expected"),
    [
        (b"", 5, []),
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nc", 2, ["b", "c"]),
        (b"a\n\n\n", 2, ["a"]),
        (b"\r 10%\r100%\n\xff\n", 5, ["100%", "\N{REPLACEMENT CHARACTER}"]),
        (b"\x1b[31mError\x1b[0m: \x1b[1mno\x1b[22m\n", 5, ["Error: no"]),
        (b"x" * (TAIL_SIZE + 10), 1, ["x" * TAIL_SIZE]),
        (b"first\n" + b"y" * TAIL_SIZE + b"\nlast\n", 5, ["last"]),
        (b"a\nb\n", 0, []),
    ],
)
def test_the_tail(tmp_path: Path, data: bytes, lines: int, expected: list[str]) -> None:
    async def body(run: Run) -> None:
        out, _ = run.open(0, show=Std.NONE)
        os.write(out, data)
        run.output.handed_over(0)
        assert await run.output.drained(PATIENCE) == []
        assert run.output.tail(0, "stdout", lines) == expected
        assert run.output.tail(0, "stderr", lines) == []
        assert run.output.tail(7, "stdout", lines) == []

    running(tmp_path, 2, body)


# -- needles


def test_lines_with_a_needle_are_kept_twice(tmp_path: Path) -> None:
    code = "import sys; print('loss 1\\nother\\nloss 2', end=''); print('Warning: x\\nloss 3', file=sys.stderr)"

    async def body(run: Run) -> None:
        teed = {0: Std.ALL, 1: Std.OUT}
        headers = {0: "[default0]:"}
        run.output.duplicate(str(tmp_path), stdout=["loss"], stderr=["Warn", "Err"], teed=teed, headers=headers)
        for rank in range(3):
            run.start(rank, code).wait()
            assert await run.output.drained(PATIENCE, [rank]) == []
        run.output.close()
        assert (tmp_path / "filtered_stdout.log").read_text() == (
            "[default0]:loss 1\n[default0]:loss 2\n[1]:loss 1\n[1]:loss 2\n"
        )
        assert (tmp_path / "filtered_stderr.log").read_text() == "[default0]:Warning: x\n"

    running(tmp_path, 3, body)


def test_without_filters_there_is_no_file(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        run.output.duplicate(str(tmp_path), stdout=["loss"])
        run.start(0, "print('loss')").wait()
        await run.output.drained(PATIENCE)
        assert (tmp_path / "filtered_stdout.log").read_text() == "[0]:loss\n"
        assert not (tmp_path / "filtered_stderr.log").exists()

    running(tmp_path, 2, body)


# -- a reader that goes away


def test_the_run_continues_after_the_reader_has_closed(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    async def body(run: Run) -> None:
        process = run.start(1, SPEED, 1, 3_000_000)
        await asyncio.to_thread(os.read, reader, 10)
        os.close(reader)
        assert await run.output.drained(PATIENCE) == []
        assert process.wait() == 0
        await run.close()
        assert run.log(1) == written(1, 3_000_000)
        assert run.messages == ""

    try:
        running(tmp_path, 2, body, out=writer)
    finally:
        os.close(writer)


def test_pipes_are_large_and_theirs_blocks(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        out, err = run.open(0)
        for fd in (out, err):
            largest = int(Path("/proc/sys/fs/pipe-max-size").read_text())
            assert fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) == min(1 << 20, largest)
            assert os.get_blocking(fd)
            assert not os.get_inheritable(fd)
        run.output.handed_over(0)
        assert await run.output.drained(PATIENCE) == []

    running(tmp_path, 2, body)


# -- properties

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x1b"), max_size=20).filter(
    lambda text: not text.startswith("[rank")  # torch's own prefix is not shown twice
)
LINES = st.lists(TEXT, max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.lists(LINES, min_size=2, max_size=3), data=st.data())
def test_any_lines_in_any_chunks_are_shown_as_they_are(
    tmp_path: Path, ranks: list[list[str]], data: st.DataObject
) -> None:
    texts = ["".join(f"{line}\n" for line in lines).encode() for lines in ranks]

    async def body(run: Run) -> None:
        pipes = [run.open(rank)[0] for rank in range(len(ranks))]
        left = list(texts)
        while any(left):
            rank = data.draw(st.integers(0, len(ranks) - 1))
            size = data.draw(st.integers(1, 30))
            os.write(pipes[rank], left[rank][:size])
            left[rank] = left[rank][size:]
            await asyncio.sleep(0)
        for rank in range(len(ranks)):
            run.output.handed_over(rank)
        assert await run.output.drained(PATIENCE) == []
        await run.close()
        shown = run.shown.decode().split("\n")
        for rank, lines in enumerate(ranks):
            assert [line[4:] for line in shown if line.startswith(f"[{rank}] ")] == lines
            assert run.log(rank) == texts[rank]
        assert len(shown) - 1 == sum(map(len, ranks))

    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        running(Path(folder), len(ranks), body)


@pytest.mark.parametrize(
    ("first", "again", "kept"),
    [
        (b"one\ntwo\n", b"one\ntwo\nthree\n", b"one\ntwo\nthree\n"),
        (b"one\ntw", b"one\ntwo\n", b"one\ntwo\n"),  # the second half of a line that had no end
        (b"at 10:00:01\nx\n", b"at 10:00:02\nx\n", b"at 10:00:01\nx\nat 10:00:02\nx\n"),  # whole lines
        (b"one\ntwo\n", b"one\ntw", b"one\ntwo\ntw"),  # it ended there
        (b"", b"one\n", b"one\n"),
    ],
)
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_what_a_worker_repeats_when_it_starts_again_is_kept_once(
    tmp_path: Path, first: bytes, again: bytes, kept: bytes, piece: int
) -> None:
    async def body(run: Run) -> None:
        out, err = (os.dup(fd) for fd in run.open(0))
        run.output.handed_over(0)
        os.write(out, first)
        run.output.repeats(0)
        for begin in range(0, len(again), piece):
            os.write(out, again[begin : begin + piece])
            run.output.catch_up(0)
        os.close(out)
        os.close(err)
        assert await run.output.drained(PATIENCE) == []

    running(tmp_path, 1, body)
    assert (tmp_path / "0" / "stdout.log").read_bytes() == kept
