"""A simulated run on a real terminal: `python simulated_screen.py RANKS SECONDS [FOLDER]`, for tests of the screen.

It makes a second of the run every twentieth of one, and then stays alive until FOLDER/over exists. What is done by
hand is written to FOLDER/actions.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.watch.model import simulation
from phalanx.watch.screen import screen
from phalanx.watch.source import LogPart, SearchResult, Stream, WhyAnswer


class Simulated:
    run = "train-simulated"

    def __init__(self, ranks: int, seconds: int, folder: Path) -> None:
        self.ranks, self.seconds, self.folder = ranks, seconds, folder
        self.alive = True

    async def events(self) -> AsyncIterator[events.AnyEvent]:
        start = time.time() - self.seconds
        for event in simulation.begin(self.ranks, now=start):
            yield event
        for number in range(self.seconds):
            for event in simulation.second(number, self.ranks, now=start + 2 + number):
                yield event
        while not (self.folder / "over").exists():
            await asyncio.sleep(0.02)
        self.alive = False
        yield events.RunEnded(time=time.time(), code=0, seconds=self.seconds)

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = 1 << 16) -> LogPart:
        if rank == 7:
            raise LaunchError("the node of rank 7 does not answer")
        text = "".join(f"rank {rank} {stream} line {number}\n" for number in range(200))
        text += "a \x1b[31mred\x1b[0m\x1b[2J word\x07\n  0%|\r 50%|\r100%|bar\n"
        start = max(0, len(text) - size) if start is None else start
        return LogPart(start=start, end=len(text), text=text[start:])

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        return []

    async def why(self) -> WhyAnswer:
        stacks = {rank: "\n".join(f"frame {number} of {rank}" for number in range(20)) for rank in range(self.ranks)}
        return WhyAnswer(report="nothing is wrong", stacks=stacks)


class Actions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _done(self, what: str) -> None:
        with open(self.folder / "actions", "a") as file:
            file.write(f"{what}\n")

    def debugger(self, rank: int) -> Sequence[str]:
        self._done(f"debugger {rank}")
        code = "print('(Pdb) of', flush=True); print('typed', input()); raise SystemExit(3)"
        return sys.executable, "-c", code

    def stop(self) -> None:
        self._done("stop")

    def interrupt(self) -> None:
        self._done("interrupt")

    def end_now(self) -> None:
        self._done("end now")


if __name__ == "__main__":
    ranks, seconds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    source = Simulated(ranks, seconds, folder)
    sys.exit(screen.show(source, actions=Actions(folder), environ=dict(os.environ), owned_by_run="held" in sys.argv))
