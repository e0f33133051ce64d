"""Checks that nodes reach each other over plain TCP. The answer identifies the node and includes its time."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.doctor.finding import Finding

CHECK = "reach"
_ANSWER = struct.Struct("!d16s")  # time of day, and id of the answering node
_PATIENCE = 3.0
_MOST = 64  # concurrent connections; our nodes never open more


@dataclass(frozen=True)
class Reach:
    """One attempt of a node to reach a peer at one of its addresses."""

    node: str
    peer: str
    address: str
    trouble: str = ""  # the error


class Echo:
    """Answers on a free port with the time and a secret that identifies this node."""

    def __init__(self) -> None:
        self.nonce = os.urandom(16)
        self._listener = _listen()
        self._listener.settimeout(0.2)
        self._room = threading.Semaphore(_MOST)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(_ANSWER.pack(time.time(), self.nonce))
        self._room.release()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def ask(
    address: str, port: int, nonce: bytes, *, times: int = 1, patience: float = _PATIENCE
) -> tuple[str, list[tuple[float, float, float]]]:
    """Contact a peer. Return the error, and (sent, their time, received) per answer."""
    samples: list[tuple[float, float, float]] = []
    try:
        with socket.create_connection((address, port), timeout=patience) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(times):
                sent = time.time()
                connection.sendall(b"?")
                answer = b""
                while len(answer) < _ANSWER.size:
                    part = connection.recv(_ANSWER.size - len(answer))
                    if not part:
                        return "closed by the other end", samples
                    answer += part
                received = time.time()
                theirs, who = _ANSWER.unpack(answer)
                if who != nonce:
                    return "another machine answers there", []
                samples.append((sent, theirs, received))
    except TimeoutError:
        return "no answer", samples
    except OSError as error:
        return error.strerror or str(error), samples
    return "", samples


def judge(tries: Sequence[Reach]) -> list[Finding]:
    """Return findings about which nodes reach each other."""
    found = list(_judge(tries))
    if tries and not found:
        found.append(Finding(CHECK, "green", "each reaches every other on a free port"))
    return found


def complete(tries: Sequence[Reach]) -> bool:
    """Whether every node reaches every other one on at least one route."""
    reached = {(one.node, one.peer) for one in tries if not one.trouble}
    return all((one.node, one.peer) in reached for one in tries)


def _judge(tries: Sequence[Reach]) -> Iterator[Finding]:
    routes: dict[tuple[str, str], list[Reach]] = {}
    for one in tries:
        routes.setdefault((one.node, one.peer), []).append(one)
    for (node, peer), route in routes.items():
        failed = [one for one in route if one.trouble]
        failures = "; ".join(f"{one.address}: {one.trouble}" for one in failed)
        if len(failed) == len(route):
            silent = all(one.trouble == "no answer" for one in failed)
            yield Finding(
                CHECK,
                "red",
                f"{node} cannot reach {peer} ({failures})",
                "a firewall drops the packets, or there is no route" if silent else "",
                f"on {peer}: nft list ruleset; on {node}: ip route get {route[0].address}   "
                "(all ports between the nodes must be open)",
                node,
            )
        elif route[0].trouble and route[0].trouble != "another machine answers there":
            good = next(one.address for one in route if not one.trouble)
            yield Finding(
                CHECK,
                "yellow",
                f"{node} reaches {peer} at {good}, but not at every address ({failures})",
                "networks that not all nodes share; gloo and NCCL may choose the wrong one",
                "GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME phalanx run …   (the interface of the good one)",
                node,
            )
