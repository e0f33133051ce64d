"""Messages between the leaders of several hosts, the lowest rank of each. On other ranks all functions do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.collectives.engines.engine import EngineCall
from phalanx.collectives.engines.gloo_transport import GlooTransport, within
from phalanx.collectives.engines.hierarchical.call_header import CallHeader, check_match, fits_inline
from phalanx.collectives.neighbours import Neighbours

HEADER, DATA = (1 << 31) - 1, (1 << 31) - 2  # tags of messages between leaders


class Deadline:
    """The deadline of the current call."""

    def __init__(self) -> None:
        self._end = 0.0  # 0: no deadline

    def begin(self, timeout: float) -> None:
        """Begin a call. 0: no timeout."""
        self._end = time.monotonic() + timeout if timeout else 0.0

    def left(self) -> float:
        """Return the remaining seconds, always positive; 0: no timeout."""
        return max(0.001, self._end - time.monotonic()) if self._end else 0.0


class HostLeaders:
    """The leaders, from the perspective of one rank: `hosts` with their ranks, `mine`, the index of its host, and
    `others`.
    """

    def __init__(
        self,
        transport: GlooTransport,
        neighbours: Neighbours,
        rank: int,
        deadline: Deadline,
        format_ranks: Callable[[Iterable[int]], str],
    ) -> None:
        self.hosts = neighbours.hosts
        self.mine = neighbours.mine
        self.others = [number for number in range(len(self.hosts)) if number != self.mine]
        self.leads = rank == neighbours.here[0]
        self._transport = transport
        self._deadline = deadline
        self._format_ranks = format_ranks
        self._headers = [CallHeader() for _ in self.hosts] if self.leads else []
        self._next_headers = [CallHeader() for _ in self._headers]
        self._posted: list[Any] = []  # receives of the headers of the next call
        self._count = 0  # calls

    def begin(self) -> None:
        """Begin a call."""
        self._count += 1

    def match_headers(self, call: EngineCall, payload: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Check that all leaders make the same call. Return the small data of each host that was sent with the
        headers.
        """
        if not self.leads:
            return []
        payload = payload if payload is not None and fits_inline(payload) else None
        headers, self._headers, coming = self._headers, self._next_headers, self._posted
        self._next_headers = headers
        headers[self.mine].write(self._count, call, payload)
        works = [self.send(headers[self.mine].tensor, other, HEADER) for other in self.others]
        coming = coming or self._post(headers)
        self._posted = self._post(self._headers)  # post those of the next call early, so that they are received at once
        self.wait(*coming, *works)
        check_match(self._format_ranks, {ranks[0]: header for ranks, header in zip(self.hosts, headers, strict=True)})
        return [header.payload(payload) for header in headers] if payload is not None else []

    def send(self, tensor: torch.Tensor, host: int, tag: int = DATA) -> Any:
        """Start to send to the leader of a host."""
        return self._transport.send(tensor, self.hosts[host][0], tag) if self.leads and tensor.numel() else None

    def recv(self, tensor: torch.Tensor, host: int, tag: int = DATA) -> Any:
        """Start to receive from the leader of a host."""
        return self._transport.recv(tensor, self.hosts[host][0], tag) if self.leads and tensor.numel() else None

    def wait(self, *works: Any) -> None:
        """Wait for the results of `send` and `recv`."""
        for work in works:
            if work is not None:
                work.wait(within(self._deadline.left()))

    def close(self) -> None:
        """Drop the receives that are still posted. Close the transport first: it cancels them."""
        self._posted = []

    def _post(self, headers: Sequence[CallHeader]) -> list[Any]:
        return [self.recv(headers[other].tensor, other, HEADER) for other in self.others]
