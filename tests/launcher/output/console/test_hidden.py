"""Nothing is written while the console is hidden, and nothing is lost."""

from __future__ import annotations

import os
import time

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std
from tests.launcher.output.console.emulator import Captured, Terminal, Worker, once, showing, until


def test_messages_of_a_hidden_console_are_shown_afterwards(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        worker = Worker(console, 1, Std.OUT)
        worker.write("before\n")
        console.say("one")
        console.hide()
        until(lambda: b"before" in terminal.data and b"one" in terminal.data, lambda: terminal.data)
        seen = terminal.data
        worker.write("meanwhile\n")
        console.say("two")
        console.waiting("for somebody")
        once(console, 0, "meanwhile too\n")
        time.sleep(0.2)  # longer than an unfinished line waits
        assert terminal.data == seen
        console.show()
        until(lambda: b"two" in terminal.data, lambda: terminal.data)
        worker.write("after\n")
        until(lambda: b"[1] after" in terminal.data, lambda: terminal.data)
        console.waiting(None)
        worker.end()
    assert b"meanwhile" not in terminal.data


def test_the_last_message_is_shown_if_the_console_stays_hidden() -> None:
    with Captured(2, terminal=True, colour=False) as shown:
        shown.console.hide()
        for number in range(600):
            shown.console.say(f"word {number}")
        once(shown.console, 1, "unseen\n")
        shown.console.close()
        lines = shown.err.decode().splitlines()
        assert lines[-1] == "phalanx: word 599"
        assert len(lines) == 500
        assert shown.out == b""


def test_a_file_gets_what_a_terminal_does_not_show(terminal: Terminal) -> None:
    """`phalanx run --screen train.py 2>errors`"""
    file = os.memfd_create("err")
    console = Console(2, out=terminal.fd, err=file, colour=False)
    try:
        console.hide()
        once(console, 0, "unseen\n")
        once(console, 1, "a warning\n", Std.ERR)
        console.say("one")
        until(lambda: os.pread(file, 1000, 0) == b"[1] a warning\nphalanx: one\n", lambda: os.pread(file, 1000, 0))
    finally:
        console.close()
        os.close(file)
    assert b"unseen" not in terminal.data
