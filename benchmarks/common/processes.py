"""Processes that benchmarks start, wait for and stop."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Mapping, Sequence

OUTPUT = "output"  # file in the folder of a process: its standard output and standard error


class ProcessLostError(Exception):
    """A process that is being measured has ended or does not continue; the text says why."""


def start_logged(command: Sequence[str], environ: Mapping[str, str], folder: str) -> subprocess.Popen[bytes]:
    """Start a command in `folder`, in a new session, with its output in a file.

    The output goes to a file because ranks would block on a pipe that is not read.
    """
    with open(os.path.join(folder, OUTPUT), "wb") as output:
        return subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def run_logged(command: Sequence[str], environ: Mapping[str, str], folder: str, timeout: float = 600.0) -> str:
    """Run `phalanx run …` in `folder` to its end; return why it failed, or an empty string."""
    process = start_logged(command, environ, folder)
    try:
        if not wait_for_exit(process, timeout):
            return f"not finished after {timeout:.0f} s"
    finally:
        if process.returncode is None:
            stop(process)
    if not process.returncode:
        return ""
    with open(os.path.join(folder, OUTPUT), errors="replace") as file:
        messages = [line for line in file.read().splitlines() if line.startswith("phalanx: ")]
    return f"exit code {process.returncode}: {messages[-1] if messages else 'no message'}"


def wait_for_exit(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for the end of a process; return whether it ended in time.

    Popen.wait with a timeout polls every 50 ms, which is too coarse here; a pidfd is readable at once.
    """
    handle = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([handle], [], [], timeout)
    finally:
        os.close(handle)
    if ready:
        process.wait()
    return bool(ready)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, wait up to 10 seconds, and kill its remaining descendants."""
    import psutil

    descendants = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    if not wait_for_exit(process, 10.0):
        process.kill()
        process.wait()
    for child in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def last_output(folder: str) -> str:
    """Return the last lines that the process in `folder` has printed, as one line."""
    with open(os.path.join(folder, OUTPUT), errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return " / ".join(lines[-3:])[-300:] or "nothing"


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all threads together."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9
