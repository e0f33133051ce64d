"""The real leader of `phalanx bench scale`: node 0 of a run, with its own ranks, its run folder and its page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from benchmarks.common import processes
from benchmarks.common.paths import script
from benchmarks.common.processes import ProcessLostError
from phalanx.contract import variables
from phalanx.control.tokens import VARIABLE
from phalanx.launcher.coordination import port
from phalanx.launcher.runs import run_folder

STALL_TIMEOUT = 5.0  # seconds
_START_TIMEOUT = 120.0
_END_TIMEOUT = 60.0
_LINK = re.compile(r"http://([\w.:]+)/#([\w-]+)")


class MeasuredLeader:
    """`phalanx run` as node 0 of `nodes` nodes, in `folder`. Ends with the block."""

    def __init__(self, nodes: int, slots: int, token: str, inherited: Mapping[str, str], folder: str) -> None:
        self.folder = folder
        with port.listen("127.0.0.1", 0) as free:
            self.port = int(free.getsockname()[1])
        self._home = os.path.join(folder, "home")
        kept = {name: value for name, value in inherited.items() if not name.startswith("PHALANX_")}
        environ = {**kept, variables.HOME: self._home, VARIABLE: token}
        command = [sys.executable, "-P", "-m", "phalanx", "run", "--cpu", "--page", "--fresh"]
        command += ["-n", f"{max(1, nodes // 2)}:{nodes}", "-i", "0", "-g", str(slots)]
        command += ["--master", f"127.0.0.1:{self.port}", "--last-call", "60s", "--preempt-signal", "none"]
        command += ["--stall-timeout", f"{STALL_TIMEOUT:g}s", script("scale.py")]
        self._process = processes.start_logged(command, environ, folder)
        self.pid = self._process.pid

    def __enter__(self) -> MeasuredLeader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            processes.stop(self._process)

    def check(self) -> None:
        """Raise ProcessLostError if the run has ended."""
        if self._process.poll() is not None:
            raise ProcessLostError(
                f"the leader ended with code {self._process.returncode}; its output: "
                f"{processes.last_output(self.folder)}"
            )

    def page(self) -> tuple[str, str]:
        """Wait for the link of the page; return address and key."""
        end = time.monotonic() + _START_TIMEOUT
        while True:
            self.check()
            with open(os.path.join(self.folder, processes.OUTPUT), errors="replace") as file:
                found = _LINK.search(file.read())
            if found is not None:
                return found[1], found[2]
            if time.monotonic() > end:
                raise ProcessLostError(f"no link of a page in {_START_TIMEOUT:.0f} s")
            time.sleep(0.05)

    def run_folder(self) -> str:
        """Return the folder of the run."""
        return list(run_folder.all_runs(self._home))[-1].folder

    def end(self) -> int:
        """Interrupt the run as Ctrl-C does, and return its exit code."""
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise ProcessLostError(f"the leader has not ended in {_END_TIMEOUT:.0f} s") from None


def memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/status") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS:")), 0)
    return 0


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def folder_size(path: str) -> int:
    """Return the bytes of all files in a folder."""
    found = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(place, name)).st_size
    return found
