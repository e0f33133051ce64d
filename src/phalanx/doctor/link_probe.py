"""Measures the link from one rank to another with the send and receive of any backend.

probe = LinkProbe(dist.send, dist.recv, chunk=4 << 20)
latency, bandwidth = probe.ask(1, seconds=0.3)    on rank 0
probe.answer(0)                                   on rank 1
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_PINGS = 40
_MOST_CHUNKS = 64

_Transfer = Callable[[torch.Tensor, int], Any]


class LinkProbe:
    """One end of the links of a rank."""

    def __init__(
        self,
        send: _Transfer,
        recv: _Transfer,
        *,
        chunk: int,
        device: torch.device = _CPU,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._recv = recv
        self._settle = settle  # waits until the device is idle
        self._short = torch.zeros(1, dtype=torch.int32, device=device)
        self._chunk = torch.zeros(chunk, dtype=torch.uint8, device=device)

    def ask(self, target: int, seconds: float) -> tuple[float, float]:
        """Return the latency in seconds, one way, and the bandwidth in bytes per second. `target` answers meanwhile.

        The time of the first chunk determines how many more are sent in so many seconds.
        """
        trips = [self._trip(target, self._short) for _ in range(_PINGS)]
        latency = statistics.quantiles(trips, n=10)[0] / 2
        once = self._trip(target, self._chunk)
        chunks = min(_MOST_CHUNKS, max(1, int(seconds / once)))
        self._send(torch.full_like(self._short, chunks), target)
        began = time.perf_counter()
        for _ in range(chunks):
            self._send(self._chunk, target)
        self._recv(self._short, target)
        self._settle()
        took = time.perf_counter() - began
        return latency, chunks * self._chunk.numel() / max(took - latency, took / 2)

    def answer(self, source: int) -> None:
        """Take part in what `source` asks."""
        for tensor in [*[self._short] * _PINGS, self._chunk]:
            self._recv(tensor, source)
            self._send(self._short, source)
        count = torch.zeros_like(self._short)
        self._recv(count, source)
        for _ in range(int(count.item())):
            self._recv(self._chunk, source)
        self._send(self._short, source)
        self._settle()

    def _trip(self, target: int, tensor: torch.Tensor) -> float:
        """Send a tensor, wait for a short answer, and return the seconds that this took."""
        began = time.perf_counter()
        self._send(tensor, target)
        self._recv(self._short, target)
        self._settle()
        return time.perf_counter() - began
