"""Which worker made the run fail, and why: pure functions from what is known of the dead to one block of text."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.diagnose.rules import timeouts
from phalanx.forkserver import paths
from phalanx.launch.output import tracebacks
from phalanx.launch.output.tracebacks import Line, TracebackReport

# What a healthy rank says when another one has gone: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|NCCL (remote|communicator was aborted)|ncclRemoteError|ProcessGroupNCCL.*(abort|watchdog)"
    r"|Connection was likely closed"
    r"|failed to connect|Rank \d+ is not ready|Gloo connectFullMesh failed|Application timeout caused pair closure"
    r"|successfully reached monitoredBarrier, but received errors"
    r"|Timed out waiting .* clients|BrokenPipeError|heartbeat"
    rf"|\b({'|'.join(paths.LOST_PEER)}): "  # of our own groups
)

_PEER_NAMED = re.compile(r"\bPeerLost: .*?\branks? (.*?) (?:has|have) ended")  # by one of our own groups
_OF_GROUP = re.compile(r" \(of this group: \d+\)")
_CLOSED = re.compile(r"(ConnectionResetError|ConnectionRefusedError|BrokenPipeError|EOFError)\b")
_IN_USE = re.compile(r"failed to listen on any local network address.*?port: (\d+).*EADDRINUSE")
_LOADER = "torch/utils/data/"
_MISMATCH = "Is there a distributed collective mismatch in your code?"  # gloo, where sizes do not fit

_NO_MESSAGE = re.compile(r"Exception raised from |^frame #\d+|^(Original )?Traceback |^C\+\+ CapturedTraceback")
_LONGEST = 300  # characters of a line
_MOST = 4  # more lines of a message

HUNG = "stands still: SIGKILL (--on-hang kill)"  # what is noted of a rank that is killed for that

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_ADVICE = {
    signal.SIGSEGV: "a crash in native code; run with PYTHONFAULTHANDLER=1 to see the Python line",
    signal.SIGABRT: "native code gave up; its last words are below",
    signal.SIGBUS: "a mapped file shrank, or /dev/shm is full",
    signal.SIGILL: "code for another processor",
}


@dataclass(frozen=True)
class ProcessFailure:
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
    told: float = 0.0  # when we told it to stop; 0: never
    blame: Sequence[str] = ()  # which rank made it time out: lines

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        return 128 - self.code if self.code < 0 else self.code


def report_of(death: ProcessFailure) -> TracebackReport:
    """What it has written about its end; a dump of faulthandler only where that is what ended it."""
    found = tracebacks.read_error_file(death.error) if death.error else TracebackReport()
    if found.exception:
        return found
    raised, dumped = tracebacks.read_traceback(death.stderr), tracebacks.read_dump(death.stderr)
    return dumped if dumped.exception and (death.code < 0 or not raised.exception) else raised


def first_cause(deaths: Sequence[ProcessFailure]) -> ProcessFailure | None:
    """The earliest death that is nobody else's consequence.

    An exception counts from when it was raised, not from when its process was gone; losing a peer counts only if
    there is nothing better. A worker that we stopped is a cause only if it had raised an exception by itself.
    """
    candidates = [(report_of(death), death) for death in deaths]
    candidates = [(report, death) for report, death in candidates if report.exception or not _obeyed(death)]
    blamed = any(death.blame for _, death in candidates)

    def order(candidate: tuple[TracebackReport, ProcessFailure]) -> tuple[bool, float]:
        report, death = candidate
        follows = _lost_a_peer(report) or (blamed and timeouts.timed_out(_said(report, death)))
        return (follows and not death.blame, _when(report, death))

    if not candidates:
        return None
    report, death = min(candidates, key=order)
    # Stopped on its way out: it would have ended with what its exception ends with.
    return replace(death, code=report.code) if report.exception and _obeyed(death) else death


def count(deaths: Sequence[ProcessFailure]) -> int:
    """How many failed by themselves: not those that ended because we told them to."""
    return sum(not death.stopped or -death.code in _CRASHES or _raised_before(death) for death in deaths)


def _raised_before(death: ProcessFailure) -> bool:
    """It had raised an exception when we told it to stop; where no time is known, one that is not by our signal."""
    report = report_of(death)
    if report.when is None:
        return bool(report.exception) and not _obeyed(death)
    return 0 < report.when <= death.told


def counted(block: str, others: int) -> str:
    """A block with the number of other ranks that failed, before its last line."""
    if others <= 0:
        return block
    *lines, last = block.split("\n")
    return "\n".join([*lines, f"  {others} other rank{'s' if others > 1 else ''} failed after it", last])


def timeout(death: ProcessFailure) -> timeouts.Timeout | None:
    """What it has waited for in vain, if a timeout of torch.distributed or of our own groups ended it."""
    return timeouts.read(_said(report_of(death), death))


def lost_a_peer(death: ProcessFailure) -> bool:
    return _lost_a_peer(report_of(death))


def _lost_a_peer(report: TracebackReport) -> bool:
    return bool(_PEER_LOST.search(report.exception)) and not _lost_a_loader(report)


def _lost_a_loader(report: TracebackReport) -> bool:
    """A process of a DataLoader has ended, and this one read from it: its socket says no more than another rank's."""
    return bool(_CLOSED.match(report.exception)) and any(_LOADER in file for file, *_ in report.stack)


def gave_up(death: ProcessFailure) -> bool:
    """A rank that waited for others, until it timed out or lost one of them."""
    return timeout(death) is not None or lost_a_peer(death)


def _said(report: TracebackReport, death: ProcessFailure) -> str:
    """NCCL's watchdog raises nothing: it aborts the process, and says why in stderr."""
    return report.exception if death.code != -signal.SIGABRT else "\n".join(death.stderr)


def lost(death: ProcessFailure) -> set[int]:
    """The ranks that it says it has lost."""
    named = _PEER_NAMED.search(_OF_GROUP.sub("", report_of(death).exception))
    return {int(rank) for rank in re.findall(r"\d+", named[1])} if named else set()


def follows(death: ProcessFailure, since: float) -> bool:
    """Whether it is what a healthy rank dies of when another one has gone, or came after something else was seen."""
    report = report_of(death)
    return _lost_a_peer(report) or _when(report, death) > since


def _when(report: TracebackReport, death: ProcessFailure) -> float:
    return report.when - death.skew if report.when else death.time


def _obeyed(death: ProcessFailure) -> bool:
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


def summary(death: ProcessFailure) -> str:
    """One line: who and why."""
    if death.blame:
        return death.blame[0]
    report = report_of(death)
    return f"{_who(death)} failed: {_short(report.exception or in_words(death.code))}"


def _who(death: ProcessFailure) -> str:
    return f"rank {death.rank}{f' ({death.device})' if death.device else ''}"


def _short(text: str) -> str:
    first = (text.splitlines() or [""])[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"


def place(death: ProcessFailure) -> str:
    """What crashed and where, in words that two of the same crash share. Empty: it was ended from outside."""
    report = report_of(death)
    if report.exception:
        file, number, *_ = report.frames[-1] if report.frames else ("", 0)
        return f"{report.exception.split(':')[0]} {file}:{number}"
    return "" if death.code == -signal.SIGKILL and not death.memory else in_words(death.code)


def differs(death: ProcessFailure) -> bool:
    """Ranks called different things, and one of our own groups has noticed."""
    return f"{paths.MISMATCH}: " in report_of(death).exception


def block(
    death: ProcessFailure, *, tail: Sequence[str], folder: str, left: Sequence[int] = (), means: Sequence[str] = ()
) -> str:
    """What the user reads at the end: the first cause, told once. `left`: ranks that had ended well by then. `means`:
    what can be said of it beside its own words."""
    report = report_of(death)
    lines = [summary(death), *(f"  {line}" for line in (*death.blame[1:], *means))]
    if death.blame:
        lines.append(f"  {_who(death)} timed out: {_short(report.exception or in_words(death.code))}")
    if report.exception:
        lines += _more(death, report)
        lines.append(f"  ended with {in_words(death.code)}")
    lines += _placed([frame for frame in report.frames if not death.blame or tracebacks.mine(frame)])
    if report.root is not None:
        lines.append(f"  {report.root.link}: {_short(report.root.exception)}")
        lines += (f"  {line}" for line in _placed([report.root.place] if report.root.place else ()))
    lines += _explained(death, report)
    if left and _lost_a_peer(report):
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left[:8]))}{' …' if len(left) > 8 else ''}"
        lines.append(f"  {who} had ended by then, without an error: uneven data, or an early return or exit?")
    if any(_MISMATCH in line for line in (report.exception, *death.stderr)):
        lines.append("  ranks called different collectives, or with different sizes: --check-collectives shows where")
    last = [*tail, *([] if report.exception else death.stderr[-10:])]  # else stderr is the traceback, told above
    if last:
        lines.append("  its last lines:")
        lines.extend(f"    {line}" for line in last)
    lines.append(f"  all of its output: {folder}")
    return "\n".join(lines)


def _more(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """The other lines of a message, without what C++ and DataLoader workers add to it."""
    more = report.exception.splitlines()[1:]
    if not report.frames:  # a refusal in words: what was seen, and what to type
        return more
    if differs(death):  # with the line of each rank
        return list(itertools.takewhile(lambda line: line.startswith("  "), more))
    told = [line for line in itertools.takewhile(lambda line: not _NO_MESSAGE.search(line), more) if line.strip()]
    return [f"    {_short(line.strip())}" for line in told[:_MOST]] + ["    …"] * (len(told) > _MOST)


def _placed(frames: Sequence[Line]) -> list[str]:
    lines = []
    for file, number, name, code in frames:
        lines.append(f"  {file}:{number}{f' in {name}' if name else ''}")
        if code:
            lines.append(f"      {code.strip()}")
    return lines


def _explained(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """What ended it, where its own words do not say that."""
    if port := _IN_USE.search(report.exception):
        return [f"  port {port[1]} is in use: leave MASTER_PORT as the launcher has set it, to a free port"]
    if _lost_a_loader(report):
        return ["  a DataLoader worker of this rank has died: run with num_workers=0 to see its error"]
    if death.memory:
        return [f"  {death.memory}"]
    if death.hung:
        return ["  it stood still, and phalanx has killed it (--on-hang kill)"]
    if death.code == -signal.SIGKILL:
        return ["  killed from outside: no memory limit was hit, as far as the kernel tells"]
    if -death.code in _ADVICE and not report.frames:
        return [f"  {_ADVICE[signal.Signals(-death.code)]}"]
    return []
