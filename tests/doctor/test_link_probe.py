"""What a link probe reports, on a link whose latency and bandwidth are known."""

from __future__ import annotations

import pytest
import torch

from phalanx.doctor import link_probe
from phalanx.doctor.link_probe import LinkProbe

LATENCY = 0.01  # seconds, one way
CHUNK = 1 << 20


class Link:
    """A link and its clock: sending takes the time of the bytes, and a reply arrives after a round trip."""

    def __init__(self, bandwidth: float) -> None:
        self.now = 0.0
        self.bandwidth = bandwidth
        self.sent: list[int] = []

    def send(self, tensor: torch.Tensor, target: int) -> None:
        size = tensor.numel() * tensor.element_size()
        self.now += size / self.bandwidth if size == CHUNK else 0.0
        self.sent.append(int(tensor[0]) if size < CHUNK else CHUNK)

    def recv(self, tensor: torch.Tensor, target: int) -> None:
        self.now += 2 * LATENCY


@pytest.mark.parametrize(
    ("bandwidth", "chunks", "expected"),
    [
        (1e6, 1, 1e6),  # slower than the requested time: one chunk
        (1e8, 9, 9 * CHUNK / (9 * CHUNK / 1e8 + LATENCY)),  # 0.3 s, at 0.03 s per chunk and its reply
        (1e12, 14, 14 * CHUNK / (LATENCY + 14 * CHUNK / 1e12)),  # the latency is larger than the time of the bytes
    ],
)
def test_latency_and_bandwidth(monkeypatch: pytest.MonkeyPatch, bandwidth: float, chunks: int, expected: float) -> None:
    link = Link(bandwidth)
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: link.now)
    probe = LinkProbe(link.send, link.recv, chunk=CHUNK)
    latency, measured = probe.ask(1, seconds=0.3)
    assert latency == pytest.approx(LATENCY)
    assert measured == pytest.approx(expected, rel=0.01)
    assert link.sent[-chunks - 1 :] == [chunks, *[CHUNK] * chunks]
    assert link.sent.count(CHUNK) == chunks + 1, "the first one tells how many follow"
