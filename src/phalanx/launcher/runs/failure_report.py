"""Describes a failure: one line, or the block of text that the user reads at the end. Pure functions."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Sequence

from phalanx.control.messages import FailedRanks
from phalanx.diagnose import words
from phalanx.diagnose.rules.collectives import timeouts
from phalanx.forkserver import paths
from phalanx.launcher.output import tracebacks
from phalanx.launcher.output.tracebacks import Line, TracebackReport
from phalanx.launcher.runs.root_cause import (
    USAGE,
    CleanExit,
    ProcessFailure,
    count,
    differs,
    failure_message,
    in_words,
    lost,
    lost_a_peer,
    obeyed,
    place,
    report_of,
    reports_lost_loader,
    reports_lost_peer,
    timeout,
)

_IN_USE = re.compile(r"failed to listen on any local network address.*?port: (\d+).*EADDRINUSE")
_NO_CUDA = re.compile(r"AttributeError: module 'torch\._C' has no attribute '_cuda_\w+'")
_GLOO = re.compile(r"\[\S+/gloo/\S+:\d+\] |\. This is typically caused by a remote worker crashing\..*")
_CAUGHT = re.compile(r"\S+: Caught \S+ in (.+)\.$")  # torch: DataLoader worker process 0, replica 0 on device 0
_IN_CALLBACK = re.compile(  # torch's words around an error of a group or of a hook of DDP
    r"RuntimeError: Got the following error when running the callback: "
    rf"(?:(?:{'|'.join((*paths.LOST_PEER, paths.MISMATCH, 'LeftEarly'))}): "
    r"(?:\w+: this group has failed before: )?)?"
)
_MISMATCH = "Is there a distributed collective mismatch in your code?"  # gloo, if sizes differ
_NO_MESSAGE = re.compile(r"Exception raised from |^frame #\d+|^(Original )?Traceback |^C\+\+ CapturedTraceback")
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages|python3(?:\.\d+)?|src)/")
_MOST_FRAMES = 12  # of the script
_LONGEST = 300  # characters of a line
_MOST = 4  # further lines of a message
_MOST_KINDS = 16  # of failures on one node
_ADVICE = {
    signal.SIGSEGV: "a crash in native code; run with PYTHONFAULTHANDLER=1 to see the Python line",
    signal.SIGABRT: "native code aborted; see its last lines below",
    signal.SIGBUS: "a mapped file shrank, or /dev/shm is full",
    signal.SIGILL: "an instruction that this processor does not support",
}


def summary(death: ProcessFailure) -> str:
    """Return rank and reason in one line."""
    if death.blame:
        return death.blame[0]
    report = report_of(death)
    memory = f", {death.memory}" if death.memory and not report.exception else ""
    return f"{_who(death)} failed: {_short(raised(report) or in_words(death.code))}{memory}"


def raised(report: TracebackReport) -> str:
    """Return the exception that ended a rank. If torch has raised it again for a process or thread, the original."""
    caught = _CAUGHT.match(report.exception.partition("\n")[0])
    if caught is not None and report.root is not None:
        return f"{report.root.exception} (in {caught[1]})"
    return _IN_CALLBACK.sub("", report.exception)


def block(
    death: ProcessFailure,
    *,
    tail: Sequence[str],
    folder: str,
    means: Sequence[str] = (),
    brief: bool = False,
) -> str:
    """Return the explanation of the first cause for the user at the end.

    `means` are further lines of explanation. `brief`: the console shows the traceback of this rank.
    """
    report = report_of(death)
    lines = [summary(death), *(f"  {line}" for line in (*death.blame[1:], *means))]
    if death.blame:
        lines.append(f"  {_victim(death)}")
    if report.exception and not brief and not (death.blame and reports_lost_peer(report)):
        lines += _more(death, report)
    explained = report.kind == "SystemExit" or (report.in_words and death.code == report.code)
    if report.exception and not explained and death.code != 1:
        lines.append(f"  ended with {in_words(death.code)}")
    usage = report.exception.startswith(f"{USAGE}: ")  # the message of argparse is enough, if it is shown
    if not brief or not death.error or (report.kind == "SystemExit" and not usage):  # no traceback says where
        lines += _frames(report, only_own=bool(death.blame))
        lines += _of_root(report, named=_CAUGHT.match(report.exception.partition("\n")[0]) is not None)
    lines += _explained(death, report)
    if any(_MISMATCH in line for line in (report.exception, *death.stderr)):
        lines.append("  ranks called different collectives, or with different sizes: --check-collectives shows where")
    last = [*tail, *([] if report.exception else death.stderr[-10:])]  # otherwise stderr is the traceback shown above
    if last and not brief:
        lines.append("  its last lines:")
        lines.extend(f"    {line}" for line in last)
    lines.append(f"  all of its output: {folder}")
    return "\n".join(lines)


def blamed(block: str, death: ProcessFailure) -> str:
    """Return the block of a failure that was written before the rank to blame was known."""
    _, *rest = block.split("\n")
    return "\n".join([summary(death), *(f"  {line}" for line in (*death.blame[1:], _victim(death))), *rest])


def failed_ranks(deaths: Sequence[ProcessFailure]) -> tuple[FailedRanks, ...]:
    """Return the ranks that failed, grouped by what failed and where. Ranks that we stopped are excluded.

    If all failures are different, only some are named.
    """
    kinds: dict[tuple[str, str, bool, bool], list[int]] = {}
    for death in deaths:
        report = report_of(death)
        if obeyed(death) and not report.exception:
            continue
        lost = reports_lost_peer(report) or timeouts.timed_out(failure_message(report, death))
        text = "" if lost else _short(raised(report) or in_words(death.code))
        key = (place(death)[:_LONGEST], text, lost, count([death]) == 0)
        if len(kinds) >= _MOST_KINDS and key not in kinds:
            key = ("", "other errors", lost, key[3])
        kinds.setdefault(key, []).append(death.rank)
    return tuple(
        FailedRanks(place=where, text=text, lost_peer=lost, late=late, ranks=tuple(ranks))
        for (where, text, lost, late), ranks in kinds.items()
    )


def afterwards(cause: ProcessFailure, failed: Iterable[FailedRanks]) -> list[str]:
    """Return lines about the ranks that failed after the first one, on any node: one per kind of failure."""
    where, text = place(cause)[:_LONGEST], _short(raised(report_of(cause)))
    same: list[int] = []
    lost: list[int] = []
    different: dict[str, list[int]] = {}
    for kind in failed:
        ranks = [rank for rank in kind.ranks if rank != cause.rank]
        if where and (kind.place == where or (": " in text and kind.text == text)):
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


def left_alone(death: ProcessFailure, exits: Iterable[CleanExit]) -> list[str]:
    """Return lines that blame ranks which exited without an error, if the worker failed because it lost one of them."""
    named, gone = lost(death), {one.rank: one.in_training for one in exits if one.time <= death.time}
    ranks = sorted(gone.keys() & named if named else gone)
    if not ranks or not lost_a_peer(death):
        return []
    when = " in the middle of the training" if all(gone[rank] for rank in ranks) else ""
    return [
        f"{words.who(ranks)} exited{when}, with exit code 0, while {_who(death)} still needed {_it(ranks)}",
        "uneven data, an early return, or sys.exit() on some ranks only?",
    ]


def script_lines(traceback: str) -> list[str]:
    """Return a traceback in a few lines: the script's frames, others folded, and the first exception of a chain."""
    report = tracebacks.read_traceback(traceback.splitlines())
    lines = _frames(report, only_own=False)
    lines += _of_root(report)
    return [line.removeprefix("  ") for line in lines]


def _of_root(report: TracebackReport, *, named: bool = False) -> list[str]:
    """Return lines about the first exception of a chain. `named`: the first line of the block has it."""
    if report.root is None:
        return []
    place = [f"  {line}" for line in _placed([report.root.place] if report.root.place else ())]
    if named:
        return ["  where it was raised:", *place] if place else []
    return [f"  {report.root.link}: {_short(report.root.exception)}", *place]


def frames(death: ProcessFailure) -> tuple[str, ...]:
    """Return lines about where the script failed."""
    return tuple(_frames(report_of(death), only_own=True))


def _more(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """Return the further lines of a message, without text that C++ and DataLoader workers append."""
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


def _explained(death: ProcessFailure, report: TracebackReport) -> list[str]:
    """Return what ended it, if its own message does not contain that."""
    if port := _IN_USE.search(report.exception):
        return [f"  port {port[1]} is in use: leave MASTER_PORT as the launcher sets it, to a free port"]
    if _NO_CUDA.match(report.exception):
        return ['  this torch is built without CUDA: torch.device("cuda" if torch.cuda.is_available() else "cpu")']
    if reports_lost_loader(report):
        return ["  a DataLoader worker of this rank died: run with num_workers=0 to see its error"]
    if death.memory:
        return [f"  {death.memory}"] if report.exception else []  # the first line already has it
    if death.hung:
        return ["  it was stalled, and phalanx killed it"]
    if death.code == -signal.SIGKILL:
        return ["  killed from outside: the kernel reports no memory limit"]
    if -death.code in _ADVICE and not report.frames:
        return [f"  {_ADVICE[signal.Signals(-death.code)]}"]
    return []


def _frames(report: TracebackReport, *, only_own: bool) -> list[str]:
    """Return the frames of the script, from the outermost. Those of libraries below and between them are folded."""
    stack: Sequence[tracebacks.Line] = report.stack or report.frames
    if report.exception.startswith("AttributeError"):
        stack = tracebacks.without_access(stack)
    if report.kind != "SystemExit" and not any(map(tracebacks.mine, stack)):
        return [] if only_own else _placed(report.frames)
    parts = [(own, list(group)) for own, group in itertools.groupby(_last_frames(stack), tracebacks.mine)]
    while parts and not parts[0][0]:
        parts.pop(0)  # frames that called the script
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


def _who(death: ProcessFailure) -> str:
    return f"rank {death.rank}{f' ({death.device})' if death.device else ''}"


def _victim(death: ProcessFailure) -> str:
    """Return what happened to a rank whose failure was caused by another one."""
    report = report_of(death)
    what = "timed out" if timeout(death) is not None or not reports_lost_peer(report) else "lost the peer"
    exception = _GLOO.sub("", raised(report))  # the block says what was the matter with the other rank
    return f"{_who(death)} {what}: {_short(exception or in_words(death.code))}"


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _short(text: str) -> str:
    first = (text.splitlines() or [""])[0]
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}…"
