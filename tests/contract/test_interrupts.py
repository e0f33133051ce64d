"""Ctrl-C during imports."""

from __future__ import annotations

import signal
import threading

import pytest

from phalanx.contract.interrupts import RecordedInterrupt, deferred, recorded


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


def test_it_is_recorded_for_the_handler_that_follows() -> None:
    with recorded() as interrupt:
        assert not interrupt.pressed
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        assert signal.getsignal(signal.SIGINT) is interrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_part_of_the_start_can_be_ended() -> None:
    def check(interrupt: RecordedInterrupt, *, press: bool) -> None:
        with interrupt.raised():
            if press:
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("not interrupted")

    with recorded() as interrupt:
        for press in (True, False):  # pressed during it, and before
            with pytest.raises(KeyboardInterrupt):
                check(interrupt, press=press)
        signal.raise_signal(signal.SIGINT)  # outside of it, it is recorded again


def test_a_handler_that_has_replaced_it_stays() -> None:
    try:
        with recorded():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with recorded() as interrupt:  # ignored, as below nohup
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
