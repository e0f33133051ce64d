"""The texts of files that have changed since the run began. A worker whose files are as they were has none."""

from __future__ import annotations

import os

texts: dict[str, bytes] = {}  # real path -> text


def text_of(path: str) -> bytes | None:
    """Return the text to use in place of a file. None: the file itself."""
    return texts.get(os.path.realpath(path)) if texts else None
