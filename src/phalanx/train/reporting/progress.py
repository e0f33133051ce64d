"""The progress bar of rank 0: steps, loss, samples per second, time left. In a log file: a line every 30 seconds.

    with ProgressBar(total=1000, start=step) as progress:
        for …:
            progress.advance(samples=64, values={"loss": loss})
            with progress.aside():
                print("…")

It is plain text without a thread: a step that draws nothing costs a look at the clock. Under `phalanx run` with a
terminal rank 0 gets a pseudo-terminal, and the console keeps the bar below the output of other ranks.
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

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.variables import LIVE_BAR

DRAW_EVERY = 0.1  # seconds, on a terminal
LOG_EVERY = 30.0  # without one
READ_EVERY = 1.0  # values: that synchronises the GPU
WINDOW = 10.0  # over which the speed is measured
_FULL, _EMPTY = "━", "─"
_NEVER = float("inf")


@dataclass(frozen=True)
class ProgressView:
    """What the bar shows at one moment."""

    step: int
    total: int | None = None
    title: str = ""  # "epoch 2/10"
    values: Mapping[str, float] = field(default_factory=dict)
    samples: float | None = None  # per second
    left: float | None = None  # seconds


def bar(view: ProgressView, width: int, *, ascii_only: bool = False) -> str:
    """Return one row of at most `width` columns. The least important parts are dropped first."""
    count = str(view.step) if view.total is None else f"{view.step}/{view.total}"
    parts = [part for part in (view.title, count, *_facts(view)) if part]
    keep = 2 if view.title else 1  # never dropped, but cut if needed
    while len(parts) > keep and len("  ".join(parts)) > width:
        del parts[-2 if len(parts) - keep > 1 else -1]  # the last one, the time left, is dropped last
    text = "  ".join(parts)
    room = min(width - len(text) - 2, 30)
    if view.total and room >= 5:
        done = min(room * view.step // view.total, room)
        full, empty = ("#", "-") if ascii_only else (_FULL, _EMPTY)
        place = keep - 1
        text = "  ".join([*parts[:place], full * done + empty * (room - done), *parts[place:]])
    return text[:width]


def line(view: ProgressView) -> str:
    """Return the same for a log file."""
    count = f"step {view.step}"
    if view.total:
        count += f"/{view.total} ({100 * view.step // view.total}%)"
    return "  ".join(part for part in (view.title, count, *_facts(view)) if part)


def _facts(view: ProgressView) -> list[str]:
    facts = [f"{name} {value:.4g}" for name, value in view.values.items()]
    if view.samples is not None:
        facts.append(f"{_short(view.samples)} samples/s")
    if view.left is not None:
        facts.append(f"{_clock(view.left)} left")
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


class SpeedMeter:
    """Counts steps and samples, and measures their rates over the last `window` seconds."""

    def __init__(self, now: float, start: int, window: float) -> None:
        self.step = start
        self.samples = 0
        self._window = window
        self._marks = deque([(now, start, 0)])  # (time, step, samples)

    def rates(self, now: float) -> tuple[float | None, float | None]:
        """Return steps and samples per second. None: unknown."""
        then, step, samples = self._marks[0]
        seconds, steps = now - then, self.step - step
        if seconds <= 0 or steps <= 0:
            return None, None
        return steps / seconds, (self.samples - samples) / seconds if self.samples > samples else None

    def mark(self, now: float) -> None:
        """Begin a window here, and drop those that are too old."""
        self._marks.append((now, self.step, self.samples))
        # The oldest mark is just outside of the window, so that there is always one to compare with.
        while len(self._marks) > 2 and now - self._marks[1][0] >= self._window:
            self._marks.popleft()


class ProgressBar:
    """A progress bar. `total` and `start` count from the very first step of the training, also in a resumed run."""

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
        self._live = shown and (_is_terminal(self._stream) or environment().get(LIVE_BAR) == "1")
        self._every = DRAW_EVERY if self._live else LOG_EVERY
        self._ascii = "utf" not in (getattr(self._stream, "encoding", None) or "").lower()
        now = clock()
        self._speed = SpeedMeter(now, start, max(WINDOW, self._every))
        self._values: Mapping[str, Any] = {}
        self._numbers: dict[str, float] = {}
        self._stale = -_NEVER  # when the values are read again
        self._due = now + self._every if shown else _NEVER
        self._drawn = start  # the step that was shown last
        self._row = ""  # row on the screen, with the cursor after it

    def advance(self, samples: int = 0, values: Mapping[str, Any] | None = None, steps: int = 1) -> None:
        """Count a committed step. Values are numbers or tensors; a tensor is read only when it is drawn."""
        self._speed.step += steps
        self._speed.samples += samples
        if values is not None:
            self._values = values
        if self._clock() >= self._due:
            self._draw()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the bar while something else is printed, and draw it again below."""
        if self._row:
            self._write("\r\x1b[K")
        try:
            yield
        finally:
            if self._row:
                self._write(self._row)

    def close(self) -> None:
        """Draw the last state, and leave it on the screen."""
        if self._due == _NEVER:
            return
        self._stale = -_NEVER
        if self._row or self._speed.step != self._drawn:
            self._draw()
        if self._row:
            self._write("\n")
        self._due, self._row = _NEVER, ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def view(self) -> ProgressView:
        """Return the current content."""
        now = self._clock()
        steps, samples = self._speed.rates(now)
        left = max(self.total - self._speed.step, 0) / steps if steps and self.total is not None else None
        if now >= self._stale:
            self._numbers = {name: _number(value) for name, value in self._values.items()}
            self._stale = now + READ_EVERY
        return ProgressView(self._speed.step, self.total, self.title, self._numbers, samples, left)

    def _draw(self) -> None:
        view = self.view()
        now = self._clock()
        self._due = now + self._every
        if self._live:
            self._row = f"\r{bar(view, self._columns() - 1, ascii_only=self._ascii)}\x1b[K"
            self._write(self._row)
        else:
            self._write(f"{line(view)}\n")
        self._drawn = self._speed.step
        self._speed.mark(now)

    def _write(self, text: str) -> None:
        """Write. A closed terminal or a full disk ends the bar, not the training."""
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
