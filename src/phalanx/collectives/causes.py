"""Why a group across machines broke: leaders tell each other, and the ranks of their machines, through the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
import torch.distributed as dist

from .engine import Call
from .neighbours import Neighbours
from .trouble import Aborted, Late, Mismatched, PeerLost

_PATIENCE = 1.0  # seconds for the leaders of other machines to say what they know
_LONGER = 3.0  # for the leader of this machine, who waits for those
_LOOK = 0.01
_KINDS: dict[str, type[dist.DistBackendError]] = {kind.__name__: kind for kind in (PeerLost, Late, Mismatched, Aborted)}


class Word(msgspec.Struct, frozen=True):
    """What a leader has seen; `text` is empty where it knows no more than that a wire ended."""

    kind: str = ""
    text: str = ""


class Causes:
    def __init__(self, store: dist.Store, neighbours: Neighbours, named: Callable[[Iterable[int]], str]) -> None:
        self._named = named
        self._store = store
        self._machines = neighbours.machines
        self._mine = neighbours.mine

    def of(self, error: Exception, call: Call, leads: bool) -> Exception:
        """What to raise instead of it."""
        try:
            return self._lead(error, call) if leads else self._follow(error)
        except (RuntimeError, ValueError):  # the store is gone, too
            return _own(error) or PeerLost(f"{_name(call)}: {error}")

    def _lead(self, error: Exception, call: Call) -> Exception:
        known = _own(error)
        word = Word(type(known).__name__, str(known)) if known else Word()
        self._store.set(f"seen by {self._mine}", msgspec.json.encode(word))
        cause = known or self._asked(error, call)
        self._store.set(f"cause at {self._mine}", msgspec.json.encode(Word(type(cause).__name__, str(cause))))
        return cause

    def _asked(self, error: Exception, call: Call) -> Exception:
        """A wire ended, or nothing came: whoever is alive says what it has seen."""
        others = {number for number in range(len(self._machines)) if number != self._mine}
        until = time.monotonic() + _PATIENCE
        while others and time.monotonic() < until:
            for number in sorted(others):
                if self._store.check([f"seen by {number}"]):
                    others.remove(number)
                    word = msgspec.json.decode(self._store.get(f"seen by {number}"), type=Word)
                    if word.text:
                        return _again(word)
            time.sleep(_LOOK)
        ranks = [rank for number in others for rank in self._machines[number]]
        late = "timed out" in str(error).lower()
        if not ranks:
            return (Late if late else PeerLost)(f"{_name(call)}: a connection between machines was lost: {error}")
        where = "on another machine" if len(others) == 1 else "on other machines"
        if late:
            return Late(f"{_name(call)} waited {call.timeout:g} s for {self._named(ranks)} {where}")
        have = "have" if len(ranks) > 1 else "has"
        return PeerLost(f"{_name(call)}: {self._named(ranks)} {where} {have} ended, or cannot be reached: {error}")

    def _follow(self, error: Exception) -> Exception:
        if not isinstance(error, Aborted):
            return error
        until = time.monotonic() + _LONGER
        while time.monotonic() < until:
            if self._store.check([f"cause at {self._mine}"]):
                word = msgspec.json.decode(self._store.get(f"cause at {self._mine}"), type=Word)
                return _again(word)
            time.sleep(_LOOK)
        return error


def _again(word: Word) -> Exception:
    error: Exception = _KINDS.get(word.kind, PeerLost)(word.text)
    return error


def _own(error: Exception) -> Exception | None:
    """What an engine says itself, and not gloo."""
    return error if isinstance(error, tuple(_KINDS.values())) else None


def as_ours(error: Exception, what: str, timeout: float) -> Exception:
    """What gloo says, in our words."""
    if known := _own(error):
        return known
    text = str(error).splitlines()[0]
    if "timed out" in text.lower():
        return Late(f"{what} timed out: it waited {timeout:g} s for another rank")
    return PeerLost(f"{what}: peer lost, a rank has ended or cannot be reached: {text}")


def _name(call: Call) -> str:
    return call.kind.name.lower()
