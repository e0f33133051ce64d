"""The process that hosts the store, so that it outlives rank 0 and there is no race for a port.

The listening socket comes from the agent: it was bound before anything started, to one address.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
import traceback
from typing import NamedTuple

from .. import linux
from .access import AgentLink, StoreAccess
from .gate import StoreGate
from .private_port import PrivatePort

_INTERVAL = 1.0  # seconds between two heartbeats


class StoreOrder(NamedTuple):
    """The parameters of a store."""

    address: str
    port: int
    gate: bool = True  # only ranks of this run may connect
    outlives: bool = False  # the end of the fork server does not end this process; the agent adopts it
    remote: bool = False  # ranks of other hosts connect, too


def host(fd: int, agent: int | None, order: StoreOrder) -> None:
    """Serve on the listening socket `fd` until killed, or until the agent is gone.

    agent     a packet socket to the agent, which gets a heartbeat each second; None: there is no agent
    """
    from torch.distributed import TCPStore

    link = AgentLink(agent)
    port = _open_gate(fd, link, order) if order.gate else None
    if port is None:
        address, at, inner = order.address, order.port, fd
    else:
        (address, at), inner = port.own_address, port.listener.detach()
    store = TCPStore(address, at, is_master=True, wait_for_workers=False, master_listen_fd=inner)
    while agent is None:
        signal.pause()
    parent = os.getppid()
    if order.outlives:
        linux.die_with_parent(0, 0)
    while True:
        store.check(["phalanx/heartbeat"])  # through the gate
        try:
            link.send(**{"is": "heartbeat"})
        except OSError:  # the agent is gone
            return
        if os.getppid() != parent:  # the agent has adopted this process
            parent = os.getppid()
            linux.die_with_parent(parent, signal.SIGKILL)
        time.sleep(_INTERVAL)


def _open_gate(fd: int, link: AgentLink, order: StoreOrder) -> PrivatePort | None:
    """Open the gate, and return the port behind it. None: the kernel does not support it; the reason is sent to the
    agent.
    """
    access = StoreAccess(link, remote=order.remote)
    if not access.checks:
        link.send(**{"is": "open", "why": "the kernel does not report which user connects"})
        return None
    try:
        port = PrivatePort()
    except OSError as error:
        link.send(**{"is": "open", "why": f"the kernel does not filter connections: {error}"})
        return None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes three descriptors
    gate = StoreGate(socket.socket(fileno=fd), port, access, link)
    threading.Thread(target=_serve, args=(gate,), name="gate", daemon=True).start()
    return port


def _serve(gate: StoreGate) -> None:
    """Serve, and end this process together with the gate: without it no rank reaches the store."""
    code = 1
    try:
        gate.serve()
        code = 0  # the agent is gone
    except Exception:  # the agent starts another store
        traceback.print_exc()
    finally:
        os._exit(code)
