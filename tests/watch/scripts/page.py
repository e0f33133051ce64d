"""The page of a simulated live run: `python page.py PORT KEY`. Unauthenticated connections last a second."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Sequence

from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.watch.model import simulation
from phalanx.watch.page import guard, server
from phalanx.watch.source import LogPart, SearchResult, Stream, WhyAnswer


class Simulated:
    run = "train-simulated"
    alive = True

    async def events(self) -> AsyncIterator[events.AnyEvent]:
        for event in simulation.begin(4, now=time.time()):
            yield event
        for number in range(10_000):
            for event in simulation.second(number % 15, 4, now=time.time()):
                yield event
            await asyncio.sleep(0.1)

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        if rank == 3:
            raise LaunchError("node 1 has not answered within 5 s")
        return LogPart(start=start or 0, end=size, text=f"{stream} of rank {rank}")

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        return [SearchResult(rank=rank, stream="stdout", at=most, line=text) for rank in ranks or (0,)]

    async def why(self) -> WhyAnswer:
        return WhyAnswer(report="nothing is wrong", stacks={0: "train.py"})


guard.LIMITS = dataclasses.replace(guard.LIMITS, patience=1.0)
sys.exit(server.serve(Simulated(), at=sys.argv[1], key=sys.argv[2]))
