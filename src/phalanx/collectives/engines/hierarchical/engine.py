"""The engine for groups on several hosts: an inner engine per host, and gloo between the leaders, the lowest rank of
each host.

Reductions run in rank order within each host, and then in the order of the hosts. So all ranks get the same bits every
time, but not the bits that the same ranks would get on one host. After an error the group is unusable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from phalanx.collectives.engines.engine import ANY_SOURCE, Engine, EngineCall
from phalanx.collectives.engines.gloo import GlooMessage
from phalanx.collectives.engines.gloo_transport import AnySourceMessage, GlooTransport
from phalanx.collectives.engines.hierarchical.failure_propagation import FailurePropagation, translate
from phalanx.collectives.engines.threaded import ENDED, Threaded
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted, PeerLost
from phalanx.collectives.neighbours import Neighbours, format_ranks
from phalanx.forkserver.signed_store import SignedStore

from .buffers import BufferCache
from .collectives import HostCollectives
from .leaders import DATA, Deadline, HostLeaders
from .local_ranks import LocalRanks


class HierarchicalEngine(Threaded):
    """`inner`: the engine of this host's ranks, numbered from 0. `ranks`: the global ranks."""

    def __init__(
        self, store: SignedStore, neighbours: Neighbours, inner: Engine, timeout: float, ranks: Sequence[int] = ()
    ) -> None:
        rank, size = neighbours.here[inner.rank], sum(map(len, neighbours.hosts))
        super().__init__(rank, size)
        self._format_ranks = partial(format_ranks, names=tuple(ranks))
        self._inner = inner
        self._transport = GlooTransport(store.at("transport"), rank, size, timeout)
        cause_store = store.at("causes")
        self._failures = FailurePropagation(
            cause_store, rank, neighbours, self._format_ranks, aborted=lambda: self._ended
        )
        self._deadline = Deadline()
        self._leaders = HostLeaders(self._transport, neighbours, rank, self._deadline, self._format_ranks)
        buffers = BufferCache()
        local = LocalRanks(inner, len(neighbours.here), buffers, self._deadline)
        self._collectives = HostCollectives(rank, neighbours, self._leaders, local, buffers)
        self._error: Exception | None = None

    # -- messages: all through gloo, because a receive from any source cannot wait on two transports

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout: float) -> GlooMessage:
        """Send a message."""
        with self._translate_errors("send to", to, timeout):
            work = self._transport.send(tensor, to, _check_tag(tag))
        return GlooMessage(work, partial(self._translate_errors, "send to", to, timeout), timeout)

    def recv(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> GlooMessage:
        """Receive a message."""
        with self._translate_errors("recv from", source, timeout):
            work = self._transport.recv(tensor, source, _check_tag(tag))
        errors = partial(self._translate_errors, "recv from", source, timeout)
        return (
            AnySourceMessage(work, errors, timeout, lambda: self._ended)
            if source == ANY_SOURCE
            else GlooMessage(work, errors, timeout)
        )

    @contextlib.contextmanager
    def _translate_errors(self, what: str, peer: int, timeout: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"{what} {'any rank' if peer == ANY_SOURCE else self._format_ranks([peer])}"
            raise GroupAborted(ENDED) if self._ended else translate(error, what, timeout) from None

    # -- calls

    def close(self) -> None:
        """Close the inner engine and the connections."""
        super().close()
        self._inner.close()
        self._transport.close()  # drops receives that are still posted
        self._leaders.close()

    def _interrupt(self) -> None:
        self._transport.cut()
        self._inner.abort()

    def _do(self, call: EngineCall) -> None:
        if self._error is not None:
            raise type(self._error)(f"{call.kind.name.lower()}: this group has failed before: {self._error}")
        self._deadline.begin(call.timeout)
        self._leaders.begin()
        try:
            self._collectives.run(call)
        except Exception as error:
            leads = self._leaders.leads
            if leads:
                self._transport.cut()  # makes the other leaders give up, too
            cause = self._failures.cause(GroupAborted(ENDED) if self._ended else error, call, leads or self._ended)
            self._error = cause
            if leads:
                self._inner.abort()  # after the cause is published: waiting ranks read it
                if not isinstance(error, PeerLost | CollectiveTimeout):  # the ranks have detected these themselves
                    self._failures.wait_for_readers()
            raise cause from error


def _check_tag(tag: int) -> int:
    if not 0 <= tag < DATA:
        raise ValueError(f"tag {tag}: expected a number from 0 to {DATA - 1}")
    return tag
