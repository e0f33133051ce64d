"""The port of a run: bound before anything starts and held until the run ends, so that no other process takes it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from phalanx.contract.visible import visible_line
from phalanx.errors import PortError

# Connections that the kernel queues until the store runs. A rank of phalanx.main makes two: one to see whether the port
# answers. If the queue is full, a rank takes the store for a host that does not answer.
_BACKLOG = 4096


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only. Port 0: a free one."""
    # Python imports the codec for international names to encode any text, even 127.0.0.1.
    host = address.encode() if address.isascii() else address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortError(
            f"the address {address} does not resolve here: {error.strerror}",
            fix="phalanx run --master-addr 127.0.0.1 …, or leave it out on one machine",
        ) from error
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    # Connections of a server that just died would block the port for a minute.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::")
    try:
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _explain(error, address, port) from error
    return sock


def listen_on(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Return one socket per address, all on the same port. Port 0: one that is free on all of them."""
    for _ in range(20 if port == 0 else 1):
        socks = [listen(addresses[0], port)]
        try:
            socks += [listen(address, socks[0].getsockname()[1]) for address in addresses[1:]]
        except PortError:
            for sock in socks:
                sock.close()
            if port:
                raise
        else:
            return socks
    raise PortError(f"no port is free on all of {', '.join(addresses)}", fix="name one: --master-port PORT")


def _explain(error: OSError, address: str, port: int) -> PortError:
    import errno

    if error.errno == errno.EADDRINUSE:
        return PortError(
            f"port {port} on {address} is in use",
            details=[_holder(port)],
            fix="leave --master-port out (a free port is taken), or choose another",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return PortError(
            f"{address} is not an address of this machine",
            fix="on one machine leave --master-addr out; on several, run this on the machine that has the address",
        )
    if error.errno == errno.EACCES:
        return PortError(
            f"port {port} may not be used by this user", fix="choose a port above 1023, or leave --master-port out"
        )
    return PortError(f"cannot listen on {address} port {port}: {error.strerror}")


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:2] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                command = visible_line(" ".join(process.cmdline()))[:120]  # `python -c` has whole scripts there
                return f"held by pid {connection.pid} ({process.username()}): {command}"
    except (psutil.Error, OSError):
        pass
    return "held by a process that this user may not see"
