"""Handles signals to a run: end it, halt it with a checkpoint, or forward them to its workers.

A second Ctrl-C kills the workers. Once the run has succeeded, a signal only ends the wait for remaining work: processes
that ranks left running, then output for a slow terminal.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from phalanx.launcher.agent.group_controller import GroupController
from phalanx.launcher.agent.notices import Notices
from phalanx.launcher.agent.run_hook import RunHook
from phalanx.launcher.agent.stopping.end_request import EndRequest
from phalanx.launcher.agent.stopping.linger import LingeringProcesses
from phalanx.launcher.agent.stopping.signals import SAME, Signals
from phalanx.launcher.coordination.coordinator import Coordinator
from phalanx.launcher.options import ShutdownOptions
from phalanx.launcher.output.console.console import Console


class Shutdown:
    """Ends a run because of signals, to this agent or to another node.

    `interrupted` handles Ctrl-C in a debug session, and returns whether there is one. `stop_waiting` ends the wait for
    imports and other nodes.
    """

    def __init__(
        self,
        options: ShutdownOptions,
        signals: Signals,
        end_request: EndRequest,
        *,
        workers: GroupController,
        coordinator: Coordinator,
        hook: RunHook,
        console: Console,
        notices: Notices,
        interrupted: Callable[[], bool],
        stop_waiting: Callable[[], None],
    ) -> None:
        self._options = options
        self._signals = signals
        self._end_request = end_request
        self._workers = workers
        self._coordinator = coordinator
        self._hook = hook
        self._console = console
        self._notices = notices
        self._interrupted = interrupted
        self._stop_waiting = stop_waiting
        self._preempting: float | None = None  # when a signal to this agent began a preemption
        self._lingering: LingeringProcesses | None = None  # set once the run has succeeded
        self._draining_output = False  # only output for a slow terminal remains

    def handlers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this agent handles signals."""
        return self._signals.installed(
            end=self.signal_received, preempt=self.preempt, forward=self.forward, resized=self._workers.resize
        )

    def run_succeeded(self, left: LingeringProcesses) -> None:
        """Record success: from now on signals only end the wait for these processes."""
        self._lingering = left

    def draining_output(self) -> None:
        """Record that only output remains: from now on signals only end the output for a slow terminal."""
        self._draining_output = True

    def signal_received(self, number: signal.Signals) -> None:
        """End the run because of a signal of the user or a scheduler."""
        if self.stop_lingering():
            return
        if number == signal.SIGINT and self._end_request.signal is None:
            if self._preempting is not None:
                self.signal_received(signal.SIGTERM)  # the second request: end at once
            elif self._interrupted():
                return
        if not self._draining_output:
            if self._end_request.signal is None:
                self._coordinator.signal_received(number)
            elif number == signal.SIGINT:
                self._coordinator.signal_received(signal.SIGKILL)
        self._end(number, ours=True)

    def preempt(self, number: signal.Signals) -> None:
        """Handle a signal that announces preemption: write a checkpoint if possible. A second signal ends the run."""
        if self.stop_lingering():
            return
        now = time.monotonic()
        if self._preempting is not None and now - self._preempting < SAME:
            return
        first = self._preempting is None and self._end_request.signal is None and self._workers.group is not None
        if first and self._coordinator.preempt(number):
            self._preempting = now
        elif number in self._options.signals:
            self.signal_received(number)
        else:
            self.forward(number)

    def forward(self, number: signal.Signals) -> None:
        """Forward a signal to the workers that handle it, on all nodes."""
        self._coordinator.forward_signal(number)
        self._signals.when_attributed(self._workers.send_signal, number)

    def end_run(self, number: signal.Signals, reason: str) -> None:
        """End the run because of a signal to another node, or because there is no time for a checkpoint."""
        if self.stop_lingering():
            return
        self._notices.record(reason)
        if number == signal.SIGKILL and self._workers.group is not None:
            self._workers.kill()
        elif self._end_request.signal is None:  # otherwise this agent received the signal too
            self._end(number)

    def stop_lingering(self) -> bool:
        """End the wait for lingering processes. False if there is none: the run has not succeeded yet."""
        if self._lingering is None or self._draining_output:
            return False
        self._lingering.stop()
        self._hook.hurry()
        return True

    def _end(self, number: signal.Signals, *, ours: bool = False) -> None:
        again = self._end_request.signal is not None
        self._end_request.signal = self._end_request.signal or number
        if self._draining_output:
            self._console.abandon()
            self._hook.hurry()
        elif self._workers.group is None:
            self._stop_waiting()
        elif again and number == signal.SIGINT:
            self._notices.note("ending at once")
            self._console.abandon()
            self._workers.kill()
        elif not again:
            if number == signal.SIGINT and ours:
                self._notices.waiting("stopping; Ctrl-C again ends at once")
            self._signals.when_attributed(self._workers.stop_by_signal, number)
