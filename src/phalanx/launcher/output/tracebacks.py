"""Parses the output of a worker about its failure: error.json, a traceback, a faulthandler dump. Pure functions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.forkserver import paths

Line = tuple[str, int, str, str]  # file, line number, function, source


@dataclass(frozen=True)
class Root:
    """The first exception of a chain, from which the last one was raised."""

    link: str  # "caused by", "while handling", "first of 2"
    exception: str
    place: Line | None = None  # the innermost line of the user's own code


@dataclass(frozen=True)
class TracebackReport:
    """The content of a traceback."""

    exception: str = ""  # "ValueError: no such key"
    when: float | None = None
    frames: tuple[Line, ...] = ()  # those to show, outermost first
    code: int = 1  # exit code that the exception leads to
    root: Root | None = None
    stack: tuple[Line, ...] = ()  # all frames, outermost first
    kind: str = ""  # name of the exception's class; "SystemExit" if the script called sys.exit
    in_words: bool = False  # the message contains all lines that matter


_HEAD = "Traceback (most recent call last):"
_ORIGINAL = f"Original {_HEAD}"  # in the message of a DataLoader worker's re-raised exception
_LINKS = {
    "The above exception was the direct cause of the following exception:": "caused by",
    "During handling of the above exception, another exception occurred:": "while handling",
}
_FRAME = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?\n(?: {4,}(?P<code>.+)\n)?', re.MULTILINE
)
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch prefixes each line of a traceback with it
_MARGIN = re.compile(r"^ *(\| ?|\+-[-+]*(?= )|\+-+$)", re.MULTILINE)  # of an exception group
_FIRST_OF_GROUP = re.compile(r"^[ |]*\+-\+-+ 1 -+$", re.MULTILINE)
_NEXT_OF_GROUP = re.compile(r"^[ |]*\+-+( \d+ -+)?$", re.MULTILINE)
_BARS = re.compile(r"^[ |]*\| ", re.MULTILINE)
_SUB_EXCEPTIONS = re.compile(r"\((\d+) sub-exceptions?\)")
_IGNORED = re.compile(r"^Exception ignored (in|on)\b|^Error in atexit")  # Python continues after these
_IN_THREAD = re.compile(r"^Exception in thread (?P<name>.+):$")
_IN_WORDS = ("CollectiveMismatchError", f"errors.{paths.MISMATCH}")  # their text contains the relevant lines
_UNNAMED = re.compile(r"^phalanx\.(\w+\.)*")
_EMPTY = re.compile(r"^([\w.]+): *$")  # an exception without a message


def read_error_file(text: str) -> TracebackReport:
    """Parse error.json, written by phalanx or by torch's @record. Malformed content gives an empty report."""
    try:
        record = json.loads(text)
        message = record["message"]
        if isinstance(message, str):  # written by @record for some errors
            return TracebackReport(exception=message)
        when = record.get("time") or float(message["extraInfo"]["timestamp"])
        frames = tuple((str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in record.get("frames", ()))
        chain = str(message["extraInfo"].get("py_callstack", ""))
        whole = _frames(_last(chain))
        return TracebackReport(
            exception=_EMPTY.sub(r"\1", str(message["message"])),
            when=float(when),
            frames=_once(frames) or shown(whole),
            code=int(record.get("code", 1)),
            root=root(chain),
            stack=whole or frames,
            kind=str(record.get("exception", "")),
            in_words=bool(record.get("in_words")),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        return TracebackReport()


def read_traceback(lines: Sequence[str]) -> TracebackReport:
    """Parse the last traceback in stderr, for workers that could not write an error file."""
    text = _RANK.sub("", "\n".join(lines))
    while (start := _start(text)) >= 0:
        before = text[:start].rstrip("\n").rpartition("\n")[2]
        if not _IGNORED.search(before):
            found = _read(text[start:], text)
            thread = _IN_THREAD.search(before)
            if thread and found.exception:
                first, *more = found.exception.split("\n")
                return TracebackReport("\n".join([f"{first} (in thread {thread['name']})", *more]), frames=found.frames)
            return found
        text = text[:start]
    return TracebackReport()


def _start(text: str) -> int:
    """Return where the last traceback starts, ignoring those within a message or a group."""
    end = len(text)
    while (start := text.rfind(_HEAD, 0, end)) >= 0:
        line = text.rfind("\n", 0, start) + 1
        if not text[line:start].strip():
            return start
        if text[line:start].strip() == "+ Exception Group":
            return line
        end = start
    return -1


def _read(trace: str, text: str) -> TracebackReport:
    frames = _frames(trace.partition(_ORIGINAL)[0])
    lines = _MARGIN.sub("", trace).splitlines()
    for at, line in enumerate(lines[1:], 1):
        if not line or line.startswith((" ", "\t")):
            continue
        if line.partition(":")[0].endswith(_IN_WORDS):
            more = list(itertools.takewhile(lambda line: line.startswith("  "), lines[at + 1 :]))
            exception = "\n".join([_UNNAMED.sub("", line), *more])
            return TracebackReport(exception, frames=() if more else shown(frames), stack=frames)
        return TracebackReport(_EMPTY.sub(r"\1", line), frames=shown(frames), root=root(text), stack=frames)
    return TracebackReport(frames=shown(frames), stack=frames)


def _last(chain: str) -> str:
    """Return the traceback of the last exception, without its message and without chained exceptions."""
    start = _start(chain)
    return chain[start:].partition(_ORIGINAL)[0] if start >= 0 else chain


def _frames(trace: str) -> tuple[Line, ...]:
    plain = _FIRST_OF_GROUP.split(trace)[0]
    plain = _MARGIN.sub("", plain) if "Exception Group" in trace[:80] else plain
    found = _FRAME.finditer(plain + "\n")
    return tuple((m["file"], int(m["line"]), m["name"] or "", m["code"] or "") for m in found)


def mine(line: Line) -> bool:
    """Return whether a line is in the user's own code."""
    from phalanx.diagnose import frames  # many patterns, which a run without failures does not need
    from phalanx.diagnose.evidence import Frame

    return frames.mine(Frame(line[0], line[1], line[2]))


def shown(frames: Sequence[Line]) -> tuple[Line, ...]:
    """Return the frames to show: the last ones, including the innermost of the user's own code."""
    own = [frame for frame in frames if mine(frame)]
    found = frames[-3:] if not own or own[-1] in frames[-3:] else [own[-1], *frames[-2:]]
    return _once(found)


def without_access(frames: Sequence[Line]) -> Sequence[Line]:
    """Return the frames without the innermost ones in which an object has rejected the name of an attribute."""
    end = len(frames)
    while end > 1 and frames[end - 1][2] in ("__getattr__", "__setattr__") and not mine(frames[end - 1]):
        end -= 1
    return frames[:end]


def _once(frames: Sequence[Line]) -> tuple[Line, ...]:
    """Collapse repeated frames of a recursion."""
    return tuple(frame for frame, _ in itertools.groupby(frames))


def root(chain: str) -> Root | None:
    """Return the first exception of the chain, or the one raised in a group or a DataLoader worker."""
    chain = _RANK.sub("", chain)
    inner = _inner(chain[max(_start(chain), 0) :])
    if inner is not None:
        return inner
    found, link = None, "caused by"
    while (start := _start(chain)) >= 0:
        before = chain[:start].rstrip()
        kind = next((_LINKS[line] for line in _LINKS if before.endswith(line)), None)
        if kind is None:
            break
        link = "while handling" if kind == "while handling" else link
        chain = before[: before.rfind("\n")] if "\n" in before else ""
        start = _start(chain)
        if start < 0:
            break
        part = chain[start:]
        found = _inner(part) or _rooted(link, part)
    return found


def _inner(part: str) -> Root | None:
    """Return the exception inside another: the first of a group, or that of a DataLoader worker."""
    if "Exception Group" in part[:80] and (first := _FIRST_OF_GROUP.search(part)):
        count = _SUB_EXCEPTIONS.search(part[: first.start()])
        return _rooted(f"first of {count[1] if count else 'several'}", _first_of_group(part))
    _, marker, original = part.partition(_ORIGINAL)
    return _rooted("caused by", f"{_HEAD}{original}") if marker else None


def _first_of_group(part: str) -> str:
    """Return the traceback of the innermost first exception of a group, without the bars."""
    end = None
    while (first := _FIRST_OF_GROUP.search(part)) and (end is None or first.start() < end.start()):
        part = part[first.end() + 1 :]
        end = _NEXT_OF_GROUP.search(part)
    return _BARS.sub("", part[: end.start()] if end else part)


def _rooted(link: str, part: str) -> Root | None:
    lines = (line for line in part.splitlines() if line and not line.startswith((" ", "\t", _HEAD)))
    exception = next(lines, "")
    if not exception:
        return None
    own = [frame for frame in _frames(part) if mine(frame)]
    return Root(link, _EMPTY.sub(r"\1", exception), own[-1] if own else None)


_FATAL = re.compile(r"^(Fatal Python error: .+|Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!)$", re.MULTILINE)
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')


def read_dump(lines: Sequence[str]) -> TracebackReport:
    """Parse a faulthandler dump of a crash, or of dump_traceback_later()."""
    text = "\n".join(lines)
    fatal = list(_FATAL.finditer(text))
    if not fatal:
        return TracebackReport()
    head_line = fatal[-1]
    threads: list[tuple[bool, list[Line]]] = []
    for line in text[head_line.end() :].splitlines():
        head, frame = _THREAD.match(line), _DUMPED.match(line)
        if head:
            threads.append((head["current"].startswith("Current"), []))
        elif frame and threads:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            threads[-1][1].append((frame["file"], number, frame["name"], ""))
    # For a crash, the thread that crashed; for a timeout, the main thread, which is written last.
    chosen = next((frames for current, frames in threads if current), threads[-1][1] if threads else [])
    frames = tuple(reversed(chosen))
    later = head_line[1].startswith("Timeout")
    exception = f"faulthandler.dump_traceback_later: {head_line[1]}" if later else head_line[1]
    return TracebackReport(exception, frames=shown(frames), stack=frames)
