"""Ranks that called different things tell each other where, so that the error has both lines side by side.

An engine knows what each rank has called, not where. The group has ended by then, and its store has not.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from phalanx.collectives.errors import CollectiveMismatch
from phalanx.forkserver import paths

_PATIENCE = 2.0  # seconds for what the others have to say
_THEIRS = re.compile(
    rf"(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|/src/phalanx/(?!{'|'.join(paths.USER_CODE)})|^<frozen"
)

_Place = tuple[str, int, str]  # file, line, and its text


def mismatch(text: str, store: dist.Store, rank: int, names: Mapping[int, int]) -> CollectiveMismatch:
    """`text`: who called what. `names`: of the ranks that may say where, what they are called in the world."""
    with contextlib.suppress(Exception):  # to the agent, before anybody ends
        sys.modules[paths.PROBE_MODULE].current.differs()
    places: dict[int, _Place] = {}
    with contextlib.suppress(Exception):  # what the engine has said is enough
        places = _exchange(_here(), store, rank, list(names))
    by_place: dict[_Place, list[int]] = {}
    for each, place in places.items():
        by_place.setdefault(place, []).append(names[each])
    error = CollectiveMismatch(
        "\n".join([text, *(line for place in by_place for line in _lines(place, by_place[place]))])
    )
    error.in_words = bool(by_place)  # the places that matter are named: the one that it is raised at does not
    return error


def _here() -> _Place | None:
    """The innermost line of the user's own. In a thread of torch's or ours the main thread waits for what that does."""
    frame = _own(sys._getframe(2)) or _own(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    return file, line, linecache.getline(file, line, frame.f_globals).strip()[:100]


def _own(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _THEIRS.search(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _exchange(own: _Place | None, store: dist.Store, rank: int, ranks: list[int]) -> dict[int, _Place]:
    with contextlib.suppress(Exception):  # another thread may wait with the first
        store = store.clone()
    keys = {each: f"differs/{each}" for each in ranks}
    store.set(keys[rank], json.dumps(own))
    with contextlib.suppress(dist.DistError):  # who does not say it may never ask for what it has started
        store.wait(list(keys.values()), timedelta(seconds=_PATIENCE))
    told = {each: json.loads(store.get(key)) for each, key in keys.items() if store.check([key])}
    return {each: (place[0], place[1], place[2]) for each, place in told.items() if place is not None}


def _lines(place: _Place, ranks: list[int]) -> list[str]:
    file, line, source = place
    who = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    where = f"  rank{'s' if len(ranks) > 1 else ''} {who}: {file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
    return [where, *([f"      {source}"] if source else [])]
