"""torch's TCPStore: one rank hosts it, the others connect. A wrong address raises within seconds, with the reason."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from phalanx.errors import JoinError, PortError
from phalanx.worker.rendezvous import addresses
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.methods import MeetingPoint

T = TypeVar("T")

PATIENCE = 3.0  # seconds for temporary problems: a name, a route, a port that was just released
CALL = 1.5  # seconds for one connection
ANSWER = 10.0  # seconds for a store to answer, if a rank hosts it
NOTICE = 3.0
NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}


def open_store(place: MeetingPoint, identity: Identity, timeout: float) -> Any:
    """Host the store if `identity.hosts_store` is set; otherwise connect to it, as soon as it exists."""
    return _keep(place, identity, timeout) if identity.hosts_store else _call(place, identity, timeout)


def answers(place: MeetingPoint) -> bool:
    """Return whether the port is still open. torch prints a page of C++ frames about a store that has ended."""
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), CALL):
        return True
    return False


def notice(text: str) -> None:
    """Print a message to standard error."""
    sys.stderr.write(f"phalanx: {text}\n")
    sys.stderr.flush()


# -- the rank that hosts it


_kept: dict[tuple[str, int], Any] = {}


def _keep(place: MeetingPoint, identity: Identity, timeout: float) -> Any:
    # For the lifetime of the process: when a group forms again, ranks connect before the port could be opened again.
    if (place.host, place.port) not in _kept:
        _kept[place.host, place.port] = _open_port(place, identity, timeout)
    return _kept[place.host, place.port]


def _open_port(place: MeetingPoint, identity: Identity, timeout: float) -> Any:
    found = _patiently(lambda: addresses.resolve(place.host, place.port), lambda error: _unresolved(place, error))
    local = place.host if addresses.is_loopback(place.host) else found[0] if place.host == "localhost" else None
    if local is not None and identity.other_nodes:
        raise _loopback(place, identity)
    with _listen(place, local) as listener:
        mine = next((address for address in found if addresses.is_own(address)), None)
        if mine is None and not _comes_back(listener, found, place.port):
            raise _elsewhere(place, found, identity)
        return _torch_store(mine or found[0], place, identity, timeout, listener)


def _listen(place: MeetingPoint, local: str | None) -> socket.socket:
    """Listen, only on loopback if that is the address: the store accepts any connection."""

    def bind() -> socket.socket:
        if local is not None:
            family = socket.AF_INET6 if ":" in local else socket.AF_INET
            return socket.create_server((local, place.port), family=family, backlog=2048)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", place.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        return socket.create_server(("", place.port), backlog=2048)

    def refused(error: OSError) -> Exception:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        return PortError(
            f"port {place.port} cannot be opened on {socket.gethostname()}, where the ranks meet: {reason}",
            details=[f"they meet at {place}"],
            fix=_set_port(place),
        )

    return _patiently(bind, refused)


def _comes_back(listener: socket.socket, found: list[str], port: int) -> bool:
    """Return whether a connection to an address of no interface ends here: a service address, a forwarded port."""
    word = os.urandom(16)
    for address in found:
        with contextlib.suppress(OSError), socket.create_connection((address, port), CALL) as calling:
            calling.sendall(word)
            # Other ranks may already be connecting.
            while select.select([listener], [], [], 1.0)[0]:
                taken, _ = listener.accept()
                with taken, contextlib.suppress(OSError):
                    taken.settimeout(1.0)
                    if taken.recv(16) == word:
                        return True
    return False


# -- the ranks that connect


def _call(place: MeetingPoint, identity: Identity, timeout: float) -> Any:
    start = time.monotonic()
    alone = identity.placement.local_world_size == 1  # the only rank on this host
    noticed, wrong_since, pause = False, None, 0.02
    while True:
        kind, reason, address = _try(place)
        now = time.monotonic()
        if kind == "":
            try:
                return _torch_store(address, place, identity, timeout)
            except JoinError:
                if time.monotonic() - start > PATIENCE:  # otherwise it may be the store of a job that is just ending
                    raise
        elif kind == "loopback" and (identity.other_nodes or identity.placement.node_rank) and not identity.hosted:
            raise _loopback(place, identity)
        elif kind == "own" and alone and not identity.hosted and now - start > PATIENCE:
            raise _not_here(place, identity)
        elif kind in ("refused", "loopback", "own"):
            wrong_since = None
            if identity.hosted and now - start > PATIENCE:
                raise JoinError(
                    f"the store of {identity.launcher} is gone: {reason}",
                    details=[f"it was at {place}"],
                    fix=f"see why {identity.launcher} ended, and start again",
                )
            if not noticed and now - start > NOTICE:
                noticed = True
                notice(f"rank {identity.rank} waits for rank 0 at {place}: {reason}")
        else:
            wrong_since = start if wrong_since is None and not noticed else wrong_since or now
            if now - wrong_since >= PATIENCE - CALL / 2:
                raise _wrong(kind, place, reason, identity)
        if now - start > timeout:
            raise _nobody_there(place, identity, timeout, reason)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)


def _try(place: MeetingPoint) -> tuple[str, str, str]:
    """Return (kind of problem, message, address that works)."""
    try:
        found = addresses.resolve(place.host, place.port)
    except OSError as error:
        return "unresolved", _words(error), ""
    worst = ("", "", "")
    for address in found:
        kind, reason = "", ""
        try:
            with socket.create_connection((address, place.port), CALL) as calling:
                if calling.getsockname() != calling.getpeername():
                    return "", "", address
                # The kernel chose the target port as the source port: this process is connected to itself.
                kind, reason = "refused", "the connection was refused"
        except TimeoutError:
            kind, reason = "silent", f"no answer in {CALL:g} s"
        except ConnectionRefusedError:
            kind, reason = "refused", "nothing listens there yet (connection refused)"
        except OSError as error:
            kind, reason = ("unreachable" if error.errno in NO_WAY else "failed"), _words(error)
        if not worst[0] or kind == "refused":
            worst = (kind, f"{address}: {reason}" if address != place.host else reason, "")
    if worst[0] == "refused" and all(map(addresses.is_own, found)):
        kind = "loopback" if all(map(addresses.is_loopback, found)) else "own"
        return kind, f"{worst[1]}; that is this host: is rank 0 on another one?", ""
    return worst


# -- both


def _torch_store(
    address: str, place: MeetingPoint, identity: Identity, timeout: float, listener: socket.socket | None = None
) -> Any:
    from torch.distributed import TCPStore

    fd = listener.detach() if listener is not None else None
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(
                TCPStore(
                    address,
                    place.port,
                    identity.world_size,
                    is_master=fd is not None,
                    timeout=timedelta(seconds=timeout),
                    wait_for_workers=False,
                    master_listen_fd=fd,
                )
            )
        except Exception as error:  # reported below
            made.append(error)

    # torch waits forever for the first answer of a server that is not a store.
    making = threading.Thread(target=make, name="store", daemon=True)
    making.start()
    # The launcher starts its store when a rank connects, which may import torch on a loaded machine.
    patience = timeout if identity.hosted else ANSWER
    making.join(patience)
    if made and not isinstance(made[0], Exception):
        return made[0]
    reason = str(made[0]).splitlines()[0] if made else f"it did not answer in {patience:g} s"
    if identity.hosted:
        raise JoinError(
            f"the store of {identity.launcher} at {place} cannot be used: {reason}",
            details=[f"rank {identity.rank} expects the other ranks there"],
            fix=f"see the messages of {identity.launcher} about its store, and store.log in the folder of the run",
        )
    raise JoinError(
        f"what listens on {address} port {place.port} is not the store of this job: {reason}",
        details=[f"rank {identity.rank} expects the other ranks at {place}"],
        fix=_set_port(place),
    )


def _patiently(do: Callable[[], T], refusal: Callable[[OSError], Exception]) -> T:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return do()
        except OSError as error:
            if time.monotonic() > end or error.errno == errno.EACCES:
                raise refusal(error) from None
            time.sleep(0.1)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)) if error.args else "no reason given"


# -- messages


def _set_address(place: MeetingPoint, address: str = "ADDRESS_OF_RANK_0") -> str:
    if place.by_method:
        return f"{_method(address, place.port)}, the same for every rank"
    return f"MASTER_ADDR={address}, the same for every rank"


def _set_port(place: MeetingPoint) -> str:
    port = place.port + 1 if place.port < 65535 else place.port - 1
    if place.by_method:
        return f"another port, the same for every rank: {_method(place.host, port)}"
    return f"another port, the same for every rank: MASTER_PORT={port}"


def _method(host: str, port: int) -> str:
    return f'phalanx.init(method="tcp://{f"[{host}]" if ":" in host else host}:{port}")'


def _wrong(kind: str, place: MeetingPoint, reason: str, identity: Identity) -> JoinError:
    if kind == "unresolved":
        return _unresolved(place, OSError(reason))
    words = {
        "unreachable": f"there is no route from {socket.gethostname()} to {place.host}",
        "silent": f"{place.host} does not answer on port {place.port}",
    }
    details = [reason, f"rank {identity.rank} expects the other ranks at {place}"]
    if kind == "silent":
        details.append(f"the host is down, the address is wrong, or a firewall drops port {place.port}")
    return JoinError(
        words.get(kind, f"cannot connect to {place.host} port {place.port}"), details=details, fix=_set_address(place)
    )


def _unresolved(place: MeetingPoint, error: OSError) -> JoinError:
    return JoinError(
        f"the name {place.host} does not resolve on {socket.gethostname()}",
        details=[f"the ranks meet at {place}", f"the name service says: {_words(error)}"],
        fix=f"{_set_address(place)}, or add {place.host} to /etc/hosts or DNS",
    )


def _loopback(place: MeetingPoint, identity: Identity) -> JoinError:
    known = [address for _, address in addresses.own()] if identity.hosts_store else []
    node_rank, local_world_size = identity.placement.node_rank, identity.placement.local_world_size
    return JoinError(
        f"{place.host} is the loopback address, but the ranks are on several hosts",
        details=[
            f"the ranks meet at {place}",
            f"this is rank {identity.rank} of {identity.world_size} on {socket.gethostname()}"
            + (f", node {node_rank}" if node_rank is not None else "")
            + (f", with {local_world_size} ranks on this node" if local_world_size else ""),
        ],
        fix=_set_address(place, known[0]) if known else _set_address(place),
    )


def _elsewhere(place: MeetingPoint, found: list[str], identity: Identity) -> JoinError:
    mine = [address for _, address in addresses.own()]
    shown = ", ".join(found)
    return JoinError(
        f"rank {identity.rank} runs on {socket.gethostname()}, but {place.host} is the address of another host",
        details=[
            f"the ranks meet at {place}" + (f", which is {shown}" if shown != place.host else ""),
            f"addresses of {socket.gethostname()}: {', '.join(mine) or 'only the loopback'}",
        ],
        fix=_set_address(place, mine[0] if mine else "127.0.0.1"),
    )


def _not_here(place: MeetingPoint, identity: Identity) -> JoinError:
    return JoinError(
        f"{place.host} is {socket.gethostname()}, where rank {identity.rank} runs alone: rank 0 is on another host",
        details=[f"the ranks meet at {place}"],
        fix=_set_address(place),
    )


def _nobody_there(place: MeetingPoint, identity: Identity, timeout: float, reason: str) -> JoinError:
    details = [
        f"this is rank {identity.rank} of {identity.world_size} on {socket.gethostname()}, by {identity.launcher}",
        f"{place}: {reason}",
    ]
    if identity.assumed:
        details.append("MASTER_ADDR is not set, so all ranks are expected on this host")
    return JoinError(
        f"rank 0 is missing: no process listened on {place.host} port {place.port} within {timeout:g} s",
        details=details,
        fix="start rank 0 there, or correct the address: MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=PORT for every rank",
    )
