"""Finds the loss of a script in its output, in the usual spellings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

# No part may match in two ways: matching a long line of spaces or digits would take quadratic time.
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
# loss 0.12, loss: 0.12, loss=0.12, 'loss': 0.12, train_loss 0.12, train/loss 0.12, loss is 0.12, loss: tensor(0.12, …)
_LOSS = re.compile(
    r"(?<![\w.])(?:(?P<of>[a-z]+)[ _/-])?loss['\"]?\s*(?:(?:[:=]+|\bis\b)\s*)?(?:tensor\(|\[)?"
    rf"(?P<value>{_NUMBER})(?![\w%/]|\.\d|-\d|\s%)",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w/])(?:global[ _-])?(?:step|iter|iteration)s?['\"]?[\s:=#\[(]*(\d+)(?:\s*/\s*(\d+))?(?![\w.])",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<![\w/])epoch['\"]?[\s:=#\[(]*(\d+)", re.IGNORECASE)
_BAR = re.compile(r"\|\s*(\d+)/(\d+)\s*\[")  # tqdm
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDS = re.compile(rb"[\r\n]+")
_LONGEST = 4096  # bytes of a line

# The word before "loss" and the metric that it means. Any other word is the kind of loss, or part of a sentence.
_NAMES = {
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "dev"), "val_loss"),
    "test": "test_loss",
}
_FALSE = frozenset(("no", "packet", "weight", "data", "without", "of", "power", "signal", "at", "stop"))


@dataclass(frozen=True)
class ParsedLoss:
    """The content of one line."""

    values: dict[str, float | None] = field(default_factory=dict)  # None: not a number
    step: int | None = None
    epoch: int | None = None
    total: int | None = None  # steps
    bar: int | None = None  # position of a progress bar: most likely within an epoch


def parse(line: str) -> ParsedLoss:
    """Parse one line. The values are empty if it contains no loss."""
    values: dict[str, float | None] = {}
    for found in _LOSS.finditer(line):
        of = (found["of"] or "").lower()
        name = _NAMES.get(of, "loss")
        if of not in _FALSE and name not in values:
            number = float(found["value"])
            values[name] = number if math.isfinite(number) else None
    step, epoch, bar = _STEP.search(line), _EPOCH.search(line), _BAR.search(line)
    return ParsedLoss(
        values,
        int(step[1]) if step else None,
        int(epoch[1]) if epoch else None,
        int(step[2]) if step and step[2] else None,
        int(bar[1]) if bar else None,
    )


class LossParser:
    """Parses one stream as it grows."""

    def __init__(self) -> None:
        self._rest = b""
        self._epoch: int | None = None
        self._last: ParsedLoss | None = None
        self._resets = False  # the step starts at 0 in every epoch: useless

    def feed(self, data: bytes, *, skipped: bool = False) -> ParsedLoss | None:
        """Return the newest loss in `data`, or None. `skipped` means that bytes before `data` were left out."""
        if skipped:  # it starts in the middle of a line
            self._rest, data = b"", _ENDS.split(data, 1)[-1]
        *lines, self._rest = _ENDS.split(self._rest + data)
        self._rest = self._rest[-_LONGEST:]
        newest: ParsedLoss | None = None
        for line in lines:
            if b"oss" not in line and b"OSS" not in line and b"poch" not in line and b"POCH" not in line:
                continue
            found = parse(_ANSI.sub("", line[-_LONGEST:].decode(errors="replace")))
            self._epoch = found.epoch if found.epoch is not None else self._epoch
            if found.values:
                before = newest.values if newest is not None else {}
                newest = self._placed(replace(found, values={**before, **found.values}, epoch=self._epoch))
        return newest

    def _placed(self, now: ParsedLoss) -> ParsedLoss:
        last, self._last = self._last, now
        if last is not None and now.step is not None and last.step is not None and now.step < last.step:
            self._resets = self._resets or (now.epoch or 0) > (last.epoch or 0)
        return replace(now, step=None, total=None) if self._resets else now
