"""Python stacks of a process that does not answer: written by faulthandler on a signal, or read by py-spy.

faulthandler writes from C, without the GIL, into a memfd that the agent created. A process that is stopped, or
that phalanx did not start, cannot do that; py-spy reads its memory, where it is installed and permitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from phalanx.diagnose.evidence import Frame, ThreadStack
from phalanx.forkserver import linux, paths

_SETTLED = 0.03  # seconds without another line: the dump is complete
_POLL = 0.01  # seconds

_HEAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')


async def written(fd: int, send: Callable[[], object], limit: float) -> str:
    """Send a signal and return the output of the process on `fd`. Empty if it writes nothing within `limit` seconds."""
    try:
        own = os.dup(fd)  # the worker may be released meanwhile, and the number reused
    except OSError:
        return ""
    try:
        os.lseek(own, 0, os.SEEK_SET)  # moves the offset of the worker too: they share the open file
        os.ftruncate(own, 0)
        send()
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        size, since = 0, loop.time()
        while loop.time() < end and not (size and loop.time() - since > _SETTLED):
            await asyncio.sleep(_POLL)
            now = os.fstat(own).st_size
            if now != size:
                size, since = now, loop.time()
        return os.pread(own, size, 0).decode(errors="replace")
    finally:
        os.close(own)


def parsed(text: str, *, name: str = "") -> tuple[ThreadStack, ...]:
    """Parse a dump of faulthandler, which writes the main thread last."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.match(line), _FRAME.match(line)
        if head:
            found.append((head["name"] or "", []))
        elif frame and found:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            found[-1][1].append(Frame(frame["file"], number, frame["name"]))
    last = len(found) - 1
    return clean(
        ThreadStack(
            name=name or own or ("MainThread" if place == last else f"thread {place + 1}"),
            frames=tuple(frames),
            main=place == last and not name,
        )
        for place, (own, frames) in enumerate(found)
    )


def clean(threads: Iterable[ThreadStack]) -> tuple[ThreadStack, ...]:
    """Remove threads and frames of phalanx itself."""
    return tuple(
        msgspec.structs.replace(
            thread, frames=tuple(frame for frame in thread.frames if f"/{paths.FORK_SERVER}" not in frame.file)
        )
        for thread in threads
        if not any(_is_probe(frame) for frame in thread.frames)
    )


async def spied(pid: int, *, native: bool, limit: float) -> tuple[tuple[ThreadStack, ...], str]:
    """Return the stacks that py-spy reads, or the reason why there are none."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=_beside())
    if program is None:
        return (), "py-spy is not installed"
    # --nonblocking may read inconsistent stacks, but a stopped process does not change.
    words = [program, "dump", "--json", "--native" if native else "--nonblocking", "--pid", str(pid)]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit)
    except TimeoutError:
        return (), f"py-spy took more than {limit:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return (), f"py-spy: {(err.decode(errors='replace').strip().splitlines() or ['failed'])[-1][:200]}"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return clean(_spied(thread, pid) for thread in json.loads(out)), ""
    return (), "py-spy printed something unexpected"


def _spied(thread: dict[str, Any], pid: int) -> ThreadStack:
    # py-spy prefixes methods with their class; faulthandler and tracebacks do not.
    frames = tuple(Frame(f["filename"], int(f["line"] or 0), f["name"].rpartition(".")[2]) for f in thread["frames"])
    main = thread.get("os_thread_id") == pid
    name = thread.get("thread_name") or ("MainThread" if main else f"thread {thread.get('os_thread_id')}")
    return ThreadStack(name=name, frames=frames, main=main, holds_gil=bool(thread.get("owns_gil")))


def _beside() -> str:
    """Return the folder of scripts next to this interpreter."""
    import sysconfig

    return sysconfig.get_path("scripts")


def text_of(threads: tuple[ThreadStack, ...]) -> str:
    """Return the stacks, formatted as faulthandler does."""
    lines = []
    for thread in threads:
        lock = ", holds the GIL" if thread.holds_gil else ""
        lines.append(f"Thread {thread.name}{lock} (most recent call first):")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in thread.frames]
    return "\n".join(lines)


def send_signal(pid: int, number: int) -> bool:
    """Signal a process that is not our child and has a handler. Uses a pidfd: the pid may have been reused."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not linux.handles(pid, number):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_probe(frame: Frame) -> bool:
    return any(f"/{folder}" in frame.file for folder in paths.PROBE)
