"""Groups that there are, or that are being made: for whoever has to end them all, as when a rank has died."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def add(group: Any) -> None:
    """As long as it lives. `group.abort()` ends it."""
    _groups.add(group)


def abort() -> None:
    """From any thread. Whoever waits in one of them, or for others to come to one, raises GroupAborted.

    Not those in which the kernel's or gloo's connections are waited for: these have to be cut.
    """
    with contextlib.suppress(ImportError):
        from phalanx.collectives import _native

        _native.abort_joining()
    for group in [*_groups]:
        with contextlib.suppress(Exception):
            group.abort()


def _forked() -> None:
    """They are those of the process that has made them."""
    _groups.clear()


os.register_at_fork(after_in_child=_forked)
