"""The last traceback of a worker is withheld from the console, exactly that text, and is never lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.launcher.output.console.withheld import DELAY, USAGE_DELAY, Withheld

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\nValueError: é\n\nmore\n\n'
GROUP = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two (2 sub-exceptions)\n"
SYNTAX = '  File "a.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
USAGE = b"usage: a.py [-h] --lr LR\n            [--epochs N]\na.py: error: the following arguments are required: --lr\n"


def withheld(folder: Path, text: str = TRACEBACK) -> Withheld:
    (folder / "traceback.txt").write_text(text)
    return Withheld(str(folder / "traceback.txt"))


def as_torch_prints(text: str) -> bytes:
    return "".join(f"[rank3]: {line}\n" if line else "\n" for line in text.splitlines()).encode()


@pytest.mark.parametrize("text", [TRACEBACK, GROUP, SYNTAX], ids=["traceback", "group", "syntax error"])
def test_a_traceback_is_kept_back_and_what_surrounds_it_is_shown(tmp_path: Path, text: str) -> None:
    one = withheld(tmp_path, text)
    assert one.feed(b"before\n" + as_torch_prints(text) + b"after\n", 0.0) == b"before\nafter\n"
    assert one.text == text.rstrip("\n") + "\n" * (text.count("\n\n") > 1)
    assert one.due == DELAY


def test_a_colored_traceback_in_single_lines_is_withheld(tmp_path: Path) -> None:
    one = withheld(tmp_path)
    for line in TRACEBACK.splitlines():
        assert one.feed(f"\x1b[35m{line}\x1b[0m\r\n".encode(), 0.0) == b""
    assert one.release().count(b"\n") == TRACEBACK.count("\n")


def test_what_the_script_prints_itself_is_shown_at_once(tmp_path: Path) -> None:
    one = Withheld(str(tmp_path / "traceback.txt"))
    assert one.feed(TRACEBACK.encode(), 0.0) == TRACEBACK.encode()
    (tmp_path / "traceback.txt").write_text(TRACEBACK.replace("line 3", "line 4"))
    assert one.feed(TRACEBACK.encode(), 0.0) == TRACEBACK.encode()
    assert one.due is None


def test_the_text_of_sys_exit_is_withheld(tmp_path: Path) -> None:
    one = Withheld(str(tmp_path / "traceback.txt"))
    assert one.feed(b"reads\nno data\n", 0.0) == b"reads\nno data\n"  # printed by the script
    withheld(tmp_path, "no data\nexpected: x\n")
    assert one.may_continue(b"no d")
    assert not one.may_continue(b"other")
    assert one.feed(b"ends\nno data\nexpected: x\nbye\n", 0.0) == b"ends\nbye\n"
    assert one.text == "no data\nexpected: x"
    assert withheld(tmp_path, "\n").feed(b"\n", 0.0) == b"\n"  # an empty text is no reason


def test_a_text_that_replaces_another_at_once_is_withheld(tmp_path: Path) -> None:
    """A script catches its own sys.exit, and then fails: both files may have the same time."""
    one, path = withheld(tmp_path, "no data\n"), tmp_path / "traceback.txt"
    os.utime(path, ns=(5, 5))
    assert one.feed(b"goes on\n", 0.0) == b"goes on\n"
    (tmp_path / "part").write_text("it fails\n")
    os.utime(tmp_path / "part", ns=(5, 5))
    (tmp_path / "part").replace(path)
    assert one.feed(b"it fails\n", 0.0) == b""
    assert one.text == "it fails"


def test_a_traceback_that_another_thread_writes_into_is_shown(tmp_path: Path) -> None:
    one = withheld(tmp_path)
    lines = TRACEBACK.encode().splitlines(keepends=True)
    torn = b"".join([*lines[:2], b"step 3\n", *lines[2:]])
    assert one.feed(torn, 0.0) == torn


def test_a_traceback_after_the_reported_failure_is_dropped(tmp_path: Path) -> None:
    one = withheld(tmp_path)
    one.feed(TRACEBACK.encode()[:40], 0.0)
    one.drop()
    late = withheld(tmp_path)
    late.drop()
    assert late.feed(TRACEBACK.encode() + b"bye\n", 0.0) == b"bye\n"
    assert (late.release(), late.due) == (b"", None)


def test_only_matching_tracebacks_are_dropped(tmp_path: Path) -> None:
    one = withheld(tmp_path)
    one.feed(TRACEBACK.encode(), 0.0)
    one.drop(lambda text: "KeyboardInterrupt" in text)
    assert one.due is not None
    one.drop(lambda text: "ValueError: é" in text)
    assert (one.due, one.release()) == (None, b"")


def test_it_is_shown_if_the_process_does_not_end(tmp_path: Path) -> None:
    one = withheld(tmp_path)
    one.feed(TRACEBACK.encode(), 5.0)
    assert one.overdue(5.0 + DELAY - 0.1) == b""
    assert one.overdue(5.0 + DELAY) == TRACEBACK.encode()
    assert one.due is None
    assert one.overdue(99.0) == b""


def test_a_usage_error_is_kept_back_for_a_moment_and_help_is_not(tmp_path: Path) -> None:
    one = Withheld(str(tmp_path / "none"))
    assert one.feed(b"hello\n" + USAGE + b"bye\n", 0.0) == b"hello\nbye\n"
    assert one.overdue(DELAY - 0.1) == b""  # its process exits, which may take seconds
    assert one.overdue(DELAY) == USAGE
    begun = Withheld(str(tmp_path / "none"))
    usage = USAGE.splitlines(keepends=True)[0]
    assert begun.feed(usage, 0.0) == b""
    assert begun.overdue(USAGE_DELAY) == usage  # no error follows
    text = b"usage: a.py [-h]\n\noptions:\n  -h, --help\n"
    assert Withheld(str(tmp_path / "none")).feed(text, 0.0) == text


NCCL = b"""\
[rank1]:[E1116 10:00:09.692247262 ProcessGroupNCCL.cpp:612] [Rank 1] raised the following async exception: NCCL error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2770 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fe0db97305d in libc10.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] watchdog thread terminated with exception: NCCL error
Exception raised from run at ProcessGroupNCCL.cpp:2100 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fe0db97305d in libc10.so)

"""


def test_what_nccl_writes_about_a_lost_peer_is_kept_back_until_the_failure_was_reported(tmp_path: Path) -> None:
    lost, stuck, ended = (withheld(tmp_path) for _ in range(3))
    for one in (lost, stuck, ended):
        assert one.feed(b"step 3\n" + NCCL + TRACEBACK.encode() + b"bye\n", 5.0) == b"step 3\nbye\n"
    lost.drop()
    assert lost.due is None
    assert lost.feed(b"step 4\n" + NCCL, 6.0) == b"step 4\n"
    assert stuck.overdue(5.0 + DELAY) == NCCL + TRACEBACK.encode()
    assert ended.release() == NCCL + TRACEBACK.encode()
    assert ended.feed(NCCL, 6.0) == NCCL
