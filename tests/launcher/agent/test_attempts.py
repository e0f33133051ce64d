"""The attempts of a run on one node: what is cleaned up and reported after each, and what follows."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launcher.actions import StartAttempt
from phalanx.launcher.agent.attempts import AttemptLoop
from phalanx.launcher.agent.stopping.end_request import EndRequest
from phalanx.launcher.coordination.coordinator import AttemptReport, RunResult
from phalanx.launcher.runs import root_cause

PLAN: Any = SimpleNamespace(shutdown=SimpleNamespace(linger=0.0))


class Output:
    def __init__(self) -> None:
        self.closed = False

    async def drained(self, timeout: float) -> None:
        pass

    async def settle_forwarded(self, *, succeeded: list[int], reported: object) -> None:
        self.succeeded, self.after_signal = succeeded, reported is not None

    def close(self) -> None:
        self.closed = True


class Group:
    """A worker group that is over at once."""

    def __init__(self, number: int, *, failed: bool) -> None:
        self.number = number
        workers = [SimpleNamespace(seat=SimpleNamespace(rank=rank), code=rank) for rank in range(2)]
        self.workers = SimpleNamespace(failed=failed, ranks={}, values=lambda: workers)
        self.failures = SimpleNamespace(explain=lambda: ([], "rank 0 failed"), clean_exits=tuple)
        self.lost_with_fork_server = False
        self.output = Output()
        self.over = asyncio.Event()
        self.over.set()

    def close(self) -> None:
        pass


class Node:
    """Everything that an attempt loop uses: `failures`: which attempts fail; `results`: what follows each."""

    def __init__(self, failures: list[bool], results: list[StartAttempt | RunResult]) -> None:
        self.plan = PLAN
        self.links = SimpleNamespace(leads=True)
        self.lost = ""
        self.keep_orphans = False
        self.end_request = EndRequest()
        self.reports: list[AttemptReport] = []
        self.groups: list[Group] = []
        self.calls: list[str] = []
        self.released: list[list[int]] = []  # ranks whose tracebacks were shown
        self.dropped: list[Any] = []  # which tracebacks were not shown, because a message reported the failure
        self.ready = True
        self.at_start: Callable[[], None] = lambda: None
        self._failures, self._results = failures, results

    async def run(self) -> RunResult:
        node: Any = self
        watchers: Any = SimpleNamespace(start=lambda _: None, attempt_over=lambda: None)
        console = SimpleNamespace(drop_withheld=self._dropped, release_withheld=self.released.append)
        context: Any = SimpleNamespace(folder=SimpleNamespace(name="run"), console=console)
        loop = AttemptLoop(
            node,
            node,
            node,
            watchers,
            self.end_request,
            note=lambda _: None,
            make_context=lambda _: context,
            succeeded=lambda _: self.calls.append("succeeded"),
        )
        return await loop.run()

    def _dropped(self, matches: Any = None) -> None:
        self.dropped.append(matches)

    # -- the coordinator

    async def first_attempt(self) -> StartAttempt:
        return attempt(0)

    async def wait_for_others(self) -> None:
        pass

    def is_last_attempt(self, *, failed: bool) -> bool:
        return not failed or not isinstance(self._results[0], StartAttempt)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        self.reports.append(report)
        return self._results.pop(0)

    # -- the group controller

    async def prepare(self, plan: Any) -> bool:
        return self.ready

    async def start(self, start: StartAttempt, context: Any) -> Group:
        self.groups.append(Group(start.attempt, failed=self._failures.pop(0)))
        self.at_start()
        return self.groups[-1]

    async def settle(self) -> None:
        pass

    def release(self) -> None:
        self.calls.append("release")

    def discard_regroup(self) -> None:
        pass

    # -- the fork server

    def startup_error(self) -> LaunchError:
        return LaunchError("the interpreter ended early")

    async def orphans(self) -> tuple[int, ...]:
        return ()

    async def end_processes(self) -> None:
        self.calls.append("end processes")

    async def end(self) -> None:
        self.calls.append("end")


def attempt(number: int) -> StartAttempt:
    return StartAttempt(number, PLAN, None)


def test_a_run_that_succeeds() -> None:
    node = Node([False], [RunResult(0)])
    assert asyncio.run(node.run()) == RunResult(0)
    assert node.reports == [AttemptReport(0)]
    assert node.calls == ["succeeded", "end"]
    assert node.groups[0].output.closed


def test_a_failed_attempt_is_swept_before_the_next_begins() -> None:
    node = Node([True, False], [attempt(1), RunResult(0)])
    assert asyncio.run(node.run()) == RunResult(0)
    assert [report.attempt for report in node.reports] == [0, 1]
    assert node.reports[0].block == "rank 0 failed"
    assert node.calls == ["release", "end processes", "succeeded", "end"]


def test_the_last_attempt_fails() -> None:
    node = Node([True], [RunResult(3, "rank 0 failed")])
    assert asyncio.run(node.run()) == RunResult(3, "rank 0 failed")
    assert node.calls == ["end"]
    # The message covers the failed ranks. Nothing else reports an exception in rank 0, which exited with 0.
    assert (node.released, node.dropped) == ([[0]], [None])


def test_success_here_after_which_node_0_wants_another_attempt() -> None:
    node = Node([False, False], [attempt(1), RunResult(0)])
    node.links.leads = False
    node.is_last_attempt = lambda *, failed: False  # type: ignore[method-assign]
    assert asyncio.run(node.run()) == RunResult(0)
    assert node.calls == ["release", "end processes", "succeeded", "end"]


def test_a_signal_hides_failures_and_nothing_lingers() -> None:
    node = Node([True], [RunResult(0)])
    node.at_start = lambda: setattr(node.end_request, "signal", signal.SIGTERM)
    asyncio.run(node.run())
    assert node.reports == [AttemptReport(0)]
    assert node.calls == ["end"]
    assert (node.released, node.dropped) == ([], [root_cause.stopped_by_signal])


def test_a_lost_fork_server_is_the_cause() -> None:
    node = Node([True], [RunResult(137)])
    node.lost = "killed by SIGKILL"
    node.at_start = lambda: setattr(node.groups[-1], "lost_with_fork_server", True)
    asyncio.run(node.run())
    assert "the fork server was lost: killed by SIGKILL" in node.reports[0].trouble


def test_an_error_ends_the_run_without_a_report_and_output_is_closed() -> None:
    node = Node([False], [RunResult(0)])
    node.at_start = lambda: setattr(node.end_request, "error", LaunchError("a host has gone"))
    with pytest.raises(LaunchError, match="a host has gone"):
        asyncio.run(node.run())
    assert node.reports == []
    assert node.groups[0].output.closed


def test_no_fork_server_becomes_ready() -> None:
    node = Node([], [])
    node.ready = False
    with pytest.raises(LaunchError, match="the interpreter ended early"):
        asyncio.run(node.run())
    node.end_request.signal = signal.SIGINT
    assert asyncio.run(node.run()) == RunResult(130)
