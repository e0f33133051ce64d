"""Measures the network with torch: send and receive between pairs of ranks, and all_reduce."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.doctor.link_probe import LinkProbe
from phalanx.doctor.pairs import Collective, HostPair, doubtful

_CHUNK = 4 << 20
_AGAIN = 2  # number of times a suspicious link is measured again
_MOST_AGAIN = 16  # links; if more are suspicious, it is not a coincidence
_REPEAT = 5
_ENOUGH = 1.0  # seconds
_GLOO_BYTES = 16 << 20
_NCCL_BYTES = 256 << 20


def open_group(store: Any, rank: int, size: int, limit: float) -> None:
    """Form a gloo group."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("doctor/gloo", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=limit),
    )


def measure_pairs(
    rank: int, names: Sequence[str], machines: Sequence[str], rounds: Sequence[Sequence[tuple[int, int]]]
) -> list[HostPair]:
    """Measure the pairs in which this rank is the first. Every rank must call it.

    Bad results are measured again and the best one counts, because a machine may be busy for a moment.
    """
    budget = min(0.3, max(0.05, 10 / max(1, len(rounds))))
    best = torch.zeros(len(names), len(names), 3, dtype=torch.float64)  # latency, and bandwidth in both directions
    for turn in range(1 + _AGAIN):
        new = torch.zeros_like(best)
        _measure(rank, rounds, budget, new)
        dist.all_reduce(new)
        seen = new[..., 0] > 0
        better = torch.cat((torch.minimum(best, new)[..., :1], torch.maximum(best, new)[..., 1:]), dim=-1)
        best = torch.where(seen[..., None], new if turn == 0 else better, best)
        found = {}
        for one, other in torch.nonzero(best[..., 0]).tolist():
            latency, there, back = best[one, other].tolist()
            local = machines[one] == machines[other]
            found[one, other] = HostPair(names[one], names[other], latency, there, back, local)
        bad = doubtful(list(found.values()))
        rounds = [[place] for place, pair in found.items() if pair in bad]
        if not 0 < len(rounds) <= _MOST_AGAIN:
            break
    return [pair for (one, _), pair in found.items() if one == rank]


def _measure(rank: int, rounds: Sequence[Sequence[tuple[int, int]]], budget: float, into: torch.Tensor) -> None:
    probe = LinkProbe(dist.send, dist.recv, chunk=_CHUNK)
    for pairs in rounds:
        dist.barrier()
        for one, other in pairs:
            if rank == one:
                latency, there = probe.ask(other, budget)
                probe.answer(other)
                into[one, other] = torch.tensor([latency, there, _rate(other)], dtype=torch.float64)
            elif rank == other:
                probe.answer(one)
                _, back = probe.ask(one, budget)
                dist.send(torch.tensor([back], dtype=torch.float64), one)
    dist.barrier()


def _rate(peer: int) -> float:
    """Return the rate that the peer measured while it was sending."""
    received = torch.zeros(1, dtype=torch.float64)
    dist.recv(received, peer)
    return float(received[0])


def all_reduce(rank: int, size: int, backend: str, device: str, group: Any = None) -> list[Collective]:
    """Measure an all_reduce of a small and a large tensor, and check its result."""
    found = []
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # establishes the connections
    for count in (4, _GLOO_BYTES if backend == "gloo" else _NCCL_BYTES):
        elements = max(1, count // 4)
        data = torch.full((elements,), float(rank + 1), device=device)
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        right = bool((data == size * (size + 1) / 2).all())
        # All ranks run the same number of repetitions, limited by the slowest rank.
        longest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        times = []
        for _ in range(min(_REPEAT, max(1, int(_ENOUGH / float(longest))))):
            data.fill_(1.0)
            _finish(device)
            began = time.perf_counter()
            dist.all_reduce(data, group=group)
            _finish(device)
            times.append(time.perf_counter() - began)
        found.append(Collective("all_reduce", backend, size, elements * 4, statistics.median(times), right))
    return found


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def close_group() -> None:
    """Destroy the group."""
    dist.destroy_process_group()


def gpu(local_rank: int) -> tuple[int, str]:
    """Return the index and UUID of the device that this rank would use; -1: none."""
    try:
        count = torch.cuda.device_count()
        if not count:
            return -1, ""
        number = local_rank % count
        return number, str(torch.cuda.get_device_properties(number).uuid)
    except (RuntimeError, AssertionError, AttributeError):
        return -1, ""


def all_reduce_nccl(rank: int, size: int, device: int, limit: float) -> list[Collective]:
    """Measure an all_reduce over NCCL."""
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=limit))
    try:
        return all_reduce(rank, size, "nccl", f"cuda:{device}", group)
    finally:
        dist.destroy_process_group(group)
