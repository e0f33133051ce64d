"""The processes of the simulated nodes."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.processes import ProcessLostError
from benchmarks.scale import nodes
from benchmarks.scale.nodes import Request

Report = dict[str, Any]


class Simulator:
    """All simulated nodes, in several processes. `lost`: nodes that the leader has rejected or dropped, with the
    reason.
    """

    def __init__(self, requests: list[Request], environ: Mapping[str, str]) -> None:
        self.lost: list[str] = []
        self._reports: queue.Queue[tuple[int, Report]] = queue.Queue()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", nodes.__name__],
                env=dict(environ),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in requests
        ]
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(len(requests))
        ]
        for thread in self._threads:
            thread.start()
        for process, request in zip(self._processes, requests, strict=True):
            self._send(process, nodes.encode(request))

    @property
    def pids(self) -> list[int]:
        """Return the processes."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def order(self, **what: object) -> None:
        """Send an order to all processes."""
        for process in self._processes:
            self._send(process, json.dumps(what).encode() + b"\n")

    def collect(self, key: str, timeout: float, check: Callable[[], None], *, value: object = None) -> list[Report]:
        """Wait until every process has reported `key`, with at least `value` if given; return the reports."""
        found: dict[int, Report] = {}
        end = time.monotonic() + timeout
        while len(found) < len(self._processes):
            number, report = self._next(end, key, check)
            if key in report and (value is None or report[key] >= value):
                found.setdefault(number, report)
        return list(found.values())

    def first(self, key: str, timeout: float, check: Callable[[], None]) -> Report:
        """Wait until one process has reported `key`."""
        end = time.monotonic() + timeout
        while True:
            _, report = self._next(end, key, check)
            if key in report:
                return report

    def _next(self, end: float, key: str, check: Callable[[], None]) -> tuple[int, Report]:
        while time.monotonic() < end:
            check()
            with contextlib.suppress(queue.Empty):
                number, report = self._reports.get(timeout=0.2)
                if "lost" in report:
                    self.lost.append(report["lost"])
                if "ended" in report:
                    raise ProcessLostError("a process of simulated nodes has ended")
                return number, report
        more = f"; {len(self.lost)} nodes were lost: {self.lost[0]}" if self.lost else ""
        raise ProcessLostError(f"the simulated nodes have not reported `{key}` in time{more}")

    def _read(self, number: int) -> None:
        for line in self._processes[number].stdout or ():
            self._reports.put((number, json.loads(line)))
        self._reports.put((number, {"ended": True}))

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
