"""From the output of a worker about its end to an exception, its frames and the root of its chain: tables of text."""

from __future__ import annotations

import json
import traceback

import pytest

from phalanx.launcher.output.tracebacks import Root, read_dump, read_error_file, read_traceback, root

LIB = "/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"message": {}}', '{"message": {"message": 1, "extraInfo": 2}}'])
def test_an_error_file_of_any_shape_is_survived(text: str) -> None:
    assert read_error_file(text).frames == ()


def test_the_error_file_of_torchs_record() -> None:
    stack = 'Traceback (most recent call last):\n  File "/a/t.py", line 3, in f\n    g(1)\nValueError: no\n'
    record = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": stack, "timestamp": "17"}}}
    report = read_error_file(json.dumps(record))
    assert (report.exception, report.when, report.frames) == ("ValueError: no", 17.0, (("/a/t.py", 3, "f", "g(1)"),))


def test_the_last_traceback_of_stderr() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "old.py", line 1, in <module>',
        "KeyError: 1",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "/x/new.py", line 7, in run',
        "    step(batch)",
        "    ^^^^^^^^^^^",
        "a.b.Trouble: it went wrong",
        "then something else was printed",
    ]
    report = read_traceback(lines)
    assert report.exception == "a.b.Trouble: it went wrong"
    assert report.frames == (("/x/new.py", 7, "run", "step(batch)"),)
    assert read_traceback(["nothing of the kind"]).exception == ""


def frame(file: str, line: int, name: str, source: str = "") -> str:
    return f'  File "{file}", line {line}, in {name}\n' + (f"    {source}\n" if source else "")


def trace(exception: str, *frames: str) -> str:
    return f"Traceback (most recent call last):\n{''.join(frames)}{exception}\n"


CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
IMPORT = trace(
    "ModuleNotFoundError: No module named 'multiprocess'", frame("/w/a.py", 6, "inner", "import multiprocess")
)
OUTER = trace("RuntimeError: Failed to import transformers.trainer", frame("/w/a.py", 10, "<module>", "raise X"))
MIDDLE = trace("ImportError: no trainer", frame("/w/b.py", 3, "load"))
WORKER = trace(
    "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal "
    + trace("KeyError: 'sample 5'", frame(LIB, 54, "fetch"), frame("/w/data.py", 8, "__getitem__", "raise KeyError")),
    frame("/w/train.py", 10, "<module>"),
)

ROOTS = {
    "none": (OUTER, None),
    "raise from": (
        IMPORT + CAUSE + OUTER,
        Root(
            "caused by",
            "ModuleNotFoundError: No module named 'multiprocess'",
            ("/w/a.py", 6, "inner", "import multiprocess"),
        ),
    ),
    "of three": (IMPORT + CAUSE + MIDDLE + CAUSE + OUTER, "ModuleNotFoundError: No module named 'multiprocess'"),
    "handling": (
        MIDDLE + HANDLING + OUTER,
        Root("while handling", "ImportError: no trainer", ("/w/b.py", 3, "load", "")),
    ),
    "a DataLoader worker": (
        WORKER,
        Root("caused by", "KeyError: 'sample 5'", ("/w/data.py", 8, "__getitem__", "raise KeyError")),
    ),
    "a DataLoader worker, and then": (WORKER + CAUSE + OUTER, "KeyError: 'sample 5'"),
    "another error before, not of the chain": (IMPORT + "\n" + OUTER, None),
    "another chain before": (IMPORT + CAUSE + OUTER + MIDDLE + CAUSE + OUTER, "ImportError: no trainer"),
    "behind what torch puts before each line": (
        "".join(f"[rank0]: {line}\n" for line in (IMPORT + CAUSE + OUTER).splitlines()),
        "ModuleNotFoundError: No module named 'multiprocess'",
    ),
}


@pytest.mark.parametrize(("story", "expected"), ROOTS.values(), ids=ROOTS.keys())
def test_the_root_of_a_chain(story: str, expected: Root | str | None) -> None:
    found = root(story)
    assert (found.exception if isinstance(expected, str) and found else found) == expected
    parsed = read_traceback(story.splitlines())
    assert parsed.root == found
    assert parsed.exception.startswith(("RuntimeError: Failed to import", "KeyError: Caught"))


def failed(text: object) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def group(name: str, *errors: Exception) -> Exception:
    try:
        raise ExceptionGroup(name, errors)
    except Exception as error:
        return error


GROUPS = {
    "two": (group("g", failed(1), failed(2)), "first of 2", "ValueError: 1"),
    "one": (group("g", failed("x")), "first of 1", "ValueError: x"),
    "of a group": (group("g", group("h", failed(7), failed(8)), failed(2)), "first of 2", "ValueError: 7"),
}


@pytest.mark.parametrize(("error", "link", "exception"), GROUPS.values(), ids=GROUPS.keys())
def test_the_first_of_an_exception_group(error: Exception, link: str, exception: str) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    parsed = read_traceback(["noise", *lines])
    assert parsed.exception.startswith("ExceptionGroup: g (")
    assert [name for _, _, name, _ in parsed.frames] == ["group"]
    assert parsed.root is not None
    assert (parsed.root.link, parsed.root.exception) == (link, exception)
    assert parsed.root.place is not None
    assert parsed.root.place[2] == "failed"


def test_what_python_ignores_is_no_reason_to_end() -> None:
    ignored = "Exception ignored in atexit callback: <function bye at 0xff>\n" + trace("ValueError: at exit")
    assert read_traceback(ignored.splitlines()).exception == ""
    assert read_traceback((OUTER + ignored).splitlines()).exception.startswith("RuntimeError: Failed")


def test_an_exception_in_a_thread_says_so() -> None:
    text = "Exception in thread Thread-1 (work):\n" + trace("ValueError: no", frame("/w/a.py", 6, "work"))
    assert read_traceback(text.splitlines()).exception == "ValueError: no (in thread Thread-1 (work))"


def test_an_exception_without_a_message_has_no_colon() -> None:
    record = {"message": {"message": "AssertionError: ", "extraInfo": {"py_callstack": "", "timestamp": "17"}}}
    assert read_error_file(json.dumps(record)).exception == "AssertionError"


def test_a_recursion_is_one_frame_and_a_syntax_error_has_its_line() -> None:
    again = [frame("/w/a.py", 5, "f", "f()")] * 3
    assert len(read_traceback(trace("RecursionError: too deep", *again).splitlines()).frames) == 1
    text = trace(
        "SyntaxError: never closed", frame("/w/a.py", 5, "f"), '  File "/w/b.py", line 1\n    x = (1,\n        ^\n'
    )
    assert read_traceback(text.splitlines()).frames[-1] == ("/w/b.py", 1, "", "x = (1,")


def test_the_innermost_line_of_the_users_own_is_shown_however_deep_a_library_raises() -> None:
    deep = [frame(LIB, number, "f") for number in range(5)]
    parsed = read_traceback(trace("ValueError: x", frame("/w/a.py", 6, "work"), *deep).splitlines())
    assert [line for _, line, _, _ in parsed.frames] == [6, 3, 4]


DUMP = """Fatal Python error: Segmentation fault

Thread 0x00aa (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00ff (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/w/net.py", line 7 in crash
  File "/w/train.py", line 8 in <module>

Extension modules: numpy, torch._C (total: 2)"""
LATER = """Timeout (0:00:05)!
Thread 0x00aa (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Thread 0x00ff (most recent call first):
  File "/w/train.py", line 3 in stuck
  File "/w/train.py", line 4 in <module>"""


def test_the_dumps_of_faulthandler() -> None:
    crash, later = read_dump(DUMP.splitlines()), read_dump(["before", *LATER.splitlines()])
    assert crash.exception == "Fatal Python error: Segmentation fault"
    assert [name for _, _, name, _ in crash.frames] == ["<module>", "crash", "string_at"]
    assert later.exception == "faulthandler.dump_traceback_later: Timeout (0:00:05)!"
    assert [line for _, line, _, _ in later.frames] == [4, 3]
    assert read_dump(["nothing of the kind"]).exception == ""
