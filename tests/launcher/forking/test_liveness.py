"""Processes besides the workers that no longer answer, and those that have outlived their fork server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from phalanx.forkserver import linux, wire
from phalanx.launcher.forking import liveness
from phalanx.launcher.forking.connection import ForkServerConnection
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.liveness import Liveness
from phalanx.launcher.workers.adopted import AdoptedProcesses
from tests.kit.cli import until

LONG = 60.0


def run_scene(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LONG))


def looks(found: Liveness, *states: tuple[str, int]) -> str:
    return next((why for state, count in states for _ in range(count) if (why := found.look(state))), "")


@pytest.mark.parametrize(
    ("timeout", "states", "why"),
    [
        (60.0, [("stopped", 10)], "stopped for 10 s"),
        (4.0, [("stopped", 4)], "stopped for 4 s"),
        (60.0, [("stopped", 9), ("sleeps", 1), ("stopped", 9)], ""),  # it was continued
        (60.0, [("sleeps", 60)], ""),
        (60.0, [("sleeps", 61)], "no answer for 61 s (sleeps)"),
        (4.0, [("computes", 20)], ""),  # a short timeout is for processes that do nothing else
    ],
)
def test_a_process_that_does_not_answer(timeout: float, states: list[tuple[str, int]], why: str) -> None:
    found = Liveness(timeout)
    found.record_answer()
    assert looks(found, *states) == why


def test_imports_may_take_any_time_and_an_answer_counts() -> None:
    found = Liveness(60.0)
    assert looks(found, ("computes", 1000)) == ""
    found.record_answer()
    assert looks(found, ("computes", 60)) == ""
    found.record_answer()
    assert looks(found, ("computes", 60)) == ""


def test_imports_that_are_known_to_end_have_a_bound() -> None:
    assert looks(Liveness(60.0, start=600.0), ("sleeps", 600)) == ""
    assert looks(Liveness(60.0, start=600.0), ("sleeps", 601)) == "no answer for 601 s (sleeps)"
    assert looks(Liveness(60.0, start=600.0), ("stopped", 10)) == "stopped for 10 s"


def stopped_server() -> tuple[ForkServerConnection, subprocess.Popen[bytes], list[str]]:
    """Start a process that has the other end of a connection, and is stopped."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], pass_fds=(theirs.fileno(),), start_new_session=True)
    theirs.close()
    process.send_signal(signal.SIGSTOP)
    until(lambda: linux.state(process.pid) == "stopped", LONG, "the process to stop")
    lost: list[str] = []
    ready = {"is": "ready", "pid": process.pid, "seconds": {}}
    client = ForkServerClient(ours, "cold", process, ready)
    connection = ForkServerConnection(client, lambda _: None, lambda: lost.append(connection.lost), timeout=2.0)
    return connection, process, lost


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stopped_fork_server_is_killed_and_lost(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "INTERVAL", 0.01)

    async def scene() -> None:
        connection, process, lost = stopped_server()
        await connection.ready()
        if at_once:
            connection.kill_if_stopped()
        asking = await connection.ask("orphans")  # it ends with the connection
        assert asking == {}
        while not lost:  # the connection ends before that is reported
            await asyncio.sleep(0.01)
        assert lost == [connection.lost]
        assert connection.lost.startswith("stopped")
        assert connection.lost.endswith(", so it was killed")
        assert process.returncode == -signal.SIGKILL

    run_scene(scene)


def test_a_stopped_fork_server_does_not_delay_the_end() -> None:
    async def scene() -> None:
        connection, process, _ = stopped_server()
        await connection.ready()
        await connection.end()
        assert process.wait() == -signal.SIGKILL

    run_scene(scene)


def test_an_order_that_a_stopped_fork_server_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the agent would wait forever, and handle no signal."""
    monkeypatch.setattr("phalanx.launcher.forking.fork_servers._SEND_TIMEOUT", 0.1)
    connection, process, _ = asyncio.run(_made())
    with connection.client.sock, pytest.raises(TimeoutError):
        connection.client.send({"do": "start", "environ": "x" * 10_000_000})
    assert process.wait() == -signal.SIGKILL


async def _made() -> tuple[ForkServerConnection, subprocess.Popen[bytes], list[str]]:
    return stopped_server()


def test_what_outlives_several_fork_servers_is_reaped_once() -> None:
    """Otherwise its exit would also be taken for that of the next process of the same name, which runs."""

    async def scene() -> None:
        exits: asyncio.Queue[wire.Message] = asyncio.Queue()
        adopted = AdoptedProcesses(exits.put_nowait)
        first, second = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
        assert adopted.adopt("store", first.pid)
        assert adopted.adopt("store", first.pid)
        first.kill()
        assert (await exits.get())["pid"] == first.pid
        assert adopted.adopt("store", second.pid)
        rescue = threading.Timer(30, second.kill)  # a loop that waits for the wrong process continues, and this fails
        rescue.start()
        for _ in range(3):  # rounds of the loop in which a reader would be called
            await asyncio.sleep(0)
        assert adopted.pids == {second.pid}
        rescue.cancel()
        second.kill()
        assert (await exits.get())["pid"] == second.pid
        assert exits.empty()
        adopted.close()
        first.poll(), second.poll()

    run_scene(scene)


def test_what_has_outlived_its_fork_server_is_signalled_and_reaped_here() -> None:
    async def scene() -> None:
        exits: asyncio.Queue[wire.Message] = asyncio.Queue()
        adopted = AdoptedProcesses(exits.put_nowait)
        first, second = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
        assert adopted.adopt("0", first.pid)
        assert adopted.adopt("1", second.pid)
        assert adopted.pids == {first.pid, second.pid}
        first.send_signal(signal.SIGSTOP)
        assert adopted.send_signal("0", signal.SIGTERM, alone=False)  # it is continued, too
        found = await exits.get()
        assert (found["name"], found["pid"], os.WTERMSIG(found["status"])) == ("0", first.pid, signal.SIGTERM)
        assert found["peak"] > 0
        assert adopted.send_signal("1", signal.SIGKILL, alone=True)
        assert os.WTERMSIG((await exits.get())["status"]) == signal.SIGKILL
        assert not adopted.send_signal("1", signal.SIGKILL, alone=True)
        assert not adopted.adopt("2", first.pid)  # it has ended
        adopted.close()
        first.poll(), second.poll()

    run_scene(scene)
