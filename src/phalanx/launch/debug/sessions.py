"""Who debugs which rank: breakpoints that wait for a terminal, and whoever attaches, here or on another node.

A debugger's terminal is a socket. The agent of the rank has its other end, and hands it on: to the terminal of
`phalanx run`, to a `phalanx attach` on the same node, or, by letters, to another node.

    o open   r reply   i interrupt   n it did not come        of a stream, by its number; others are bridge.py's
    s ranks at a debugger here, to node 0   p all of them, from node 0   w one waits for a terminal, to node 0
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.contract import events
from phalanx.forkserver import wire
from phalanx.launch.agent.worker import Worker
from phalanx.launch.agent.worker_group import WorkerGroup
from phalanx.launch.debug import attached
from phalanx.launch.debug.attached import Attached, AttachRefused
from phalanx.launch.debug.tty_lease import TtyLease
from phalanx.launch.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launch.ipc.stream_proxy import StreamProxy
from phalanx.launch.output.console import Console
from phalanx.launch.runs.run_folder import RunFolder

KIND = "debug"
_ANSWER = 5.0  # seconds for a rank: it has a thread that does nothing else, unless Python's lock is held
_LONGER = 20.0  # for one on another node, or a debugger that has to be imported
_DEBUGPY = "debugpy"
_LOOK = 1.0  # seconds between two looks whether the other end of a stream is there
_MOST = 64  # streams that another node may have opened here
_HOW = ("breakpoint", "stopped", "looking")
_NO_TOKEN = (
    "this run has no token (--no-auth), so that nobody knows who asks: ranks are debugged from their own node alone",
    "phalanx attach on the node of the rank, or a run without --no-auth",
)

Way = tuple[int | None, int]  # to whom (None: node 0), and the number of the stream


@dataclass
class _Debugged:
    """A rank of this node."""

    by: str = ""
    place: str = ""
    sock: socket.socket | None = None  # it waits at a breakpoint, for somebody to take this


class DebugTarget(Protocol):
    @property
    def attempt(self) -> WorkerGroup | None: ...
    @property
    def post(self) -> NodeRpc: ...
    def note(self, text: str) -> None: ...


class DebugSessions:
    def __init__(
        self,
        supervised: DebugTarget,
        coordinator: RpcCarrier,
        console: Console,
        folder: RunFolder,
        *,
        trusted: bool = True,
    ) -> None:
        self._supervised = supervised
        self._trusted = trusted  # other nodes have proved that they have the token
        self._coordinator = coordinator
        self._console = console
        self._folder = folder  # its name changes when the nodes have come together
        self._keyboard = TtyLease(console)
        self._here: dict[str, _Debugged] = {}  # by the name of the worker
        self._away: dict[int, frozenset[int]] = {}  # by member: where this node leads
        self._waiting: list[tuple[int, str]] = []  # for the keyboard: rank and place
        self._bridges: dict[Way, StreamProxy] = {}
        self._hang_ups: dict[Way, Callable[[], None]] = {}  # what to do at the end of one that is for another node
        self._replies: dict[Way, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._deaf = False  # the rank that has the keyboard does not come when it is interrupted
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._told: tuple[bool, frozenset[int], frozenset[int]] | None = None  # as a leader or not, which ranks, whom
        supervised.post.reads(KIND, self._read)

    # -- what ranks of this node say

    def heard(self, name: str, message: wire.Message, fds: list[int]) -> None:
        socks = [socket.socket(fileno=fd) for fd in fds]
        worker = self._worker(name)
        match message["is"]:
            case "breakpoint" if worker is not None and socks:
                self._here[name] = _Debugged(place=str(message.get("place", "")), sock=socks.pop())
                self._changed()
                self._offer(worker.seat.rank, self._here[name].place)
            case "released" | "gone" if name in self._here:
                left = self._here.pop(name).sock
                if left is not None:
                    left.close()
                self._changed()
        for sock in socks:
            sock.close()

    def _worker(self, name: str) -> Worker | None:
        attempt = self._supervised.attempt
        return attempt.workers.get(name) if attempt is not None else None

    def _is_here(self, rank: int) -> bool:
        attempt = self._supervised.attempt
        return attempt is not None and any(worker.seat.rank == rank for worker in attempt.workers.values())

    def _changed(self) -> None:
        """Everybody is to know: others wait for these ranks, and that is no fault."""
        self._keep_looking()
        own = frozenset(worker.seat.rank for name in self._here if (worker := self._worker(name)) is not None)
        leads, members = self._coordinator.leads, self._coordinator.members()
        ranks = own.union(*(self._away.get(member, ()) for member in members))
        told, self._told = self._told, (leads, ranks, frozenset(members))
        if leads:
            self._apply(ranks)
        if told == self._told and (leads or not own):  # node 0 may be another one since
            return
        for to in members if leads else (None,):
            self._send((to, 0), b"p" if leads else b"s", {"ranks": sorted(ranks)})

    def _apply(self, ranks: frozenset[int]) -> None:
        attempt = self._supervised.attempt
        if attempt is None or attempt.debugged == ranks:
            return
        before, attempt.debugged = attempt.debugged, ranks
        if bool(before) != bool(ranks):
            self._order("suspend" if ranks else "resume")
        self._keep_looking()

    def _order(self, what: str) -> None:
        attempt = self._supervised.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.probe is not None:
                worker.probe.order(what)

    # -- the terminal of `phalanx run`

    def _offer(self, rank: int, place: str) -> None:
        if not self._coordinator.leads:
            self._send((None, 0), b"w", {"rank": rank, "place": place})
            return
        if not self._keyboard.there or not (self._trusted or self._is_here(rank)):
            self._say_how(rank, place)
            return
        if any(rank == other for other, _ in self._waiting[1:]):
            return
        if self._waiting:
            self._console.say(f"rank {rank} waits at a breakpoint, {place}, until the terminal is free")
        self._waiting.append((rank, place))
        if len(self._waiting) == 1:
            self._start(self._serve())

    def _say_how(self, rank: int, place: str) -> None:
        how = f"phalanx attach {rank} {self._folder.name}"
        told = f"rank {rank} waits at a breakpoint, {place}: {how}"
        self._folder.event(
            events.NoteEvent(time=time.time(), text=told + (", or its number and d" * self._console.hidden))
        )
        self._console.say(told)

    async def _serve(self) -> None:
        """One after the other."""
        while self._waiting:
            rank, place = self._waiting[0]
            try:
                if self._keyboard.there:
                    await self._lend(rank, place)
                else:
                    self._say_how(rank, place)
            except (AttachRefused, OSError):  # somebody else has it, or it is gone
                pass
            finally:
                self._waiting.pop(0)

    async def _lend(self, rank: int, place: str) -> None:
        opened = await self.open(rank, by="the terminal of phalanx run", waits=True)
        if opened.sock is None:
            return
        self._deaf = False
        self._console.say(f"rank {rank} is at a breakpoint, {place}, and has the terminal until it goes on (c)")
        attempt = self._supervised.attempt

        def catch_up() -> None:
            self._deaf = False
            if attempt is not None:
                attempt.output.catch_up(rank)

        await self._keyboard.lend(rank, opened.sock, catch_up)
        opened.hang_up()

    def interrupted(self) -> bool:
        """Ctrl-C. Whether it is the debugger's."""
        rank = self._keyboard.rank
        if rank is None or self._deaf:
            return False
        self._start(self._interrupt_by_hand(rank))
        return True

    async def _interrupt_by_hand(self, rank: int) -> None:
        if not await self.interrupt(rank):
            self._did_not_come(rank)

    def _did_not_come(self, rank: int) -> None:
        if self._keyboard.rank == rank and not self._deaf:
            self._deaf = True
            self._console.say(
                f"rank {rank} is in native code, and does not come to its debugger; Ctrl-C again ends the run"
            )

    # -- whoever attaches

    async def attach(self, question: wire.Message, caller: socket.socket) -> None:
        """From the desk. What follows the question is Ctrl-C, a byte each."""
        with caller:
            try:
                rank, port = int(question.get("rank", -1)), question.get("port")
                opened = await self.open(rank, by=f"process {question.get('pid')}", port=port)
            except AttachRefused as refused:
                wire.send(caller, {"is": "refused", "why": refused.why, "fix": refused.fix})
                return
            told = {"is": "attached", "how": opened.how, "place": opened.place}
            if opened.sock is None:
                wire.send(caller, {**told, "port": opened.port, "host": opened.host})
                return
            with opened.sock as sock:
                wire.send(caller, told, [sock.fileno()])
            caller.setblocking(False)
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(caller, 1):
                    await self.interrupt(rank)
            opened.hang_up()

    async def _let_go(self, name: str, known: _Debugged) -> None:
        """Whoever debugged is gone, without a word perhaps: a rank that is at no prompt would not come to know, and
        be traced for ever."""
        await asyncio.sleep(_LOOK)  # it may only just have been let go
        worker = self._worker(name)
        if self._here.get(name) is known and worker is not None and worker.probe is not None:
            await worker.probe.ask("interrupt", timeout=_ANSWER)

    async def open(self, rank: int, *, by: str, port: int | None = None, waits: bool = False) -> Attached:
        """A debugger in a rank, wherever it is. `port`: debugpy is to listen. `waits`: only if it is at a breakpoint.
        Raises Refused."""
        attempt = self._supervised.attempt
        if attempt is None:
            raise AttachRefused("no rank is running at this moment", "the same again, once ranks have begun")
        if not 0 <= rank < attempt.world_size:
            last = attempt.world_size - 1
            raise AttachRefused(f"there is no rank {rank}", f"phalanx attach 0 … (ranks 0 to {last})" if last else "")
        for name, worker in attempt.workers.items():
            if worker.seat.rank == rank and not worker.spare:
                if worker.code is not None:
                    raise AttachRefused(f"rank {rank} has ended")
                return await self._open_here(name, worker, by, port, waits=waits)
        if not self._trusted:
            raise AttachRefused(*_NO_TOKEN)
        to = None
        if self._coordinator.leads:
            to = next((member for member, ranks in self._coordinator.members().items() if rank in ranks), None)
            if to is None:
                raise AttachRefused(f"the node of rank {rank} is not there")
        return await self._open_there(to, {"rank": rank, "by": by, "port": port, "waits": waits})

    async def _open_here(self, name: str, worker: Worker, by: str, port: int | None, *, waits: bool) -> Attached:
        rank, known = worker.seat.rank, self._here.get(name)
        if known is not None and known.sock is not None and port is None:
            sock, known.sock, known.by = known.sock, None, by
            return Attached("breakpoint", known.place, sock=sock, hang_up=self._hang_up(name, known))
        if waits or (known is not None and not (port is not None and known.by == _DEBUGPY)):
            by = (known.by if known is not None else "") or "its breakpoint"
            raise AttachRefused(f"rank {rank} is being debugged already, by {by}")
        if worker.probe is None:
            raise AttachRefused(*attached.no_python(rank))
        ours, theirs = socket.socketpair()
        own = self._here[name] = _Debugged(by if port is None else _DEBUGPY)
        try:
            if port is None:
                answer = await worker.probe.ask("attach", timeout=_ANSWER, fds=[theirs.fileno()])
            else:
                answer = await worker.probe.ask("listen", timeout=_LONGER, port=port)
            opened = attached.judge(rank, answer, begun=worker.probe.page.looked > 0)
        except BaseException:
            if self._here.get(name) is own:  # else it has come to a breakpoint meanwhile
                del self._here[name]
            ours.close()
            raise
        finally:
            theirs.close()
        self._changed()
        if opened.how != "listens":
            return Attached(opened.how, sock=ours, hang_up=self._hang_up(name, own))
        ours.close()
        return opened

    def _hang_up(self, name: str, known: _Debugged) -> Callable[[], None]:
        return lambda: self._start(self._let_go(name, known))

    async def interrupt(self, rank: int) -> bool:
        """Whether it has come, or may have."""
        attempt = self._supervised.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank == rank and worker.probe is not None:
                answer = await worker.probe.ask("interrupt", timeout=_ANSWER)
                return answer is not None and bool(answer.get("came"))
        for way, bridge in self._bridges.items():
            if bridge.rank == rank and self._is_ours(way):
                self._send(way, b"i")
        return True

    # -- other nodes

    def _send(self, way: Way, kind: bytes, content: dict[str, Any] | bytes = b"") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self._supervised.post.send(KIND, way[1], kind + body, to=way[0])

    def _is_ours(self, way: Way) -> bool:
        """Whether this node has opened it. Numbers of node 0 are even, those of the others odd."""
        return way[1] % 2 == (0 if self._coordinator.leads else 1)

    def _bridge(self, way: Way, rank: int) -> StreamProxy:
        def send(letter: bytes) -> None:
            self._send(way, letter[:1], letter[1:])

        def over() -> None:
            if self._bridges.get(way) is bridge:
                del self._bridges[way]
            self._hang_ups.pop(way, lambda: None)()

        bridge = self._bridges[way] = StreamProxy(rank, send, over)
        self._changed()
        return bridge

    def _keep_looking(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """The other end of a stream may be gone without a word, ranks get other numbers in a group that forms anew,
        and workers and groups that are new have their time limits."""
        while self._bridges or self._here or any(self._away.values()) or self._debugged:
            await asyncio.sleep(_LOOK)
            if self._debugged:
                self._order("suspend")
            there = set(self._coordinator.members()) if self._coordinator.leads else {None}
            for way, bridge in list(self._bridges.items()):
                if way[0] not in there:
                    bridge.close()
            self._away = {member: ranks for member, ranks in self._away.items() if member in there}
            self._changed()

    @property
    def _debugged(self) -> bool:
        """Any rank, anywhere."""
        attempt = self._supervised.attempt
        return attempt is not None and bool(attempt.debugged)

    async def _open_there(self, to: int | None, what: dict[str, Any]) -> Attached:
        way = (to, 2 * next(self._numbers) + (0 if self._coordinator.leads else 1))
        bridge = self._bridge(way, what["rank"])
        reply = self._replies[way] = asyncio.get_running_loop().create_future()
        self._send(way, b"o", what)
        try:
            answer = await asyncio.wait_for(reply, _LONGER)
        except TimeoutError:
            self._bridges.pop(way, None)
            raise AttachRefused("the other node does not answer") from None
        finally:
            del self._replies[way]
        if answer.get("how") in _HOW:
            ours, theirs = socket.socketpair()
            bridge.start(ours)
            return Attached(answer["how"], str(answer.get("place", "")), sock=theirs, hang_up=bridge.close)
        self._bridges.pop(way, None)
        if answer.get("how") == "listens":
            return Attached("listens", port=int(answer.get("port", 0)), host=str(answer.get("host")))
        raise AttachRefused(
            str(answer.get("why", "the other node answers what cannot be read")), str(answer.get("fix", ""))
        )

    async def _opened_for(self, way: Way, bridge: StreamProxy, what: dict[str, Any]) -> None:
        """Another node asks."""
        by, port = f"{str(what.get('by'))[:100]} of another node", what.get("port")
        try:
            if not self._trusted:
                raise AttachRefused(*_NO_TOKEN)
            port = None if port is None else int(port)
            opened = await self.open(bridge.rank, by=by, port=port, waits=bool(what.get("waits")))
        except (AttachRefused, ValueError, TypeError, OverflowError) as error:
            self._bridges.pop(way, None)
            self._send(way, b"r", {"why": str(error), "fix": error.fix if isinstance(error, AttachRefused) else ""})
            return
        told = {"how": opened.how, "place": opened.place, "port": opened.port, "host": opened.host}
        self._send(way, b"r", told)
        if opened.sock is not None:
            self._hang_ups[way] = opened.hang_up
            bridge.start(opened.sock)
        else:
            self._bridges.pop(way, None)

    def _read(self, who: int | None, number: int, content: bytes) -> None:
        way, kind, body = (who, number), content[:1], content[1:]
        # What another node writes may be anything: then it is not read.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if kind in (b"d", b"a", b"e", b"c"):
                if way in self._bridges:
                    self._bridges[way].arrived(kind, body)
                elif kind == b"d":
                    self._send(way, b"c")
                return
            said: dict[str, Any] = json.loads(body or b"{}")
            if isinstance(said, dict):
                self._follow(way, kind, said)

    def _follow(self, way: Way, kind: bytes, said: dict[str, Any]) -> None:
        who, bridge = way[0], self._bridges.get(way)
        match kind:
            case b"o" if bridge is None and not self._is_ours(way):
                if sum(other[0] == who and not self._is_ours(other) for other in self._bridges) < _MOST:
                    self._start(self._opened_for(way, self._bridge(way, int(said["rank"])), said))
            case b"r" if way in self._replies and not self._replies[way].done():
                self._replies[way].set_result(said)
            case b"i" if bridge is not None and not self._is_ours(way):
                self._start(self._interrupted_from(way, bridge.rank))
            case b"n" if bridge is not None and self._is_ours(way):
                self._did_not_come(bridge.rank)
                for other, one in self._bridges.items():  # that this node only passes on
                    if one.rank == bridge.rank and not self._is_ours(other):
                        self._send(other, b"n")
            case b"p" if who is None:
                self._apply(frozenset(map(int, said["ranks"])))
            case b"s" if who is not None:
                self._away[who] = frozenset(map(int, said["ranks"])).intersection(
                    self._coordinator.members().get(who, ())
                )
                self._changed()
            case b"w" if who is not None and int(said["rank"]) in self._coordinator.members().get(who, ()):
                self._offer(int(said["rank"]), str(said["place"])[:1000])

    async def _interrupted_from(self, way: Way, rank: int) -> None:
        if not await self.interrupt(rank):
            self._send(way, b"n")

    # -- the end

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in [*self._tasks, *([self._looking] if self._looking is not None else [])]:
            task.cancel()
        for bridge in list(self._bridges.values()):
            bridge.close()
        for debugged in self._here.values():
            if debugged.sock is not None:
                debugged.sock.close()
