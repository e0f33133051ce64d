"""Which ranks are in a debugger. All nodes know it: waiting for those ranks is not a stall."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from phalanx.launcher.debug.messages import DebuggedAnywhere, DebuggedHere, DebugMessage
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.workers.worker import Worker
from phalanx.launcher.workers.worker_group import WorkerGroup

Send = Callable[[int | None, DebugMessage], None]  # to a node (None: the leader)


class DebugTarget(Protocol):
    """The agent, as far as debug sessions need it."""

    @property
    def attempt(self) -> WorkerGroup | None:
        """Return the current worker group."""


@dataclass
class DebuggedWorker:
    """A worker of this node that is in a debugger."""

    by: str = ""
    place: str = ""
    sock: socket.socket | None = None  # it waits at a breakpoint for a user to take this


class DebuggedRanks:
    """The workers of this node that are in a debugger, by name; on the leader, also the ranks of other nodes."""

    def __init__(self, target: DebugTarget, links: NodeLinks, send: Send) -> None:
        self.workers: dict[str, DebuggedWorker] = {}
        self._target = target
        self._links = links
        self._send = send
        self._remote: dict[int, frozenset[int]] = {}  # by member, on the leader
        # What was published last: whether this node led, the ranks, the members.
        self._published: tuple[bool, frozenset[int], frozenset[int]] | None = None

    def __bool__(self) -> bool:
        """Return whether any rank on any node is in a debugger, as far as this node knows."""
        return bool(self.workers or any(self._remote.values()) or self._applied)

    @property
    def _applied(self) -> bool:
        attempt = self._target.attempt
        return attempt is not None and bool(attempt.workers.debugged)

    def worker(self, name: str) -> Worker | None:
        """Return a worker of this node."""
        attempt = self._target.attempt
        return attempt.workers.get(name) if attempt is not None else None

    def publish(self) -> None:
        """Tell all nodes which ranks are in a debugger."""
        own = frozenset(worker.seat.rank for name in self.workers if (worker := self.worker(name)) is not None)
        leads, members = self._links.leads, self._links.members()
        ranks = own.union(*(self._remote.get(member, ()) for member in members))
        before, self._published = self._published, (leads, ranks, frozenset(members))
        if leads:
            self.apply(ranks)
        if before == self._published and (leads or not own):  # the leader may have changed
            return
        if not leads:
            self._send(None, DebuggedHere(ranks=sorted(ranks)))
            return
        for member in members:
            self._send(member, DebuggedAnywhere(ranks=sorted(ranks)))

    def apply(self, ranks: frozenset[int]) -> None:
        """Suspend the timeouts of this node's workers while any rank is in a debugger."""
        attempt = self._target.attempt
        if attempt is None or attempt.workers.debugged == ranks:
            return
        before, attempt.workers.debugged = attempt.workers.debugged, ranks
        if bool(before) != bool(ranks):
            self._order("suspend" if ranks else "resume")

    def receive(self, member: int, ranks: Iterable[int]) -> None:
        """Handle the ranks of a follower, on the leader."""
        theirs = self._links.members().get(member, ())
        self._remote[member] = frozenset(ranks).intersection(theirs)
        self.publish()

    def check(self, connected: Collection[int | None]) -> None:
        """Drop nodes that are not connected, suspend the timeouts of new workers, and publish new rank numbers."""
        if self._applied:
            self._order("suspend")
        self._remote = {member: ranks for member, ranks in self._remote.items() if member in connected}
        self.publish()

    def close(self) -> None:
        """Close the sockets of workers that wait at a breakpoint."""
        for debugged in self.workers.values():
            if debugged.sock is not None:
                debugged.sock.close()

    def _order(self, what: str) -> None:
        attempt = self._target.attempt
        for _, worker in attempt.living if attempt is not None else ():
            if worker.probe is not None:
                worker.probe.send(what)
