"""Child processes that a rank waits for: command, state, and the line of a fork."""

from __future__ import annotations

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Frame, Rank
from phalanx.diagnose.frames import Act

_MOST = 4
_STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "idle",
    "D": "waiting for a disk or another device",
    "T": "stopped",
    "t": "held by a tracer",
    "Z": "dead",
    "X": "dead",
}
# Waits that a child process may have to end, besides waits for the end of a process.
_FOR_RESULTS = ("waiting for a future", "waiting for a queue", "waiting for another process")


def awaited(rank: Rank, act: Act) -> list[str]:
    """Return a line per process that a rank waits for, e.g. "process 4711 `sleep 10`, sleeping"."""
    if rank.process is None or (act.what != "subprocess" and act.words not in _FOR_RESULTS):
        return []
    children = [child.split(maxsplit=2) for child in rank.process.children[:_MOST]]
    return [_line(rank, *child) for child in children if len(child) == 3]


def _line(rank: Rank, pid: str, process_state: str, command: str) -> str:
    return f"process {pid} `{command}`, {_STATES.get(process_state, process_state)}{words.at(_place(rank, pid))}"


def _place(rank: Rank, pid: str) -> Frame | None:
    """Return the place of a forked child: below its own frames it has those of its parent."""
    stack = next((each.frames for each in rank.threads if each.name.split()[:2] == ["process", pid]), ())
    return frames.own(stack)
