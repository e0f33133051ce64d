"""Many simulated nodes in one process of `phalanx bench scale`.

    python -m benchmarks.scale.nodes

The first line of standard input is a `Request`, the others are orders. Reports go to standard output, one per line.
Times are from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.scale import frames
from benchmarks.scale.node import LostError, SimulatedNode
from phalanx.control import tls
from phalanx.control.messages import NodeInfo
from phalanx.control.tokens import Token

HOST = "127.0.0.1"
_AT_ONCE = 32  # nodes that open their connection at the same time
_INTERVAL = 0.05  # seconds between two bursts of log lines
_TURNS = 0.25  # seconds between two looks at whose turn it is to send telemetry
_READY = select.EPOLLIN
_WRITING = select.EPOLLIN | select.EPOLLOUT


@dataclass(frozen=True)
class Request:
    """The work of the nodes of one process."""

    port: int  # of the leader
    token: str
    nodes: list[int]  # their numbers
    slots: int  # ranks per node
    lines: float  # of output per second, of all these nodes
    versions: dict[str, str]
    terms: dict[str, str]
    failover_port: int  # no process listens there: a dead node rejects connections


class Nodes:
    """The nodes of one process, and their reports."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._context = tls.client_context(Token(bytes.fromhex(request.token), "bench"))
        self._waiting = list(reversed(request.nodes))  # have not connected yet
        self._joining: set[int] = set()  # descriptors
        self._nodes: dict[int, SimulatedNode] = {}  # by descriptor
        self._poll = select.epoll()
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._orders = b""
        self._stalled = False
        self._reported = -1  # generation
        self._step = frames.FIRST_STEP
        self._second = 0  # of the latest step
        self._lines = 0  # sent
        self._late = 0.0  # seconds: the maximum delay of a second's telemetry
        self._closing = False

    def run(self) -> None:
        """Run until the leader has ended all nodes, or standard input ends."""
        logged, looked = time.monotonic(), 0.0
        while not self._closing or self._nodes:
            self._connect()
            wait = max(0.0, logged + _INTERVAL - time.monotonic())
            for fd, mask in self._poll.poll(wait, 4096):
                if fd == sys.stdin.fileno():
                    if not self._take_orders():
                        return
                else:
                    self._ready(fd, mask)
            self._report()
            if (since := time.monotonic() - logged) >= _INTERVAL:
                self._send_lines(since)
                logged += since
            if (now := time.time()) - looked >= _TURNS:
                self._send_telemetry(now)
                looked = now

    # -- connections

    def _connect(self) -> None:
        while self._waiting and len(self._joining) < _AT_ONCE:
            number = self._waiting.pop()
            info = NodeInfo(
                run="",
                member=number,
                host=f"node-{number:05}",
                pid=os.getpid(),
                slots=self._request.slots,
                versions=self._request.versions,
                terms=self._request.terms,
                time=time.time(),
                failover_port=self._request.failover_port,
            )
            node = SimulatedNode(info, self._context, (HOST, self._request.port))
            self._nodes[node.fileno()] = node
            self._joining.add(node.fileno())
            self._poll.register(node.fileno(), _WRITING)

    def _ready(self, fd: int, mask: int) -> None:
        node = self._nodes.get(fd)
        if node is None:
            return
        try:
            node.ready(self._step)
        except LostError as error:
            self._remove(fd)
            if not (node.ended or self._closing):
                answer(lost=str(error))
            return
        if fd in self._joining and node.member >= 0:
            self._joining.discard(fd)
            if not self._joining and not self._waiting:
                answer(joined=len(self._nodes), at=time.monotonic())
        wanted = _WRITING if node.writing else _READY
        if mask & select.EPOLLOUT or wanted == _WRITING:
            self._poll.modify(fd, wanted)

    def _remove(self, fd: int) -> None:
        node = self._nodes.pop(fd)
        self._joining.discard(fd)
        self._poll.unregister(fd)
        node.close()

    # -- what the nodes send

    def _send_telemetry(self, now: float) -> None:
        if int(now) > self._second:  # a step takes a second
            self._second = int(now)
            self._step += not self._stalled
        for fd, node in list(self._nodes.items()):
            if node.ended:
                continue
            try:
                self._late = max(self._late, node.report(now, self._step, stalled=self._stalled))
            except LostError as error:
                self._remove(fd)
                answer(lost=str(error))
                continue
            if node.writing:
                self._poll.modify(fd, _WRITING)

    def _send_lines(self, seconds: float) -> None:
        nodes = list(self._nodes.values())
        if not nodes or self._reported < 0:
            return
        for _ in range(round(min(seconds, 1.0) * self._request.lines)):
            self._lines += 1
            node = nodes[self._lines % len(nodes)]
            if not node.ended:
                with contextlib.suppress(LostError):  # it is noticed when it is read
                    node.log(self._lines)

    # -- orders and reports

    def _take_orders(self) -> bool:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "kill":
                fd = next((fd for fd, node in self._nodes.items() if node.member == order["node"]), None)
                if fd is not None:
                    answer(killed=order["node"], at=time.monotonic())
                    self._remove(fd)
            case "stall":
                self._stalled = True
                for node in self._nodes.values():
                    node.stall(frozenset(order["ranks"]))
            case "resume":
                self._stalled = False
            case "end":
                self._closing = True
                usage = resource.getrusage(resource.RUSAGE_SELF)
                cpu = usage.ru_utime + usage.ru_stime
                answer(cpu=cpu, late=self._late, lines=self._lines, nodes=len(self._nodes))

    def _report(self) -> None:
        """Report a generation once all nodes have its assignment."""
        if self._nodes and not self._waiting:
            least = min(node.generation for node in self._nodes.values())
            if least > self._reported:
                self._reported = least
                last = max(node.assigned for node in self._nodes.values())
                answer(generation=least, at=last)


def answer(**what: object) -> None:
    """Write a report."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def encode(request: Request) -> bytes:
    """Return the first line for a process."""
    return json.dumps(asdict(request)).encode() + b"\n"


def main() -> None:
    """Run the nodes that standard input requests."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows is read with epoll
        line += os.read(sys.stdin.fileno(), 1) or sys.exit("standard input is closed")
    Nodes(Request(**json.loads(line))).run()


if __name__ == "__main__":
    main()
