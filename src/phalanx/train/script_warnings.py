"""Warnings about a training script, shown at the line of the script that called phalanx."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import torch

# torch frames are between the script and a hook of phalanx that torch calls; those of contextlib, if a block ends.
_FOLDERS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))
_NOT_THE_SCRIPT = (*_FOLDERS, contextlib.__file__)


class ScriptWarnings:
    """Warns once per subject."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn(self, subject: str, text: str) -> None:
        """Warn with `text`, unless there was a warning about `subject` before."""
        if subject in self._given:
            return
        self._given.add(subject)
        frame, level = sys._getframe(1), 2
        while frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT) and frame.f_back is not None:
            frame, level = frame.f_back, level + 1
        warnings.warn(text, stacklevel=level)
