"""Explains why a `phalanx.spawn` failed: the failure of each rank, and which of them is the first cause."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.diagnose import words
from phalanx.errors import LaunchError, RankError
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.spawn import cells

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpawnFailure:
    """A rank that failed, or that we ended."""

    rank: int
    text: str
    time: float
    ours: bool = False  # we ended it
    traceback: str = ""
    exception: bytes = b""
    fix: str = ""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The sort key: the first cause first, consequences of another rank's failure last."""
        return self.ours, root_cause.names_lost_peer(self.text), self.time


def find(
    rank: int, answer: dict[str, Any] | None, *, code: int | None, ended: float, stopped: bool
) -> SpawnFailure | None:
    """Return the failure of a rank; None: it succeeded.

    `answer` is the message of the rank, `code` its exit code at `ended` (None: it did not exit by itself). `stopped`:
    we ended the ranks.
    """
    if answer and "error" in answer:
        kept = {name: answer.get(name, empty) for name, empty in (("traceback", ""), ("exception", b""), ("fix", ""))}
        return SpawnFailure(rank, answer["error"], answer["time"], **kept)
    if answer and (code == 0 or (code is None and stopped)):
        return None
    if code is None:
        return SpawnFailure(rank, "was stopped" if stopped else "its fork server was killed", time.time(), ours=True)
    text = f"{'killed by' if code < 0 else 'ended with'} {root_cause.in_words(code)}"
    return SpawnFailure(rank, text + (" and no result" if code >= 0 and not answer else ""), ended)


def error(failures: Sequence[SpawnFailure], world: int) -> RankError:
    """Return the exception that `spawn` raises: the first cause, with its traceback, and what followed."""
    first, *others = sorted(failures, key=lambda failure: failure.order)
    raised = RankError(
        f"rank {first.rank} of {world}: {first.text}",
        rank=first.rank,
        traceback=first.traceback,
        details=[*map(cells.named, failure_report.script_lines(first.traceback)), *_afterwards(first, others)],
        fix=first.fix,
    )
    if first.exception:
        try:
            raised.exception = pickle.loads(first.exception)  # noqa: S301 - from our own child
        except Exception:  # many exceptions can be pickled but not unpickled
            logger.debug("the exception of rank %d cannot be unpickled", first.rank, exc_info=True)
    return raised


def _afterwards(first: SpawnFailure, others: Sequence[SpawnFailure]) -> list[str]:
    """Return lines about the failures of the other ranks: one per kind of failure."""
    kinds: dict[str, list[int]] = {}
    for other in others:
        if other.ours:
            continue
        lost = root_cause.names_lost_peer(other.text)
        text = "lost the peer" if lost else other.text.partition("\n")[0]
        kinds.setdefault("failed in the same way" if other.text == first.text else text, []).append(other.rank)
    own = ("failed in the same way", "lost the peer")
    return [f"afterwards: {words.who(ranks)}{' ' if text in own else ': '}{text}" for text, ranks in kinds.items()]


def timeout_error(late: Sequence[int], world: int, timeout: float, details: Sequence[str] = ()) -> LaunchError:
    """Return the exception that `spawn` raises if ranks have not ended in time. `details`: where they were, and why."""
    were = words.verb(late, "was", "were")
    return LaunchError(
        f"{words.who(late)} of {world} had not ended after {timeout:g} s, and {were} stopped",
        details=[*map(cells.named, details)],
        fix="a longer timeout=… if they were only slow",
    )


def interruption(running: Sequence[int], world: int, details: Sequence[str] = ()) -> KeyboardInterrupt:
    """Return the exception that `spawn` raises after Ctrl-C. `details`: where the ranks were."""
    text = f"{words.who(running)} of {world} {words.verb(running, 'was', 'were')} stopped"
    return KeyboardInterrupt("\n  ".join([text, *map(cells.named, details)]))
