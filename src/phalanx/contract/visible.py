"""Makes text of other processes, hosts and files safe for a terminal: control characters are escaped.

A host name, a verdict or an exception message may contain escape sequences. Sent to a terminal, they could hide or
forge other text, change the window title or write to the clipboard.
"""

from __future__ import annotations

import re

# C0 except tab and newline, DEL, C1, and the characters that reorder or break lines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return the text with control characters as escapes: `\\x1b` for ESC. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return _CONTROLS.sub(lambda found: _escape(found[0]), text)


def visible_line(text: str) -> str:
    """Return the text as one line: newlines and tabs are shown as escapes, too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
