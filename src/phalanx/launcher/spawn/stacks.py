"""Where the ranks of a `phalanx.spawn` are at its timeout, and which of them the others wait for.

Each rank has a file without a name, to which faulthandler writes its stack when the caller sends a signal. This works
while the rank waits in native code.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections.abc import Mapping, Sequence

from phalanx.contract.messages.function_call import STACK_SIGNAL
from phalanx.diagnose import frames, source, words
from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import Evidence, Frame, Rank, ThreadStack

_TIMEOUT = 2.0  # seconds for the ranks to write their stacks
_INTERVAL = 0.02
_END = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_OUTERMOST = re.compile(r'^  File ".*/multiprocessing/process\.py", line \d+ in _bootstrap$', re.MULTILINE)
_CUT = "\n  ...\n"  # faulthandler writes at most 100 frames, the innermost ones
_IMPORTS = "<frozen importlib"
_LARGEST = 1 << 16  # bytes of a stack


def collect(ranks: Mapping[int, tuple[int, int]]) -> dict[int, tuple[Frame, ...]]:
    """Return the stacks of ranks, the innermost frame first. `ranks`: rank -> its pid and the file for its stack."""
    for pid, _ in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until = time.monotonic() + _TIMEOUT
    while time.monotonic() < until and not all(_is_whole(_read(fd)) for _, fd in ranks.values()):
        time.sleep(_INTERVAL)
    return {rank: stack for rank, (_, fd) in ranks.items() if (stack := parse(_read(fd)))}


def _read(fd: int) -> str:
    return os.pread(fd, _LARGEST, 0).decode(errors="replace")


def _is_whole(text: str) -> bool:
    """Return whether a stack is complete: its outermost frames are those of multiprocessing, in which ranks run."""
    return text.endswith(_CUT) or (text.endswith("\n") and _OUTERMOST.search(text) is not None)


def parse(text: str) -> tuple[Frame, ...]:
    """Parse the output of faulthandler. Source lines are those that this process knows, also those of a notebook."""
    found = [Frame(each["file"], int(each["line"]), each["name"]) for each in _END.finditer(text)]
    return tuple(_annotated(frame) for frame in found)


def _annotated(frame: Frame) -> Frame:
    text = "".join(linecache.getlines(frame.file)) if frames.mine(frame) else ""
    return source.annotate(frame, text) if text else frame


def verdict(stacks: Mapping[int, tuple[Frame, ...]], world: int, waited: float) -> list[str]:
    """Return lines about which rank waits for which, then where each rank is."""
    ranks = tuple(
        Rank(rank=rank, node=0, since=waited, threads=(ThreadStack(name="MainThread", frames=stack, main=True),))
        for rank, stack in sorted(stacks.items())
    )
    found = diagnose(Evidence(time=time.time(), waited=waited, ranks=ranks, world_size=world)) if ranks else []
    lines = [f"{'' if first.certain else 'probably: '}{first.text}" for first in found[:1]]
    places: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(_where(stack), []).append(rank)
    return [*lines, *(f"{words.who(at)} {words.verb(at, 'is', 'are')} {where}" for where, at in places.items())]


def _where(stack: Sequence[Frame]) -> str:
    """Return where a rank is: a line of the script, if the stack shows one."""
    own = frames.own(stack)
    if own is None and any(frame.file.startswith(_IMPORTS) for frame in stack):
        return "importing modules"
    frame = own or stack[0]
    return f"at {words.place(frame)}" + (f": {frame.source.strip()}" if frame.source else "")
