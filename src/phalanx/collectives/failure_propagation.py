"""Why a group across machines broke: leaders tell each other, and the ranks of their machines, through the store."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable

import msgspec
import torch.distributed as dist

from .engines.engine import CallKind, EngineCall
from .engines.threaded import ENDED
from .errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from .neighbours import Neighbours

_PATIENCE = 1.0  # seconds for the leaders of other machines to say what they know
_LONGER = 3.0  # for the leader of this machine, who waits for those
_MOMENT = 0.3  # for those who are told
_FIRST = 0.1  # before anybody is asked: whoever forms a new group takes the store away, which torch would lament
_LOOK = 0.01
_KINDS: dict[str, type[dist.DistBackendError]] = {
    kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CollectiveMismatch, GroupAborted)
}
_GLOO = re.compile(r"gloo|connect|socket|timed out|pipe|pair|abort|peer", re.IGNORECASE)  # anything else is no wire's
_PARTS = [kind.name.lower() for kind in CallKind]


class FailureMessage(msgspec.Struct, frozen=True):
    """What a leader has seen; `text` is empty where it knows no more than that a wire ended."""

    kind: str = ""
    text: str = ""


class FailurePropagation:
    """`over`: whether the group was aborted. Then its store may be gone as well, and is not asked any more."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        neighbours: Neighbours,
        named: Callable[[Iterable[int]], str],
        over: Callable[[], bool],
    ) -> None:
        self._over = over
        self._rank = rank
        self._named = named
        self._store = store
        self._machines = neighbours.machines
        self._mine = neighbours.mine

    def of(self, error: Exception, call: EngineCall, leads: bool) -> Exception:
        """What to raise instead of it."""
        try:
            return self._lead(error, call) if leads else self._follow(error, call)
        except (RuntimeError, ValueError):  # the store is gone, too
            known = _own(error, call)
            if known is None or (isinstance(known, GroupAborted) and not leads):
                return PeerLost(f"{_name(call)}: peer lost, a rank on another machine, or the store of the group")
            return known

    def heard(self) -> None:
        """For the leader: until the ranks of this machine know. With it, the store may go."""
        keys = [f"heard by {rank}" for rank in self._machines[self._mine][1:]]
        until = time.monotonic() + _MOMENT
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < until and not self._over() and not self._store.check(keys):
                time.sleep(_LOOK)

    def _lead(self, error: Exception, call: EngineCall) -> Exception:
        known = _own(error, call)
        self._tell("seen by", known)
        cause = known or self._asked(error, call)
        self._tell("cause at", cause)
        return cause

    def _asked(self, error: Exception, call: EngineCall) -> Exception:
        """A wire ended, or nothing came: whoever is alive says what it has seen."""
        others = {number for number in range(len(self._machines)) if number != self._mine}
        self._pause()
        until = time.monotonic() + _PATIENCE
        while others and time.monotonic() < until:
            if self._over():
                return GroupAborted(ENDED)
            for number in sorted(others):
                if self._store.check([f"seen by {number}"]):
                    others.remove(number)
                    word = msgspec.json.decode(self._store.get(f"seen by {number}"), type=FailureMessage)
                    if word.text:
                        return _again(word)
            time.sleep(_LOOK)
        ranks = [rank for number in others for rank in self._machines[number]]
        late = "timed out" in str(error).lower()
        if not ranks:
            return as_ours(error, _name(call), call.timeout)
        where = "on another machine" if len(others) == 1 else "on other machines"
        if late:
            return CollectiveTimeout(
                f"{_name(call)}: {self._named(ranks)} {where} did not come within the timeout of {call.timeout:g} s"
            )
        have = "have" if len(ranks) > 1 else "has"
        return PeerLost(
            f"{_name(call)}: {self._named(ranks)} {where} {have} ended, or cannot be reached: {plainly(error)}"
        )

    def _follow(self, error: Exception, call: EngineCall) -> Exception:
        known = _own(error, call) or error
        if isinstance(known, PeerLost):  # it may be the leader of this machine, who then tells nobody
            self._tell("seen by", known)
        if not isinstance(known, GroupAborted | CollectiveTimeout):
            return known
        self._pause()
        until = time.monotonic() + _LONGER
        while time.monotonic() < until and not self._over():
            if self._store.check([f"cause at {self._mine}"]):
                word = msgspec.json.decode(self._store.get(f"cause at {self._mine}"), type=FailureMessage)
                self._store.set(f"heard by {self._rank}", "")
                return _again(word)
            time.sleep(_LOOK)
        return known

    def _pause(self) -> None:
        until = time.monotonic() + _FIRST
        while time.monotonic() < until and not self._over():
            time.sleep(_LOOK)

    def _tell(self, how: str, error: Exception | None) -> None:
        word = FailureMessage(type(error).__name__, str(error)) if error else FailureMessage()
        self._store.set(f"{how} {self._mine}", msgspec.json.encode(word))


def _again(word: FailureMessage) -> Exception:
    error: Exception = _KINDS.get(word.kind, PeerLost)(word.text)
    return error


def _own(error: Exception, call: EngineCall) -> Exception | None:
    """What an engine says itself, and not gloo. The one within speaks of a part of the call, as if it were all."""
    if not isinstance(error, tuple(_KINDS.values())):
        return None
    text = re.sub(r" \(of this group: \d+\)", "", str(error))  # its own numbers
    text = re.sub(r"timeout of [\d.]+ s", f"timeout of {call.timeout:g} s", text)
    part = next((name for name in _PARTS if text.startswith((f"{name} ", f"{name}:"))), "")
    return _again(FailureMessage(type(error).__name__, f"{_name(call)}{text.removeprefix(part)}" if part else text))


def as_ours(error: Exception, what: str, timeout: float) -> Exception:
    """What gloo says, in our words; what is not gloo's, as it is."""
    if isinstance(error, tuple(_KINDS.values())) or not _GLOO.search(str(error)):
        return error
    if "timed out" in str(error).lower():
        return CollectiveTimeout(f"{what} timed out after {timeout:g} s")
    return PeerLost(f"{what}: peer lost, it has ended or cannot be reached: {plainly(error)}")


def plainly(error: Exception) -> str:
    """What gloo says, without where in its source, and without its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).splitlines()[0].partition(". This ")[0]


def _name(call: EngineCall) -> str:
    return call.kind.name.lower()
