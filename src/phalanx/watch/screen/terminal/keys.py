"""Turns terminal input into key names. Pasted text is ignored."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable

_ESCAPE = 0.05  # seconds after which an escape byte is the Escape key

# With and without application mode.
_NAMED = {
    **{
        f"\x1b{lead}{letter}": name
        for lead in "[O"
        for letter, name in zip("ABHF", ("up", "down", "home", "end"), strict=True)
    },
    **{f"\x1b{lead}{letter}": name for lead in "[O" for letter, name in zip("DC", ("left", "right"), strict=True)},
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[Z": "back tab",
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl-c",
    "\x04": "ctrl-d",
    "\x0c": "ctrl-l",
    "\x1a": "ctrl-z",
}
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b[^\x1b\[O]|[^\x1b]", re.DOTALL)
_PASTED, _THROUGH = "\x1b[200~", "\x1b[201~"


class Keys:
    """A decoder that keeps incomplete escape sequences."""

    def __init__(self) -> None:
        self._rest = ""
        self._pasting = False

    @property
    def halfway(self) -> bool:
        """Whether an escape byte was received that may be the Escape key or the beginning of another key."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys in `data`."""
        if data == b"\x03":  # Ctrl-C always works, even if the end of a paste got lost
            self._pasting, self._rest = False, ""
        self._rest += data.decode(errors="ignore")
        found: list[str] = []
        while self._rest:
            match = _KEY.match(self._rest)
            if match is None:
                break
            key, self._rest = match[0], self._rest[match.end() :]
            if key in (_PASTED, _THROUGH):
                self._pasting = key == _PASTED
            elif not self._pasting:
                found.append(_NAMED.get(key, key if key.isprintable() else ""))
        if len(self._rest) > 64:  # no key is that long
            self._rest = ""
        return [key for key in found if key]

    def lapse(self) -> list[str]:
        """Return the Escape key if only an escape byte was received. Return nothing during a paste."""
        if self._pasting:
            return []
        alone, self._rest = self._rest == "\x1b", ""
        return ["escape"] if alone else []


class Keyboard:
    """Reads keys from a terminal, in the event loop. Calls `gone` when the terminal is closed."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._keys = Keys()
        self._fd: int | None = None
        self._escape_timer: asyncio.TimerHandle | None = None

    def listen(self, fd: int, pressed: Callable[[list[str]], None]) -> None:
        """Start reading. `pressed` is called with the names of keys."""
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read, fd, pressed)

    def ignore(self) -> None:
        """Stop reading: another program uses the terminal."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)

    def _read(self, fd: int, pressed: Callable[[list[str]], None]) -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        if self._escape_timer is not None:
            self._escape_timer.cancel()
        pressed(self._keys.feed(data))
        if self._keys.halfway:
            loop = asyncio.get_running_loop()
            self._escape_timer = loop.call_later(_ESCAPE, lambda: pressed(self._keys.lapse()))
