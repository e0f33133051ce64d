"""Groups across simulated hosts: ranks on this host that treat other ranks as ranks on another host.

    python -m tests.collectives.across results babca
    python -m tests.collectives.across profiled
    python -m tests.collectives.across trouble

A letter names the host of each rank. `trouble` prints the error of each rank as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.collectives import neighbours
from phalanx.collectives.engines.engine import ANY_SOURCE, CallKind, Engine, EngineCall, Op, Reduction
from phalanx.collectives.engines.gloo import GlooEngine, reduced
from phalanx.collectives.engines.hierarchical import collectives, leader_reduce
from phalanx.collectives.engines.hierarchical.engine import HierarchicalEngine
from phalanx.forkserver.signed_store import SignedStore
from tests.collectives.ranks import fork

LIMIT = 60.0
HOWS = [
    (torch.float32, Reduction()),
    (torch.float32, Reduction(average=True)),
    (torch.float32, Reduction(scale=0.3)),
    (torch.bfloat16, Reduction(average=True)),
    (torch.float16, Reduction(Op.MIN)),
    (torch.int64, Reduction(average=True)),
    (torch.uint8, Reduction(Op.BXOR)),
    (torch.bool, Reduction(Op.MAX)),
]


def group(places: str, rank: int, path: str) -> HierarchicalEngine:
    store = SignedStore(dist.FileStore(path, len(places)), "group")
    known = neighbours.by_host([*places], rank)
    try:
        from phalanx.collectives.engines.shm import join
    except ImportError:
        inside = store.at(places[rank])
        inner: Engine = GlooEngine(
            inside, known.here.index(rank), len(known.here), timedelta(seconds=LIMIT), known.here
        )
    else:
        inner = join(store, rank, known.here, known.here, LIMIT)
    return HierarchicalEngine(store, known, inner, LIMIT)


def values(of: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(of)
    numbers = torch.randn(count, generator=random) * 3
    return (
        numbers > 0 if dtype == torch.bool else numbers.abs().to(dtype) if dtype == torch.uint8 else numbers.to(dtype)
    )


def expected(parts: list[torch.Tensor], how: Reduction, places: str) -> torch.Tensor:
    """Return the expected result: host by host; 16-bit types in 32 bits."""
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    machines = neighbours.by_host([*places], 0).hosts
    totals = [reduced([parts[rank].to(wide) for rank in ranks], Reduction(how.op, how.scale)) for ranks in machines]
    total = reduced(totals, Reduction(how.op))
    if how.average:
        total = torch.div(total, len(parts), rounding_mode=None if wide.is_floating_point else "trunc")
    return total.to(parts[0].dtype)


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        raise AssertionError(f"{what}: {got} instead of {want}")


def reductions(engine: HierarchicalEngine, places: str, count: int) -> None:
    rank, size = engine.rank, engine.size
    for number, (dtype, how) in enumerate(HOWS):
        parts = [values(of, count, dtype) for of in range(size)]
        want = expected(parts, how, places)
        mine = parts[rank].clone()
        engine.run(EngineCall(CallKind.ALL_REDUCE, outs=[mine], reduction=how, timeout=LIMIT))
        same(f"all_reduce {dtype} {how}", mine, want)
        mine, root = parts[rank].clone(), number % size
        engine.run(EngineCall(CallKind.REDUCE, outs=[mine], reduction=how, root=root, timeout=LIMIT))
        same(f"reduce {dtype} {how}", mine, want if rank == root else parts[rank])
        each = count // size
        mine = torch.empty(each, dtype=dtype)
        whole = [part[: each * size] for part in parts]
        ins = [whole[rank]] if number % 2 else [*whole[rank].view(size, each)]
        engine.run(EngineCall(CallKind.REDUCE_SCATTER, ins=ins, outs=[mine], reduction=how, timeout=LIMIT))
        same(f"reduce_scatter {dtype} {how}", mine, want[: each * size].view(size, each)[rank])
        same("what went in", whole[rank], values(rank, count, dtype)[: each * size])


def moves(engine: HierarchicalEngine, count: int) -> None:
    rank, size = engine.rank, engine.size
    alls = [values(of, count, torch.float64) for of in range(size)]
    for root in range(size):
        mine = alls[rank].clone()
        engine.run(EngineCall(CallKind.BROADCAST, outs=[mine], root=root, timeout=LIMIT))
        same("broadcast", mine, alls[root])
        outs = [torch.empty_like(mine) for _ in range(size)] if rank == root else []
        engine.run(EngineCall(CallKind.GATHER, ins=[alls[rank]], outs=outs, root=root, timeout=LIMIT))
        for out, want in zip(outs, alls, strict=bool(outs)):
            same("gather", out, want)
        mine = torch.empty_like(mine)
        engine.run(
            EngineCall(CallKind.SCATTER, ins=alls if rank == root else [], outs=[mine], root=root, timeout=LIMIT)
        )
        same("scatter", mine, alls[rank])
    for outs in ([torch.empty(count * size, dtype=torch.float64)], [torch.empty_like(mine) for _ in range(size)]):
        engine.run(EngineCall(CallKind.ALL_GATHER, ins=[alls[rank]], outs=outs, timeout=LIMIT))
        same("all_gather", torch.cat(outs), torch.cat(alls))
    uneven = [part[: of * (count // size)] for of, part in enumerate(alls)]  # rank 0 has no data
    outs = [torch.empty_like(part) for part in uneven]
    engine.run(EngineCall(CallKind.ALL_GATHER, ins=[uneven[rank]], outs=outs, timeout=LIMIT))
    same("uneven all_gather", torch.cat(outs), torch.cat(uneven))
    rows = [[(count // 9) * ((of * 3 + to * 5) % 4) + of % 2 for to in range(size)] for of in range(size)]
    ins = [torch.full((rows[rank][to],), rank * size + to) for to in range(size)]
    outs = [torch.empty(rows[of][rank], dtype=torch.int64) for of in range(size)]
    engine.run(EngineCall(CallKind.ALL_TO_ALL, ins=ins, outs=outs, timeout=LIMIT))
    for of, out in enumerate(outs):
        same("all_to_all", out, torch.full((rows[of][rank],), of * size + rank))


def others(engine: HierarchicalEngine) -> None:
    rank, size = engine.rank, engine.size
    parts = [torch.full((300,), float(rank + k)) for k in range(4)]
    started = [engine.start(EngineCall(CallKind.ALL_REDUCE, outs=[part], timeout=LIMIT)) for part in parts]
    if rank == 0:
        one, come = torch.empty(1, dtype=torch.int64), []
        for _ in range(size - 1):
            message = engine.recv(one, ANY_SOURCE, 7, LIMIT)
            while not message.done():
                time.sleep(0.001)
            assert one.item() == message.source
            come.append(message.source)
        assert sorted(come) == [*range(1, size)]
    else:
        engine.send(torch.tensor([rank]), 0, 7, LIMIT).wait()
    for k, (pending, part) in enumerate(zip(started, parts, strict=True)):
        assert pending.wait()
        same("started", part, torch.full((300,), float(sum(range(size)) + k * size)))
    engine.run(EngineCall(CallKind.BARRIER, timeout=LIMIT))


def results(places: str) -> None:
    def work(rank: int, _: int, path: str) -> None:
        collectives.PIECE, leader_reduce.SMALL = 1 << 13, 1 << 10  # so that small data has many pieces
        engine = group(places, rank, path)
        for count in (0, 7, 6011):
            reductions(engine, places, count)
            moves(engine, count)
        others(engine)
        engine.close()

    ends = fork(len(places), work)
    print(ends)
    sys.exit(any(ends))


def profiled() -> None:
    """Each call has its own profile. The message of one call is received in the profile of the next."""

    def work(rank: int, _: int, path: str) -> None:
        engine = group("aab", rank, path)
        message = None
        for number in range(4):
            part = torch.full((8,), float(number))
            with torch.autograd.profiler.profile(record_shapes=True):
                for _ in range(64):  # earlier events, so that those of the group are not the first in memory
                    part + 1
                engine.run(EngineCall(CallKind.REDUCE, outs=[part], reduction=Reduction(Op.MAX), timeout=LIMIT))
                last, message = message, engine.recv(part, 2, number, LIMIT) if rank == 0 else None
                if rank == 2:
                    engine.send(part, 0, number, LIMIT).wait()
                if last is not None:
                    last.wait()
        if message is not None:
            message.wait()
        engine.close()

    ends = fork(3, work, 100)
    print(ends)
    sys.exit(any(ends))


# -- failures: four ranks, two on each host


def _all_reduce(engine: HierarchicalEngine, timeout: float = LIMIT) -> None:
    engine.run(EngineCall(CallKind.ALL_REDUCE, outs=[torch.ones(100_000)], timeout=timeout))


def _leader_dies(engine: HierarchicalEngine) -> None:
    if engine.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _all_reduce(engine)


def _other_dies(engine: HierarchicalEngine) -> None:
    if engine.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    _all_reduce(engine)


def _late(engine: HierarchicalEngine) -> None:
    if engine.rank == 3:
        time.sleep(2)
    else:
        _all_reduce(engine, 1.0)


def _different(engine: HierarchicalEngine) -> None:
    if engine.rank < 2:
        _all_reduce(engine)
    else:
        engine.run(EngineCall(CallKind.BROADCAST, outs=[torch.ones(8)], root=3, timeout=LIMIT))


def _abort(engine: HierarchicalEngine) -> None:
    if engine.rank == 3:
        time.sleep(1)
        return
    if engine.rank != 1:
        threading.Timer(0.3, engine.abort).start()
    if engine.rank == 2:
        engine.recv(torch.empty(1), ANY_SOURCE, 0, LIMIT).wait()
    else:
        _all_reduce(engine)


def _no_message(engine: HierarchicalEngine) -> None:
    if engine.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.rank == 0:
        engine.recv(torch.empty(1), 3, 0, LIMIT).wait()


TROUBLE: dict[str, Callable[[HierarchicalEngine], None]] = {
    "the leader of the other machine dies": _leader_dies,
    "a rank of the other machine dies": _other_dies,
    "late": _late,
    "different calls": _different,
    "abort": _abort,
    "no message": _no_message,
}


def trouble() -> None:
    for name, act in TROUBLE.items():

        def work(
            rank: int,
            _: int,
            path: str,
            name: str = name,
            act: Callable[[HierarchicalEngine], None] = act,
        ) -> None:
            engine = group("aabb", rank, path)
            _all_reduce(engine)
            begun = time.monotonic()
            try:
                act(engine)
                failure = ["", ""]
            except dist.DistBackendError as error:
                failure = [type(error).__name__, str(error)]
            seconds = time.monotonic() - begun
            os.write(1, json.dumps([name, rank, *failure, seconds]).encode() + b"\n")
            if rank == 0:
                engine.close()

        fork(4, work, 30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1]:
        case "results":
            results(sys.argv[2])
        case "profiled":
            profiled()
        case "trouble":
            trouble()
