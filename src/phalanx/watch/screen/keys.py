"""What is typed, from bytes to the names of keys. What is pasted is nothing that anybody has typed."""

from __future__ import annotations

import re

# As terminals send them, with and without application mode.
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
    def __init__(self) -> None:
        self._rest = ""
        self._pasting = False

    @property
    def halfway(self) -> bool:
        """An escape has come, and nothing behind it yet: the key itself, or the beginning of another."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        if data == b"\x03":  # whatever else has got lost: nobody is caught here
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
        if len(self._rest) > 64:  # no key is as long
            self._rest = ""
        return [key for key in found if key]

    def lapse(self) -> list[str]:
        """Nothing more has come for a while. Of what is pasted, the end is waited for: without it no key is one."""
        if self._pasting:
            return []
        alone, self._rest = self._rest == "\x1b", ""
        return ["escape"] if alone else []
