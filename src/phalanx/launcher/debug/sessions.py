"""Debug sessions: breakpoints that wait for a terminal, and users who attach, on this node or another.

A debugger's terminal is a socket. The agent of the rank has its other end and passes it on: to the terminal of
`phalanx run`, to `phalanx attach` on the same node, or through RPC messages to another node.

    i interrupt   n not interrupted        messages of a stream; the others are StreamProxy's
    s ranks in a debugger on this node, to the leader   p all of them, from the leader
    w a rank waits for a terminal, to the leader

A node opens a stream by a request of kind "attach", and chooses its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from phalanx.contract import encoding, events
from phalanx.contract.encoding import Decoder
from phalanx.forkserver import wire
from phalanx.launcher.agent.worker import Worker
from phalanx.launcher.agent.worker_group import WorkerGroup
from phalanx.launcher.debug import attachment
from phalanx.launcher.debug.attachment import Attachment, AttachRefused
from phalanx.launcher.debug.tty_lease import TtyLease
from phalanx.launcher.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launcher.ipc.stream_proxy import StreamProxy
from phalanx.launcher.output.console import Console
from phalanx.launcher.runs.run_folder import RunFolder

KIND = "debug"
ATTACH = "attach"
_PROBE_TIMEOUT = 5.0  # seconds for a rank: its probe thread answers at once, unless the GIL is held
_NODE_TIMEOUT = 20.0  # seconds for another node, or for a debugger that must be imported first
_DEBUGPY = "debugpy"
_CHECK_INTERVAL = 1.0  # seconds between two checks whether the other end of a stream still exists
_MAX_STREAMS = 64  # that another node may have open here
_HOW = ("breakpoint", "stopped", "looking")
_NO_TOKEN = (
    "this run has no token (--no-auth), so a caller on another node cannot be authenticated",
    "phalanx attach on the node of the rank, or a run without --no-auth",
)

StreamKey = tuple[int | None, int]  # the other node (None: the leader), and the number of the stream


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of another node to open a stream to the debugger of a rank."""

    stream: Annotated[int, msgspec.Meta(ge=1)]
    rank: int
    by: str = ""
    port: int | None = None
    waits: bool = False


class AttachReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An Attachment without its socket, or why there is none."""

    how: str = ""
    place: str = ""
    port: int = 0
    host: str = ""
    why: str = ""
    fix: str = ""


_attach_requests: Decoder[AttachRequest] = Decoder(AttachRequest)
_attach_replies: Decoder[AttachReply] = Decoder(AttachReply)
_stream_messages: Decoder[dict[str, Any]] = Decoder(dict[str, Any])


@dataclass
class _Debugged:
    """A rank of this node that is in a debugger."""

    by: str = ""
    place: str = ""
    sock: socket.socket | None = None  # it waits at a breakpoint, for a user to take this


class DebugTarget(Protocol):
    """The agent, as far as debug sessions need it."""

    @property
    def attempt(self) -> WorkerGroup | None:
        """Return the current worker group."""


class DebugSessions:
    """Connects debuggers in ranks with the terminals of users."""

    def __init__(
        self,
        target: DebugTarget,
        coordinator: RpcCarrier,
        rpc: NodeRpc,
        console: Console,
        folder: RunFolder,
        *,
        trusted: bool = True,
    ) -> None:
        self._target = target
        self._trusted = trusted  # other nodes have proved that they have the token
        self._coordinator = coordinator
        self._rpc = rpc
        self._console = console
        self._folder = folder  # its name changes when the nodes have joined
        self._tty = TtyLease(console)
        self._local: dict[str, _Debugged] = {}  # by name of the worker
        self._remote: dict[int, frozenset[int]] = {}  # by member, on the leader
        self._waiting: list[tuple[int, str]] = []  # for the terminal: rank and place
        self._proxies: dict[StreamKey, StreamProxy] = {}
        self._on_close: dict[StreamKey, Callable[[], None]] = {}  # called when a stream to another node ends
        self._numbers = itertools.count(1)
        self._unresponsive = False  # the rank that has the terminal cannot be interrupted
        self._tasks: set[asyncio.Task[None]] = set()
        self._check_task: asyncio.Task[None] | None = None
        # What was published last: whether this node led, the ranks, the members.
        self._published: tuple[bool, frozenset[int], frozenset[int]] | None = None
        rpc.on(KIND, self._receive)
        rpc.serve(ATTACH, self._answer_attach)

    # -- ranks of this node

    def probe_message(self, name: str, message: wire.Message, fds: list[int]) -> None:
        """Process a message of a worker's probe: it is at a breakpoint, or left it."""
        socks = [socket.socket(fileno=fd) for fd in fds]
        worker = self._worker(name)
        match message["is"]:
            case "breakpoint" if worker is not None and socks:
                self._local[name] = _Debugged(place=str(message.get("place", "")), sock=socks.pop())
                self._publish()
                self._offer(worker.seat.rank, self._local[name].place)
            case "released" | "gone" if name in self._local:
                left = self._local.pop(name).sock
                if left is not None:
                    left.close()
                self._publish()
        for sock in socks:
            sock.close()

    def _worker(self, name: str) -> Worker | None:
        attempt = self._target.attempt
        return attempt.workers.get(name) if attempt is not None else None

    def _is_here(self, rank: int) -> bool:
        attempt = self._target.attempt
        return attempt is not None and any(worker.seat.rank == rank for worker in attempt.workers.values())

    def _publish(self) -> None:
        """Tell all nodes which ranks are in a debugger: waiting for those is not a stall."""
        self._keep_checking()
        own = frozenset(worker.seat.rank for name in self._local if (worker := self._worker(name)) is not None)
        leads, members = self._coordinator.leads, self._coordinator.members()
        ranks = own.union(*(self._remote.get(member, ()) for member in members))
        before, self._published = self._published, (leads, ranks, frozenset(members))
        if leads:
            self._apply(ranks)
        if before == self._published and (leads or not own):  # the leader may have changed
            return
        for to in members if leads else (None,):
            self._send((to, 0), b"p" if leads else b"s", {"ranks": sorted(ranks)})

    def _apply(self, ranks: frozenset[int]) -> None:
        attempt = self._target.attempt
        if attempt is None or attempt.debugged == ranks:
            return
        before, attempt.debugged = attempt.debugged, ranks
        if bool(before) != bool(ranks):
            self._order("suspend" if ranks else "resume")
        self._keep_checking()

    def _order(self, what: str) -> None:
        attempt = self._target.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.probe is not None:
                worker.probe.send(what)

    # -- the terminal of `phalanx run`

    def _offer(self, rank: int, place: str) -> None:
        if not self._coordinator.leads:
            self._send((None, 0), b"w", {"rank": rank, "place": place})
            return
        if not self._tty.available or not (self._trusted or self._is_here(rank)):
            self._say_how_to_attach(rank, place)
            return
        if any(rank == other for other, _ in self._waiting[1:]):
            return
        if self._waiting:
            self._console.say(f"rank {rank} waits at a breakpoint, {place}, until the terminal is free")
        self._waiting.append((rank, place))
        if len(self._waiting) == 1:
            self._run(self._serve())

    def _say_how_to_attach(self, rank: int, place: str) -> None:
        how = f"phalanx attach {rank} {self._folder.name}"
        text = f"rank {rank} waits at a breakpoint, {place}: {how}"
        hint = ", or type its number and d" * self._console.hidden
        self._folder.event(events.NoteEvent(time=time.time(), text=text + hint))
        self._console.say(text)

    async def _serve(self) -> None:
        """Give the terminal to the waiting ranks, one at a time."""
        while self._waiting:
            rank, place = self._waiting[0]
            try:
                if self._tty.available:
                    await self._lend(rank, place)
                else:
                    self._say_how_to_attach(rank, place)
            except (AttachRefused, OSError):  # another user has it, or it is gone
                pass
            finally:
                self._waiting.pop(0)

    async def _lend(self, rank: int, place: str) -> None:
        attached = await self.open(rank, by="the terminal of phalanx run", waits=True)
        if attached.sock is None:
            return
        self._unresponsive = False
        self._console.say(f"rank {rank} is at a breakpoint, {place}, and has the terminal until it continues (c)")
        attempt = self._target.attempt

        def catch_up() -> None:
            self._unresponsive = False
            if attempt is not None:
                attempt.output.catch_up(rank)

        await self._tty.lend(rank, attached.sock, catch_up)
        attached.hang_up()

    def interrupted(self) -> bool:
        """Handle Ctrl-C. Return False if no debugger has the terminal: then it is for the run."""
        rank = self._tty.rank
        if rank is None or self._unresponsive:
            return False
        self._run(self._interrupt_by_hand(rank))
        return True

    async def _interrupt_by_hand(self, rank: int) -> None:
        if not await self.interrupt(rank):
            self._interrupt_failed(rank)

    def _interrupt_failed(self, rank: int) -> None:
        if self._tty.rank == rank and not self._unresponsive:
            self._unresponsive = True
            self._console.say(
                f"rank {rank} is in native code and cannot be interrupted; press Ctrl-C again to end the run"
            )

    # -- attaching

    async def attach(self, request: wire.Message, caller: socket.socket) -> None:
        """Serve `phalanx attach`. After the request, every byte from the caller is a Ctrl-C."""
        with caller:
            try:
                rank, port = int(request.get("rank", -1)), request.get("port")
                attached = await self.open(rank, by=f"process {request.get('pid')}", port=port)
            except AttachRefused as refused:
                wire.send(caller, {"is": "refused", "why": refused.why, "fix": refused.fix})
                return
            reply = {"is": "attached", "how": attached.how, "place": attached.place}
            if attached.sock is None:
                wire.send(caller, {**reply, "port": attached.port, "host": attached.host})
                return
            with attached.sock as sock:
                wire.send(caller, reply, [sock.fileno()])
            caller.setblocking(False)
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(caller, 1):
                    await self.interrupt(rank)
            attached.hang_up()

    async def _let_go(self, name: str, known: _Debugged) -> None:
        """Interrupt a rank whose user has left: unless it is at a prompt it would not notice, and stay traced."""
        await asyncio.sleep(_CHECK_INTERVAL)  # it may just be leaving the debugger
        worker = self._worker(name)
        if self._local.get(name) is known and worker is not None and worker.probe is not None:
            await worker.probe.ask("interrupt", timeout=_PROBE_TIMEOUT)

    async def open(self, rank: int, *, by: str, port: int | None = None, waits: bool = False) -> Attachment:
        """Attach a debugger to a rank on any node. Raises AttachRefused.

        With `port`, debugpy listens on it. `waits`: only if the rank waits at a breakpoint.
        """
        attempt = self._target.attempt
        if attempt is None:
            raise AttachRefused("no rank is running", "try again once ranks have started")
        if not 0 <= rank < attempt.world_size:
            last = attempt.world_size - 1
            raise AttachRefused(f"there is no rank {rank}", f"phalanx attach 0 … (ranks 0 to {last})" if last else "")
        for name, worker in attempt.workers.items():
            if worker.seat.rank == rank and not worker.spare:
                if worker.code is not None:
                    raise AttachRefused(f"rank {rank} has ended")
                return await self._open_local(name, worker, by, port, waits=waits)
        if not self._trusted:
            raise AttachRefused(*_NO_TOKEN)
        to = None
        if self._coordinator.leads:
            to = next((member for member, ranks in self._coordinator.members().items() if rank in ranks), None)
            if to is None:
                raise AttachRefused(f"the node of rank {rank} is not connected")
        return await self._open_remote(to, rank, by=by, port=port, waits=waits)

    async def _open_local(self, name: str, worker: Worker, by: str, port: int | None, *, waits: bool) -> Attachment:
        rank, known = worker.seat.rank, self._local.get(name)
        if known is not None and known.sock is not None and port is None:
            sock, known.sock, known.by = known.sock, None, by
            return Attachment("breakpoint", known.place, sock=sock, hang_up=self._hang_up(name, known))
        if waits or (known is not None and not (port is not None and known.by == _DEBUGPY)):
            by = (known.by if known is not None else "") or "its breakpoint"
            raise AttachRefused(f"rank {rank} is already being debugged by {by}")
        if worker.probe is None:
            raise AttachRefused(*attachment.no_probe(rank))
        ours, theirs = socket.socketpair()
        own = self._local[name] = _Debugged(by if port is None else _DEBUGPY)
        try:
            if port is None:
                answer = await worker.probe.ask("attach", timeout=_PROBE_TIMEOUT, fds=[theirs.fileno()])
            else:
                answer = await worker.probe.ask("listen", timeout=_NODE_TIMEOUT, port=port)
            attached = attachment.judge(rank, answer, begun=worker.probe.status.looked > 0)
        except BaseException:
            if self._local.get(name) is own:  # else it has reached a breakpoint meanwhile
                del self._local[name]
            ours.close()
            raise
        finally:
            theirs.close()
        self._publish()
        if attached.how != "listens":
            return Attachment(attached.how, sock=ours, hang_up=self._hang_up(name, own))
        ours.close()
        return attached

    def _hang_up(self, name: str, known: _Debugged) -> Callable[[], None]:
        return lambda: self._run(self._let_go(name, known))

    async def interrupt(self, rank: int) -> bool:
        """Interrupt a rank. Return False if it is known not to have stopped."""
        attempt = self._target.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank == rank and worker.probe is not None:
                answer = await worker.probe.ask("interrupt", timeout=_PROBE_TIMEOUT)
                return answer is not None and bool(answer.get("came"))
        for key, proxy in self._proxies.items():
            if proxy.rank == rank and self._is_ours(key):
                self._send(key, b"i")
        return True

    # -- other nodes

    def _send(self, key: StreamKey, kind: bytes, content: dict[str, Any] | bytes = b"") -> None:
        body = content if isinstance(content, bytes) else encoding.encode(content)
        with contextlib.suppress(OSError):
            self._rpc.send(KIND, key[1], kind + body, to=key[0])

    def _is_ours(self, key: StreamKey) -> bool:
        """Return whether this node attached the stream. Numbers of the leader are even, those of followers odd."""
        return key[1] % 2 == (0 if self._coordinator.leads else 1)

    def _proxy(self, key: StreamKey, rank: int) -> StreamProxy:
        def send(message: bytes) -> None:
            self._send(key, message[:1], message[1:])

        def ended() -> None:
            if self._proxies.get(key) is proxy:
                del self._proxies[key]
            self._on_close.pop(key, lambda: None)()

        proxy = self._proxies[key] = StreamProxy(rank, send, ended)
        self._publish()
        return proxy

    def _keep_checking(self) -> None:
        if self._check_task is None or self._check_task.done():
            self._check_task = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        """Check regularly: a peer may vanish, a regroup renumbers ranks, and new workers have timeouts to suspend."""
        while self._proxies or self._local or any(self._remote.values()) or self._debugged:
            await asyncio.sleep(_CHECK_INTERVAL)
            if self._debugged:
                self._order("suspend")
            there = set(self._coordinator.members()) if self._coordinator.leads else {None}
            for key, proxy in list(self._proxies.items()):
                if key[0] not in there:
                    proxy.close()
            self._remote = {member: ranks for member, ranks in self._remote.items() if member in there}
            self._publish()

    @property
    def _debugged(self) -> bool:
        """Return whether any rank on any node is in a debugger."""
        attempt = self._target.attempt
        return attempt is not None and bool(attempt.debugged)

    async def _open_remote(self, to: int | None, rank: int, *, by: str, port: int | None, waits: bool) -> Attachment:
        key = (to, 2 * next(self._numbers) + (0 if self._coordinator.leads else 1))
        proxy = self._proxy(key, rank)
        request = AttachRequest(stream=key[1], rank=rank, by=by, port=port, waits=waits)
        try:
            reply = await self._rpc.request(ATTACH, encoding.encode(request), to=to, timeout=_NODE_TIMEOUT)
            answer = _attach_replies.decode(reply)
        except TimeoutError:
            answer = AttachReply(why="the other node does not answer")
        except msgspec.DecodeError:
            answer = AttachReply(why="unreadable answer of the other node")
        if answer.how in _HOW:
            ours, theirs = socket.socketpair()
            proxy.start(ours)
            return Attachment(answer.how, answer.place, sock=theirs, hang_up=proxy.close)
        self._proxies.pop(key, None)
        if answer.how == "listens":
            return Attachment("listens", port=answer.port, host=answer.host)
        raise AttachRefused(answer.why or "unreadable answer of the other node", answer.fix)

    async def _answer_attach(self, who: int | None, content: bytes) -> bytes | None:
        """Attach for another node. Do not trust it: a malformed request gets no answer."""
        try:
            request = _attach_requests.decode(content)
        except msgspec.DecodeError:
            return None
        key = (who, request.stream)
        theirs = sum(other[0] == who and not self._is_ours(other) for other in self._proxies)
        if key in self._proxies or self._is_ours(key) or theirs >= _MAX_STREAMS:
            return None
        proxy = self._proxy(key, request.rank)
        try:
            if not self._trusted:
                raise AttachRefused(*_NO_TOKEN)
            by = f"{request.by[:100]} of another node"
            attached = await self.open(request.rank, by=by, port=request.port, waits=request.waits)
        except AttachRefused as refused:
            self._proxies.pop(key, None)
            return encoding.encode(AttachReply(why=refused.why, fix=refused.fix))
        if attached.sock is not None:
            self._on_close[key] = attached.hang_up
            proxy.start(attached.sock)
        else:
            self._proxies.pop(key, None)
        return encoding.encode(
            AttachReply(how=attached.how, place=attached.place, port=attached.port, host=attached.host)
        )

    def _receive(self, who: int | None, number: int, content: bytes) -> None:
        key, kind, body = (who, number), content[:1], content[1:]
        # Do not trust another node: ignore what is malformed.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            if kind in (b"d", b"a", b"e", b"c"):
                if key in self._proxies:
                    self._proxies[key].receive(kind, body)
                elif kind == b"d":
                    self._send(key, b"c")
                return
            self._handle(key, kind, _stream_messages.decode(body or b"{}"))

    def _handle(self, key: StreamKey, kind: bytes, message: dict[str, Any]) -> None:
        who, proxy = key[0], self._proxies.get(key)
        match kind:
            case b"i" if proxy is not None and not self._is_ours(key):
                self._run(self._interrupted_from(key, proxy.rank))
            case b"n" if proxy is not None and self._is_ours(key):
                self._interrupt_failed(proxy.rank)
                for other, one in self._proxies.items():  # that this node only forwards
                    if one.rank == proxy.rank and not self._is_ours(other):
                        self._send(other, b"n")
            case b"p" if who is None:
                self._apply(frozenset(map(int, message["ranks"])))
            case b"s" if who is not None:
                self._remote[who] = frozenset(map(int, message["ranks"])).intersection(
                    self._coordinator.members().get(who, ())
                )
                self._publish()
            case b"w" if who is not None and int(message["rank"]) in self._coordinator.members().get(who, ()):
                self._offer(int(message["rank"]), str(message["place"])[:1000])

    async def _interrupted_from(self, key: StreamKey, rank: int) -> None:
        if not await self.interrupt(rank):
            self._send(key, b"n")

    # -- the end

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all sessions."""
        for task in [*self._tasks, *([self._check_task] if self._check_task is not None else [])]:
            task.cancel()
        for proxy in list(self._proxies.values()):
            proxy.close()
        for debugged in self._local.values():
            if debugged.sock is not None:
                debugged.sock.close()
