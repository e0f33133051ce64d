"""What was called in our groups and what is done, as torch's flight recorder keeps it of the groups that it knows.

The probe of a worker (forkserver/probe) finds this module and asks it from a thread of its own, while others
write: nothing here takes a lock, and no tensor is kept.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.forkserver import paths

_KEPT = 256  # calls of a group
_TENSORS = 8  # of a call, whose shapes are kept
_DEEP = 24  # frames of a call that is under way
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_SHARED = {"all_gather", "all_gather_into_tensor", "scatter"}  # whose outputs are of the same size on all ranks

_numbers = itertools.count()
_journals: weakref.WeakValueDictionary[int, FlightRecorder] = weakref.WeakValueDictionary()

_clock = time.time_ns
_frame = sys._getframe


class PendingEntry(Protocol):
    """`over`, where asking for `done` may take a lock or set something going: what is known without."""

    def done(self) -> bool: ...


class RecordedCall:
    """One call. Who has made it says when it is over: `done`, or by `pending`, which is asked."""

    __slots__ = ("_pending", "at", "call", "done", "seq", "site")

    seq: int  # of the collectives of the group, from 1; 0: a message
    call: tuple[Any, ...]  # as _Call has it
    site: Sequence[Any]  # code and place in it, in turns, the innermost first
    at: int  # nanoseconds of the epoch
    done: bool
    _pending: Callable[[], PendingEntry | None] | None

    @property
    def pending(self) -> PendingEntry | None:
        return self._pending() if self._pending is not None else None

    @pending.setter
    def pending(self, pending: PendingEntry) -> None:
        """It goes on while who has started it may be anywhere: all of its site is kept, and nothing else of it."""
        self._pending = weakref.ref(pending)
        if self.site:
            self.site = _site(_frame(2))

    def over(self) -> bool:
        if self.done or self._pending is None:
            return self.done
        pending = self._pending()
        try:
            known = getattr(pending, "over", None)
            self.done = pending is None or bool(pending.done() if known is None else known)
        except Exception:  # of a group that has ended: nobody waits for it any more
            self.done = True
        return self.done


class _Call(NamedTuple):
    """Made when it is asked for: a plain tuple is faster."""

    op: str
    dtype: torch.dtype | None
    ins: tuple[Sequence[int], ...]  # shapes
    outs: tuple[Sequence[int], ...]
    peer: int | None
    tag: int | None
    reduction: str
    root: int | None


class Unseen:
    """Instead of an entry, where nobody looks."""

    __slots__ = ()

    def _ignore(self, value: Any) -> None: ...

    done = property(None, _ignore)
    pending = property(None, _ignore)


_UNSEEN = Unseen()


class FlightRecorder:
    """Of one group. `name`: asked when it is needed, for torch gives it afterwards. `ranks`: global ones, where they
    are known already."""

    def __init__(self, name: Callable[[], str], ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        self.enqueued = 0
        self.completed = 0
        self._name = name
        self._count = itertools.count(1)
        self._entries: deque[RecordedCall] = deque(maxlen=_KEPT)
        self._watched = _current(paths.PROBE_MODULE) is not None
        self._checker = _current(paths.CHECKER_MODULE)  # --check-collectives
        self.number = next(_numbers)
        _journals[self.number] = self

    @property
    def name(self) -> str:
        try:
            return str(self._name())
        except Exception:  # it has none yet, or no more
            return ""

    def enter(
        self,
        op: str,
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        peer: int | None = None,
        tag: int | None = None,
        reduction: str = "",
        root: int | None = None,
    ) -> RecordedCall | Unseen:
        """Before a call. `peer`: of a message, the other rank of the group; -1: any. `root`: a rank of the group."""
        seq = 0
        if peer is None:
            self.enqueued = seq = next(self._count)
        if not self._watched:
            return _UNSEEN
        if self._checker is not None and peer is None:
            self._checker.called(
                self.name,
                op,
                (outs or ins) if op in _SHARED else (ins or outs),
                reduction,
                root if op in _ROOTED else None,
            )
        entry = RecordedCall()
        first = ins or outs
        ours = (ins[0].shape,) if len(ins) == 1 else tuple([each.shape for each in ins[:_TENSORS]])
        theirs = ours if outs is ins else tuple([each.shape for each in outs[:_TENSORS]])
        entry.call = (op, first[0].dtype if first else None, ours, theirs, peer, tag, reduction, root)
        entry.seq = seq
        a: Any = _frame(1)
        try:  # the nearest frames, fast: every call comes here
            a = a.f_back
            b = a.f_back
            c = b.f_back
            d = c.f_back
            e = d.f_back
            entry.site = (
                a.f_code, a.f_lasti, b.f_code, b.f_lasti, c.f_code, c.f_lasti, d.f_code, d.f_lasti, e.f_code, e.f_lasti
            )  # fmt: skip
        except AttributeError:  # there are not so many
            entry.site = _site(a)
        entry.at = _clock()
        entry.done = False
        entry._pending = None
        self._entries.append(entry)
        return entry

    def entries(self) -> list[RecordedCall]:
        """The newest, the oldest of them first."""
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # one more just came
                continue

    def advance(self) -> int:
        """The newest collective that is over: they are done in the order of their calls."""
        for entry in reversed(self.entries()):
            if entry.seq and entry.over():
                self.completed = max(self.completed, entry.seq)
                break
        return self.completed

    def close(self) -> None:
        """The group is no more: nothing of it is pending."""
        _journals.pop(self.number, None)
        self._entries.clear()


def status() -> dict[str, dict[str, Any]]:
    """How far each group is: "pg_status" of a flight recorder, and the group's name and ranks. Cheap."""
    return {
        str(journal.number): {
            "last_enqueued_collective": journal.enqueued,
            "last_completed_collective": journal.advance(),
            "name": journal.name,
            "ranks": list(journal.ranks),
        }
        for journal in _all()
    }


def entries() -> list[dict[str, Any]]:
    """The newest calls of each group, with their sites: "entries" of a flight recorder, and what it does not know."""
    found = []
    for journal in _all():
        name = journal.name
        for entry in journal.entries():
            call = _Call(*entry.call)
            dtypes = [str(call.dtype).removeprefix("torch.")] if call.dtype is not None else []
            found.append(
                {
                    "pg_id": journal.number,
                    "process_group": [name, ""],
                    "profiling_name": f"phalanx:{call.op}",
                    "is_p2p": not entry.seq,
                    "collective_seq_id": entry.seq,
                    "input_dtypes": dtypes,
                    "input_sizes": [list(shape) for shape in call.ins or call.outs],
                    "output_sizes": [list(shape) for shape in call.outs],
                    "retired": entry.over(),
                    "time_created_ns": entry.at,
                    "frames": _frames(_whole(entry)),
                    "peer": call.peer,
                    "tag": call.tag,
                    "reduction": call.reduction,
                    "root": call.root if call.op in _ROOTED else None,
                }
            )
    return sorted(found, key=lambda one: int(one["time_created_ns"]))


def _current(module: str) -> Any:
    """The probe or checker of a worker that phalanx has started."""
    return getattr(sys.modules.get(module), "current", None)


def _all() -> list[FlightRecorder]:
    """Those that nobody has let go of, as they were made."""
    found = {number: _journals.get(number) for number in sorted(_journals.keys())}
    return [journal for journal in found.values() if journal is not None]


def _site(frame: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    while frame is not None and len(found) < 2 * _DEEP:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _whole(entry: RecordedCall) -> Sequence[Any]:
    """Whoever waits in it is still there, and all of its stack can be seen."""
    if entry.done or entry._pending is not None or not entry.site:
        return entry.site
    near = entry.site[:4]
    for thread in sys._current_frames().values():
        for each in _outwards(thread):
            if each.f_code is near[0] and each.f_lasti == near[1] and (whole := _site(each))[:4] == near:
                return whole
    return entry.site


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(site: Sequence[Any]) -> list[dict[str, Any]]:
    codes = zip(site[::2], site[1::2], strict=True)
    return [{"filename": code.co_filename, "line": _line(code, at), "name": code.co_name} for code, at in codes]


def _line(code: CodeType, at: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return next(lines, None) or code.co_firstlineno
