"""The flight recorder of phalanx's groups, in the format of torch's own.

The probe of a worker (forkserver/probe) finds this module and reads it from its own thread while others write: nothing
here takes a lock, and no tensor is kept alive.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.forkserver import paths, thread_frames

logger = logging.getLogger(__name__)

_MAX_CALLS = 256  # calls per group
_MAX_TENSORS = 8  # tensors per call whose shapes are kept
_MAX_FRAMES = 24  # frames of a call in progress
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_EQUAL_OUTPUTS = {"all_gather", "all_gather_into_tensor", "scatter"}  # outputs have the same size on all ranks

_numbers = itertools.count()
_recorders: weakref.WeakValueDictionary[int, FlightRecorder] = weakref.WeakValueDictionary()

_clock = time.time_ns
_frame = sys._getframe


class PendingEntry(Protocol):
    """A call in progress. It may have `finished`: what is known without taking a lock or starting anything, unlike
    `done`.
    """

    def done(self) -> bool:
        """Return whether the call has finished."""


class RecordedCall:
    """One call. Its caller sets `done`, or sets `pending`, which is queried."""

    __slots__ = ("_pending", "at", "call", "done", "seq", "site")

    seq: int  # among the collectives of the group, from 1; 0: a message
    call: tuple[Any, ...]  # the fields of _Call
    site: Sequence[Any]  # alternating code and instruction offset, innermost frame first
    at: int  # nanoseconds since the epoch
    done: bool
    _pending: Callable[[], PendingEntry | None] | None

    @property
    def pending(self) -> PendingEntry | None:
        """The call in progress, or None."""
        return self._pending() if self._pending is not None else None

    @pending.setter
    def pending(self, pending: PendingEntry) -> None:
        """Keep a weak reference, and the whole stack: the caller may be anywhere while the call is in progress."""
        self._pending = weakref.ref(pending)
        if self.site:
            self.site = _site(_frame(2))

    def finished(self) -> bool:
        """Return whether the call has finished."""
        if self.done or self._pending is None:
            return self.done
        pending = self._pending()
        try:
            known = getattr(pending, "finished", None)
            self.done = pending is None or bool(pending.done() if known is None else known)
        except Exception:
            logger.debug("cannot tell whether a call has finished: its group may be closed", exc_info=True)
            self.done = True
        return self.done


class _Call(NamedTuple):
    """The fields of a recorded call. Built on request: a plain tuple is faster."""

    op: str
    dtype: torch.dtype | None
    ins: tuple[Sequence[int], ...]  # shapes
    outs: tuple[Sequence[int], ...]
    peer: int | None
    tag: int | None
    reduction: str
    root: int | None


class IgnoredCall:
    """Replaces an entry where no probe is running."""

    __slots__ = ()

    def _ignore(self, value: Any) -> None: ...

    done = property(None, _ignore)
    pending = property(None, _ignore)


_IGNORED = IgnoredCall()


class FlightRecorder:
    """The recorder of one group. `name` is called when needed, because torch sets it later. `ranks`: the global ranks,
    if known.
    """

    def __init__(self, name: Callable[[], str], ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        self.enqueued = 0
        self.completed = 0
        self._name = name
        self._count = itertools.count(1)
        self._entries: deque[RecordedCall] = deque(maxlen=_MAX_CALLS)
        self._enabled = _current(paths.PROBE_MODULE) is not None
        self._checker = _current(paths.CHECKER_MODULE)  # --check-collectives
        self.number = next(_numbers)
        _recorders[self.number] = self

    @property
    def name(self) -> str:
        """The name of the group; empty if it has none."""
        try:
            return str(self._name())
        except Exception:
            logger.debug("a group has no name", exc_info=True)
            return ""

    def record(
        self,
        op: str,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        peer: int | None = None,
        tag: int | None = None,
        reduction: str = "",
        root: int | None = None,
    ) -> RecordedCall | IgnoredCall:
        """Record a call before it is made. `peer`: for a message, the other rank of the group; -1: any. `root`: a rank
        of the group.
        """
        seq = 0
        if peer is None:
            self.enqueued = seq = next(self._count)
        if not self._enabled:
            return _IGNORED
        if self._checker is not None and peer is None:
            self._checker.check_own(
                self.name,
                op,
                (outs or ins) if op in _EQUAL_OUTPUTS else (ins or outs),
                reduction,
                root if op in _ROOTED else None,
            )
        entry = RecordedCall()
        first = ins or outs
        in_shapes = (ins[0].shape,) if len(ins) == 1 else tuple([each.shape for each in ins[:_MAX_TENSORS]])
        out_shapes = in_shapes if outs is ins else tuple([each.shape for each in outs[:_MAX_TENSORS]])
        entry.call = (op, first[0].dtype if first else None, in_shapes, out_shapes, peer, tag, reduction, root)
        entry.seq = seq
        a: Any = _frame(1)
        try:  # fast path: every call is recorded
            a = a.f_back
            b = a.f_back
            c = b.f_back
            d = c.f_back
            e = d.f_back
            entry.site = (
                a.f_code, a.f_lasti, b.f_code, b.f_lasti, c.f_code, c.f_lasti, d.f_code, d.f_lasti, e.f_code, e.f_lasti
            )  # fmt: skip
        except AttributeError:  # the stack is not that deep
            entry.site = _site(a)
        entry.at = _clock()
        entry.done = False
        entry._pending = None
        self._entries.append(entry)
        return entry

    def entries(self) -> list[RecordedCall]:
        """Return the newest calls, oldest first."""
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # a call was added meanwhile
                continue

    def advance(self) -> int:
        """Return the newest collective that has finished; they finish in order."""
        for entry in reversed(self.entries()):
            if entry.seq and entry.finished():
                self.completed = max(self.completed, entry.seq)
                break
        return self.completed

    def close(self) -> None:
        """Remove the group, which is closed."""
        _recorders.pop(self.number, None)
        self._entries.clear()


def status() -> dict[str, dict[str, Any]]:
    """Return the progress of each group: "pg_status" of a flight recorder, plus name and ranks. Cheap."""
    return {
        str(recorder.number): {
            "last_completed_collective": recorder.advance(),  # before the other, which other threads may increase
            "last_enqueued_collective": recorder.enqueued,
            "name": recorder.name,
            "ranks": list(recorder.ranks),
        }
        for recorder in _all()
    }


def entries() -> list[dict[str, Any]]:
    """Return the newest calls of each group with their stacks: "entries" of a flight recorder, plus fields that torch's
    does not have.
    """
    found = []
    for recorder in _all():
        name = recorder.name
        for entry in recorder.entries():
            call = _Call(*entry.call)
            dtypes = [str(call.dtype).removeprefix("torch.")] if call.dtype is not None else []
            found.append(
                {
                    "pg_id": recorder.number,
                    "process_group": [name, ""],
                    "profiling_name": f"phalanx:{call.op}",
                    "is_p2p": not entry.seq,
                    "collective_seq_id": entry.seq,
                    "input_dtypes": dtypes,
                    "input_sizes": [list(shape) for shape in call.ins or call.outs],
                    "output_sizes": [list(shape) for shape in call.outs],
                    "retired": entry.finished(),
                    "time_created_ns": entry.at,
                    "frames": _frames(_whole_site(entry)),
                    "peer": call.peer,
                    "tag": call.tag,
                    "reduction": call.reduction,
                    "root": call.root if call.op in _ROOTED else None,
                }
            )
    return sorted(found, key=lambda one: int(one["time_created_ns"]))


def _current(module: str) -> Any:
    """Return the probe or checker of this worker, or None."""
    return getattr(sys.modules.get(module), "current", None)


def _all() -> list[FlightRecorder]:
    """Return the recorders of all live groups, in order of creation."""
    found = {number: _recorders.get(number) for number in sorted(_recorders.keys())}
    return [recorder for recorder in found.values() if recorder is not None]


def _site(frame: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    while frame is not None and len(found) < 2 * _MAX_FRAMES:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _whole_site(entry: RecordedCall) -> Sequence[Any]:
    """Return the whole stack of a call: if a thread still waits in it, all of its frames can be read."""
    if entry.done or entry._pending is not None or not entry.site:
        return entry.site
    near = entry.site[:4]
    with thread_frames.reading():
        for thread in sys._current_frames().values():
            for each in _callers(thread):
                if each.f_code is near[0] and each.f_lasti == near[1] and (whole := _site(each))[:4] == near:
                    return whole
    return entry.site


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(site: Sequence[Any]) -> list[dict[str, Any]]:
    codes = zip(site[::2], site[1::2], strict=True)
    return [{"filename": code.co_filename, "line": _line(code, at), "name": code.co_name} for code, at in codes]


def _line(code: CodeType, at: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return next(lines, None) or code.co_firstlineno
