"""Whether the default port is free, and how many ports there are for connections."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import several

CHECK = "ports"
USUAL = 29500  # torch's default, used in most examples
_FEW = 1000


@dataclass(frozen=True)
class Ports:
    """The default control port and the range of free ports."""

    port: int = USUAL
    free: bool = True
    holder: str = ""  # the process that uses it, if visible
    first: int = 32768  # the range from which the kernel takes outgoing and free ports
    last: int = 60999
    reserved: bool = False  # the port is excluded from that range


def read(port: int = USUAL, root: str = "/") -> Ports:
    """Read whether the port is free."""
    first, last = _range(Path(root, "proc/sys/net/ipv4/ip_local_port_range"))
    free = _free(port)
    holder = "" if free else _holder(port)
    reserved = _reserved(Path(root, "proc/sys/net/ipv4/ip_local_reserved_ports"), port)
    return Ports(port, free, holder, first, last, reserved)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # a connection in TIME_WAIT does not occupy the port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    return ""
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({process.name()}, of {process.username()})"
    except (psutil.Error, OSError):
        pass  # belongs to another user
    return ""


def _range(path: Path) -> tuple[int, int]:
    try:
        first, last = path.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999


def _reserved(path: Path, port: int) -> bool:
    from phalanx.cluster.affinity import parse

    try:
        return port in parse(path.read_text())
    except (OSError, ValueError):
        return False


def judge(ports: Ports) -> list[Finding]:
    """Return findings about the port."""
    found: list[Finding] = []
    if not ports.free:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"port {ports.port} is in use{f' by {ports.holder}' if ports.holder else ''}",
                "another run, most likely; phalanx takes a free port by itself, but a run that is given this one fails",
                f"phalanx ps; phalanx stop RUN   (or another --master-port than {ports.port})",
            )
        )
    count = ports.last - ports.first + 1
    if count < _FEW:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"there are {several(count, 'port')} for connections ({ports.first} to {ports.last})",
                "net.ipv4.ip_local_port_range is narrow; every pair of ranks needs some",
                "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
            )
        )
    elif ports.first <= ports.port <= ports.last and not ports.reserved:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"port {ports.port} is in the range of ephemeral ports ({ports.first} to {ports.last})",
                "any program may use it for a while; a run with a fixed port can fail",
                f"sysctl -w net.ipv4.ip_local_reserved_ports={ports.port}",
            )
        )
    return found or [
        Finding(CHECK, "green", f"{ports.port} is free; {ports.first} to {ports.last} are for connections")
    ]
