"""A run as plain lines."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.screen import lines
from tests.watch.screen.simulated_screen import Simulated


class Past(Simulated):
    def __init__(self, ranks: int, seconds: int, *, start: float, code: int = 0) -> None:
        self.ranks, self.seconds, self.start, self.code = ranks, seconds, start, code

    async def events(self) -> AsyncIterator[events.AnyEvent]:
        for event in simulation.run(self.ranks, self.seconds, now=self.start, code=self.code):
            yield event


def test_a_run_that_has_ended() -> None:
    out = io.StringIO()
    assert lines.show(Past(4, 60, start=1.7e9, code=3), out=out) == 3
    printed = out.getvalue().splitlines()
    assert any("fault: rank 1 failed: SIGKILL" in line for line in printed)
    assert any("recovered in 0.31 s" in line for line in printed)
    assert any("verdict: rank 2 is in data loading" in line for line in printed)
    assert printed[-1].startswith("train-simulated: failed with exit code 3 after 1:02")
    assert not any("steps/s" in line for line in printed)  # an old rate is not shown


def test_progress_is_printed_at_intervals() -> None:
    out = io.StringIO()
    assert lines.show(Past(4, 35, start=time.time() + 1), out=out) == 0
    printed = [line for line in out.getvalue().splitlines() if "running, step" in line]
    assert len(printed) == 3
    assert "steps/s, 244 samples/s, loss" in printed[-1]
    assert "/1000" in printed[-1]
    assert "succeeded" in out.getvalue().splitlines()[-1]


def test_a_run_without_an_end_event() -> None:
    class Killed(Past):
        async def events(self) -> AsyncIterator[events.AnyEvent]:
            async for event in super().events():
                if not isinstance(event, events.RunEnded):
                    yield event

    out = io.StringIO()
    assert lines.show(Killed(4, 5, start=1.7e9), out=out) == 1
    assert "the end was not recorded" in out.getvalue().splitlines()[-1]
