"""The texts of files that have changed since the run began. Empty if no file has changed."""

from __future__ import annotations

import os

texts: dict[str, bytes] = {}  # real path -> text


def text_of(path: str) -> bytes | None:
    """Return the text to use instead of a file. None: use the file itself."""
    return texts.get(os.path.realpath(path)) if texts else None
