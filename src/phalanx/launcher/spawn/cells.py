"""Names the cells of a notebook, whose code has file names such as `/tmp/ipykernel_31283/1096529376.py`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

_CODE = re.compile(r"(?:/[^\s:\"]*/)?([^\s:/\"]+)(?=:\d)")


def named(text: str) -> str:
    """Return a text with `Cell In[3]` instead of the file names of cells."""
    cells = {os.path.basename(file): number for file, number in _cells().items()}
    return _CODE.sub(lambda found: f"Cell In[{cells[found[1]]}]" if found[1] in cells else found[0], text)


def _cells() -> Mapping[str, int]:
    """Return the file names of cells, with the numbers that the notebook shows. Empty: this is not a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    found = getattr(getattr(shell, "compile", None), "_filename_map", None)  # IPython names cells in tracebacks by it
    return found if isinstance(found, Mapping) else {}
