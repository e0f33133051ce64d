"""Defers Ctrl-C while modules are imported, and records it while a run starts.

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


class RecordedInterrupt:
    """A handler of SIGINT that records it, for the handler that replaces it later."""

    def __init__(self) -> None:
        self.pressed = False
        self._raises = False

    def __call__(self, *_: object) -> None:
        """Handle the signal."""
        self.pressed = True
        if self._raises:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the block, also if Ctrl-C was pressed before."""
        self._raises = True
        try:
            if self.pressed:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False


@contextlib.contextmanager
def recorded() -> Iterator[RecordedInterrupt]:
    """Record Ctrl-C in the block. The handler is not restored if another one has replaced it."""
    interrupt = RecordedInterrupt()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or set by other code
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
