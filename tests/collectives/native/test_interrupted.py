"""Waits of the shm engine that end early: a rank dies, is late, leaves, or is interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from phalanx.collectives.engines.engine import CallKind, EngineCall
from phalanx.collectives.engines.shm import ShmEngine
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted, PeerLost
from tests.collectives.forked import LIMIT, ranks
from tests.collectives.native.calls import SUM, raised

pytestmark = pytest.mark.xdist_group("native")


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
        assert seconds < LIMIT / 2  # 0.02 on an idle machine


def test_a_rank_killed_while_it_waits_is_named_before_the_last_rank_arrives() -> None:
    over, tell = os.pipe()

    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # kills it in the barrier
        if rank == 2:
            os.read(over, 1)  # until rank 0 has failed
        found = raised(lambda: engine.barrier(LIMIT))
        os.write(tell, b".")
        return found

    waited, killed, came = ranks(3, body)
    os.close(over), os.close(tell)
    assert killed == -signal.SIGALRM
    assert waited == came == (PeerLost.__name__, "barrier: peer lost, rank 1 has ended")


def test_a_late_rank_is_named() -> None:
    over, tell = os.pipe()

    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 1:
            os.read(over, 1)  # until rank 0 has timed out
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
            return os.read(over, 1).decode()  # it does not arrive
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
    assert seconds < LIMIT / 2  # 0.22 on an idle machine
    assert other == (GroupAborted.__name__, "barrier: the process group was aborted")
    assert absent == "!"


def test_a_collective_in_a_signal_handler_is_refused_where_it_would_deadlock() -> None:
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


def test_the_group_survives_an_interrupted_message() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            message = engine.recv(torch.ones(1), 1, 5, LIMIT)
            with pytest.raises(KeyboardInterrupt):
                message.wait()
            assert raised(message.wait) == (GroupAborted.__name__, "recv was interrupted")
        return raised(lambda: engine.barrier(LIMIT))

    assert ranks(2, body) == [("", "")] * 2


def test_close_ends_a_wait_in_another_thread() -> None:
    over, tell = os.pipe()
    kept: list[int] = []

    def body(engine: ShmEngine, rank: int) -> object:
        if rank == 1:
            return os.read(over, 1).decode()  # it does not arrive
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
    assert held == [1]  # the thread of the group may still write to it


def test_a_rank_that_closed_the_group_is_named() -> None:
    def body(engine: ShmEngine, rank: int) -> object:
        engine.barrier(LIMIT)
        if rank == 0:
            return engine.close()
        return raised(lambda: engine.barrier(LIMIT))

    assert ranks(2, body) == [None, (PeerLost.__name__, "barrier: peer lost, rank 0 has ended")]
