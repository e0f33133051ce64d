"""Finds the worker that made a run fail: which failures are causes, and which are consequences. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.diagnose.rules.collectives import timeouts
from phalanx.errors import NonFiniteError
from phalanx.forkserver import paths
from phalanx.launcher.output import tracebacks
from phalanx.launcher.output.tracebacks import TracebackReport

# pybind11 passes KeyboardInterrupt on as another exception, with the lines of the call after it.
_INTERRUPTED = re.compile(r"^\w+Error: .*\bKeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:\n(  .*\n?)*\s*\Z", re.MULTILINE)

# Errors of a healthy rank that lost a peer: a consequence, never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue\w* failed|sendBytes failed|remote process exited"
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
_LOADER = "torch/utils/data/"
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
_WRONG_CALL = re.compile(  # whatever the data; which plain value an object is may depend on it
    r"AttributeError: (?!'(NoneType|bool|int|float|complex|str|bytes|list|tuple|dict|set)' object)"
    r"|TypeError: .*( unexpected keyword argument| required .*argument| positional argument)"
)
USAGE = "usage error"  # the report of a script that argparse has ended begins with this
HUNG = "stalled: SIGKILL"
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class ProcessFailure:
    """A worker that failed, and everything known about it."""

    rank: int
    code: int  # exit code, or minus the signal
    time: float  # when its end was detected
    stopped: bool = False  # we had stopped it before
    device: str = ""
    error: str = ""  # content of its error.json
    stderr: Sequence[str] = ()
    memory: str = ""  # what the kernel reports about memory
    hung: bool = False  # we killed it because it was stalled
    skew: float = 0.0  # of its node's clock, which its error file uses
    stop_sent: float = 0.0  # when we stopped it; 0: never
    blame: Sequence[str] = ()  # lines that say which rank made it time out, or left it alone

    @property
    def exit_code(self) -> int:
        """Return the exit code as shells report it."""
        return 128 - self.code if self.code < 0 else self.code


@dataclass(frozen=True)
class CleanExit:
    """A worker that exited with exit code 0, and that we had not stopped."""

    rank: int
    time: float
    in_training: bool = False  # it is known that its training had not ended


def report_of(death: ProcessFailure) -> TracebackReport:
    """Return the worker's report about its failure; a faulthandler dump only if that ended it."""
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
    candidates = [(report, death) for report, death in candidates if report.exception or not obeyed(death)]
    blamed = any(death.blame for _, death in candidates)

    def order(candidate: tuple[TracebackReport, ProcessFailure]) -> tuple[bool, float]:
        report, death = candidate
        follows = reports_lost_peer(report) or (blamed and timeouts.timed_out(failure_message(report, death)))
        return (follows and not death.blame, _when(report, death))

    if not candidates:
        return None
    report, death = min(candidates, key=order)
    # We stopped it while it was exiting: report the code that its exception leads to.
    return replace(death, code=report.code) if report.exception and obeyed(death) else death


def count(deaths: Sequence[ProcessFailure]) -> int:
    """Return how many failed by themselves, not because we stopped them."""
    return sum(not death.stopped or -death.code in _CRASHES or _raised_before(death) for death in deaths)


def _raised_before(death: ProcessFailure) -> bool:
    """Return whether it had raised an exception before we stopped it."""
    report = report_of(death)
    if report.when is None:
        return bool(report.exception) and not obeyed(death)
    return 0 < report.when <= death.stop_sent


def timeout(death: ProcessFailure) -> timeouts.Timeout | None:
    """Return what the worker waited for, if a timeout of torch.distributed or of phalanx's groups ended it."""
    return timeouts.read(failure_message(report_of(death), death))


def lost_a_peer(death: ProcessFailure) -> bool:
    """Return whether the worker failed because it lost another rank."""
    return reports_lost_peer(report_of(death))


def names_lost_peer(exception: str) -> bool:
    """Return whether the text of an exception is that of a rank that lost a peer."""
    return bool(_PEER_LOST.search(exception))


def stopped_by_signal(text: str) -> bool:
    """Return whether a traceback is a consequence of Ctrl-C: an interrupt, or the loss of a peer that was stopped."""
    last = next((line for line in reversed(text.splitlines()) if line and not line.startswith(" ")), "")
    return last.startswith("KeyboardInterrupt") or _INTERRUPTED.search(text) is not None or names_lost_peer(text)


def reports_lost_peer(report: TracebackReport) -> bool:
    """Return whether the exception of a report is the loss of a peer."""
    return names_lost_peer(report.exception) and not reports_lost_loader(report)


def reports_lost_loader(report: TracebackReport) -> bool:
    """Return whether a DataLoader worker died: its closed socket looks like the loss of a peer."""
    return bool(_CLOSED.match(report.exception)) and any(_LOADER in file for file, *_ in report.stack)


def gave_up(death: ProcessFailure) -> bool:
    """Return whether the rank was waiting for others when it timed out or lost one of them."""
    return timeout(death) is not None or lost_a_peer(death)


def failure_message(report: TracebackReport, death: ProcessFailure) -> str:
    """Return the message of a failure. NCCL's watchdog raises nothing: it aborts, and writes to stderr."""
    return report.exception if death.code != -signal.SIGABRT else "\n".join(death.stderr)


def lost(death: ProcessFailure) -> set[int]:
    """Return the ranks that the worker reported as lost."""
    named = _PEER_NAMED.search(_OF_GROUP.sub("", report_of(death).exception))
    return {int(rank) for rank in re.findall(r"\d+", named[1])} if named else set()


def follows(death: ProcessFailure, since: float) -> bool:
    """Return whether the failure is a consequence: the loss of a peer, or later than `since`."""
    report = report_of(death)
    return reports_lost_peer(report) or _when(report, death) > since


def _when(report: TracebackReport, death: ProcessFailure) -> float:
    return report.when - death.skew if report.when else death.time


def obeyed(death: ProcessFailure) -> bool:
    """Return whether it ended with the signal that we sent, or the exit code for it."""
    numbers = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    return death.stopped and (-death.code in numbers or death.code - 128 in numbers)


def in_words(code: int) -> str:
    """Describe an exit code or signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{number.name} ({signal.strsignal(number)})"


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
    """Return whether a retry would fail in the same way: the script cannot be parsed or imported, uses a name or an
    attribute that does not exist, calls a function with wrong arguments, or rejects its own.
    """
    report = report_of(death)
    return report.kind in _PERMANENT or report.exception.startswith(f"{USAGE}: ") or _calls_wrongly(report)


def _calls_wrongly(report: TracebackReport) -> bool:
    """Return whether a line of the script itself names what an object does not have, or calls it wrongly."""
    stack = tracebacks.without_access(report.stack)
    return bool(stack and _WRONG_CALL.match(report.exception)) and tracebacks.mine(stack[-1])


def stopped_itself(death: ProcessFailure) -> bool:
    """Return whether the training has stopped itself, because its loss or its gradients were not finite."""
    return report_of(death).kind == NonFiniteError.__name__


def raised(death: ProcessFailure) -> bool:
    """Return whether an exception of the script ended it, rather than the loss of others."""
    report = report_of(death)
    return bool(report.exception and report.stack) and death.code >= 0 and not gave_up(death)
