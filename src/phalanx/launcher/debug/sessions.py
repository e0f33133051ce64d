"""Debug sessions: breakpoints that wait for a terminal, and users who attach, on this node or another.

A debugger's terminal is a socket. The agent of the rank has its other end and passes it to the terminal of `phalanx
run` (`TerminalQueue`), to `phalanx attach` on the same node, or through RPC messages to another node (`RemoteStreams`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.contract import encoding
from phalanx.forkserver import wire
from phalanx.launcher.debug import attachment, messages
from phalanx.launcher.debug.attachment import Attachment, AttachRefused
from phalanx.launcher.debug.debugged_ranks import DebuggedRanks, DebuggedWorker, DebugTarget
from phalanx.launcher.debug.messages import AtBreakpoint, DebuggedAnywhere, DebuggedHere, DebugMessage
from phalanx.launcher.debug.remote_streams import KIND, NODE_TIMEOUT, AttachRequest, RemoteStreams
from phalanx.launcher.debug.terminal_queue import TerminalQueue
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import AttachedReply, AttachQuery, QueryRefused
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import Worker

if TYPE_CHECKING:  # a run on one node does not need it
    from phalanx.launcher.rendezvous_config import AttachFrom

_PROBE_TIMEOUT = 8.0  # seconds for a rank: its probe thread answers in 4 s, unless the GIL is held
_DEBUGPY = "debugpy"
_CHECK_INTERVAL = 1.0  # seconds between two checks whether the other end of a stream still exists
_NO_TOKEN = (
    "this run has no token (--no-auth), so a caller on another node cannot be authenticated",
    "phalanx attach on the node of the rank, or a run without --no-auth",
)

_NOT_FROM_OTHERS = (
    "the node of the rank lets no other node attach a debugger (--attach-from none)",
    "phalanx attach on the node of the rank, or a run with --attach-from leader",
)
_ONLY_LEADER = (
    "only node 0 may attach a debugger to ranks of other nodes (--attach-from leader)",
    "phalanx attach on node 0 or on the node of the rank, or a run with --attach-from all",
)


def remote_refusal(who: int | None, attach_from: AttachFrom, *, trusted: bool) -> AttachRefused | None:
    """Return why another node may not attach a debugger here. `who`: a member, or None for the leader.

    The leader requests it for itself and for members, which it has already checked with this function.
    """
    if not trusted:
        return AttachRefused(*_NO_TOKEN)
    if attach_from == "none":
        return AttachRefused(*_NOT_FROM_OTHERS)
    if attach_from == "leader" and who is not None:
        return AttachRefused(*_ONLY_LEADER)
    return None


class DebugSessions:
    """Connects debuggers in ranks with the terminals of users."""

    def __init__(
        self,
        target: DebugTarget,
        links: NodeLinks,
        rpc: NodeRpc,
        console: Console,
        folder: RunFolder,
        *,
        trusted: bool = True,
        attach_from: AttachFrom = "leader",
    ) -> None:
        self._target = target
        self._trusted = trusted  # other nodes have proved that they have the token
        self._attach_from = attach_from
        self._links = links
        self._rpc = rpc
        self._ranks = DebuggedRanks(target, links, self._send)
        self._streams = RemoteStreams(rpc, links, self)
        self._terminal = TerminalQueue(target, console, folder, self._attach_terminal)
        self._tasks: set[asyncio.Task[None]] = set()
        self._check_task: asyncio.Task[None] | None = None
        rpc.on(KIND, self._receive_stream)
        rpc.on(messages.KIND, self._receive)

    # -- ranks of this node

    def probe_message(self, name: str, message: wire.Message, fds: list[int]) -> None:
        """Process a message of a worker's probe: it is at a breakpoint, or left it."""
        socks = [socket.socket(fileno=fd) for fd in fds]
        worker, known = self._ranks.worker(name), self._ranks.workers
        match message["is"]:
            case "breakpoint" if worker is not None and socks:
                known[name] = DebuggedWorker(place=str(message.get("place", "")), sock=socks.pop())
                self._publish()
                self._offer(worker.seat.rank, known[name].place)
            case "released" | "gone" if name in known:
                left = known.pop(name).sock
                if left is not None:
                    left.close()
                self._publish()
        for sock in socks:
            sock.close()

    def _publish(self) -> None:
        self._keep_checking()
        self._ranks.publish()

    def _keep_checking(self) -> None:
        if self._check_task is None or self._check_task.done():
            self._check_task = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        """Check regularly: a peer may disappear, a regroup renumbers ranks, and new workers have timeouts to
        suspend.
        """
        while self._streams or self._ranks:
            await asyncio.sleep(_CHECK_INTERVAL)
            connected = set(self._links.members()) if self._links.leads else {None}
            self._streams.close_lost(connected)
            self._ranks.check(connected)

    # -- the terminal of `phalanx run`

    def _offer(self, rank: int, place: str) -> None:
        if not self._links.leads:
            self._send(None, AtBreakpoint(rank=rank, place=place[:1000]))
            return
        self._terminal.offer(rank, place, reachable=self._reaches_others or self._is_here(rank))

    @property
    def _reaches_others(self) -> bool:
        return self._trusted and self._attach_from != "none"

    def _is_here(self, rank: int) -> bool:
        attempt = self._target.attempt
        return attempt is not None and any(worker.seat.rank == rank for worker in attempt.workers.values())

    async def _attach_terminal(self, rank: int) -> Attachment:
        return await self.open(rank, by="the terminal of phalanx run", waits=True)

    def interrupted(self) -> bool:
        """Handle Ctrl-C. Return False if no debugger has the terminal: then it is for the run."""
        rank = self._terminal.holder
        if rank is None:
            return False
        self._run(self._interrupt_by_hand(rank))
        return True

    async def _interrupt_by_hand(self, rank: int) -> None:
        if not await self.interrupt(rank):
            self._terminal.interrupt_failed(rank)

    # -- attaching

    async def attach(self, query: AttachQuery, caller: socket.socket) -> None:
        """Serve `phalanx attach`. After the query, every byte from the caller is a Ctrl-C."""
        with caller:
            try:
                attached = await self.open(query.rank, by=f"process {query.pid}", port=query.port)
            except AttachRefused as refused:
                control_socket.send(caller, QueryRefused(why=refused.why, fix=refused.fix))
                return
            reply = AttachedReply(how=attached.how, place=attached.place, port=attached.port, host=attached.host)
            if attached.sock is None:
                control_socket.send(caller, reply)
                return
            with attached.sock as sock:
                control_socket.send(caller, reply, [sock.fileno()])
            caller.setblocking(False)
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(caller, 1):
                    await self.interrupt(query.rank)
            attached.hang_up()

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
        if self._links.leads:
            to = next((member for member, ranks in self._links.members().items() if rank in ranks), None)
            if to is None:
                raise AttachRefused(f"the node of rank {rank} is not connected")
        return await self._streams.open(to, rank, by=by, port=port, waits=waits)

    async def _open_local(self, name: str, worker: Worker, by: str, port: int | None, *, waits: bool) -> Attachment:
        workers = self._ranks.workers
        rank, known = worker.seat.rank, workers.get(name)
        if known is not None and known.sock is not None and port is None:
            sock, known.sock, known.by = known.sock, None, by
            return Attachment("breakpoint", known.place, sock=sock, hang_up=self._hang_up(name, known))
        if waits or (known is not None and not (port is not None and known.by == _DEBUGPY)):
            by = (known.by if known is not None else "") or "its breakpoint"
            raise AttachRefused(f"rank {rank} is already being debugged by {by}")
        if worker.probe is None:
            raise AttachRefused(*attachment.no_probe(rank))
        ours, theirs = socket.socketpair()
        own = workers[name] = DebuggedWorker(by if port is None else _DEBUGPY)
        try:
            if port is None:
                answer = await worker.probe.ask("attach", timeout=_PROBE_TIMEOUT, fds=[theirs.fileno()])
            else:
                answer = await worker.probe.ask("listen", timeout=NODE_TIMEOUT, port=port)
            attached = attachment.judge(rank, answer, begun=worker.probe.status.looked > 0)
        except BaseException:
            if workers.get(name) is own:  # otherwise it has reached a breakpoint meanwhile
                del workers[name]
            ours.close()
            raise
        finally:
            theirs.close()
        self._publish()
        if attached.how != "listens":
            return Attachment(attached.how, sock=ours, hang_up=self._hang_up(name, own))
        ours.close()
        return attached

    def _hang_up(self, name: str, known: DebuggedWorker) -> Callable[[], None]:
        return lambda: self._run(self._let_go(name, known))

    async def _let_go(self, name: str, known: DebuggedWorker) -> None:
        """Interrupt a rank whose user has left: unless it is at a prompt it would not notice, and would stay traced."""
        await asyncio.sleep(_CHECK_INTERVAL)  # it may just be leaving the debugger
        worker = self._ranks.worker(name)
        if self._ranks.workers.get(name) is known and worker is not None and worker.probe is not None:
            await worker.probe.ask("interrupt", timeout=_PROBE_TIMEOUT)

    async def interrupt(self, rank: int) -> bool:
        """Interrupt a rank. Return False if it is known not to have stopped."""
        attempt = self._target.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank == rank and worker.probe is not None:
                answer = await worker.probe.ask("interrupt", timeout=_PROBE_TIMEOUT)
                return answer is not None and bool(answer.get("came"))
        self._streams.interrupt(rank)
        return True

    # -- other nodes

    async def attach_for_node(self, who: int | None, request: AttachRequest) -> Attachment:
        """Attach a debugger for another node (None: the leader). Raises AttachRefused."""
        refused = remote_refusal(who, self._attach_from, trusted=self._trusted)
        if refused is not None:
            raise refused
        by = f"{request.by[:100]} of another node"
        return await self.open(request.rank, by=by, port=request.port, waits=request.waits)

    def interrupt_failed(self, rank: int) -> None:
        """Report that a rank on another node cannot be interrupted."""
        self._terminal.interrupt_failed(rank)

    def stream_opened(self) -> None:
        """Check from now on whether the other end of a stream still exists."""
        self._publish()

    def _send(self, to: int | None, message: DebugMessage) -> None:
        with contextlib.suppress(OSError):
            self._rpc.send(messages.KIND, 0, encoding.encode(message), to=to)

    def _receive_stream(self, who: int | None, number: int, content: bytes) -> None:
        # Other nodes are not trusted: ignore malformed messages.
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            self._streams.receive((who, number), content[:1], content[1:])

    def _receive(self, who: int | None, _number: int, content: bytes) -> None:
        try:
            message = messages.messages.decode(content)
        except msgspec.DecodeError:  # other nodes are not trusted
            return
        match message:
            case DebuggedAnywhere() if who is None:
                self._ranks.apply(frozenset(message.ranks))
                self._keep_checking()
            case DebuggedHere() if who is not None:
                self._keep_checking()
                self._ranks.receive(who, message.ranks)
            case AtBreakpoint() if who is not None and message.rank in self._links.members().get(who, ()):
                self._offer(message.rank, message.place)

    # -- the end

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all sessions."""
        for task in [*self._tasks, *([self._check_task] if self._check_task is not None else [])]:
            task.cancel()
        self._terminal.close()
        self._streams.close()
        self._ranks.close()
