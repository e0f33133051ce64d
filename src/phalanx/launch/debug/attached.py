"""What comes of asking for a debugger in a rank: a stream to it, or why there is none."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.forkserver import wire


class AttachRefused(Exception):  # noqa: N818 - it is an answer
    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


@dataclass(frozen=True)
class Attached:
    how: str  # breakpoint, stopped, looking, listens
    place: str = ""
    port: int = 0  # of debugpy, and on which machine
    host: str = ""
    sock: socket.socket | None = None
    hang_up: Callable[[], None] = lambda: None  # whoever has asked for it is gone


def judge(rank: int, answer: wire.Message | None, *, begun: bool) -> Attached:
    """What a rank has answered. Raises Refused. `begun`: it has a probe."""
    if answer is None and not begun:
        raise AttachRefused(*no_python(rank))
    if answer is None:
        raise AttachRefused(
            f"rank {rank} does not answer: Python's lock is held there, it is stopped, or ending",
            "phalanx why shows its stack",
        )
    match answer.get("how"):
        case "busy":
            raise AttachRefused(f"rank {rank} is at a debugger already")
        case "missing":
            raise AttachRefused(f"debugpy is not installed in {answer['why']}", "pip install 'phalanx[debug]'")
        case "failed":
            raise AttachRefused(f"rank {rank} cannot be debugged: {answer['why']}")
    return Attached(str(answer["how"]), port=int(answer.get("port", 0)), host=socket.gethostname())


def no_python(rank: int) -> tuple[str, str]:
    return (
        f"rank {rank} has not answered yet: it has only begun, holds Python's lock since then, or is no Python that "
        "phalanx has forked (--no-python, --fresh)",
        "phalanx why",
    )
