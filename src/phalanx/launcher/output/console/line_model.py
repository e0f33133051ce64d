"""A model of the content of a stream on a terminal: finished lines, and rows that may still change."""

from __future__ import annotations

import re
from collections import deque

LINE_LIMIT = 1 << 26  # bytes after which a line is broken, to bound memory
LIVE_LIMIT = 1 << 20  # the same, for rows that are repainted
REACH = 60  # rows that the cursor can move up

_CSI = re.compile(rb"\x1b\[([0-?]{0,32})[ -/]{0,4}([@-~])")
_TOKEN = re.compile(rb"[\n\r]|" + _CSI.pattern)
CUT = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?")  # an incomplete sequence
_MOVES = re.compile(rb"\x1b(?!\[[0-9;:]*m)")  # anything but colours
_ESCAPE = re.compile(_CSI.pattern + rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_PARTIAL = re.compile(rb"(?:[\xc0-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf7][\x80-\xbf]{0,2})\Z")  # character


def plain(text: bytes) -> str:
    """Return the text without colours, links and cursor movement."""
    return _ESCAPE.sub(b"", text).decode(errors="replace")


def columns(text: bytes) -> int:
    """Return the width of a text on a terminal."""
    shown = plain(text)
    if shown.isascii():
        return len(shown.expandtabs())
    import unicodedata

    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in shown)
    return len(shown) + wide - sum(unicodedata.combining(c) != 0 for c in shown)


def overwrite(old: bytes, new: bytes) -> bytes:
    """Return what a row shows after `new` is written from its first column."""
    if not old or not new:
        return new or old
    rest = old.decode(errors="surrogateescape")
    if b"\x1b" in old or b"\x1b" in new:
        rest = _beyond(rest, len(plain(new)))
    else:
        rest = rest[len(new.decode(errors="surrogateescape")) :]
    return (new + rest.encode(errors="surrogateescape")).rstrip(b" ")  # bars are erased with spaces


def _beyond(text: str, count: int) -> str:
    """Return the text after `count` characters, with its colours."""
    escapes = ""
    for token in re.finditer(r"\x1b\[[0-9;:]*m|.", text, re.DOTALL):
        if token[0][0] == "\x1b" and len(token[0]) > 1:
            escapes += token[0]
        elif count == 0:
            return escapes + text[token.start() :]
        else:
            count -= 1
    return ""


class ConsoleRow:
    """A row that may still change."""

    __slots__ = ("base", "phantom", "returned", "sealed", "text")

    def __init__(self, base: bytes = b"", *, phantom: bool = False) -> None:
        self.base = base  # before the last carriage return
        self.text = bytearray()  # after it
        self.returned = bool(base)
        self.sealed = False  # a progress bar that is complete: other text does not belong to it
        self.phantom = phantom  # replaces a row that was finished long ago

    @property
    def state(self) -> bytes:
        """Return the content of the row."""
        return overwrite(self.base, bytes(self.text))

    def rewind(self) -> None:
        """Move to the first column."""
        self.base, self.text, self.returned, self.sealed = self.state, bytearray(), True, False

    def copy(self) -> ConsoleRow:
        """Return a copy of the row."""
        copied = ConsoleRow(self.base, phantom=self.phantom)
        copied.text, copied.returned, copied.sealed = bytearray(self.text), self.returned, self.sealed
        return copied

    def unseal(self) -> None:
        """Drop a bar after which something else is written, such as a warning. The bar is drawn again below it."""
        self.base, self.text, self.returned, self.sealed = b"", bytearray(), False, False


class LineModel:
    """Turns the bytes of a stream into finished lines; `rows` may still change.

    Usually that is one row, the line being written. If a program moves the cursor up (tqdm with a position, rich.Live),
    all rows that it reaches stay unfinished until it stays below them.
    """

    def __init__(self, *, live: bool = False, limit: int | None = None) -> None:
        self.rows = [ConsoleRow()]
        self.past: deque[bytes] = deque(maxlen=REACH if live else 0)  # finished, and within reach of the cursor
        self.reclaimed: list[bytes] = []  # finished lines to remove from the screen
        self.modes: list[bytes] = []
        self._limit = limit or (LIVE_LIMIT if live else LINE_LIMIT)
        self._at = 0
        self._reach = 0
        self._cut = b""  # an incomplete escape sequence
        self._returned: ConsoleRow | None = None  # the row before a carriage return that ended the last data
        self._hidden = False  # the cursor is hidden, as by rich while it repaints

    @property
    def pending(self) -> bool:
        """Return whether there is unfinished text."""
        return len(self.rows) > 1 or bool(self.rows[0].text or self.rows[0].base)

    @property
    def bar(self) -> bool:
        """Return whether the unfinished rows are progress bars."""
        return len(self.rows) > 1 or self.rows[0].returned

    @property
    def rest(self) -> int:
        """Return after how many quiet intervals the rows above the cursor are finished. 0: never."""
        if len(self.rows) == 1 or self._at < len(self.rows) - 1 or self._hidden:
            return 0
        last = self.rows[-1]
        return 1 if not last.returned or not (last.text or last.base) else 10

    def states(self) -> list[bytes]:
        """Return the content of the rows, without incomplete characters."""
        return [overwrite(row.base, _PARTIAL.sub(b"", row.text)) for row in self.rows]

    def feed(self, data: bytes) -> bytes:
        """Process the next bytes and return the finished lines."""
        data = self._cut + data
        self._cut = b""
        if self._returned is not None and data:
            if data.startswith(b"\n"):  # with the carriage return, this is a line end
                self.rows[self._at] = self._returned
            self._returned = None
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        one = len(self.rows) == 1 and not self._reach and not self.rows[0].sealed and b"\r" not in data
        if one and (b"\x1b" not in data or not _MOVES.search(data)):
            return self._straight(data)
        return self._moving(data)

    def settle(self) -> bytes:
        """Finish the rows above the cursor, which is on the lowest one, and return them."""
        done: list[bytes] = []
        for row in self.rows[:-1]:
            self._finish(row, done)
        self.rows, self._at, self._reach = self.rows[-1:], 0, 0
        self.rows[0].returned = bool(self.rows[0].base)
        self._returned = None
        return _joined(done)

    def let_go(self) -> None:
        """Drop the only row: it stays on the screen."""
        self.rows, self._returned = [ConsoleRow()], None

    def end(self) -> bytes:
        """Finish all rows and return them."""
        done: list[bytes] = []
        self._write(self._cut, done)
        rows = self.rows
        while rows and not rows[-1].state.strip(b" "):
            rows.pop()
        for row in rows:
            self._finish(row, done)
        self.rows, self._at, self._reach, self._cut, self._returned = [ConsoleRow()], 0, 0, b"", None
        return _joined(done)

    def _straight(self, data: bytes) -> bytes:
        """Process data without cursor movement, up to the last newline at once."""
        done: list[bytes] = []
        last = data.rfind(b"\n")
        if last >= 0:
            first = data.find(b"\n")
            self._write(data[:first], done)
            self._finish(self.rows[0], done)
            self.rows = [ConsoleRow()]
            if last > first:
                self._finish_all(data[first + 1 : last], done)
        self._write(data[last + 1 :], done)
        return _joined(done)

    def _moving(self, data: bytes) -> bytes:
        done: list[bytes] = []
        escape = data.rfind(b"\x1b", max(len(data) - 40, 0))
        if escape >= 0 and CUT.fullmatch(data, escape):
            data, self._cut = data[:escape], data[escape:]
        end = 0
        for token in _TOKEN.finditer(data):
            self._write(data[end : token.start()], done)
            end = token.end()
            if token[0] == b"\n":
                self._newline(done)
            elif token[0] == b"\r":
                if end == len(data) and not self._cut:
                    self._returned = self.rows[self._at].copy()
                self.rows[self._at].rewind()
            else:
                self._control(token, done)
        self._write(data[end:], done)
        return _joined(done)

    def _control(self, token: re.Match[bytes], done: list[bytes]) -> None:
        row = self.rows[self._at]
        number = int(token[1]) if token[1].isdigit() else 0
        match token[2]:
            case b"m" if row.sealed:
                row.text += token[0]
            case b"m":
                self._write(token[0], done)
            case b"A":
                self._up(number or 1, done)
            case b"F":
                self._up(number or 1, done)
                self.rows[self._at].rewind()
            case b"B":
                self._at = min(self._at + (number or 1), len(self.rows) - 1)
            case b"K" | b"J" if number >= 2:  # the whole row; of the screen, this row is all we have
                row.base, row.text = b"", bytearray()
            case b"K" if number == 0:
                row.base = b""
                row.sealed = row.returned and bool(row.text)
            case b"J" if number == 0:
                row.base = b""
                del self.rows[self._at + 1 :]
            case b"G" if number <= 1:
                row.rewind()
            case b"h" | b"l" if token[1].startswith(b"?"):
                self.modes.append(token[0])
                if token[1] == b"?25":
                    self._hidden = token[2] == b"l"

    def _write(self, text: bytes, done: list[bytes]) -> None:
        if not text:
            return
        row = self.rows[self._at]
        if row.sealed:
            row.unseal()
        row.text += text
        while len(row.text) > self._limit:
            self._done(bytes(row.text[: self._limit]), done)
            del row.text[: self._limit]
            row.base = b""

    def _newline(self, done: list[bytes]) -> None:
        self._at += 1
        if self._at < len(self.rows):
            self.rows[self._at].rewind()
            return
        self.rows.append(ConsoleRow())
        while len(self.rows) > self._reach + 1:
            self._finish(self.rows.pop(0), done)
            self._at -= 1

    def _up(self, number: int, done: list[bytes]) -> None:
        first = not self.rows[self._at].text  # a move up keeps the column
        self._at -= number
        while self._at < 0 and len(self.rows) <= REACH:
            self.rows.insert(0, self._reclaim(done))
            self._at += 1
        self._at = max(self._at, 0)
        if first:
            self.rows[self._at].rewind()
        self._reach = max(self._reach, len(self.rows) - 1 - self._at)

    def _reclaim(self, done: list[bytes]) -> ConsoleRow:
        if not self.past:
            return ConsoleRow(phantom=True)
        line = self.past.pop()
        if done:
            done.pop()
        else:
            self.reclaimed.insert(0, line)
        return ConsoleRow(line)

    def _finish(self, row: ConsoleRow, done: list[bytes]) -> None:
        state = row.state
        if state or not row.phantom:
            self._done(state, done)

    def _done(self, line: bytes, done: list[bytes]) -> None:
        done.append(line)
        self.past.append(line)

    def _finish_all(self, lines: bytes, done: list[bytes]) -> None:
        if len(lines) > self._limit:
            step = self._limit
            pieces = ((line, at) for line in lines.split(b"\n") for at in range(0, len(line) or 1, step))
            lines = b"\n".join(line[at : at + step] for line, at in pieces)
        done.append(lines)
        if self.past.maxlen:
            self.past.extend(lines.rsplit(b"\n", REACH)[-REACH:])


def _joined(done: list[bytes]) -> bytes:
    return b"\n".join(done) + b"\n" if done else b""
