"""Stops the workers of an attempt."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import WorkerState
from phalanx.launcher.workers.worker_channels import WorkerChannels
from phalanx.launcher.workers.workers import Workers


def escalation(number: signal.Signals, grace: float) -> list[tuple[signal.Signals, float]]:
    """Return the signals that follow `number`, and the seconds before each. The last one is SIGKILL."""
    if number == signal.SIGTERM:
        return [(signal.SIGKILL, grace)]
    return [(signal.SIGTERM, grace / 3), (signal.SIGKILL, grace * 2 / 3)]


class Stopper:
    """Stops all workers, with stronger signals for those that do not stop in time."""

    def __init__(
        self, workers: Workers, channels: WorkerChannels, folder: RunFolder, note: Callable[[str], None]
    ) -> None:
        self._workers = workers
        self._channels = channels
        self._folder = folder
        self._note = note
        self._escalation: asyncio.Task[None] | None = None
        self._last = signal.SIGTERM  # signal that was sent

    @property
    def stopping(self) -> bool:
        """Return whether the workers are being stopped."""
        return self._escalation is not None

    def stop(
        self, number: signal.Signals, reason: str, grace: float, *, already_sent: bool = False, failed: bool = False
    ) -> None:
        """Stop all workers, and kill those that do not stop within `grace` seconds.

        `already_sent`: they have received the signal. `failed`: the reason is a failure, not a request.
        """
        self._last = number
        self._folder.event(events.Stopping(time=time.time(), reason=reason, signal=number.name))
        for name, worker in self._workers.living:
            worker.enter(WorkerState.STOPPING)
            worker.exit.stop_sent = time.time()
            if worker.seat.rank in self._workers.debugged and number == signal.SIGINT:  # a debugger would handle it
                self._workers.send_signal(name, signal.SIGTERM)
            elif not already_sent:
                self._workers.send_signal(name, number)
            self._channels.send(worker.pid, worker_messages.EndWorker(number, failed))
        if self._escalation is None:
            self._escalation = asyncio.get_running_loop().create_task(self._escalate(number, grace, failed))

    async def _escalate(self, number: signal.Signals, grace: float, failed: bool) -> None:
        """Send stronger signals. A worker in native code does not handle SIGINT, and one may ignore SIGTERM."""
        for next_signal, wait in escalation(number, grace):
            await asyncio.sleep(wait)
            self._last = next_signal
            for name, worker in self._workers.living:
                self._note(f"rank {worker.seat.rank} has not stopped after {wait:.0f} s: {next_signal.name}")
                self._workers.send_signal(name, next_signal)
                self._channels.send(worker.pid, worker_messages.EndWorker(next_signal, failed))

    def repeat(self) -> None:
        """Send the last signal again: the fork server was lost, possibly before it had forwarded the signal."""
        for name, _ in self._workers.living:
            self._workers.send_signal(name, self._last)

    def cancel(self) -> None:
        """Stop sending signals."""
        if self._escalation is not None:
            self._escalation.cancel()
