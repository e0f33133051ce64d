"""The handles with which tests run commands: no output is lost, waits end, no process is left."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

from tests.kit import handle
from tests.kit.cli import alive, descendants, python, run, start, terminal, torchrun, until
from tests.kit.reports import SCRIPTS

SLEEPY = (sys.executable, "-u", f"{SCRIPTS}/sleepy.py")


def test_result_has_code_streams_and_seconds() -> None:
    code = "import sys, time; time.sleep(0.2); print(input()); sys.stderr.write('e\\r\\n'); sys.exit(3)"
    result = python("-c", code, input="one\ntwo\n")
    assert (result.code, result.out, result.err) == (3, "one\n", "e\r\n")
    assert 0.2 < result.seconds < 10


def test_env_sets_and_removes() -> None:
    code = (
        "import os; print(os.environ.get('A'), os.environ.get('HOME'), [n for n in os.environ if n[:7] == 'PYTEST_'])"
    )
    assert python("-c", code, env={"A": "1", "HOME": None}).out == "1 None []\n"


def test_wait_for_finds_what_was_and_what_will_be_written() -> None:
    job = start(words=SLEEPY)
    (ready,) = job.wait_for(re.compile(r"ready 0 (\d+)"))
    assert int(ready[1]) == job.pid
    assert job.wait_for("ready")
    assert alive(job.pid)
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    assert not alive(job.pid)


def test_wait_for_fails_at_once_when_the_command_has_ended() -> None:
    with pytest.raises(AssertionError, match=r"'never' was written 0 times, not 1, when the command ended(?s:.*)hello"):
        start(words=("echo", "hello")).wait_for("never", timeout=60)


def test_wait_that_takes_too_long_shows_the_output() -> None:
    job = start(words=SLEEPY)
    job.wait_for("ready")
    with pytest.raises(AssertionError, match=r"did not end in 0.4 s(?s:.*)ready 0"):
        job.wait(0.1)


def test_output_is_read_in_the_background() -> None:
    job = start(words=(sys.executable, "-u", f"{SCRIPTS}/noisy.py", "--mb", "1", "--stream", "both"))
    assert job.wait() == 0
    assert job.out == job.err
    assert len(job.out.splitlines()) == 10001


def test_end_takes_the_whole_family() -> None:
    job = start(words=("sh", "-c", "sleep 60 & setsid sleep 61 & echo up; wait"))
    job.wait_for("up")
    family = until(lambda: len(found := descendants(job.pid)) == 2 and found, 5, "two children")
    job.end()
    until(lambda: not any(map(alive, family)), 5, "the children to die")


def test_command_that_leaves_its_output_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "HELD", 2.0)
    before = {*descendants(os.getpid())}  # a lab of other tests may be up
    with pytest.raises(AssertionError, match=r"held open by\nprocess \d+: sleep 4"):
        run(("sh", "-c", "sleep 4 & echo done"))
    until(lambda: {*descendants(os.getpid())} <= before, 10, "the sleeper to end")


def test_until_says_what_it_waited_for() -> None:
    assert until(lambda: [1], 1, "a list") == [1]
    with pytest.raises(AssertionError, match=r"waited 0.2 s for rain; the last answer was \[\]"):
        until(list, 0.05, "rain")


def test_terminal_is_one() -> None:
    code = (
        "import os; open('/dev/tty')\n"
        "print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size(), os.getsid(0) == os.getpid())"
    )
    job = terminal(words=(sys.executable, "-c", code), size=(30, 100))
    assert job.wait() == 0
    assert job.out == "[True, True, True] os.terminal_size(columns=100, lines=30) True\r\n"


def test_keys_are_typed_and_the_window_resized() -> None:
    job = terminal(
        words=("sh", "-c", "trap 'stty size' WINCH; echo up; read line; echo got $line; while :; do sleep 0.05; done")
    )
    job.wait_for("up")
    job.send(b"some words\n")
    job.wait_for("got some words")
    job.resize(40, 120)
    job.wait_for("40 120")
    job.send(b"\x03")
    assert job.wait() == -signal.SIGINT


def test_closed_window_hangs_up() -> None:
    job = terminal(words=SLEEPY)
    job.wait_for("ready")
    job.hang_up()
    assert job.wait() == -signal.SIGHUP


@pytest.mark.extended
def test_torchrun_leaves_no_log_folder() -> None:
    result = torchrun("--no-python", "echo", "hello")
    assert (result.code, result.out) == (0, "hello\n")
