"""Real processes, whose output is captured and shown."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from phalanx.launcher.output.capture import OutputCapture
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std

PATIENCE = 30.0


class Run:
    """An output, and a console that writes into memory by default."""

    def __init__(self, folder: Path, world: int, *, out: int | None = None, terminal: bool | None = None) -> None:
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        target = self._out if out is None else out
        self.console = Console(world, out=target, err=self._err, colour=False, terminal=terminal)
        self.output = OutputCapture(asyncio.get_running_loop(), self.console)
        self.folder = folder

    def start(
        self, rank: int, code: str, *args: object, show: Std = Std.ALL, terminal: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a worker that runs this Python code."""
        out, err = self.open(rank, show=show, terminal=terminal)
        command = [sys.executable, "-S", "-c", code, *map(str, args)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self.output.handed_over(rank)
        return process

    def open(self, rank: int, *, show: Std = Std.ALL, terminal: bool = False) -> tuple[int, int]:
        (self.folder / str(rank)).mkdir(exist_ok=True)
        return self.output.open(rank, str(self.folder / str(rank)), show=show, terminal=terminal)

    def log(self, rank: int, name: str = "stdout") -> bytes:
        return (self.folder / str(rank) / f"{name}.log").read_bytes()

    @property
    def shown(self) -> bytes:
        return os.pread(self._out, 1 << 27, 0)

    @property
    def messages(self) -> str:
        return os.pread(self._err, 1 << 20, 0).decode()

    async def close(self) -> None:
        self.output.close()
        await asyncio.to_thread(self.console.close)

    def free(self) -> None:
        self.console.abandon()
        self.console.close()
        os.close(self._out)
        os.close(self._err)


def running(folder: Path, world: int, body: Callable[[Run], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        run = Run(folder, world, **options)  # type: ignore[arg-type]
        try:
            await body(run)
        finally:
            run.output.close()
            run.free()

    asyncio.run(main())


SPEED = """
import os, sys
rank, size = int(sys.argv[1]), int(sys.argv[2])
block = b"".join(b"rank %d line %d %s\\n" % (rank, n, b"x" * (n * 37 % 301)) for n in range(997))
left = size
while left:
    data = memoryview(block)[:left]
    left -= len(data)
    while data:
        data = data[os.write(1, data):]
"""


def written(rank: int, size: int) -> bytes:
    block = b"".join(b"rank %d line %d %s\n" % (rank, n, b"x" * (n * 37 % 301)) for n in range(997))
    return (block * (size // len(block) + 1))[:size]
