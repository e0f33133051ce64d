"""A rank whose script is over: when it is named, when it is ended, and the message about it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.diagnose.evidence import Frame, Process, Rank, ThreadStack
from phalanx.launcher.agent.stopping.exits import Exit, Exits, decide, waits_for
from phalanx.launcher.telemetry.node_sampler import WorkerReading
from phalanx.launcher.telemetry.process_stats import ProcessStatsReader
from phalanx.launcher.workers.worker import Worker
from tests.kit.placements import seat


@pytest.mark.parametrize(
    ("seen", "named", "expected"),
    [
        (Exit(1.0), False, "wait"),
        (Exit(8.0), False, "name"),
        (Exit(8.0), True, "wait"),
        (Exit(500.0, idle=500.0), True, "wait"),  # threads or atexit functions, however idle they are
        (Exit(9.0, 9.0, 9.0), True, "wait"),
        (Exit(10.0, 10.0, 9.0), True, "end"),
        (Exit(10.0, 10.0, 9.0), False, "end"),
        (Exit(60.0, 10.0, 7.0), True, "wait"),  # it works
        (Exit(60.0, 5.0, 50.0), True, "wait"),  # its atexit functions took long
        (Exit(60.0, 10.0, 9.0, children=True), True, "wait"),
    ],
)
def test_when_something_is_done(seen: Exit, named: bool, expected: str) -> None:
    assert decide(seen, named=named) == expected


STD = "/usr/lib/python3.11/"
SHUTDOWN = (Frame(f"{STD}threading.py", 1583, "_shutdown"),)
WORK = (Frame(f"{STD}socket.py", 7, "send"), Frame("/home/me/up.py", 12, "put"), Frame(f"{STD}threading.py", 9, "run"))


def rank(main: tuple[Frame, ...], *threads: str, process: Process | None = None) -> Rank:
    others = [ThreadStack(name=name, frames=WORK) for name in threads]
    found = (ThreadStack(name="MainThread", frames=main, main=True), *others)
    return Rank(rank=1, node=0, threads=found, process=process)


@pytest.mark.parametrize(
    ("seen", "text", "expected"),
    [
        (rank(SHUTDOWN, "up", "beside"), {"threads": ["up"]}, 'it waits for its thread "up" (up.py:12 in put)'),
        (
            rank(SHUTDOWN, "a", "b"),
            {"threads": ["a", "b"]},
            'it waits for its threads "a" (up.py:12 in put) and "b" (up.py:12 in put)',
        ),
        (rank(WORK[:2]), {"threads": []}, "it is in its atexit function put (up.py:12 in put)"),
        (rank(()), {"ending": True}, "it is in its atexit functions"),
        (
            rank((), process=Process(pid=1, state="S", children=("7 S sleep 9", "8 Z sh"))),
            {"ending": True},
            "it is in its atexit functions; its child processes: 7 S sleep 9",
        ),
        (
            rank((), process=Process(pid=1, state="S", wchan="futex_wait_queue")),
            {"ending": True, "teardown": 1.0},
            "it is in the teardown of the interpreter, in futex_wait_queue",
        ),
    ],
)
def test_what_an_exiting_rank_waits_for(seen: Rank, text: dict[str, Any], expected: str) -> None:
    assert waits_for(seen, text) == expected


def reading(*workers: WorkerReading, **more: Any) -> Any:
    group = SimpleNamespace(debugged=more.get("debugged", frozenset()))
    attempt = SimpleNamespace(stopping=more.get("stopping", False), workers=group)
    return SimpleNamespace(attempt=attempt, workers=workers, last=more.get("last", False))


def read(code: int | None = None, **text: Any) -> WorkerReading:
    worker = Worker(seat(1, 2, local_rank=0), "", pid=1, code=code)
    status: Any = SimpleNamespace(text=text) if text else None
    return WorkerReading("1", worker, status)


@pytest.mark.parametrize(
    ("seen", "checked"),
    [
        (reading(read(over=1.0)), True),
        (reading(read(place="train.py")), False),
        (reading(read()), False),  # it has no probe
        (reading(read(code=0, over=1.0)), False),
        (reading(read(over=1.0), debugged=frozenset({1})), False),
        (reading(read(over=1.0), stopping=True), False),
        (reading(read(over=1.0), last=True), False),
    ],
)
def test_only_workers_whose_script_is_over_are_checked(
    seen: Any, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    async def look(_: Exits, __: Any, name: str, *___: Any) -> None:
        looked.append(name)

    async def scenario() -> None:
        exits = Exits(lambda _: None, ProcessStatsReader())
        exits.observe(seen)
        exits.observe(seen)  # the first check still runs
        await asyncio.sleep(0.01)
        await exits.end()

    monkeypatch.setattr(Exits, "_look", look)
    asyncio.run(scenario())
    assert looked == ["1"] * checked
