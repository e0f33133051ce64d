"""Access control of the store: processes of this user on this host, and ranks for which another node vouches."""

from __future__ import annotations

import itertools
import json
import os
import pwd
import select
import socket
import time
from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

from .peers import Address, PeerLookup, plain

_MOST_NAMED = 16  # number of callers that are logged by name; a port scan has thousands
_MOST_ASKED = 128  # concurrent requests to the agent per host
_MOST_ASKED_IN_ALL = 1024
_DEADLINE = 30.0  # seconds for the agent, which answers within 10; later the connection is closed
_MESSAGE = 4096  # bytes of a message, at most


def log(text: str) -> None:
    """Write a line to the log of the store, which is the standard error of its process."""
    os.write(2, f"{text}\n".encode())


class AgentLink:
    """The store's end of its socket to the agent: packets of JSON. Without an agent, nothing is sent."""

    def __init__(self, fd: int | None) -> None:
        self._sock = None if fd is None else socket.socket(fileno=fd)
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        """Return its descriptor. -1: there is no agent."""
        return -1 if self._sock is None else self._sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        if self._sock is not None:
            self._sock.close()

    def send(self, **message: object) -> bool:
        """Send a message. Return False if the agent cannot receive it now. Raises BrokenPipeError if it has ended."""
        if self._sock is None:
            return False
        try:
            self._sock.send(json.dumps(message).encode("ascii"))
        except BlockingIOError:  # the agent is busy, or stopped
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Return a message of the agent. None: the agent has ended."""
        if self._sock is None:
            return None
        try:
            data = self._sock.recv(_MESSAGE)
        except ConnectionResetError:
            return None
        return dict(json.loads(data)) if data else None


class AccessDecision(Enum):
    """Whether a connection is accepted."""

    ADMITTED = "admitted"
    ASKED = "asked"  # the agent decides
    REFUSED = "refused"


class _Asked(NamedTuple):
    """A connection for which a request to the agent is pending."""

    sock: socket.socket
    host: str
    who: str
    since: float


class StoreAccess:
    """Decides about each connection, by the user who owns its other end. Each rejected caller is logged once.

    `remote`: ranks of other nodes connect, too. For these the agent decides: it asks their node.
    """

    def __init__(self, link: AgentLink, *, remote: bool) -> None:
        self._link = link
        self._remote = remote
        self._lookup = PeerLookup()
        self._user = os.getuid()
        self._asked: dict[int, _Asked] = {}
        self._waiting: Counter[str] = Counter()  # pending requests per host
        self._numbers = itertools.count(1)
        self._named: set[str] = set()
        self.checks = self._lookup.works()

    def judge(self, sock: socket.socket) -> AccessDecision:
        """Decide about a new connection."""
        try:
            peer, own = _address(sock.getpeername()), _address(sock.getsockname())
            user = self._lookup.user(peer, own)
        except OSError:  # it is already closed, or the kernel does not report it any more
            return AccessDecision.REFUSED
        if user == self._user:
            return AccessDecision.ADMITTED
        if user is None and hung_up(sock):  # e.g. a rank that checked whether the port answers
            return AccessDecision.REFUSED
        who = _name(user) if user is not None else f"{peer[0]}, which no process of this host has open"
        if self._remote and self._ask(sock, peer, own, who):
            return AccessDecision.ASKED
        self._refused(who)
        return AccessDecision.REFUSED

    def close(self) -> None:
        """Close the connections that wait for an answer."""
        self._lookup.close()
        for asked in self._asked.values():
            asked.sock.close()

    def _ask(self, sock: socket.socket, peer: Address, own: Address, who: str) -> bool:
        self._close_unanswered(time.monotonic() - _DEADLINE)
        if self._waiting[peer[0]] >= _MOST_ASKED or len(self._asked) >= _MOST_ASKED_IN_ALL:
            return False
        number = next(self._numbers)
        if not self._tell(**{"is": "ask", "number": number, "near": peer, "far": own}):
            return False
        self._asked[number] = _Asked(sock, peer[0], who, time.monotonic())
        self._waiting[peer[0]] += 1
        return True

    def answered(self, message: dict[str, Any]) -> socket.socket | None:
        """Handle an answer of the agent. Return the connection if it is admitted."""
        asked = self._take(message["number"])
        if asked is None:  # the answer is too late
            return None
        if message["admitted"]:
            return asked.sock
        if not hung_up(asked.sock):
            self._refused(asked.who)
        asked.sock.close()
        return None

    def _close_unanswered(self, before: float) -> None:
        """Close the connections whose requests to the agent were sent before that time."""
        for number in [number for number, asked in self._asked.items() if asked.since <= before]:
            if (asked := self._take(number)) is not None:
                asked.sock.close()

    def _take(self, number: int) -> _Asked | None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._waiting[asked.host] -= 1
            if not self._waiting[asked.host]:
                del self._waiting[asked.host]
        return asked

    def _refused(self, who: str) -> None:
        if who in self._named or len(self._named) >= _MOST_NAMED:
            return
        self._named.add(who)
        log(f"refused a connection of {who}")
        self._tell(**{"is": "refused", "who": who})

    def _tell(self, **message: object) -> bool:
        """Send a message to the agent. Return False if it cannot receive it or has ended, which the server notices."""
        try:
            return self._link.send(**message)
        except OSError:
            return False


def hung_up(sock: socket.socket) -> bool:
    """Return whether the other end sends nothing more. Earlier data may still be unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _address(found: tuple[str, int]) -> Address:
    return plain(found[0]), found[1]


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
