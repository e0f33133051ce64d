"""Decides which connections from other nodes the store accepts: those of processes for which an agent of this run
vouches.

    rank ──TCP── store ── agent of the store ──encrypted── agent of the rank ── its kernel: whose socket is that?

A rank connects to MASTER_ADDR and MASTER_PORT as under torchrun. The store sees the addresses of the connection. The
agent of the node at that address knows whether a process of its user has the other end.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import msgspec

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.forkserver.store import peers
from phalanx.forkserver.store.peers import Address, PeerLookup
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc

logger = logging.getLogger(__name__)

_KIND = "store-peer"
_TIMEOUT = 10.0  # seconds for the other node; torch's client tries again
_YES, _NO = b"y", b"n"

_Host = Annotated[str, msgspec.Meta(max_length=64)]


class PeerQuery(msgspec.Struct, frozen=True):
    """Asks whether a process of the user has the socket with the address `near`, connected to `far`."""

    near: tuple[_Host, int]
    far: tuple[_Host, int]


_queries: Decoder[PeerQuery] = Decoder(PeerQuery)


class StorePeers:
    """Asks other nodes about connections to the store of this node, and answers the leader about those of this node."""

    def __init__(self, links: NodeLinks, rpc: NodeRpc) -> None:
        self._links = links
        self._rpc = rpc
        self._lookup: PeerLookup | None = None
        self._checks = True  # the kernel reports the owner of a socket
        rpc.serve(_KIND, self._answer)

    async def admits(self, near: Address, far: Address) -> bool:
        """Return whether a node of this run vouches for the process that has connected from `near` to `far`."""
        links = self._links
        asked = [node for node in links.members() if peers.plain(links.address(node)) == near[0]]
        query = encoding.encode(PeerQuery(near, far))
        replies = await asyncio.gather(
            *(self._rpc.request(_KIND, query, timeout=_TIMEOUT, to=node) for node in asked), return_exceptions=True
        )
        for node, reply in zip(asked, replies, strict=True):
            if isinstance(reply, BaseException):
                logger.warning("node %s does not report the owner of connection %s: %r", node, near, reply)
        return _YES in replies

    async def _answer(self, sender: int | None, content: bytes) -> bytes | None:
        """Answer the leader. Members never send this request, and get no reply."""
        if sender is not None:
            return None
        query = _queries.decode(content)
        return _YES if self._is_own(query.near, query.far) else _NO

    def _is_own(self, near: Address, far: Address) -> bool:
        if self._lookup is None:
            self._lookup = PeerLookup()
            self._checks = self._lookup.works()
            if not self._checks:
                logger.warning("the kernel does not report which user connects: any user here can connect to the store")
        try:
            return not self._checks or self._lookup.user(near, far) == os.getuid()
        except OSError:  # not an address
            return False

    def close(self) -> None:
        """Close the lookup."""
        if self._lookup is not None:
            self._lookup.close()
