"""Defers Ctrl-C while modules are imported.

msgspec crashes the process (SIGSEGV) if KeyboardInterrupt is raised while it creates a decoder, and many modules create
one when they are imported.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if Ctrl-C was pressed during it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or set by other code
        yield
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        pressed = True

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
