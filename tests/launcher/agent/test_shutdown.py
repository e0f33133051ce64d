"""The effects of signals on a run: in which phase, how often, and which nodes are informed."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launcher.agent.shutdown import Shutdown
from phalanx.launcher.agent.stopping.end_request import EndRequest

INT, TERM, USR1, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


class Run:
    """A shutdown whose collaborators record their calls."""

    def __init__(self, *, group: bool = True, debugged: bool = False, can_halt: bool = False) -> None:
        self.calls: list[Any] = []
        self.end_request = EndRequest()
        workers: Any = SimpleNamespace(
            group=object() if group else None,
            kill=self.record("kill"),
            stop_by_signal=self.record("stop"),
            send_signal=self.record("send"),
            resize=self.record("resize"),
        )
        coordinator: Any = SimpleNamespace(
            signal_received=self.record("tell"),
            forward_signal=self.record("forward"),
            preempt=self.record("preempt", can_halt),
        )
        options: Any = SimpleNamespace(signals=(TERM, INT))
        signals: Any = SimpleNamespace(when_attributed=lambda act, number: act(number))
        hook: Any = SimpleNamespace(hurry=self.record("hurry"))
        console: Any = SimpleNamespace(abandon=self.record("abandon"))
        notices: Any = SimpleNamespace(
            note=self.record("note"), record=self.record("record"), waiting=self.record("waiting")
        )
        self.shutdown = Shutdown(
            options,
            signals,
            self.end_request,
            workers=workers,
            coordinator=coordinator,
            hook=hook,
            console=console,
            notices=notices,
            interrupted=lambda: debugged,
            stop_waiting=self.record("stop waiting"),
        )

    def record(self, name: str, returns: Any = None) -> Any:
        def called(*args: Any) -> Any:
            self.calls.append((name, *args) if args else name)
            return returns

        return called


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_stops_the_workers_and_informs_the_other_nodes(number: signal.Signals) -> None:
    run = Run()
    run.shutdown.signal_received(number)
    assert run.end_request.signal == number
    assert [call for call in run.calls if call[0] != "waiting"] == [("tell", number), ("stop", number)]


def test_a_second_ctrl_c_kills() -> None:
    run = Run()
    run.shutdown.signal_received(INT)
    run.calls.clear()
    run.shutdown.signal_received(INT)
    assert run.calls == [("tell", KILL), ("note", "ending at once"), "abandon", "kill"]


def test_a_repeated_sigterm_changes_nothing() -> None:
    run = Run()
    run.shutdown.signal_received(TERM)
    run.calls.clear()
    run.shutdown.signal_received(TERM)
    assert run.calls == []


def test_before_the_first_attempt_a_signal_ends_the_wait() -> None:
    run = Run(group=False)
    run.shutdown.signal_received(INT)
    assert run.calls == [("tell", INT), "stop waiting"]


def test_a_debug_session_gets_the_first_ctrl_c_but_not_sigterm() -> None:
    run = Run(debugged=True)
    run.shutdown.signal_received(INT)
    assert run.calls == []
    assert not run.end_request.made
    run.shutdown.signal_received(TERM)
    assert ("stop", TERM) in run.calls


def test_a_preemption_is_followed_by_an_end_at_once() -> None:
    run = Run(can_halt=True)
    run.shutdown.preempt(TERM)
    assert run.calls == [("preempt", TERM)]
    run.shutdown.preempt(TERM)  # a scheduler that signals all processes
    assert run.calls == [("preempt", TERM)]
    run.calls.clear()
    run.shutdown.signal_received(INT)
    assert run.end_request.signal == TERM
    assert run.calls == [
        ("tell", TERM),
        ("stop", TERM),
        ("tell", KILL),
        ("note", "ending at once"),
        "abandon",
        "kill",
    ]


def test_a_preemption_without_a_checkpoint_ends_the_run_or_reaches_the_workers() -> None:
    run = Run()
    run.shutdown.preempt(USR1)
    assert run.calls == [("preempt", USR1), ("forward", USR1), ("send", USR1)]
    run.calls.clear()
    run.shutdown.preempt(TERM)
    assert run.calls == [("preempt", TERM), ("tell", TERM), ("stop", TERM)]


def test_after_success_a_signal_ends_only_the_wait_for_processes_and_output() -> None:
    run = Run()
    left: Any = SimpleNamespace(stop=run.record("stop lingering"))
    run.shutdown.run_succeeded(left)
    for end in (
        lambda: run.shutdown.signal_received(TERM),
        lambda: run.shutdown.preempt(TERM),
        lambda: run.shutdown.end_run(TERM, "SIGTERM received by another node"),
    ):
        run.calls.clear()
        end()
        assert run.calls == ["stop lingering", "hurry"]
    assert not run.end_request.made
    run.calls.clear()
    run.shutdown.draining_output()
    run.shutdown.signal_received(INT)
    assert run.calls == ["abandon", "hurry"]


def test_a_signal_to_another_node_is_recorded_and_not_sent_back() -> None:
    run = Run()
    run.shutdown.end_run(INT, "SIGINT received by node 1")
    assert run.calls == [("record", "SIGINT received by node 1"), ("stop", INT)]
    run.calls.clear()
    run.shutdown.end_run(KILL, "SIGKILL received by node 1")
    assert run.calls == [("record", "SIGKILL received by node 1"), "kill"]


def test_the_exit_code_of_a_run_that_never_started() -> None:
    early, refused = LaunchError("it ended early"), LaunchError("a host refused")
    assert EndRequest(signal=TERM).exit_code(early) == 143
    with pytest.raises(LaunchError, match="a host refused"):
        EndRequest(signal=TERM, error=refused).exit_code(early)
    with pytest.raises(LaunchError, match="it ended early"):
        EndRequest().exit_code(early)
