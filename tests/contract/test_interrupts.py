"""Ctrl-C during imports."""

from __future__ import annotations

import signal
import threading

import pytest

from phalanx.contract.interrupts import deferred


@pytest.fixture(autouse=True)
def _default() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_when_the_imports_are_done() -> None:
    done = []

    def imports() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("imports")

    with pytest.raises(KeyboardInterrupt):
        imports()
    assert done == ["imports"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_it_nothing_happens() -> None:
    with deferred():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_an_import_comes_first() -> None:
    def imports() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            raise ImportError("no module")

    with pytest.raises(ImportError):
        imports()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signals_stay_ignored_and_other_threads_change_nothing() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[object] = []

    def elsewhere() -> None:
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
