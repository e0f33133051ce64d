"""What was called in our groups and what is done, as torch's flight recorder keeps it of the groups that it knows.

The witness of a worker (launch/zygote/witness) finds this module and asks it from a thread of its own, while others
write: nothing here takes a lock, and no tensor is kept.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol

import torch

ANYONE = -1

_KEPT = 256  # calls of a group
_TENSORS = 8  # of a call, whose shapes are kept
_DEEP = 24  # frames of a call that is under way
_ABOUT = ("peer", "tag", "reduction", "root")
_WITNESS = "_phalanx_zygote.witness.witness"  # as a worker that phalanx has started knows it

_numbers = itertools.count()
_journals: weakref.WeakValueDictionary[int, Journal] = weakref.WeakValueDictionary()

_clock = time.time_ns
_frame = sys._getframe


class Pending(Protocol):
    def done(self) -> bool:
        """Asked by any thread: it waits for nothing."""


class Entry:
    """One call. Who has made it says when it is over: `done`, or by `pending`, which is asked."""

    __slots__ = ("_pending", "_under", "about", "at", "done", "dtype", "ins", "op", "outs", "seq", "site", "thread")

    seq: int  # of the collectives of the group, from 1; 0: a message
    op: str
    ins: tuple[Sequence[int], ...]  # shapes
    outs: tuple[Sequence[int], ...]
    dtype: torch.dtype | None
    about: tuple[Any, ...]  # _ABOUT
    site: Sequence[Any]  # code and place in it, in turns, the innermost first
    thread: int
    at: int  # nanoseconds of the epoch
    done: bool
    _under: deque[Entry]
    _pending: Pending | None

    @property
    def pending(self) -> Pending | None:
        return self._pending

    @pending.setter
    def pending(self, pending: Pending | None) -> None:
        """It goes on while who has started it may be anywhere: all of its site is kept."""
        self._pending = pending
        if self.site:
            self.site = _site(_frame(2))
        under = self._under
        under.append(self)
        while under and under[0].over():  # what is over holds tensors no longer
            try:
                under.popleft()
            except IndexError:  # another thread has
                break

    def over(self) -> bool:
        if self.done:
            self._pending = None
            return True
        pending = self._pending
        if pending is None:
            return False
        try:
            over = pending.done()
        except Exception:  # of a group that has ended: nobody waits for it any more
            over = True
        if over:
            self.done, self._pending = True, None
        return over


class Unseen:
    """Instead of an entry, where nobody looks."""

    __slots__ = ()

    def _ignore(self, value: Any) -> None: ...

    done = property(None, _ignore)
    pending = property(None, _ignore)


_UNSEEN = Unseen()


class Journal:
    """Of one group. `name`: asked when it is needed, for torch gives it afterwards. `ranks`: global ones, where they
    are known already."""

    def __init__(self, name: Callable[[], str], ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        self.enqueued = 0
        self.completed = 0
        self._name = name
        self._count = itertools.count(1)
        self._entries: deque[Entry] = deque(maxlen=_KEPT)
        self._under: deque[Entry] = deque()  # started, and not seen to be over
        self._watched = getattr(sys.modules.get(_WITNESS), "current", None) is not None
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
    ) -> Entry | Unseen:
        """Before a call. `peer`: of a message, the other rank of the group, or ANYONE. `root`: a rank of the group."""
        seq = 0
        if peer is None:
            self.enqueued = seq = next(self._count)
        if not self._watched:
            return _UNSEEN
        entry = Entry()
        entry.seq = seq
        entry.op = op
        first = ins or outs
        entry.dtype = first[0].dtype if first else None
        entry.ins = ours = (ins[0].shape,) if len(ins) == 1 else tuple([each.shape for each in ins[:_TENSORS]])
        entry.outs = ours if outs is ins else tuple([each.shape for each in outs[:_TENSORS]])
        entry.about = (peer, tag, reduction, root)
        entry.site = _near(_frame(2))
        entry.thread = get_ident()
        entry.at = _clock()
        entry.done = False
        entry._under = self._under
        entry._pending = None
        self._entries.append(entry)
        return entry

    def entries(self) -> list[Entry]:
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
        self._under.clear()


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
            dtypes = [str(entry.dtype).removeprefix("torch.")] if entry.dtype is not None else []
            found.append(
                {
                    "pg_id": journal.number,
                    "process_group": [name, ""],
                    "profiling_name": f"phalanx:{entry.op}",
                    "is_p2p": not entry.seq,
                    "collective_seq_id": entry.seq,
                    "input_dtypes": dtypes,
                    "input_sizes": [list(shape) for shape in entry.ins],
                    "output_sizes": [list(shape) for shape in entry.outs],
                    "retired": entry.over(),
                    "time_created_ns": entry.at,
                    "frames": _frames(_whole(entry)),
                    **dict(zip(_ABOUT, entry.about, strict=True)),
                }
            )
    return sorted(found, key=lambda one: int(one["time_created_ns"]))


def _all() -> list[Journal]:
    """Those that nobody has let go of, as they were made."""
    found = {number: _journals.get(number) for number in sorted(_journals.keys())}
    return [journal for journal in found.values() if journal is not None]


def _near(a: Any) -> tuple[Any, ...]:
    """The nearest frames, fast: every call does it."""
    try:
        b = a.f_back
        c = b.f_back
        d = c.f_back
        e = d.f_back
        return a.f_code, a.f_lasti, b.f_code, b.f_lasti, c.f_code, c.f_lasti, d.f_code, d.f_lasti, e.f_code, e.f_lasti
    except AttributeError:  # there are not so many
        return _site(a)


def _site(frame: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    while frame is not None and len(found) < 2 * _DEEP:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def _whole(entry: Entry) -> Sequence[Any]:
    """Whoever waits in it is still there, and all of its stack can be seen."""
    if entry.done or entry._pending is not None or not entry.site:
        return entry.site
    frame = sys._current_frames().get(entry.thread)
    while frame is not None and (frame.f_code is not entry.site[0] or frame.f_lasti != entry.site[1]):
        frame = frame.f_back
    return _site(frame) if frame is not None else entry.site


def _frames(site: Sequence[Any]) -> list[dict[str, Any]]:
    codes = zip(site[::2], site[1::2], strict=True)
    return [{"filename": code.co_filename, "line": _line(code, at), "name": code.co_name} for code, at in codes]


def _line(code: CodeType, at: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return next(lines, None) or code.co_firstlineno
