"""Explains why a leader cannot be reached, or rejects this node: from evidence to messages."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.control import interfaces
from phalanx.control.refusals import FIXES

Kind = Literal[
    "unresolved",
    "loopback",
    "refused",
    "unreachable",
    "filtered",
    "not-phalanx",
    "silent",
    "token",
    "run",
    "plan",
    "version",
    "taken",
    "devices",
    "other",
]
HOSTS = "/etc/hosts"
ANSWER = 4096  # bytes of an answer that are inspected
_NOBODYS = 9  # a port at which no process answers
_HIGH = 59_999  # the same, in the range of ports that the kernel gives to process groups
ADDRESSES = 16  # maximum number of addresses tried per name
NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET}
# Of several addresses, the one that got furthest is the most informative.
TELLING: tuple[Kind, ...] = ("not-phalanx", "silent", "refused", "filtered", "unreachable", "other")


@dataclass(frozen=True)
class JoinProblem:
    """Why this node cannot join."""

    kind: Kind
    what: str
    details: tuple[str, ...] = ()
    fix: str = ""
    certain: bool = False  # more waiting cannot help


@dataclass(frozen=True)
class JoinTarget:
    """One of the addresses of the leader."""

    family: socket.AddressFamily
    where: tuple[Any, ...]  # in the form of the socket module

    @property
    def address(self) -> str:
        """The address."""
        return str(self.where[0])


async def probe(host: str, port: int, *, timeout: float, hello: bytes, expected: bytes) -> JoinProblem | None:
    """Send `hello` to the leader. Return None if `expected` is in the answer. All addresses are tried at once.

    Resolving, connecting and answering may each take `timeout` seconds.
    """
    try:
        targets = await asyncio.wait_for(_resolve(host, port), timeout)
    except (OSError, ValueError) as error:  # a timeout is an OSError; an invalid name is a ValueError
        return _unresolved(host, error, timeout)
    tries = [asyncio.ensure_future(_try(target, port, timeout, hello, expected)) for target in targets]
    try:
        for done in asyncio.as_completed(tries):
            if await done is None:
                return None
    finally:
        for attempt in tries:
            attempt.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
    found = [problem for attempt in tries if (problem := attempt.result())]  # in the order of the addresses
    addresses = [target.address for target in targets]
    if not interfaces.is_loopback(host) and all(interfaces.is_loopback(address) for address in addresses):
        return _loopback(host, addresses, found)
    return _most_telling(host, port, addresses, found)


async def way(address: str, *, timeout: float) -> str:
    """Return what can be determined about the route to a silent machine.

    A rejected connection means that it is reachable.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, (address, _NOBODYS)), timeout)
        except ConnectionRefusedError:
            pass
        except TimeoutError:
            return f"link down, or a firewall: nothing comes back from {address}"
        except OSError as error:
            return f"link down: no way to {address} ({_reason(error)})"
    return f"its machine can be reached ({address}), so its agent is stopped or overloaded"


async def reaches(address: str, *, timeout: float) -> bool:
    """Return whether a machine can be reached at the ports that process groups use. A rejected connection means yes."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, (address, _HIGH)), timeout)
        except TimeoutError:
            return False
        except OSError as error:
            return error.errno not in NO_WAY
    return True


def refusal(kind: Kind, *, mine: str, theirs: str, leader: str) -> JoinProblem:
    """Return the message for a leader that answered and rejected this node. `mine` and `theirs` are the values that
    differ.

    token:    "PHALANX_TOKEN (fingerprint ab12cd34)" for both, in the text form of a Token
    run:      the ids of the runs
    plan:     "world size 4", "world size 6"
    version:  "torch 2.13.0", "torch 2.11.0"
    taken:    "node 2", the host that has it
    devices:  what this node has, and what was expected: "3 workers", "4 workers"
    """
    mine, theirs, leader = _printable(mine), _printable(theirs), _printable(leader)
    node0 = f"node 0 ({leader})"
    differ = (f"this node: {mine}", f"{node0}: {theirs}")
    words: dict[str, tuple[str, tuple[str, ...], str]] = {
        "token": (
            f"{node0} does not know this node's token",
            (f"this node's token: {mine}", f"node 0's token: {theirs}"),
            "copy the token file of node 0 to this machine, or set PHALANX_TOKEN to the same value on both, "
            "or name the same file on both: --token-file FILE",
        ),
        "run": (
            f"{node0} leads another run",
            differ,
            FIXES["run"],
        ),
        "plan": (
            f"this node would not start what {node0} starts",
            differ,
            FIXES["plan"],
        ),
        "version": (
            f"this node has other versions than {node0}",
            differ,
            FIXES["version"],
        ),
        "taken": (
            f"{mine} of this run is already there: {theirs}",
            (f"{node0} says so", "two nodes cannot have the same number"),
            FIXES["taken"],
        ),
        "devices": (
            f"this node has {mine}, but {theirs} were expected",
            (f"{node0} was started that way",),
            FIXES["devices"],
        ),
    }
    what, details, fix = words.get(kind, (f"{node0} refuses this node", differ, ""))
    return JoinProblem(kind if kind in words else "other", what, details, fix, certain=True)


async def _resolve(host: str, port: int) -> list[JoinTarget]:
    """Return the addresses of a name. Uses a thread that is not joined, because a dead name server takes long."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[JoinTarget]] = loop.create_future()

    def tell(found: list[JoinTarget] | Exception) -> None:
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: list[JoinTarget] | Exception
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(JoinTarget(entry[0], entry[4]) for entry in entries))[:ADDRESSES]
        except (OSError, ValueError) as error:  # ValueError: not a valid name
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, found)

    if not host:
        raise ValueError("the name is empty")
    threading.Thread(target=ask, name=f"resolve {host[:60]}", daemon=True).start()
    return await answer


async def _try(target: JoinTarget, port: int, timeout: float, hello: bytes, expected: bytes) -> JoinProblem | None:
    """Return the result for one address; `what` describes only that address."""
    loop = asyncio.get_running_loop()
    place = f"{target.address} port {port}"
    try:
        sock = socket.socket(target.family, socket.SOCK_STREAM)
    except OSError as error:  # IPv6 may be switched off
        return JoinProblem("unreachable", f"{place}: {_reason(error)}")
    with sock:
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, target.where), timeout)
            if sock.getsockname() == sock.getpeername():
                # The kernel chose the target port as the source port: this process is connected to itself.
                return JoinProblem("refused", f"{place}: the connection was refused")
        except TimeoutError:
            return JoinProblem("filtered", f"{place}: no answer in {timeout:g} s, {_origin(target.address)}")
        except ConnectionRefusedError:
            here = ", which is this machine itself" if interfaces.is_loopback(target.address) else ""
            return JoinProblem("refused", f"{place}{here}: the connection was refused")
        except OSError as error:
            kind: Kind = "unreachable" if error.errno in NO_WAY else "other"
            return JoinProblem(kind, f"{place}: {_reason(error)}, {_origin(target.address)}")
        answer, end = await _converse(sock, timeout, hello, expected)
    if expected in answer:
        return None
    if answer:
        return JoinProblem("not-phalanx", f'{place}: answered "{_first_bytes(answer)}"')
    return JoinProblem("silent", f"{place}: accepted the connection, {end}")


async def _converse(sock: socket.socket, timeout: float, hello: bytes, expected: bytes) -> tuple[bytes, str]:
    """Return the answer, and how the connection ended."""
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        async with asyncio.timeout(timeout):
            await loop.sock_sendall(sock, hello)
            while len(answer) < ANSWER and expected not in answer:
                data = await loop.sock_recv(sock, ANSWER - len(answer))
                if not data:
                    return answer, "and closed it without a reply"
                answer += data
    except TimeoutError:
        return answer, f"but sent nothing in {timeout:g} s"
    except OSError as error:
        return answer, f"and broke it: {_reason(error)}"
    return answer, ""


def _reason(error: OSError) -> str:
    # asyncio replaces the message of the kernel.
    return os.strerror(error.errno) if error.errno else str(error)


def _origin(address: str) -> str:
    local = interfaces.route_to(address)
    if local is None:
        return "no route from this machine"
    return f"tried from {local} ({interfaces.owner(local, interfaces.survey()) or 'no interface'})"


def _unresolved(host: str, error: Exception, timeout: float) -> JoinProblem:
    if isinstance(error, socket.gaierror):
        reason = f"the name service says: {error.strerror}"
    elif isinstance(error, TimeoutError):
        reason = f"the name service did not answer in {timeout:g} s"
    else:
        reason = f"it cannot be the name of a machine: {error}"
    return JoinProblem(
        "unresolved",
        f'the name "{_printable(host)}" of the leader does not resolve here',
        (reason,),
        f"use an address of node 0: --master ADDRESS, or add the name to {HOSTS} or DNS",
    )


def _loopback(host: str, addresses: list[str], found: list[JoinProblem]) -> JoinProblem:
    lines = _hosts_lines(host, _hosts())
    own = host.lower().rstrip(".").endswith("localhost")  # intended
    fix = "use an address of node 0 that other machines reach: --master ADDRESS"
    if lines and not own:
        fix += f", or give {host} its real address in {HOSTS} of this machine"
    return JoinProblem(
        "loopback",
        f'the name "{host}" of the leader resolves to this machine itself, and no leader runs on it',
        (
            f"{host} is {', '.join(addresses)} here; no other machine is reached by that",
            *(lines or (f"no line of {HOSTS} says so; the name service does",)),
            *(problem.what for problem in found),
        ),
        fix,
    )


def _most_telling(host: str, port: int, addresses: list[str], found: list[JoinProblem]) -> JoinProblem:
    best = min(found, key=lambda problem: TELLING.index(problem.kind))
    address = addresses[found.index(best)]
    leader = host if host == address else f"{host} ({address})"
    words: dict[str, tuple[str, str]] = {
        "refused": (
            f"{leader} is up, but nothing listens on its port {port}",
            "start node 0, or give its port: --master-port PORT (is node 0 another machine? --master ADDRESS)",
        ),
        "unreachable": (
            f"this machine has no route to {leader}",
            "use an address of node 0 in a network that this machine is in: --master ADDRESS"
            " (if it is one: the machine is off, or a firewall rejects the connection)",
        ),
        "filtered": (
            f"{leader} does not answer on port {port}",
            f"a firewall drops it, or the machine is down: let TCP port {port} through to node 0,"
            " or use another: --master-port PORT",
        ),
        "not-phalanx": (
            f"what listens on {leader} port {port} is not phalanx",
            "choose another port for all nodes: --master-port PORT",
        ),
        "silent": (
            f"{leader} accepted the connection on port {port}, but did not answer",
            "see whether node 0 still runs and whether the port is its own; or another: --master-port PORT",
        ),
    }
    what, fix = words.get(
        best.kind, (f"{leader} port {port} cannot be called", "use another address: --master ADDRESS")
    )
    return replace(best, what=what, details=tuple(problem.what for problem in found), fix=fix)


def _hosts() -> str:
    try:
        with open(HOSTS, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _hosts_lines(host: str, text: str) -> tuple[str, ...]:
    """Return the lines of a hosts file that make the name an address of this machine."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if interfaces.is_loopback(address) and host.lower().rstrip(".") in (name.lower() for name in names):
            found.append(f"{HOSTS}:{number}: {_printable(' '.join(line.split()))}")
    return tuple(found)


def _first_bytes(data: bytes) -> str:
    # An unknown server may send terminal escapes.
    text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in data.strip()[:61])
    return text if len(text) <= 60 else f"{text[:59]}…"


def _printable(text: str, limit: int = 200) -> str:
    """Return untrusted text as one printable line without effects on a terminal."""
    text = "".join(char if char.isprintable() else "." for char in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
