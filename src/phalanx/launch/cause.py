"""Which worker made the run fail, and why: pure functions from what is known of the dead to one block of text."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

# What a healthy rank says when another one has gone: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|NCCL (remote|communicator was aborted)|ncclRemoteError|ProcessGroupNCCL.*(abort|watchdog)"
    r"|Connection was likely closed"
    r"|failed to connect|Rank \d+ is not ready|Gloo connectFullMesh failed|Application timeout caused pair closure"
    r"|Timed out waiting .* clients|BrokenPipeError|heartbeat"
    r"|\b(PeerLost|Late|Aborted): "  # of our own groups
)

_MISMATCH = "Is there a distributed collective mismatch in your code?"  # gloo, where sizes do not fit

HUNG = "stands still: SIGKILL (--on-hang kill)"  # what is noted of a rank that is killed for that

_ADVICE = {
    signal.SIGSEGV: "a crash in native code; run with PYTHONFAULTHANDLER=1 to see the Python line",
    signal.SIGABRT: "native code gave up; its last words are below",
    signal.SIGBUS: "a mapped file shrank, or /dev/shm is full",
    signal.SIGILL: "code for another processor",
}


@dataclass(frozen=True)
class Death:
    """One worker that ended badly, and everything known about it."""

    rank: int
    code: int  # exit code, or minus the signal
    time: float  # when it was seen to end
    stopped: bool = False  # we had told it to stop by then
    device: str = ""
    error: str = ""  # content of its error.json
    stderr: Sequence[str] = ()
    memory: str = ""  # what the kernel says about memory
    hung: bool = False  # we have killed it for that
    skew: float = 0.0  # of its node's clock, which the error file goes by

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True)
class Report:
    exception: str = ""  # "ValueError: no such key"
    when: float | None = None
    frames: tuple[tuple[str, int, str, str], ...] = ()
    code: int = 1  # that its process would have ended with


def read_error_file(text: str) -> Report:
    """error.json as written by us or by torch's @record; nothing in it is trusted to have a shape."""
    try:
        record = json.loads(text)
        message = record["message"]
        if isinstance(message, str):  # written by @record for some errors
            return Report(exception=message)
        when = record.get("time") or float(message["extraInfo"]["timestamp"])
        frames = tuple((str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in record.get("frames", ()))
        if not frames:
            frames = _frames(message["extraInfo"].get("py_callstack", ""))
        return Report(str(message["message"]), float(when), frames, int(record.get("code", 1)))
    except (ValueError, KeyError, TypeError, IndexError):
        return Report()


_FRAME = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?: {4,}(?P<code>.+)\n)?', re.MULTILINE
)


_TORCHS = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # what torch puts before each line of a traceback
_IN_WORDS = "CollectiveMismatchError"  # its text has the places that matter


def _frames(trace: str) -> tuple[tuple[str, int, str, str], ...]:
    found = [(m["file"], int(m["line"]), m["name"], m["code"] or "") for m in _FRAME.finditer(trace + "\n")]
    return tuple(found[-3:])


def read_traceback(lines: Sequence[str]) -> Report:
    """The last traceback in a worker's stderr, for workers that could not write an error file."""
    text = _TORCHS.sub("", "\n".join(lines))
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return Report()
    trace = text[start:]
    told = trace.splitlines()
    for at, line in enumerate(told[1:], 1):
        if line and not line.startswith((" ", "\t")):
            if _IN_WORDS in line.partition(":")[0]:
                more = itertools.takewhile(lambda line: line.startswith("  "), told[at + 1 :])
                return Report(exception="\n".join([line.removeprefix("phalanx."), *more]))
            return Report(exception=line, frames=_frames(trace))
    return Report(frames=_frames(trace))


def report_of(death: Death) -> Report:
    found = read_error_file(death.error) if death.error else Report()
    return found if found.exception else read_traceback(death.stderr)


def first_cause(deaths: Sequence[Death]) -> Death | None:
    """The earliest death that is nobody else's consequence.

    An exception counts from when it was raised, not from when its process was gone; losing a peer counts only if
    there is nothing better. A worker that we stopped is a cause only if it had raised an exception by itself.
    """
    candidates = [(report_of(death), death) for death in deaths]
    candidates = [(report, death) for report, death in candidates if report.exception or not _obeyed(death)]

    def order(candidate: tuple[Report, Death]) -> tuple[bool, float]:
        report, death = candidate
        return (bool(_PEER_LOST.search(report.exception)), _when(report, death))

    if not candidates:
        return None
    report, death = min(candidates, key=order)
    # Stopped on its way out: it would have ended with what its exception ends with.
    return replace(death, code=report.code) if report.exception and _obeyed(death) else death


def follows(death: Death, since: float) -> bool:
    """Whether it is what a healthy rank dies of when another one has gone, or came after something else was seen."""
    report = report_of(death)
    return bool(_PEER_LOST.search(report.exception)) or _when(report, death) > since


def _when(report: Report, death: Death) -> float:
    return report.when - death.skew if report.when else death.time


def _obeyed(death: Death) -> bool:
    """It ended by the signal that it was stopped with, or by the exit code that stands for it."""
    numbers = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    return death.stopped and (-death.code in numbers or death.code - 128 in numbers)


def in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{number.name} ({signal.strsignal(number)})"


def summary(death: Death) -> str:
    """One line: who and why."""
    report = report_of(death)
    where = f" ({death.device})" if death.device else ""
    why = report.exception.splitlines()[0] if report.exception else in_words(death.code)
    return f"rank {death.rank}{where} failed: {why[:300]}"


def place(death: Death) -> str:
    """What crashed and where, in words that two of the same crash share. Empty: it was ended from outside."""
    report = report_of(death)
    if report.exception:
        file, number, *_ = report.frames[-1] if report.frames else ("", 0)
        return f"{report.exception.split(':')[0]} {file}:{number}"
    return "" if death.code == -signal.SIGKILL and not death.memory else in_words(death.code)


def block(death: Death, *, tail: Sequence[str], folder: str, also: int = 0, left: Sequence[int] = ()) -> str:
    """What the user reads at the end: the first cause, told once. `left`: ranks that had ended well by then."""
    report = report_of(death)
    lines = [summary(death)]
    if report.exception:
        if not report.frames:  # a refusal in words: what was seen, and what to type
            lines.extend(report.exception.splitlines()[1:])
        lines.append(f"  ended with {in_words(death.code)}")
    for file, number, name, code in report.frames:
        lines.append(f"  {file}:{number} in {name}")
        if code:
            lines.append(f"      {code.strip()}")
    if death.memory:
        lines.append(f"  {death.memory}")
    elif death.hung:
        lines.append("  it stood still, and phalanx has killed it (--on-hang kill)")
    elif death.code == -signal.SIGKILL:
        lines.append("  killed from outside: no memory limit was hit, as far as the kernel tells")
    elif -death.code in _ADVICE:
        lines.append(f"  {_ADVICE[signal.Signals(-death.code)]}")
    if left and _PEER_LOST.search(report.exception):
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left[:8]))}{' …' if len(left) > 8 else ''}"
        lines.append(f"  {who} had ended by then, with exit code 0: uneven data, or an early return or exit?")
    if any(_MISMATCH in line for line in (report.exception, *death.stderr)):
        lines.append("  ranks called different collectives, or with different sizes: --check-collectives shows where")
    last = [*tail, *([] if report.exception else death.stderr[-10:])]  # else stderr is the traceback, told above
    if last:
        lines.append("  its last lines:")
        lines.extend(f"    {line}" for line in last)
    if also:
        lines.append(f"  {also} other rank{'s' if also > 1 else ''} failed after it")
    lines.append(f"  all of its output: {folder}")
    return "\n".join(lines)
