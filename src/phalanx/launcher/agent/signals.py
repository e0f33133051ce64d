"""The signals that an agent takes, and whether its workers have got them as well.

A terminal signals the agent alone. Slurm signals every process of a job, the workers too, or the agent alone,
as it was asked. The fork server, which nobody signals by itself, tells which it was: what it gets, workers have got.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from phalanx.launcher.plan import Plan

_DELAY = 0.2  # seconds in which a scheduler has signalled all that it is going to
SAME = 2.0  # seconds within which it is the same signal

Act = Callable[[signal.Signals], None]


class Signals:
    def __init__(self, plan: Plan) -> None:
        self._shutdown = plan.shutdown
        self._delay = _DELAY if "SLURM_JOB_ID" in plan.environ else 0.0
        self._fork_server: dict[int, float] = {}  # what it got, and when

    @contextlib.contextmanager
    def installed(self, *, end: Act, preempt: Act, forward: Act, resized: Callable[[], None]) -> Iterator[None]:
        """`end` the run by those that end one, or `preempt` it; `forward` those that are meant for the workers."""
        loop = asyncio.get_running_loop()
        handled = {*self._shutdown.signals, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.discard(signal.SIGHUP)  # nohup: the user has said that a lost terminal is no reason to stop
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
            yield
        finally:
            for number in (*handled, *preempting, *passed, signal.SIGWINCH):
                loop.remove_signal_handler(number)
            if self._delay:
                # srun ends all tasks when the first of them has ended badly: that would be the code of the others.
                for number in handled - {signal.SIGINT}:
                    signal.signal(number, signal.SIG_IGN)

    def fork_server_received(self, number: int) -> None:
        self._fork_server[number] = time.monotonic()

    def when_attributed(self, act: Act, number: signal.Signals) -> None:
        """Once it can be known who has got it: at once, but where a scheduler is."""
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, act, number)
        else:
            act(number)

    def workers_received(self, number: signal.Signals) -> bool:
        """Whether the workers have got it as we have."""
        return time.monotonic() - self._fork_server.get(number, float("-inf")) < SAME
