"""The result of attaching a debugger to a rank: a stream to it, or the reason why there is none."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.forkserver import wire


class AttachRefused(Exception):  # noqa: N818 - it is an answer
    """Raised if no debugger can be attached. `why` and `fix` are for the user."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


@dataclass(frozen=True)
class Attachment:
    """A debugger in a rank, and the stream to it."""

    how: str  # breakpoint, stopped, looking, listens
    place: str = ""
    port: int = 0  # of debugpy, if it listens
    host: str = ""
    sock: socket.socket | None = None
    hang_up: Callable[[], None] = lambda: None  # call it when the user has left


def judge(rank: int, answer: wire.Message | None, *, begun: bool) -> Attachment:
    """Interpret the answer of a rank's probe. `begun`: the probe is running. Raises AttachRefused."""
    if answer is None and not begun:
        raise AttachRefused(*no_probe(rank))
    if answer is None:
        raise AttachRefused(
            f"rank {rank} does not answer: its GIL is held, it is stopped, or it is ending",
            "phalanx why shows its stack",
        )
    match answer.get("how"):
        case "busy":
            raise AttachRefused(f"rank {rank} is already in a debugger")
        case "missing":
            raise AttachRefused(f"debugpy is not installed in {answer['why']}", "pip install 'phalanx[debug]'")
        case "failed":
            raise AttachRefused(f"rank {rank} cannot be debugged: {answer['why']}")
    return Attachment(str(answer["how"]), port=int(answer.get("port", 0)), host=socket.gethostname())


def no_probe(rank: int) -> tuple[str, str]:
    """Return why a rank without a running probe cannot be debugged, and what to do."""
    return (
        f"rank {rank} has not answered yet: it has just started, has held the GIL since then, or is not a Python that "
        "phalanx forked (--no-python, --fresh)",
        "phalanx why",
    )
