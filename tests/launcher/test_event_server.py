"""Those who look at a run hear everything once, hold nobody up, and may sit at any node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from phalanx.contract import events
from phalanx.control import messages
from phalanx.errors import LaunchError
from phalanx.forkserver import linux
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import SearchReply, WatchQuery
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_rpc import NodeRpc, RequestHandler
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import event_cursor, finished_run, run_folder
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord
from phalanx.launcher.viewers import event_server, log_queries, viewer, views
from phalanx.launcher.viewers.event_server import EventServer
from phalanx.launcher.workers.watched import WatchContext
from phalanx.watch.source import SearchResult


class Node:
    """An agent, as far as those who look have to do with it. Letters to other nodes come a moment later."""

    def __init__(self, folder: Path, *, leads: bool = True, ranks: tuple[int, ...] = ()) -> None:
        folder.mkdir()
        self.folder = RunFolder(str(folder))
        self.leads = leads
        self.all_joined = True
        self.attempt: Any = None
        self.leader: Node = self
        self.others: dict[int, Node] = {}
        self.number = 0
        self.ranks = ranks
        self.rpc = NodeRpc(cast("Any", self))
        pid = os.getpid()
        self.record = RunRecord(
            id="run",
            pid=pid,
            pid_started=linux.start_time(pid) or 0,
            command=["train.py"],
            cwd="/",
            folder=str(folder),
            world_size=1,
            started=time.time(),
        )
        self.folder.record(self.record)
        self.note("begins")
        for rank in ranks:
            place = Path(self.folder.rank_folder(0, str(rank)))
            (place / "stdout.log").write_text(f"rank {rank} speaks\n")

    def open(self) -> None:
        self.control = ControlSocket(self.folder)
        here = cast("Any", self)
        self.server = EventServer(WatchContext(here, here, self.rpc, self.control, self.folder))

    def close(self) -> None:
        self.control.close()
        self.server.close()
        self.folder.close()

    def note(self, text: str) -> None:
        self.folder.event(events.NoteEvent(time=time.time(), text=text))

    def sight(self, size: int = 0) -> None:
        glances = (events.RankSample(rank=0, place="x" * size),)
        self.folder.sample(events.ClusterSample(time=time.time(), seconds=1.0, ranks=glances))

    def call(self, since: float | None = None) -> Any:
        return control_socket.call(self.record, WatchQuery(since=since))

    # -- Carrier

    def members(self) -> dict[int, tuple[int, ...]]:
        return {number: node.ranks for number, node in self.others.items()}

    def backlog(self, to: int | None) -> int:
        return 0

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        node, who = (self.others[to], None) if to is not None else (self.leader, self.number)
        asyncio.get_running_loop().call_soon(node.rpc.receive, who, frame)


@contextlib.asynccontextmanager
async def nodes(folder: Path, count: int = 1) -> AsyncIterator[list[Node]]:
    made = [Node(folder / f"run_{number}", leads=number == 0, ranks=(number,)) for number in range(count)]
    for number, node in enumerate(made):
        node.number, node.leader = number, made[0]
        if number:
            made[0].others[number] = node
        node.open()
    try:
        yield made
    finally:
        for node in made:
            node.close()


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


async def heard(source: Any, *, until: str = "") -> list[str]:
    """The notes, in order; S: a sight."""
    found: list[str] = []
    async for event in source.events():
        found.append(
            event.text
            if isinstance(event, events.NoteEvent)
            else "S"
            if isinstance(event, events.ClusterSample)
            else "end"
        )
        if until and found[-1] == until:
            break
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_past_then_what_happens_each_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            expected = ["begins"]

            async def happen() -> None:
                for number in range(300):
                    node.note(f"note {number}")
                    node.sight()
                    expected.extend((f"note {number}", "S"))
                    await asyncio.sleep(0.001)
                node.server.end(0, 1.0)

            for number in range(2000):
                node.note(f"past {number}")
                expected.append(f"past {number}")
            happening = asyncio.create_task(happen())
            everybody = await asyncio.gather(*(heard(views.of(node.record)) for _ in range(5)))
            await happening
            assert everybody == [[*expected, "end"]] * 5

    play(work)


def test_parts_of_the_past_are_in_the_order_of_time_and_bounded(tmp_path: Path, monkeypatch: Any) -> None:
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


def test_how_it_began_is_told_first(tmp_path: Path) -> None:
    """A sight is of a whole second, and the first of them may have begun before the run."""
    folder = RunFolder(str(tmp_path))
    folder.sample(events.ClusterSample(time=7.0, seconds=1.0))
    folder.event(events.RunStarted(time=7.4, run="r", command=("train.py",), world_size=1, pid=1))
    folder.event(events.NoteEvent(time=8.5, text="later"))
    folder.sample(events.ClusterSample(time=8.0, seconds=1.0))
    folder.close()
    lines, _ = event_cursor.part(str(tmp_path), event_cursor.begin(str(tmp_path)))
    assert [events.decode(line).time for line in lines.splitlines()] == [7.4, 7.0, 8.0, 8.5]


def test_what_a_broken_disk_has_left_is_passed_over(tmp_path: Path) -> None:
    note = events.encode(events.NoteEvent(time=2.0, text="ä"))
    cut = note[: note.index("ä".encode()) + 1]
    (tmp_path / "events.jsonl").write_bytes(b"\0" * (event_cursor._READ + 100) + b"\n" + cut + note + note)
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


def test_who_does_not_read_loses_sights_first_and_is_dropped_in_the_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            with await asyncio.to_thread(node.call) as deaf:
                await until(lambda: len(node.server._viewers) == 1)
                (caller,) = node.server._viewers
                await until(lambda: caller._held is None)
                for _ in range(100):
                    node.sight(1 << 16)
                    await asyncio.sleep(0)
                assert caller._transport is not None
                assert caller._transport.get_write_buffer_size() < viewer._SAMPLES_LIMIT + (1 << 17)
                node.note("something happens")  # that is not lost yet
                assert caller in node.server._viewers
                for number in range(200):
                    node.note(f"{number}" * (1 << 14))
                    await asyncio.sleep(0)
                await until(lambda: not node.server._viewers)
                # Whoever reads gets it all the same.
                node.server.end(0, 1.0)
                assert (await heard(views.of(node.record)))[-1] == "end"
                deaf.close()

    play(work)


def test_there_is_a_limit_to_those_who_look(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "MAX_VIEWERS", 2)
    monkeypatch.setattr(control_socket, "HANDLER_TIMEOUT", 0.2)

    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            first, second = await asyncio.to_thread(node.call), await asyncio.to_thread(node.call)
            await until(lambda: len(node.server._viewers) == 2)
            with pytest.raises(LaunchError, match="this run has 2 viewers already"):
                await heard(views.of(node.record))
            first.close()
            await until(lambda: len(node.server._viewers) == 1)
            assert await heard(views.of(node.record), until="begins") == ["begins"]
            second.close()

    play(work)


def test_who_says_nothing_at_the_desk_keeps_nobody_from_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            name = Path(node.folder.path, "control").read_text().split()[0]
            with contextlib.ExitStack() as held:
                strangers = [
                    held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(control_socket._MAX_PENDING + 20)
                ]
                for stranger in strangers:
                    await asyncio.to_thread(stranger.connect, f"\0{name}")
                assert await heard(views.of(node.record), until="begins") == ["begins"]
                assert len(node.control._pending) <= control_socket._MAX_PENDING
                strangers[0].settimeout(10)
                assert await asyncio.to_thread(strangers[0].recv, 1) == b""

    play(work)


def test_a_broken_connection_is_made_again_and_nothing_is_told_twice(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            hearing = asyncio.create_task(heard(views.of(node.record)))
            for number in range(3):
                await until(lambda: bool(node.server._viewers))
                node.note(f"before {number}")
                await asyncio.sleep(0.05)
                node.server._drop_all()
                node.note(f"meanwhile {number}")
            await until(lambda: bool(node.server._viewers))
            node.server.end(3, 1.0)
            words = [f"{word} {number}" for number in range(3) for word in ("before", "meanwhile")]
            assert await hearing == ["begins", *words, "end"]

    play(work)


def test_who_is_hung_up_on_at_the_end_reads_the_rest_from_the_files(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            source = views.of(node.record)
            hearing = asyncio.create_task(heard(source))
            await until(lambda: bool(node.server._viewers))
            node.note("heard")
            await asyncio.sleep(0.1)
            os.unlink(os.path.join(node.folder.path, "control"))
            node.server.close()
            node.note("missed")
            node.folder.event(events.RunEnded(time=time.time(), code=1, seconds=1.0))
            node.folder.ended(1)
            assert await hearing == ["begins", "heard", "missed", "end"]

    play(work)


def replies(content: bytes | None) -> RequestHandler:
    async def reply(_: int | None, __: bytes) -> bytes | None:
        return content

    return reply


def test_one_node_that_is_broken_is_told_of_and_the_others_are_heard(tmp_path: Path, monkeypatch: Any) -> None:
    async def work() -> None:
        async with nodes(tmp_path, 4) as (leader, one, _, broken):
            for said in (
                b"[1]",
                b'{"reply": "search", "found": 5}',
                b'{"reply": "search", "found": [{"rank": "0"}]}',
                b'{"reply": "why"}',
                b"[" * 9999,
            ):
                broken.rpc.serve("query", replies(said))
                for node in (leader, one):
                    source = views.of(node.record)
                    found = await source.search("speaks")
                    assert [line.rank for line in found if line.rank >= 0] == [0, 1, 2]
                    with pytest.raises(LaunchError):
                        await source.log(3, "stdout")
            lie = SearchResult(rank=0, stream="stdout", at=0, line="speaks as another")
            broken.rpc.serve("query", replies(msgspec.json.encode(SearchReply(found=(lie,)))))
            assert [line.line for line in await views.of(leader.record).search("speaks")] == [
                f"rank {rank} speaks" for rank in range(3)
            ]
            broken.rpc.serve("query", replies(None))
            monkeypatch.setattr(log_queries, "NODE_TIMEOUT", 1.0)
            *found, note = await views.of(one.record).search("speaks")  # node 0 waits as well
            assert [line.rank for line in found] == [0, 1, 2]
            assert note.line == "node 3 has not answered within 1 s"

    play(work)


@pytest.mark.parametrize("waiting", [0, 1], ids=["stopped", "stopped, and others wait"])
def test_whoever_leaves_does_not_wait_for_a_agent_that_is_stopped(tmp_path: Path, waiting: int) -> None:
    node = Node(tmp_path / "run")
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        name = f"phalanx-test-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen(0)
        for _ in range(waiting):
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        (tmp_path / "run" / "control").write_text(f"{name} key\n")

        async def look() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(heard(views.of(node.record)), 0.3)

        began = time.monotonic()
        asyncio.run(look())
        assert time.monotonic() - began < control_socket.HANDLER_TIMEOUT - 1
    node.folder.close()


def test_from_a_node_that_does_not_lead(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)
    monkeypatch.setattr(event_server, "_EXPIRES", 0.5)

    async def work() -> None:
        async with nodes(tmp_path, 3) as (leader, one, _):
            for number in range(5000):
                leader.note(f"past {number}")
            several = [asyncio.create_task(heard(views.of(one.record))) for _ in range(3)]
            await until(lambda: len(one.server._viewers) == 3 and 1 in leader.server._members)
            assert list(leader.server._members) == [1]  # however many look there
            one.note("not for those who look at the whole")
            leader.note("now")
            for number in range(3):
                source = views.of(leader.others.get(number, leader).record)
                for rank in range(3):
                    part = await source.log(rank, "stdout")
                    assert (part.start, part.text) == (0, f"rank {rank} speaks\n")
                assert [line.rank for line in await source.search("SPEAKS")] == [0, 1, 2]
                assert await source.search("rank 2", [0, 1]) == []
                assert (await source.log(7, "stdout")).text == ""
            leader.server.end(0, 1.0)
            words = ["begins", *(f"past {number}" for number in range(5000)), "now", "end"]
            for task in several:
                assert await task == words
            await until(lambda: not one.server._viewers)
            await until(lambda: not leader.server._members)
            # One that dies leaves nothing behind: what is not renewed expires.
            leader.server._members[2] = time.monotonic() + 0.1
            await asyncio.sleep(0.15)
            leader.note("later")
            assert not leader.server._members

    play(work)


def test_a_node_that_was_not_heard_of_for_a_while_is_told_what_it_has_missed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 2) as (leader, one):
            hearing = asyncio.create_task(heard(views.of(one.record)))
            await until(lambda: 1 in leader.server._members and bool(one.server._leader))
            leader.server._members.clear()  # it was stopped for longer than its wish is good for
            leader.note("missed")
            await until(lambda: 1 in leader.server._members)
            await asyncio.sleep(0.3)
            leader.server.end(0, 1.0)
            assert await hearing == ["begins", "missed", "end"]

    play(work)


def test_another_node_leads_and_the_stream_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 3) as (leader, heir, other):
            hearing = [asyncio.create_task(heard(views.of(node.record))) for node in (heir, other)]
            await until(lambda: len(leader.server._members) == 2)
            await until(lambda: all(not caller._held for node in (heir, other) for caller in node.server._viewers))
            leader.note("the last of the first")
            await asyncio.sleep(0.1)
            heir.leads, heir.leader, other.leader = True, heir, heir
            leader.others, heir.others = {}, {2: other}
            heir.note("the first of the second")
            await until(lambda: 2 in heir.server._members)
            heir.note("and more")
            await asyncio.sleep(0.3)
            heir.server.end(0, 1.0)
            for task in hearing:
                told = await task
                assert [word for word in told if word != "begins"] == [
                    "the last of the first",
                    "the first of the second",
                    "and more",
                    "end",
                ]

    play(work)


def test_a_node_that_has_not_joined_yet_shows_what_it_knows_itself(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 2) as (leader, node):
            node.all_joined = False
            leader.note("long ago")
            hearing = asyncio.create_task(heard(views.of(node.record)))
            await until(lambda: bool(node.server._viewers))
            node.note("waits for node 0")
            await asyncio.sleep(0.1)
            node.all_joined = True
            await until(lambda: bool(leader.server._members))
            leader.server.end(0, 1.0)
            assert await hearing == ["begins", "waits for node 0", "begins", "long ago", "end"]

    play(work)


def test_a_run_whose_agent_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.event(events.NoteEvent(time=1.0, text="one"))
    folder.sample(events.ClusterSample(time=2.0, seconds=1.0))
    folder.event(events.RunEnded(time=3.0, code=1, seconds=2.0))
    (tmp_path / "node_1").mkdir()
    other = RunFolder(str(tmp_path / "node_1"))  # that has led since
    other.event(events.NoteEvent(time=2.5, text="its own, from when it followed"))
    other.sample(events.ClusterSample(time=4.0, seconds=1.0))
    other.event(events.NoteEvent(time=5.0, text="led"))
    for run, rank in ((folder, 0), (other, 1)):
        for name in (f"{rank}", f"{rank}.1"):  # another has taken its place
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
        assert await heard(source) == ["one", "S", "end", "S", "led"]
        assert (await source.log(1, "stderr")).text == "1.1 warns\n"
        found = await source.search("WARNS")
        assert [(line.rank, line.line) for line in found] == [(0, "0.1 warns"), (1, "1.1 warns")]
        assert "failed (1)" in (await source.why()).report

    play(work)


def test_a_run_of_another_machine_on_a_disk_that_is_shared(tmp_path: Path, monkeypatch: Any) -> None:
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
        hearing = asyncio.create_task(heard(source))
        with open(tmp_path / "events.jsonl", "ab", buffering=0) as file:
            for piece in (line[:20], line[20:]):
                await asyncio.sleep(0.1)
                file.write(piece)
        assert source.alive
        folder.sample(events.ClusterSample(time=3.0, seconds=1.0))
        await asyncio.sleep(0.1)
        folder.event(events.RunEnded(time=4.0, code=0, seconds=3.0))
        folder.ended(0)
        assert await hearing == ["one", "in two pieces", "S", "end"]
        assert not source.alive

    play(work)
    folder.close()


# -- what ranks have written


def test_parts_of_a_log(tmp_path: Path) -> None:
    text = "".join(f"line {number} äöü€\n" for number in range(10_000))
    (tmp_path / "stdout.log").write_text(text)
    found, at = "", 0
    while True:
        part = log_reader.part(str(tmp_path), "stdout", at, 1000)
        assert part.start == at
        if not part.text:
            break
        found, at = found + part.text, part.end
    assert found == text
    last = log_reader.part(str(tmp_path), "stdout", None, 100)
    assert last.text.startswith("line ")
    assert text.endswith(last.text)
    assert len(log_reader.part(str(tmp_path), "stdout", 0, 1 << 30).text.encode()) <= log_reader.PART
    beyond = log_reader.part(str(tmp_path), "stdout", 1 << 40)
    assert (beyond.start, beyond.end, beyond.text) == (len(text.encode()), len(text.encode()), "")
    with open(tmp_path / "stdout.log", "ab") as file:
        file.write("half €".encode()[:-1])  # and the rest of it a moment later
        file.flush()
        half = log_reader.part(str(tmp_path), "stdout", beyond.end)
        file.write("half €".encode()[-1:])
        file.flush()
        rest = log_reader.part(str(tmp_path), "stdout", half.end)
        assert (half.text, rest.text) == ("half ", "€")
    (tmp_path / "stdout.log").write_bytes(b"ended\xe2")
    half = log_reader.part(str(tmp_path), "stdout", 0)
    assert (half.text, log_reader.part(str(tmp_path), "stdout", half.end).text) == ("ended", "\ufffd")
    assert log_reader.part(str(tmp_path), "stderr", None).text == ""
    assert log_reader.part(None, "stdout", 3).text == ""


def test_a_search_is_bounded_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_reader, "SEARCHED", 1 << 16)
    monkeypatch.setattr(log_reader, "_BLOCK", 1 << 10)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    lines = [f"line {number}" + " Needle" * (number % 1000 == 0) for number in range(20_000)]
    (tmp_path / "0" / "stdout.log").write_text("\n".join(lines))
    (tmp_path / "1" / "stderr.log").write_text("x" * 5000 + "needle" + "y" * 5000)
    places = {rank: str(tmp_path / str(rank)) for rank in (0, 1)}
    *found, note = log_reader.search(places, "needle", 100)
    assert note == SearchResult(rank=-1, stream="stdout", at=0, line="only the last 0 MiB of rank 0 were searched")
    assert [line.line for line in found[:-1]] == [f"line {number} Needle" for number in range(15_000, 20_000, 1000)]
    text = (tmp_path / "0" / "stdout.log").read_bytes()
    assert all(text[line.at :].startswith(line.line.encode()) for line in found[:-1])
    assert found[-1].rank == 1
    assert found[-1].line.startswith("needle")
    assert len(found[-1].line) <= log_reader._LINE
    *few, limit, _ = log_reader.search(places, "needle", 2)
    assert [(line.rank, line.line[:10]) for line in few] == [(0, "line 19000"), (1, "needleyyyy")]
    assert limit.line == "only 2 lines are shown, of more"
    assert "the search timed out" in log_reader.search(places, "needle", 2, timeout=-1.0)[-1].line


def test_where_a_rank_has_written_last(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    for name in ("0", "1", "spare.2"):
        (Path(folder.rank_folder(0, name)) / "stdout.log").write_text(name)
    for number, (rank, spare) in enumerate(((0, False), (1, False), (1, True))):
        folder.event(events.WorkerStarted(time=1.0, rank=rank, pid=10 + number, spare=spare))
    assert {rank: Path(path).name for rank, path in log_reader.folders(str(tmp_path)).items()} == {0: "0", 1: "1"}
    os.utime(tmp_path / "attempt_0" / "spare.2" / "stdout.log", (time.time(), time.time() + 9))
    folder.event(events.RankChanged(time=2.0, rank=1, pid=12, previous_rank=1))
    assert {rank: Path(path).name for rank, path in log_reader.folders(str(tmp_path)).items()} == {0: "0", 1: "spare.2"}
    folder.close()
