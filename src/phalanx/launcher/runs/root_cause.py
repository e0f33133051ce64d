"""Finds the worker that made a run fail, and explains why, in one block of text. Pure functions."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.control.messages import FailedRanks
from phalanx.diagnose import words
from phalanx.diagnose.rules import timeouts
from phalanx.errors import NonFiniteError
from phalanx.forkserver import paths
from phalanx.launcher.output import tracebacks
from phalanx.launcher.output.tracebacks import Line, TracebackReport

# Errors of a healthy rank that lost a peer: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed|remote process exited"
    r"|NCCL (remote|communicator was aborted)|ncclRemoteError|ProcessGroupNCCL.*(abort|watchdog)"
    r"|Connection was likely closed"
    r"|failed to connect|Rank \d+ is not ready|Gloo connectFullMesh failed|Application timeout caused pair closure"
    r"|successfully reached monitoredBarrier, but received errors"
    r"|Timed out waiting .* clients|BrokenPipeError|heartbeat"
    rf"|\b({'|'.join(paths.LOST_PEER)}): "  # phalanx's own groups
)

_PEER_NAMED = re.compile(r"\bPeerLost: .*?\branks? (.*?) (?:has|have) ended")  # phalanx's own groups
_OF_GROUP = re.compile(r" \(of this group: \d+\)")
_CLOSED = re.compile(r"(ConnectionResetError|ConnectionRefusedError|BrokenPipeError|EOFError)\b")
_IN_USE = re.compile(r"failed to listen on any local network address.*?port: (\d+).*EADDRINUSE")
_LOADER = "torch/utils/data/"
_MISMATCH = "Is there a distributed collective mismatch in your code?"  # gloo, if sizes differ

_NO_MESSAGE = re.compile(r"Exception raised from |^frame #\d+|^(Original )?Traceback |^C\+\+ CapturedTraceback")
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages|python3(?:\.\d+)?|src)/")
_PERMANENT = (
    "SyntaxError",
    "IndentationError",
    "TabError",
    "ImportError",
    "ModuleNotFoundError",
    "UsageError",
    "OptionError",
    "NameError",
    "UnboundLocalError",
)
USAGE = "usage error"  # how the report of a script begins that argparse has ended
_MOST_FRAMES = 12  # of the script
_LONGEST = 300  # characters of a line
_MOST = 4  # further lines of a message
_MOST_KINDS = 16  # of failures on one node

HUNG = "stalled: SIGKILL (--on-hang kill)"

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_ADVICE = {
    signal.SIGSEGV: "a crash in native code; run with PYTHONFAULTHANDLER=1 to see the Python line",
    signal.SIGABRT: "native code aborted; see its last lines below",
    signal.SIGBUS: "a mapped file shrank, or /dev/shm is full",
    signal.SIGILL: "an instruction that this processor does not support",
}


@dataclass(frozen=True)
class ProcessFailure:
    """A worker that failed, and everything known about it."""

    rank: int
    code: int  # exit code, or minus the signal
    time: float  # when its end was noticed
    stopped: bool = False  # we had told it to stop before
    device: str = ""
    error: str = ""  # content of its error.json
    stderr: Sequence[str] = ()
    memory: str = ""  # what the kernel reports about memory
    hung: bool = False  # we killed it because it was stalled
    skew: float = 0.0  # of its node's clock, which its error file uses
    stop_sent: float = 0.0  # when we told it to stop; 0: never
    blame: Sequence[str] = ()  # lines that say which rank made it time out, or left it alone

    @property
    def exit_code(self) -> int:
        """Return the exit code as shells report it."""
        return 128 - self.code if self.code < 0 else self.code


def report_of(death: ProcessFailure) -> TracebackReport:
    """Return what the worker wrote about its failure; a faulthandler dump only if that ended it."""
    found = tracebacks.read_error_file(death.error) if death.error else TracebackReport()
    if found.exception and (found.kind != "SystemExit" or found.code == death.code):
        return found  # a script may catch the SystemExit of sys.exit, and end in another way
    raised, dumped = tracebacks.read_traceback(death.stderr), tracebacks.read_dump(death.stderr)
    return dumped if dumped.exception and (death.code < 0 or not raised.exception) else raised


def first_cause(deaths: Sequence[ProcessFailure]) -> ProcessFailure | None:
    """Return the earliest failure that is not a consequence of another.

    An exception counts from when it was raised, not from when its process ended. The loss of a peer counts only if
    there is nothing better. A worker that we stopped is a cause only if it raised an exception by itself.
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
    # We stopped it while it was exiting: report the code that its exception leads to.
    return replace(death, code=report.code) if report.exception and _obeyed(death) else death


def count(deaths: Sequence[ProcessFailure]) -> int:
    """Return how many failed by themselves, rather than because we stopped them."""
    return sum(not death.stopped or -death.code in _CRASHES or _raised_before(death) for death in deaths)


def _raised_before(death: ProcessFailure) -> bool:
    """Return whether it had raised an exception before we stopped it."""
    report = report_of(death)
    if report.when is None:
        return bool(report.exception) and not _obeyed(death)
    return 0 < report.when <= death.stop_sent


def failed_ranks(deaths: Sequence[ProcessFailure]) -> tuple[FailedRanks, ...]:
    """Return the ranks that failed, grouped by what failed and where. Without those that ended because we stopped them.

    Of failures that are all different, only some are named.
    """
    kinds: dict[tuple[str, str, bool, bool], list[int]] = {}
    for death in deaths:
        report = report_of(death)
        if _obeyed(death) and not report.exception:
            continue
        lost = _lost_a_peer(report) or timeouts.timed_out(_said(report, death))
        text = "" if lost else _short(report.exception or in_words(death.code))
        key = (place(death)[:_LONGEST], text, lost, count([death]) == 0)
        if len(kinds) >= _MOST_KINDS and key not in kinds:
            key = ("", "other errors", lost, key[3])
        kinds.setdefault(key, []).append(death.rank)
    return tuple(
        FailedRanks(place=where, text=text, lost_peer=lost, late=late, ranks=tuple(ranks))
        for (where, text, lost, late), ranks in kinds.items()
    )


def afterwards(cause: ProcessFailure, failed: Iterable[FailedRanks]) -> list[str]:
    """Return what became of the ranks that failed after the first one, on any node: one line per kind of failure."""
    where = place(cause)[:_LONGEST]
    same: list[int] = []
    lost: list[int] = []
    different: dict[str, list[int]] = {}
    for kind in failed:
        ranks = [rank for rank in kind.ranks if rank != cause.rank]
        if where and kind.place == where:
            same += ranks
        elif kind.lost_peer:
            lost += ranks
        elif ranks and not kind.late:
            different[kind.text] = [*different.get(kind.text, ()), *ranks]
    lines = [f"{words.who(sorted(same))} failed in the same way"] if same else []
    lines += [f"{words.who(sorted(ranks))} failed: {text}" for text, ranks in list(different.items())[:_MOST]]
    if len(different) > _MOST:
        lines.append(f"{sum(map(len, list(different.values())[_MOST:]))} more failed in other ways")
    lines += [f"{words.who(sorted(lost))} lost the peer"] if lost else []
    return [f"afterwards: {line}" for line in lines]


def with_afterwards(block: str, lines: Sequence[str]) -> str:
    """Insert the lines of `afterwards` before the last line of a block, which says where the output is."""
    shown = block.split("\n")
    end = max(len(shown) - 1, 1)
    return "\n".join([*shown[:end], *(f"  {line}" for line in lines), *shown[end:]])


def timeout(death: ProcessFailure) -> timeouts.Timeout | None:
    """Return what the worker waited for, if a timeout of torch.distributed or of phalanx's groups ended it."""
    return timeouts.read(_said(report_of(death), death))


def lost_a_peer(death: ProcessFailure) -> bool:
    """Return whether the worker failed because another rank was gone."""
    return _lost_a_peer(report_of(death))


def names_lost_peer(exception: str) -> bool:
    """Return whether the text of an exception is that of a rank that lost a peer."""
    return bool(_PEER_LOST.search(exception))


def stopped_by_signal(text: str) -> bool:
    """Return whether a traceback is a consequence of Ctrl-C: an interrupt, or the loss of a peer that was stopped."""
    last = next((line for line in reversed(text.splitlines()) if line and not line.startswith(" ")), "")
    return last.startswith("KeyboardInterrupt") or names_lost_peer(text)


def _lost_a_peer(report: TracebackReport) -> bool:
    return names_lost_peer(report.exception) and not _lost_a_loader(report)


def _lost_a_loader(report: TracebackReport) -> bool:
    """Return whether a DataLoader worker died: its closed socket looks like the loss of a peer."""
    return bool(_CLOSED.match(report.exception)) and any(_LOADER in file for file, *_ in report.stack)


def gave_up(death: ProcessFailure) -> bool:
    """Return whether the rank was waiting for others when it timed out or lost one of them."""
    return timeout(death) is not None or lost_a_peer(death)


def _said(report: TracebackReport, death: ProcessFailure) -> str:
    """Return the message of a failure. NCCL's watchdog raises nothing: it aborts, and writes to stderr."""
    return report.exception if death.code != -signal.SIGABRT else "\n".join(death.stderr)


def lost(death: ProcessFailure) -> set[int]:
    """Return the ranks that the worker reported as lost."""
    named = _PEER_NAMED.search(_OF_GROUP.sub("", report_of(death).exception))
    return {int(rank) for rank in re.findall(r"\d+", named[1])} if named else set()


def left_alone(death: ProcessFailure, gone: Mapping[int, bool]) -> list[str]:
    """Return lines that blame ranks which exited without an error, if the worker failed because it lost one of them.

    `gone`: all ranks that had exited with exit code 0, and whether they are known to have done so during the training.
    """
    named = lost(death)
    ranks = sorted(gone.keys() & named if named else gone)
    if not ranks or not lost_a_peer(death):
        return []
    when = " in the middle of the training" if all(gone[rank] for rank in ranks) else ""
    return [
        f"{words.who(ranks)} exited{when}, with exit code 0, while {_who(death)} still needed {_it(ranks)}",
        "uneven data, an early return, or sys.exit() on some ranks only?",
    ]


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def follows(death: ProcessFailure, since: float) -> bool:
    """Return whether the failure is a consequence: the loss of a peer, or later than `since`."""
    report = report_of(death)
    return _lost_a_peer(report) or _when(report, death) > since


def _when(report: TracebackReport, death: ProcessFailure) -> float:
    return report.when - death.skew if report.when else death.time


def _obeyed(death: ProcessFailure) -> bool:
    """Return whether it ended with the signal that we sent, or the exit code for it."""
    numbers = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    return death.stopped and (-death.code in numbers or death.code - 128 in numbers)


def in_words(code: int) -> str:
    """Return an exit code or signal as text."""
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{number.name} ({signal.strsignal(number)})"


def summary(death: ProcessFailure) -> str:
    """Return rank and reason in one line."""
    if death.blame:
        return death.blame[0]
    report = report_of(death)
    memory = f", {death.memory}" if death.memory and not report.exception else ""
    return f"{_who(death)} failed: {_short(report.exception or in_words(death.code))}{memory}"


def _who(death: ProcessFailure) -> str:
    return f"rank {death.rank}{f' ({death.device})' if death.device else ''}"


def _short(text: str) -> str:
    first = (text.splitlines() or [""])[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"


def place(death: ProcessFailure) -> str:
    """Return what failed and where, equal for two of the same failure. Empty if it was killed from outside."""
    report = report_of(death)
    if report.exception:
        file, number, *_ = report.frames[-1] if report.frames else ("", 0)
        return f"{report.exception.split(':')[0]} {file}:{number}"
    return "" if death.code == -signal.SIGKILL and not death.memory else in_words(death.code)


def differs(death: ProcessFailure) -> bool:
    """Return whether one of phalanx's groups found a collective mismatch."""
    return f"{paths.MISMATCH}: " in report_of(death).exception


def permanent(death: ProcessFailure) -> bool:
    """Return whether another try would fail in the same way: the script cannot be parsed or imported, uses a name that
    does not exist, or refuses its arguments.
    """
    report = report_of(death)
    return report.kind in _PERMANENT or report.exception.startswith(f"{USAGE}: ")


def stopped_itself(death: ProcessFailure) -> bool:
    """Return whether the training has stopped itself, because its loss or its gradients were not finite."""
    return report_of(death).kind == NonFiniteError.__name__


def raised(death: ProcessFailure) -> bool:
    """Return whether an exception of the script ended it, rather than the loss of others."""
    report = report_of(death)
    return bool(report.exception and report.stack) and death.code >= 0 and not gave_up(death)


def block(
    death: ProcessFailure,
    *,
    tail: Sequence[str],
    folder: str,
    means: Sequence[str] = (),
    brief: bool = False,
) -> str:
    """Return the explanation of the first cause that the user reads at the end.

    `means` are further lines of explanation. `brief`: the console shows the traceback of this rank.
    """
    report = report_of(death)
    lines = [summary(death), *(f"  {line}" for line in (*death.blame[1:], *means))]
    if death.blame:
        what = "timed out" if timeout(death) is not None or not _lost_a_peer(report) else "lost the peer"
        lines.append(f"  {_who(death)} {what}: {_short(report.exception or in_words(death.code))}")
    if report.exception and not brief and not (death.blame and _lost_a_peer(report)):
        lines += _more(death, report)
    said = report.kind == "SystemExit" or (report.in_words and death.code == report.code)
    if report.exception and not said and death.code != 1:
        lines.append(f"  ended with {in_words(death.code)}")
    usage = report.exception.startswith(f"{USAGE}: ")  # the message of argparse is enough, if it is shown
    if not brief or not death.error or (report.kind == "SystemExit" and not usage):  # no traceback says where
        lines += _frames(report, only_own=bool(death.blame))
        if report.root is not None:
            lines.append(f"  {report.root.link}: {_short(report.root.exception)}")
            lines += (f"  {line}" for line in _placed([report.root.place] if report.root.place else ()))
    lines += _explained(death, report)
    if any(_MISMATCH in line for line in (report.exception, *death.stderr)):
        lines.append("  ranks called different collectives, or with different sizes: --check-collectives shows where")
    last = [*tail, *([] if report.exception else death.stderr[-10:])]  # otherwise stderr is the traceback shown above
    if last and not brief:
        lines.append("  its last lines:")
        lines.extend(f"    {line}" for line in last)
    lines.append(f"  all of its output: {folder}")
    return "\n".join(lines)


def _more(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """Return the further lines of a message, without what C++ and DataLoader workers append."""
    more = report.exception.splitlines()[1:]
    if report.exception.startswith(f"{USAGE}: "):
        return [f"    {line.rstrip()}" for line in _usage(death.stderr)]
    if report.in_words or not report.frames:  # an error of phalanx: its details and fix
        return more
    if differs(death):  # the call of each rank
        return list(itertools.takewhile(lambda line: line.startswith("  "), more))
    kept = [line for line in itertools.takewhile(lambda line: not _NO_MESSAGE.search(line), more) if line.strip()]
    return [f"    {_short(line.strip())}" for line in kept[:_MOST]] + ["    …"] * (len(kept) > _MOST)


def _usage(stderr: Sequence[str]) -> list[str]:
    """Return the last usage message of argparse, without its error."""
    starts = [index for index, line in enumerate(stderr) if line.startswith("usage: ")]
    if not starts:
        return []
    first, *rest = stderr[starts[-1] :]
    return [first, *itertools.takewhile(lambda line: line.startswith(" "), rest)]


def script_lines(traceback: str) -> list[str]:
    """Return a traceback in a few lines: the script's frames, others folded, and the first exception of a chain."""
    report = tracebacks.read_traceback(traceback.splitlines())
    lines = _frames(report, only_own=False)
    if report.root is not None:
        lines.append(f"  {report.root.link}: {_short(report.root.exception)}")
        lines += (f"  {line}" for line in _placed([report.root.place] if report.root.place else ()))
    return [line.removeprefix("  ") for line in lines]


def frames(death: ProcessFailure) -> tuple[str, ...]:
    """Return lines about where the script failed."""
    return tuple(_frames(report_of(death), only_own=True))


def _frames(report: TracebackReport, *, only_own: bool) -> list[str]:
    """Return the frames of the script, from the outermost. Those of libraries below and between them are folded."""
    stack = report.stack or report.frames
    if report.kind != "SystemExit" and not any(map(tracebacks.mine, stack)):
        return [] if only_own else _placed(report.frames)
    parts = [(own, list(group)) for own, group in itertools.groupby(_last_frames(stack), tracebacks.mine)]
    while parts and not parts[0][0]:
        parts.pop(0)  # what called the script
    lines = []
    for own, group in parts:
        if own:
            lines += _placed([frame for frame, _ in itertools.groupby(group)])
        elif not only_own and report.kind != "SystemExit":
            lines.append(_folded(group))
    return lines


def _last_frames(stack: Sequence[Line]) -> Sequence[Line]:
    """Return a stack without most of its repeated frames."""
    once = [frame for frame, _ in itertools.groupby(stack)]
    own = [index for index, frame in enumerate(once) if tracebacks.mine(frame)]
    return once if len(own) <= _MOST_FRAMES else once[own[-_MOST_FRAMES] :]


def _folded(frames: Sequence[Line]) -> str:
    """Return one line for several frames of libraries."""
    file, number, name, _ = frames[-1]
    file = _PACKAGES.sub("", file)
    if len(frames) == 1:
        return f"  … {file}:{number} in {name}"
    return f"  … {len(frames)} frames, the last {file}:{number} in {name}"


def _placed(frames: Sequence[Line]) -> list[str]:
    lines = []
    for file, number, name, code in frames:
        lines.append(f"  {file}:{number}{f' in {name}' if name else ''}")
        if code:
            lines.append(f"      {code.strip()}")
    return lines


def _explained(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """Return what ended it, if its own message does not say that."""
    if port := _IN_USE.search(report.exception):
        return [f"  port {port[1]} is in use: leave MASTER_PORT as the launcher sets it, to a free port"]
    if _lost_a_loader(report):
        return ["  a DataLoader worker of this rank died: run with num_workers=0 to see its error"]
    if death.memory:
        return [f"  {death.memory}"] if report.exception else []  # the first line has it
    if death.hung:
        return ["  it was stalled, and phalanx killed it (--on-hang kill)"]
    if death.code == -signal.SIGKILL:
        return ["  killed from outside: the kernel reports no memory limit"]
    if -death.code in _ADVICE and not report.frames:
        return [f"  {_ADVICE[signal.Signals(-death.code)]}"]
    return []
