"""A bar for rank 0: steps, loss, samples a second, time left. In a log file, a line now and then.

    with Progress(total=1000, start=run_was_at) as progress:
        for …:
            progress.advance(samples=64, values={"loss": loss})
            with progress.aside():
                print("…")

Plain text and no thread: a step at which nothing is drawn costs a look at the clock. Under `phalanx run` rank 0 has a
terminal of its own if people have one, and the console keeps its unfinished row alive below what others print.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

DRAW_EVERY = 0.1  # seconds, on a terminal
LOG_EVERY = 30.0  # without one
READ_EVERY = 1.0  # values: a GPU has to come to the end of its work for that
WINDOW = 10.0  # of which the speed is told
_FULL, _EMPTY = "━", "─"
_NEVER = float("inf")


@dataclass(frozen=True)
class ProgressView:
    """What there is to see at one moment."""

    step: int
    total: int | None = None
    title: str = ""  # "epoch 2/10"
    values: Mapping[str, float] = field(default_factory=dict)
    samples: float | None = None  # a second
    left: float | None = None  # seconds


def bar(sight: ProgressView, width: int, *, ascii_only: bool = False) -> str:
    """One row of at most `width` columns: what matters least is left out first, and the bar takes what is left."""
    count = str(sight.step) if sight.total is None else f"{sight.step}/{sight.total}"
    parts = [part for part in (sight.title, count, *_facts(sight)) if part]
    keep = 2 if sight.title else 1  # these stay, cut if need be
    while len(parts) > keep and len("  ".join(parts)) > width:
        del parts[-2 if len(parts) - keep > 1 else -1]  # the last one, time left, stays as long as it can
    text = "  ".join(parts)
    room = min(width - len(text) - 2, 30)
    if sight.total and room >= 5:
        done = min(room * sight.step // sight.total, room)
        full, empty = ("#", "-") if ascii_only else (_FULL, _EMPTY)
        place = keep - 1
        text = "  ".join([*parts[:place], full * done + empty * (room - done), *parts[place:]])
    return text[:width]


def line(sight: ProgressView) -> str:
    """The same for a log file."""
    count = f"step {sight.step}"
    if sight.total:
        count += f"/{sight.total} ({100 * sight.step // sight.total}%)"
    return "  ".join(part for part in (sight.title, count, *_facts(sight)) if part)


def _facts(sight: ProgressView) -> list[str]:
    facts = [f"{name} {value:.4g}" for name, value in sight.values.items()]
    if sight.samples is not None:
        facts.append(f"{_short(sight.samples)} samples/s")
    if sight.left is not None:
        facts.append(f"{_clock(sight.left)} left")
    return facts


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
    hours = f"{whole // 3600}:{whole % 3600 // 60:02}" if whole >= 3600 else str(whole // 60)
    return f"{hours}:{whole % 60:02}"


class ProgressBar:
    """`total` and `start` count from the very first step of the training, also when this process resumes it."""

    def __init__(
        self,
        total: int | None = None,
        *,
        start: int = 0,
        title: str = "",
        shown: bool = True,  # False on every rank but 0
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.title = title
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._live = shown and _is_terminal(self._stream)
        self._every = DRAW_EVERY if self._live else LOG_EVERY
        self._ascii = "utf" not in (getattr(self._stream, "encoding", None) or "").lower()
        self._step = start
        self._samples = 0
        self._values: Mapping[str, Any] = {}
        self._numbers: dict[str, float] = {}
        self._stale = -_NEVER  # when they are to be read again
        now = clock()
        self._marks = deque([(now, start, 0)])  # (time, step, samples) of the last WINDOW seconds
        self._due = now + self._every if shown else _NEVER
        self._drawn = start  # the step that was shown last
        self._row = ""  # what is on the screen, with the cursor behind it

    def advance(self, samples: int = 0, values: Mapping[str, Any] | None = None, steps: int = 1) -> None:
        """A committed step. Values are numbers or tensors; a tensor is read only when it is drawn, and seldom."""
        self._step += steps
        self._samples += samples
        if values is not None:
            self._values = values
        if self._clock() >= self._due:
            self._draw()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While something else is printed: the bar makes room for it, and is there again below."""
        if self._row:
            self._write("\r\x1b[K")
        try:
            yield
        finally:
            if self._row:
                self._write(self._row)

    def close(self) -> None:
        """The last state stays. Of a training that has done nothing, there is none."""
        if self._due == _NEVER:
            return
        self._stale = -_NEVER
        if self._row or self._step != self._drawn:
            self._draw()
        if self._row:
            self._write("\n")
        self._due, self._row = _NEVER, ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def sight(self) -> ProgressView:
        """What would be drawn now."""
        now = self._clock()
        then, step, samples = self._marks[0]
        seconds, steps = now - then, self._step - step
        known = seconds > 0 and steps > 0
        left = None
        if known and self.total is not None:
            left = max(self.total - self._step, 0) * seconds / steps
        rate = (self._samples - samples) / seconds if known and self._samples > samples else None
        if now >= self._stale:
            self._numbers = {name: _number(value) for name, value in self._values.items()}
            self._stale = now + READ_EVERY
        return ProgressView(self._step, self.total, self.title, self._numbers, rate, left)

    def _draw(self) -> None:
        sight = self.sight()
        now = self._clock()
        self._due = now + self._every
        if self._live:
            self._row = f"\r{bar(sight, self._columns() - 1, ascii_only=self._ascii)}\x1b[K"
            self._write(self._row)
        else:
            self._write(f"{line(sight)}\n")
        self._drawn = self._step
        self._marks.append((now, self._step, self._samples))
        # The oldest mark is the one just outside of the window, so that there is always something to compare with.
        while len(self._marks) > 2 and now - self._marks[1][0] >= max(WINDOW, self._every):
            self._marks.popleft()

    def _write(self, text: str) -> None:
        """A terminal that was closed, or a log on a full disk, ends the bar and not the training."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._due, self._row = _NEVER, ""

    def _columns(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
