"""A port in use by another program, one whose owner is ending, and one that rank 0 opens late."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.errors import JoinError
from phalanx.worker.rendezvous import tcp_store
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.methods import MeetingPoint

tcp_store.ANSWER = 2.0
caller = Identity("hand-set variables", PartialPlacement(rank=1, world_size=2), hosts_store=False)
with socket.create_server(("127.0.0.1", 0)) as foreign:
    port = foreign.getsockname()[1]
    with pytest.raises(JoinError, match=f"what listens on 127.0.0.1 port {port} is not the store of this job"):
        tcp_store.open_store(MeetingPoint("tcp", "127.0.0.1", port), caller, 60)
    print("a foreign server is named")

# The launcher has opened the port, but its store starts slowly.
tcp_store.ANSWER = 0.1
found: list[Any] = []
listener = socket.create_server(("127.0.0.1", 0))
place = MeetingPoint("tcp", "127.0.0.1", listener.getsockname()[1])
hosted = replace(caller, hosted=True)
calling = threading.Thread(target=lambda: found.append(tcp_store.open_store(place, hosted, 60)))
calling.start()
calling.join(1.0)
late = TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
calling.join(60)
late.set("key", "value")
assert found[0].get("key") == b"value"
print("a slow store of the launcher is waited for")

tcp_store.ANSWER = tcp_store.PATIENCE = 20.0
found = []
with socket.create_server(("127.0.0.1", 0)) as ending:
    place = MeetingPoint("tcp", "127.0.0.1", ending.getsockname()[1])
    calling = threading.Thread(target=lambda: found.append(tcp_store.open_store(place, caller, 30)))
    calling.start()
    for _ in range(2):  # one to check whether a server answers, one to connect
        ending.accept()[0].close()
kept = tcp_store.open_store(place, Identity("hand-set variables", PartialPlacement(rank=0, world_size=2)), 30)
calling.join(30)
kept.set("key", "value")
assert found[0].get("key") == b"value"
print("rank 0 came later")

listening = [
    entry.laddr.ip
    for entry in psutil.Process().net_connections("tcp")
    if entry.status == psutil.CONN_LISTEN and entry.laddr.port == place.port
]
assert listening == ["127.0.0.1"], listening
print("on the loopback alone")
