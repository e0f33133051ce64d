"""A simulated run of many ranks, and its page: events arrive once per second, as from an agent.

python -m benchmarks.watch.simulated_run RANKS SECONDS [live]    prints the link, and serves until it is terminated

The first SECONDS are in the past. With `live` the run continues, otherwise it adds no events.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from phalanx.contract.events import AnyEvent
from phalanx.watch.model import simulation
from phalanx.watch.source import LogPart, SearchResult, Stream, WhyAnswer

_LINES = "".join(f"epoch {step // 100}  step {step}  loss {2.3 * 0.985**step + 0.1:.3f}\n" for step in range(1, 41))


class SimulatedSource:
    """A Source of a simulated run."""

    run = "train-simulated"
    alive = True

    def __init__(self, ranks: int, past: int, *, live: bool) -> None:
        self._ranks, self._past, self._live = ranks, past, live
        self._now = time.time()

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield the events of the run."""
        start = self._now - self._past
        for event in simulation.begin(self._ranks, now=start - 2):
            yield event
        for number in range(self._past):
            for event in simulation.second(number, self._ranks, now=start + number):
                yield event
        number = self._past
        while self._live:
            made = simulation.second(
                number, self._ranks, now=0.0
            )  # made in advance: its cost must not be part of the latency
            await asyncio.sleep(max(0.0, start + number - time.time()))
            for event in made:
                yield msgspec.structs.replace(event, time=time.time())
            number += 1
        await asyncio.Event().wait()

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:  # noqa: ARG002
        """Return a part of a log."""
        text = _LINES if stream == "stdout" else ""
        begin = max(0, len(text) - size) if start is None else min(start, len(text))
        return LogPart(start=begin, end=min(len(text), begin + size), text=text[begin : begin + size])

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        """Return the lines of rank 0 that contain `text`."""
        found, at = [], 0
        for line in _LINES.splitlines(keepends=True):
            if text.lower() in line.lower() and (ranks is None or 0 in ranks):
                found.append(SearchResult(rank=0, stream="stdout", at=at, line=line.rstrip()))
            at += len(line)
        return found[:most]

    async def why(self) -> WhyAnswer:
        """Return a verdict with stacks."""
        text = "rank 2 is in data loading, dataset.py:41 in __getitem__; the others wait for it in all_reduce #214"
        waits = 'File "train.py", line 88, in step\n    loss.backward()'
        stacks = dict.fromkeys(range(self._ranks), waits)
        stacks[2] = 'File "dataset.py", line 41, in __getitem__\n    return self.images[number]'
        return WhyAnswer(report=f"probably: {text}", verdicts=(text,), stacks=stacks)


def main(argv: list[str]) -> int:
    """Serve the page of a simulated run."""
    from phalanx.watch.page import server

    return server.serve(SimulatedSource(int(argv[0]), int(argv[1]), live="live" in argv[2:]), at=None, fd=None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
