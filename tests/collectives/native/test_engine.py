"""Collectives and messages of the shm engine: results, mismatches, threads, invalid calls."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
import torch

from phalanx.collectives import _native
from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction
from phalanx.collectives.engines.shm import ShmEngine
from phalanx.collectives.errors import CollectiveMismatch
from tests.collectives.forked import LIMIT, ranks
from tests.collectives.native.calls import SUM, raised

pytestmark = pytest.mark.xdist_group("native")


def every_kind(engine: ShmEngine, rank: int) -> None:
    size = engine.size
    for count in (0, 3, 700, 70000):
        x = torch.arange(count, dtype=torch.float32)
        mine = x + rank
        total = x * size + size * (size - 1) / 2
        tensor = mine.clone()
        engine.all_reduce(tensor, SUM, LIMIT)
        assert torch.equal(tensor, total)
        tensor = mine.to(torch.complex64)
        engine.broadcast(tensor, size - 1, LIMIT)
        assert torch.equal(tensor, (x + size - 1).to(torch.complex64))
        engine.barrier(LIMIT)
        root = engine.start(EngineCall(CallKind.REDUCE, (), [reduce := mine.clone()], SUM, root=1, timeout=LIMIT))
        whole = torch.empty(size * count)
        engine.run(EngineCall(CallKind.ALL_GATHER, [mine], [whole], timeout=LIMIT))
        assert torch.equal(whole, torch.cat([x + r for r in range(size)]))
        assert root.wait()
        assert torch.equal(reduce, total if rank == 1 else mine)
        parts = [torch.empty(count) for _ in range(size)] if rank == 0 else []
        engine.run(EngineCall(CallKind.GATHER, [mine], parts, root=0, timeout=LIMIT))
        assert all(torch.equal(part, x + r) for r, part in enumerate(parts))
        part = torch.empty(count)
        engine.run(EngineCall(CallKind.SCATTER, [whole] if rank == 0 else (), [part], root=0, timeout=LIMIT))
        assert torch.equal(part, mine)
        engine.run(EngineCall(CallKind.REDUCE_SCATTER, [whole], [part], Reduction(Op.MAX), timeout=LIMIT))
        assert torch.equal(part, mine)
        swapped = torch.empty_like(whole)
        engine.run(EngineCall(CallKind.ALL_TO_ALL, [whole + 1000 * rank], [swapped], timeout=LIMIT))
        assert torch.equal(swapped, torch.cat([mine + 1000 * r for r in range(size)]))


@pytest.mark.parametrize(("size", "direct"), [(1, True), (2, True), (3, False)])
def test_every_kind_of_collective(size: int, direct: bool) -> None:
    def body(engine: ShmEngine, rank: int) -> bool:
        if size > 1:
            every_kind(engine, rank)
        engine.all_reduce(torch.ones(5), SUM, LIMIT)
        return _native.direct(engine._group)

    assert ranks(size, body, slot=1 << 16, direct=direct) == [direct] * size


def test_different_calls_are_named_on_all_ranks() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        call = [
            lambda: engine.all_reduce(torch.ones(4), SUM, LIMIT),
            lambda: engine.broadcast(torch.ones(8, dtype=torch.complex64), 0, LIMIT),
            lambda: engine.all_reduce(torch.ones(4), SUM, LIMIT),
        ][rank]
        return raised(call), raised(lambda: engine.barrier(LIMIT))

    answers = ranks(3, body, names=[4, 5, 2])
    for first, later in answers:
        assert first == (
            CollectiveMismatch.__name__,
            "ranks called different things: ranks 4 (of this group: 0) and 2 all_reduce of 4 float32 (SUM), "
            "rank 5 (of this group: 1) broadcast of 64 bytes from rank 4 (of this group: 0)",
        )
        assert later == (CollectiveMismatch.__name__, f"barrier: this group has failed before: {first[1]}")


def test_different_sizes_on_two_ranks_are_named_on_all_ranks() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        outs = [torch.zeros(5 if rank == 1 else 4), torch.zeros(5), torch.zeros(5)]
        call = EngineCall(CallKind.ALL_GATHER, [torch.ones(4 if rank == 0 else 5)], outs, timeout=LIMIT)
        return raised(lambda: engine.run(call))

    results = ranks(3, body)
    assert results == [results[0]] * 3
    assert results[0][0] == CollectiveMismatch.__name__


def test_different_reductions_are_named() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        return raised(lambda: engine.all_reduce(torch.ones(4), Reduction(average=rank == 1), LIMIT))[1]

    difference = "rank 0 all_reduce of 4 float32 (SUM), rank 1 all_reduce of 4 float32 (AVG)"
    assert ranks(2, body) == [f"ranks called different things: {difference}"] * 2


def test_two_threads_wait_for_one_message() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        sys.setswitchinterval(1e-6)
        troubles = []
        for _ in range(300):
            if rank == 0:
                engine.send(torch.ones(20000), 1, 0, LIMIT).wait()
                continue
            message = engine.recv(torch.ones(20000), 0, 0, LIMIT)
            other = threading.Thread(target=lambda one=message: troubles.append(raised(one.wait)))
            other.start()
            troubles.append(raised(message.wait))
            other.join()
        return set(troubles)

    assert ranks(2, body) == [set(), {("", "")}]


def test_a_started_call_completes_without_other_references_to_its_tensors() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 0:
            pending = [
                engine.start(EngineCall(CallKind.BROADCAST, (), [torch.full((50000,), 7.0)], timeout=LIMIT))
                for _ in "123"
            ]
            gc.collect()
            garbage = [torch.zeros(50000) for _ in range(8)]
            engine.barrier(LIMIT)
            assert all(one.done() and one.wait() for one in pending)
            return len(garbage)
        tensors = [torch.zeros(50000) for _ in "123"]
        for tensor in tensors:
            engine.broadcast(tensor, 0, LIMIT)
        engine.barrier(LIMIT)
        return all(bool((tensor == 7).all()) for tensor in tensors)

    assert ranks(2, body, slot=1 << 14) == [8, True]


def test_a_forked_child_cannot_use_the_group() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        child = os.fork()
        if child == 0:
            error = raised(lambda: engine.barrier(LIMIT))[1]
            engine.close()
            os._exit(0 if "forks" in error else 1)
        status = os.waitpid(child, 0)[1]
        engine.barrier(LIMIT)
        return status

    assert ranks(2, body) == [0, 0]


def test_invalid_calls_are_refused_before_any_rank_waits() -> None:
    def body(engine: ShmEngine, _: int) -> object:
        return [
            raised(lambda: engine.broadcast(torch.ones(1), 7, LIMIT)),
            raised(lambda: engine.all_reduce(torch.ones(1), Reduction(Op.BAND), LIMIT)),
            raised(
                lambda: engine.run(EngineCall(CallKind.ALL_GATHER, [torch.ones(1)], [torch.ones(1)] * 3, timeout=LIMIT))
            ),
            raised(lambda: engine.barrier(LIMIT)),
        ]

    assert ranks(1, body) == [
        [
            ("ValueError", "the root is not a rank of this group"),
            ("ValueError", "unsupported reduction of this type"),
            ("ValueError", "wrong number of output tensors"),
            ("", ""),
        ]
    ]
