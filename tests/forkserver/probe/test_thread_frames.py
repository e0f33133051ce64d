"""Frames of other threads are read while the garbage collector is off, because in Python 3.11 it can free them."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from phalanx.forkserver import thread_frames
from phalanx.forkserver.probe import stacks

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions of Python collect at safe points")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


def test_no_collection_starts_while_stacks_are_read() -> None:
    started: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            started.append(sys._getframe(1).f_code.co_name)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        found = stacks.threads()
    finally:
        gc.callbacks.remove(note)
    assert found[0]["main"]
    assert stacks.frames.__name__ not in started


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with thread_frames.reading():
        assert not gc.isenabled()
        with thread_frames.reading():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_the_last_thread_enables_the_collector() -> None:
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with thread_frames.reading():
            inside.set()
            leave.wait()

    other = threading.Thread(target=read)
    with thread_frames.reading():
        other.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()


def test_a_child_forked_meanwhile_has_the_collector() -> None:
    with thread_frames.reading():
        pid = os.fork()
        if not pid:
            with thread_frames.reading():
                pass
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(pid, 0)[1] == 0
