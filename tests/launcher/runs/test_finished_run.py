"""Events of a run read from its files: in the order of time, in bounded parts, across damage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from phalanx.contract import events
from phalanx.launcher.runs import event_cursor, finished_run, run_folder
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord
from phalanx.launcher.viewers import views
from tests.launcher.viewers.nodes import received, run_async, until


def test_parts_are_bounded_and_in_the_order_of_time(tmp_path: Path, monkeypatch: Any) -> None:
    folder = RunFolder(str(tmp_path))
    for number in range(50):
        folder.event(events.NoteEvent(time=float(number), text=f"{number}"))
        folder.sample(events.ClusterSample(time=number + 0.5, seconds=1.0))
    folder.close()
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"event":"note","time":60.0,"te')  # the disk was full
    monkeypatch.setattr(event_cursor, "PART", 200)
    cursor: event_cursor.EventCursor | None = event_cursor.begin(str(tmp_path))
    lines, parts = b"", 0
    while cursor is not None:
        part, cursor = event_cursor.part(str(tmp_path), cursor)
        assert len(part) < 400
        lines, parts = lines + part, parts + 1
    times = [events.decode(line).time for line in lines.splitlines()]
    assert times == [number / 2 for number in range(100)]
    assert parts > 20
    lately, _ = event_cursor.part(str(tmp_path), event_cursor.begin(str(tmp_path), since=48.0 + event_cursor.SLACK))
    assert [events.decode(line).time for line in lately.splitlines()] == [48.0, 48.5, 49.0, 49.5]


def test_older_events_are_skipped_without_reading_them(tmp_path: Path, monkeypatch: Any) -> None:
    """A viewer that connects again must not cost the leader more, the longer the run is."""
    folder = RunFolder(str(tmp_path))
    for number in range(5000):
        folder.event(events.NoteEvent(time=float(number), text="x" * (number % 50)))
        if number % 7 == 0:
            folder.sample(events.ClusterSample(time=number + 0.5, seconds=1.0))
    folder.close()
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    damaged = lines[2500][:20] + b"\n"
    (tmp_path / "events.jsonl").write_bytes(b"".join([*lines[:2500], damaged, *lines[2501:]]))
    monkeypatch.setattr(event_cursor, "_READ", 2000)
    for since in (1.0, 2499.0, 2501.0, 4000.0, 4999.0, 9000.0):
        cursor = event_cursor.begin(str(tmp_path), since=since + event_cursor.SLACK)
        assert _times(tmp_path, cursor) == [
            time for time in _times(tmp_path, event_cursor.begin(str(tmp_path))) if time >= since
        ]
        skipped = event_cursor._skipped(str(tmp_path / "events.jsonl"), since)
        older = sum(map(len, lines[: int(since)]))
        assert skipped <= older <= skipped + 4000


def _times(folder: Path, cursor: event_cursor.EventCursor | None) -> list[float]:
    found = b""
    while cursor is not None:
        lines, cursor = event_cursor.part(str(folder), cursor)
        found += lines
    return [events.decode(line).time for line in found.splitlines() if line.endswith(b"}")]


def test_a_sample_of_many_ranks_is_read(tmp_path: Path) -> None:
    """That of 32,768 ranks has 5 MB."""
    folder = RunFolder(str(tmp_path))
    sample = events.ClusterSample(time=1.0, seconds=1.0, ranks=(events.RankSample(rank=0, place="x" * 5_000_000),))
    folder.sample(sample)
    folder.close()
    line, _ = event_cursor.part(str(tmp_path), event_cursor.begin(str(tmp_path)))
    assert events.decode(line) == sample


def test_the_start_of_the_run_comes_first(tmp_path: Path) -> None:
    """A sample covers a whole second, and the first one may begin before the run."""
    folder = RunFolder(str(tmp_path))
    folder.sample(events.ClusterSample(time=7.0, seconds=1.0))
    folder.event(events.RunStarted(time=7.4, run="r", command=("train.py",), world_size=1, pid=1))
    folder.event(events.NoteEvent(time=8.5, text="later"))
    folder.sample(events.ClusterSample(time=8.0, seconds=1.0))
    folder.close()
    lines, _ = event_cursor.part(str(tmp_path), event_cursor.begin(str(tmp_path)))
    assert [events.decode(line).time for line in lines.splitlines()] == [7.4, 7.0, 8.0, 8.5]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    note = events.encode(events.NoteEvent(time=2.0, text="ä"))
    cut = note[: note.index("ä".encode()) + 1]
    (tmp_path / "events.jsonl").write_bytes(b"\0" * (event_cursor._LONGEST + 100) + b"\n" + cut + note + note)
    cursor: event_cursor.EventCursor | None = event_cursor.begin(str(tmp_path))
    lines, parts = b"", 0
    while cursor is not None:
        part, cursor = event_cursor.part(str(tmp_path), cursor)
        lines, parts = lines + part, parts + 1
        assert parts < 10
    found = []
    for line in lines.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(events.decode(line))
    assert found == [events.NoteEvent(time=2.0, text="ä")]


def test_a_run_without_an_agent_is_read_from_its_files(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.event(events.NoteEvent(time=1.0, text="one"))
    folder.sample(events.ClusterSample(time=2.0, seconds=1.0))
    folder.event(events.RunEnded(time=3.0, code=1, seconds=2.0))
    (tmp_path / "node_1").mkdir()
    other = RunFolder(str(tmp_path / "node_1"))  # which has led since then
    other.event(events.NoteEvent(time=2.5, text="its own, from when it followed"))
    other.sample(events.ClusterSample(time=4.0, seconds=1.0))
    other.event(events.NoteEvent(time=5.0, text="led"))
    for run, rank in ((folder, 0), (other, 1)):
        for name in (f"{rank}", f"{rank}.1"):  # a replacement
            place = Path(run.rank_folder(2, name))
            (place / "stderr.log").write_text(f"{name} warns\n")
            os.utime(place / "stderr.log", (time.time(), time.time() + len(name)))
    other.close()
    folder.close()
    record = RunRecord(
        id="run",
        pid=1,
        pid_started=0,
        command=["t.py"],
        cwd="/",
        folder=str(tmp_path / "node_1"),
        world_size=2,
        started=1.0,
        ended=5.0,
        code=1,
    )
    run_folder.RunFolder(str(tmp_path)).record(record)

    async def work() -> None:
        source = views.of(record)
        assert not source.alive
        assert await received(source) == ["one", "S", "end", "S", "led"]
        assert (await source.log(1, "stderr")).text == "1.1 warns\n"
        found = await source.search("WARNS")
        assert [(line.rank, line.line) for line in found] == [(0, "0.1 warns"), (1, "1.1 warns")]
        assert "failed (1)" in (await source.why()).report

    run_async(work)


def test_a_run_of_another_host_is_followed_on_a_shared_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(finished_run, "_POLL_INTERVAL", 0.02)
    folder = RunFolder(str(tmp_path))
    record = RunRecord(
        id="run",
        pid=1,
        pid_started=0,
        command=["t.py"],
        cwd="/",
        folder=str(tmp_path),
        world_size=1,
        started=1.0,
        host="elsewhere",
    )
    folder.record(record)
    line = events.encode(events.NoteEvent(time=2.0, text="in two pieces"))

    async def work() -> None:
        folder.event(events.NoteEvent(time=1.0, text="one"))
        source = views.of(record)
        seen: list[str] = []
        receiving = asyncio.create_task(received(source, found=seen))
        with open(tmp_path / "events.jsonl", "ab", buffering=0) as file:
            for piece in (line[:20], line[20:]):
                await asyncio.sleep(0.1)
                file.write(piece)
        assert source.alive
        folder.sample(events.ClusterSample(time=3.0, seconds=1.0))
        await until(lambda: "S" in seen)
        folder.event(events.RunEnded(time=4.0, code=0, seconds=3.0))
        folder.ended(0)
        assert await receiving == ["one", "in two pieces", "S", "end"]
        assert not source.alive

    run_async(work)
    folder.close()
