"""Ranks that made different calls exchange their source lines, so that the error shows them side by side.

An engine knows what each rank has called, but not from which line. At this point the group has failed, but its store
still works.

Ranks also exchange whether they are at the end of their training (`ending`). If only some of them are, no call is
wrong: the others have lost them.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import logging
import os
import re
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from phalanx.collectives.errors import CollectiveMismatch, LeftEarly, PeerLost
from phalanx.forkserver import paths, thread_frames
from phalanx.forkserver.signed_store import SignedStore

logger = logging.getLogger(__name__)

_TIMEOUT = 2.0  # seconds to wait for the lines of the others
_LIBRARIES = re.compile(
    rf"(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|/src/phalanx/(?!{'|'.join(paths.USER_CODE)})|^<frozen"
)

_SourceLine = tuple[str, int, str]  # file, line number, source text
_ending = 0  # nesting depth of `ending` in this process


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Mark calls in this context as those of a rank that has ended its training, such as waiting for saves."""
    global _ending
    _ending += 1
    try:
        yield
    finally:
        _ending -= 1


def make_error(text: str, store: SignedStore, rank: int, names: Mapping[int, int]) -> dist.DistBackendError:
    """Return the error to raise. `text`: what each rank has called. `names`: rank -> global rank of the ranks that
    report.

    If only some ranks have ended their training, it is LeftEarly on those, and PeerLost on the others.
    """
    try:
        probe = sys.modules.get(paths.PROBE_MODULE)
        if probe is not None and probe.current is not None:
            probe.current.report_mismatch()  # report to the agent before a rank exits
    except Exception:
        logger.debug("cannot report a mismatch to the agent", exc_info=True)
    places: dict[int, _SourceLine | None] = {}
    ended: set[int] = set()
    try:
        places, ended = _exchange(_user_line(), store, rank, list(names))
    except Exception:  # the engine's own message is enough
        logger.debug("cannot exchange source lines", exc_info=True)
    by_place: dict[_SourceLine, list[int]] = {}
    for each, place in places.items():
        if place is not None:
            by_place.setdefault(place, []).append(names[each])
    if ended and ended != names.keys():
        return _left([names[each] for each in sorted(ended)], text, own=rank in ended)
    error = CollectiveMismatch(
        "\n".join([text, *(line for place in by_place for line in _lines(place, by_place[place]))])
    )
    error.in_words = bool(by_place)  # the message names the lines that matter, not the one it is raised at
    return error


def _left(ended: Collection[int], text: str, *, own: bool) -> dist.DistBackendError:
    who = f"rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))} {'has' if len(ended) == 1 else 'have'}"
    return (LeftEarly if own else PeerLost)(f"{who} ended the training, and the other ranks have not: {text}")


def _user_line() -> _SourceLine | None:
    """Return the innermost line of user code. In a thread of torch or phalanx: the line of the main thread, which waits
    for it.
    """
    frame = _user_frame(sys._getframe(2))
    if frame is None:
        with thread_frames.reading():
            frame = _user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    return file, line, linecache.getline(file, line, frame.f_globals).strip()[:100]


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _LIBRARIES.search(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _exchange(
    own: _SourceLine | None, store: SignedStore, rank: int, ranks: list[int]
) -> tuple[dict[int, _SourceLine | None], set[int]]:
    """Return the source lines of the ranks that report, and which of them are at the end of their training."""
    with contextlib.suppress(RuntimeError):  # not all stores can be cloned; another thread may be waiting with this one
        store = store.clone()
    keys = {each: f"differs/{each}" for each in ranks}
    store.set(keys[rank], json.dumps([own, _ending > 0]))
    with contextlib.suppress(dist.DistError):  # a rank that does not wait for the call it started reports nothing
        store.wait(list(keys.values()), timedelta(seconds=_TIMEOUT))
    received = {each: json.loads(store.get(key)) for each, key in keys.items() if store.check([key])}
    places = {each: None if place is None else (place[0], place[1], place[2]) for each, (place, _) in received.items()}
    return places, {each for each, (_, ended) in received.items() if ended}


def _lines(place: _SourceLine, ranks: list[int]) -> list[str]:
    file, line, source = place
    who = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    where = f"  rank{'s' if len(ranks) > 1 else ''} {who}: {file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
    return [where, *([f"      {source}"] if source else [])]
