"""The signals that an agent handles, and whether its workers have received them too.

A terminal signals only the agent. Slurm signals all processes of a job or only the agent, depending on its options. The
fork server reports the signals that it receives: the workers have received these too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from phalanx.contract.interrupts import RecordedInterrupt
from phalanx.launcher.plan import Plan

_DELAY = 0.2  # seconds in which a scheduler signals all processes
SAME = 2.0  # seconds within which a repeated signal counts as one

Act = Callable[[signal.Signals], None]


class Signals:
    """The signal handlers of an agent."""

    def __init__(self, plan: Plan) -> None:
        self._shutdown = plan.shutdown
        self._delay = _DELAY if "SLURM_JOB_ID" in plan.environ else 0.0
        self._fork_server: dict[int, float] = {}  # signal -> when it received it

    @contextlib.contextmanager
    def installed(self, *, end: Act, preempt: Act, forward: Act, resized: Callable[[], None]) -> Iterator[None]:
        """Install handlers: `end` and `preempt` act on the run, `forward` passes signals to the workers.

        Ctrl-C that was recorded before is handled at once.
        """
        before = signal.getsignal(signal.SIGINT)
        loop = asyncio.get_running_loop()
        handled = {*self._shutdown.signals, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.discard(signal.SIGHUP)  # nohup: keep running without a terminal
        passed = {signal.SIGUSR1, signal.SIGUSR2} - handled - {*self._shutdown.preempt_signals}
        preempting = {*self._shutdown.preempt_signals}
        for number in handled - preempting:
            loop.add_signal_handler(number, end, number)
        for number in preempting:
            loop.add_signal_handler(number, preempt, number)
        for number in passed:
            loop.add_signal_handler(number, forward, number)
        loop.add_signal_handler(signal.SIGWINCH, resized)
        try:
            if isinstance(before, RecordedInterrupt) and before.pressed:
                end(signal.SIGINT)
            yield
        finally:
            # srun signals all tasks when one has failed: that must not change the exit code of this one.
            ignored = handled - {signal.SIGINT} if self._delay else set()
            for number in (*handled, *preempting, *passed, signal.SIGWINCH):
                loop.remove_signal_handler(number)
                if number in ignored:  # at once: until then the signal would end this process
                    signal.signal(number, signal.SIG_IGN)

    def fork_server_received(self, number: int) -> None:
        """Record that the fork server has received a signal."""
        self._fork_server[number] = time.monotonic()

    def when_attributed(self, act: Act, number: signal.Signals) -> None:
        """Call `act` when it is known which processes have received the signal: at once, unless a scheduler sent it."""
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, act, number)
        else:
            act(number)

    def workers_received(self, number: signal.Signals) -> bool:
        """Return whether the workers have received the signal too."""
        return time.monotonic() - self._fork_server.get(number, float("-inf")) < SAME
