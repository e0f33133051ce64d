"""The core in C: what it computes, what it says when something goes wrong, and that it ends whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.collectives import _native, creation
from phalanx.collectives.engines import segment, shm
from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction
from phalanx.collectives.engines.shm import DTYPES, ShmEngine
from phalanx.collectives.errors import CallRefused, CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from phalanx.contract import shared_memory
from phalanx.forkserver.signed_store import SignedStore
from tests.collectives.forked import LIMIT, ranks

pytestmark = pytest.mark.xdist_group("native")

NATIVE = Path(shm.__file__).parents[1] / "native"
PROGRAM = Path(__file__).parent / "native" / "ranks.c"
SUM = Reduction()


# -- the program that has threads and processes as ranks

FLAVOURS = {  # not optimised: most of the time would be the compiler's
    "thread": ["-g", "-fsanitize=thread", "-Dmmap=shared_mmap", "-Dmunmap=shared_munmap"],
    "address": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "faults": ["-DPHX_FAULTS"],
}
RUNS = [
    ("thread", "threads", 2, "direct"),
    ("thread", "threads", 3, "staged"),
    ("address", "processes", 3, "direct"),
    ("address", "processes", 4, "staged"),
    ("address", "processes", 1, "direct"),
    ("faults", "deaths", 2, "direct"),
    ("faults", "deaths", 3, "direct"),
    ("faults", "deaths", 3, "staged"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("native")

    @functools.cache
    def build(flavour: str) -> Path:
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-pthread", f"-I{NATIVE}", *FLAVOURS[flavour]]
        parts = []
        for source in [*sorted(NATIVE.glob("*.c")), PROGRAM]:
            if source.name == "binding.c":
                continue
            # The program itself has the true mmap: it is the one that shares it.
            own = [flag for flag in flags if not (source == PROGRAM and flag.startswith("-Dm"))]
            part = place / f"{flavour}-{source.stem}.o"
            subprocess.run(["gcc", *own, "-c", "-o", part, source], check=True, timeout=LIMIT)
            parts.append(part)
        subprocess.run(["gcc", *flags, "-o", place / flavour, *parts], check=True, timeout=LIMIT)
        return place / flavour

    return build


@pytest.mark.parametrize(("flavour", "mode", "size", "way"), RUNS, ids=["-".join(map(str, run)) for run in RUNS])
def test_all_collectives_and_all_deaths(
    built: Callable[[str], Path], flavour: str, mode: str, size: int, way: str
) -> None:
    # A search for leaks takes seconds at each exit: one of these runs is enough for that.
    env = {**os.environ, "ASAN_OPTIONS": f"detect_leaks={int((size, way) == (3, 'direct'))}"}
    words = [built(flavour), mode, str(size), way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    if mode == "deaths":
        assert int(done.stdout.split()[0]) > 100


# -- arithmetic

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


def reduced(inputs: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    out = torch.empty_like(inputs[0])
    addresses = tuple(tensor.data_ptr() for tensor in inputs)
    how = (DTYPES[out.dtype], reduction.op, reduction.scale, reduction.average)
    _native.reduce(out.data_ptr(), addresses, out.numel(), *how)
    return out


def samples(dtype: torch.dtype, count: int = 3001) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if dtype.is_floating_point:
        return [torch.randn(count, generator=generator, dtype=torch.float64).mul(50).to(dtype) for _ in range(3)]
    return [torch.randint(0, 120, (count,), generator=generator).to(dtype) for _ in range(3)]


OPS = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}
BITS = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_floats_are_reduced_as_torch_does_it_in_order(dtype: torch.dtype, op: Op) -> None:
    inputs = samples(dtype)
    inputs[1][5] = inputs[0][6] = inputs[2][7] = float("nan")
    wide = [tensor.float() if dtype.itemsize == 2 else tensor for tensor in inputs]
    for some in (2, 3):
        expected = functools.reduce(OPS[op], wide[:some]).to(dtype)
        torch.testing.assert_close(reduced(inputs[:some], Reduction(op)), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_factors_and_averages_of_floats(dtype: torch.dtype) -> None:
    inputs = samples(dtype)
    wide = [tensor.float() if dtype.itemsize == 2 else tensor for tensor in inputs]
    average = ((wide[0] + wide[1] + wide[2]) / 3).to(dtype)
    assert torch.equal(reduced(inputs, Reduction(average=True)), average)
    factor = torch.tensor(0.3, dtype=wide[0].dtype)
    scaled = (wide[0] * factor + wide[1] * factor + wide[2] * factor).to(dtype)
    assert torch.equal(reduced(inputs, Reduction(scale=0.3)), scaled)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers(dtype: torch.dtype) -> None:
    inputs = samples(dtype)
    wide = [tensor.to(torch.int64) for tensor in inputs]
    for op, combine in {**OPS, **BITS}.items():
        assert torch.equal(reduced(inputs, Reduction(op)), functools.reduce(combine, wide).to(dtype)), op
    some = [tensor // 4 for tensor in wide]  # their sum is no larger than the type
    small = [tensor.to(dtype) for tensor in some]
    assert torch.equal(reduced(small, Reduction(average=True)), (sum(some) // 3).to(dtype))
    assert torch.equal(reduced(small, Reduction(scale=2.7)), (2 * sum(some)).to(dtype))


def test_averages_of_whole_numbers_go_towards_zero() -> None:
    inputs = [torch.tensor([-7, 7, -1], dtype=torch.int32), torch.tensor([0, 0, 0], dtype=torch.int32)]
    assert reduced(inputs, Reduction(average=True)).tolist() == [-3, 3, 0]


def test_the_average_of_more_ranks_than_the_type_can_count() -> None:
    assert reduced([torch.zeros(2, dtype=torch.uint8)] * 256, Reduction(average=True)).tolist() == [0, 0]


def test_truths() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for op in (Op.SUM, Op.MAX, Op.BOR):
        assert torch.equal(reduced([a, b], Reduction(op)), a | b)
    for op in (Op.PRODUCT, Op.MIN, Op.BAND):
        assert torch.equal(reduced([a, b], Reduction(op)), a & b)
    assert torch.equal(reduced([a, b], Reduction(Op.BXOR)), a ^ b)


def test_every_half_and_back() -> None:
    every = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        halves = every.view(dtype)
        same = reduced([halves, torch.zeros_like(halves)], Reduction(Op.MAX, scale=1.0))
        expected = torch.maximum(halves.float(), torch.zeros(1)).to(dtype)
        torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)


def test_small_halves_are_kept_where_small_floats_are_not() -> None:
    small = torch.arange(1, 1024, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    assert torch.set_flush_denormal(True)
    try:
        doubled = reduced([small, small], SUM)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(doubled, small * 2)


# -- the engine


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
def test_every_kind(size: int, direct: bool) -> None:
    def body(engine: ShmEngine, rank: int) -> bool:
        if size > 1:
            every_kind(engine, rank)
        engine.all_reduce(torch.ones(5), SUM, LIMIT)
        return _native.direct(engine._group)

    assert ranks(size, body, slot=1 << 16, direct=direct) == [direct] * size


def raised(what: Callable[[], object]) -> tuple[str, str]:
    try:
        what()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_differs_is_told() -> None:
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


def test_sizes_that_differ_between_two_are_told_to_all() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        outs = [torch.zeros(5 if rank == 1 else 4), torch.zeros(5), torch.zeros(5)]
        call = EngineCall(CallKind.ALL_GATHER, [torch.ones(4 if rank == 0 else 5)], outs, timeout=LIMIT)
        return raised(lambda: engine.run(call))

    said = ranks(3, body)
    assert said == [said[0]] * 3
    assert said[0][0] == CollectiveMismatch.__name__


def test_reductions_that_differ_are_told() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        return raised(lambda: engine.all_reduce(torch.ones(4), Reduction(average=rank == 1), LIMIT))[1]

    told = "rank 0 all_reduce of 4 float32 (SUM), rank 1 all_reduce of 4 float32 (AVG)"
    assert ranks(2, body) == [f"ranks called different things: {told}"] * 2


def test_a_killed_rank_is_named_at_once() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        error = raised(lambda: engine.all_reduce(torch.ones(100000), SUM, LIMIT))
        return error, time.monotonic() - began

    one, killed, other = ranks(3, body)
    assert killed == -signal.SIGKILL
    for error, seconds in (one, other):
        assert error == (PeerLost.__name__, "all_reduce: peer lost, rank 1 has ended")
        assert seconds < 5  # 0.02 on a machine that is idle


def test_one_that_is_killed_while_it_waits_is_named_before_the_last_has_come() -> None:
    over, tell = os.pipe()

    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # is its end, within the barrier
        if rank == 2:
            os.read(over, 1)  # the first has been told already
        found = raised(lambda: engine.barrier(LIMIT))
        os.write(tell, b".")
        return found

    waited, killed, came = ranks(3, body)
    os.close(over), os.close(tell)
    assert killed == -signal.SIGALRM
    assert waited == came == (PeerLost.__name__, "barrier: peer lost, rank 1 has ended")


def test_who_is_late_is_named() -> None:
    over, tell = os.pipe()

    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 1:
            os.read(over, 1)  # the other has given up
        found = raised(lambda: engine.barrier(0.2))
        os.write(tell, b".")
        return found

    waited, came = ranks(2, body)
    os.close(over), os.close(tell)
    assert waited == (CollectiveTimeout.__name__, "barrier: rank 1 did not come within the timeout of 0.2 s")
    assert came == (
        CollectiveTimeout.__name__,
        "barrier: this rank arrived too late: the others timed out waiting for rank 1",
    )


def test_ctrl_c_ends_a_wait_and_the_group() -> None:
    over, tell = os.pipe()

    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 2:
            return os.read(over, 1).decode()  # it does not come
        if rank == 1:
            return raised(lambda: engine.start(EngineCall(CallKind.BARRIER, timeout=LIMIT)).wait())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            engine.barrier(LIMIT)
        os.write(tell, b"!")
        return time.monotonic() - began

    seconds, other, absent = ranks(3, body)
    os.close(over)
    os.close(tell)
    assert seconds < 10  # 0.22 on a machine that is idle
    assert other == (GroupAborted.__name__, "barrier: the process group was aborted")
    assert absent == "!"


def test_a_signal_handler_is_refused_what_would_wait_for_ever() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 1:
            return raised(
                lambda: engine.start(EngineCall(CallKind.BROADCAST, (), [torch.ones(1)], timeout=LIMIT)).wait()
            )[0]
        signal.signal(signal.SIGUSR1, lambda *_: engine.barrier(LIMIT))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(RuntimeError, match="a signal handler cannot run a collective on a group on which"):
            engine.run(EngineCall(CallKind.SCATTER, (), [torch.ones(1)], root=2, timeout=LIMIT))
        return "refused"

    def absent(engine: ShmEngine, rank: int) -> object:
        return raised(lambda: engine.recv(torch.ones(1), 0, 0, LIMIT).wait())[0] if rank == 2 else body(engine, rank)

    assert ranks(3, absent) == ["refused", GroupAborted.__name__, GroupAborted.__name__]


def test_two_threads_wait_for_one_message() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        sys.setswitchinterval(1e-6)
        troubles = []
        for _ in range(300):
            if rank == 0:
                engine.send(torch.ones(20000), 1, 0, LIMIT).wait()
                continue
            parcel = engine.recv(torch.ones(20000), 0, 0, LIMIT)
            other = threading.Thread(target=lambda one=parcel: troubles.append(raised(one.wait)))
            other.start()
            troubles.append(raised(parcel.wait))
            other.join()
        return set(troubles)

    assert ranks(2, body) == [set(), {("", "")}]


def test_a_message_that_was_interrupted_says_so_and_the_group_goes_on() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            parcel = engine.recv(torch.ones(1), 1, 5, LIMIT)
            with pytest.raises(KeyboardInterrupt):
                parcel.wait()
            assert raised(parcel.wait) == (GroupAborted.__name__, "recv was interrupted")
        return raised(lambda: engine.barrier(LIMIT))

    assert ranks(2, body) == [("", "")] * 2


def test_a_wait_in_one_thread_is_ended_by_another() -> None:
    over, tell = os.pipe()
    kept: list[int] = []

    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 1:
            return os.read(over, 1).decode()  # it does not come
        engine.start(EngineCall(CallKind.BARRIER, timeout=LIMIT))

        def close() -> None:
            engine.close()
            kept.append(len(engine._running))

        closing = threading.Timer(0.2, close)
        closing.start()
        waited, later = raised(lambda: engine.barrier(LIMIT)), raised(lambda: engine.barrier(LIMIT))
        closing.join()
        os.write(tell, b"!")
        return waited, later, kept

    (waited, later, held), _ = ranks(2, body)
    os.close(over)
    os.close(tell)
    assert waited == (GroupAborted.__name__, "barrier: the process group was aborted")
    assert later == ("ValueError", "this process has left the group")
    assert held == [1]  # what the group's thread may still write to


def test_a_rank_that_has_left_is_missed() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 0:
            return engine.close()
        return raised(lambda: engine.barrier(LIMIT))

    assert ranks(2, body) == [None, (PeerLost.__name__, "barrier: peer lost, rank 0 has ended")]


def test_what_was_started_goes_on_by_itself_with_tensors_nobody_holds() -> None:
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


def test_a_fork_has_no_part_in_it() -> None:
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


def test_what_makes_no_sense_is_refused_before_anybody_waits() -> None:
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


# -- memory


def test_ranks_find_each_other_through_a_store_and_leave_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")

    def child(rank: int) -> int:
        store = dist.FileStore(path, 3)
        engine = shm.join(store, rank, [0, 2], [0, 2], LIMIT)
        engine.all_reduce(ones := torch.ones(2), SUM, LIMIT)
        named = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        engine.barrier(LIMIT)
        engine.close()
        mapped = "memfd:phalanx" in Path("/proc/self/maps").read_text()
        return 0 if ones.tolist() == [2, 2] and not any("memfd" in name for name in named) and not mapped else 1

    children = []
    for rank in (0, 2):
        if (pid := os.fork()) == 0:
            signal.alarm(int(LIMIT))
            os._exit(child(rank))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


def test_who_cannot_join_says_why_and_is_missed_at_once() -> None:
    memory = shared_memory.create("phalanx", _native.memory(2, segment.SLOT))

    def body(engine: ShmEngine, rank: int) -> object:
        pids = torch.zeros(2, dtype=torch.int64)
        engine.run(EngineCall(CallKind.ALL_GATHER, [torch.tensor([os.getpid()])], [pids], timeout=LIMIT))
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        files = []
        with contextlib.suppress(OSError):
            while rank == 1:
                files.append(os.open("/dev/null", os.O_RDONLY))
        answer = raised(lambda: ShmEngine(memory, rank, pids.tolist(), [0, 1], LIMIT))
        for file in files:
            os.close(file)
        return answer

    missed, refused = ranks(2, body)
    os.close(memory)
    assert missed == (PeerLost.__name__, "joining: peer lost, a rank of this host has ended")
    assert refused[0] == CallRefused.__name__
    assert "Too many open files" in refused[1]


# Of seccomp: what the numbers of the calls are compared with, one after the other.
_LOAD, _IS, _RETURN, _ALLOW, _NOT_PERMITTED = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001
_PIDFD_OPEN = 434  # on every processor


def forbid(call: int) -> None:
    """As some containers do."""
    filters = [(_LOAD, 0, 0, 0), (_IS, 0, 1, call), (_RETURN, 0, 0, _NOT_PERMITTED), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
    program = struct.pack("H6xQ", len(filters), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0


@pytest.mark.parametrize("why", ["forbidden", "too many"])
def test_where_memory_cannot_be_shared_all_ranks_go_another_way(tmp_path: Path, why: str) -> None:
    def child(rank: int) -> int:
        if why == "too many":
            segment.MAX_RANKS = 1
        elif rank == 1:
            forbid(_PIDFD_OPEN)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        group = creation.shm(store, rank, 2, timedelta(seconds=LIMIT))
        group.allreduce([ones := torch.ones(2)]).wait()
        return 0 if type(group._engine).__name__ == "GlooEngine" and ones.tolist() == [2, 2] else 1

    children = []
    for rank in (0, 1):
        if (pid := os.fork()) == 0:
            signal.alarm(int(LIMIT))
            os._exit(child(rank))
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


def test_the_memory_of_another_group_is_not_taken_for_ours() -> None:
    first, second = shared_memory.create("phalanx", 4096), shared_memory.create("phalanx", 4096)
    where = f"{os.getpid()}:{first}:{os.fstat(first).st_ino}"
    os.close(segment._open(where, 0, 4096))
    os.dup2(second, first)  # the number goes on, as that of a group whose making was given up
    with pytest.raises(PeerLost, match="what rank 0 shares is not the memory of this group"):
        segment._open(where, 0, 4096)
    os.close(first)
    os.close(second)


def test_what_is_no_memory_of_ours_is_not_opened(tmp_path: Path) -> None:
    """A pipe without a reader would hold us up, and a file be written to."""
    with open(tmp_path / "precious", "wb") as file:
        file.truncate(4096)
        where = f"{os.getpid()}:{file.fileno()}:{os.fstat(file.fileno()).st_ino}"
        with pytest.raises(PeerLost, match="what rank 0 shares is not the memory of this group"):
            segment._open(where, 0, 4096)


def test_who_does_not_come_to_the_store_is_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(CollectiveTimeout, match=r"joining timed out: waited 0.3 s for ranks 1, 2 of this host"):
        segment.create(SignedStore(store, ""), 0, [0, 1, 2], 0.3)
