"""Finds out why a group on several hosts failed: leaders exchange causes through the store, and pass them to the ranks
of their hosts.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable

import msgspec
import torch.distributed as dist

from phalanx.collectives.engines.engine import CallKind, EngineCall
from phalanx.collectives.engines.threaded import ENDED
from phalanx.collectives.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from phalanx.collectives.neighbours import Neighbours
from phalanx.forkserver.signed_store import SignedStore

_LEADER_TIMEOUT = 1.0  # seconds for leaders of other hosts to report
_FOLLOWER_TIMEOUT = 3.0  # seconds that a rank waits for its own leader, which waits for the others
_ACK_TIMEOUT = 0.3  # seconds that a leader waits until its ranks have read the cause
_DELAY = 0.1  # seconds before the store is read: a new group may replace it, and torch would log errors
_POLL = 0.01
_KINDS: dict[str, type[dist.DistBackendError]] = {
    kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CollectiveMismatch, GroupAborted)
}
_GLOO = re.compile(r"gloo|connect|socket|timed out|pipe|pair|abort|peer", re.IGNORECASE)  # other errors are not gloo's
_CALL_NAMES = [kind.name.lower() for kind in CallKind]


class FailureMessage(msgspec.Struct, frozen=True):
    """What a leader has observed. `text` is empty if it only knows that a connection was closed."""

    kind: str = ""
    text: str = ""


class FailurePropagation:
    """Finds the cause of a failure. `aborted` returns whether the group was aborted; then the store may have ended and
    is not used.
    """

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        neighbours: Neighbours,
        format_ranks: Callable[[Iterable[int]], str],
        aborted: Callable[[], bool],
    ) -> None:
        self._aborted = aborted
        self._rank = rank
        self._format_ranks = format_ranks
        self._store = store
        self._hosts = neighbours.hosts
        self._mine = neighbours.mine

    def cause(self, error: Exception, call: EngineCall, leads: bool) -> Exception:
        """Return the exception to raise instead of `error`."""
        try:
            return self._lead(error, call) if leads else self._follow(error, call)
        except (RuntimeError, ValueError):  # the store has ended, too
            known = _engine_error(error, call)
            if known is None or (isinstance(known, GroupAborted) and not leads):
                return PeerLost(f"{_name(call)}: peer lost, a rank on another host, or the store of the group")
            return known

    def wait_for_readers(self) -> None:
        """Wait, as the leader, until the ranks of this host have read the cause: the store may end with this
        process.
        """
        keys = [f"read by {rank}" for rank in self._hosts[self._mine][1:]]
        deadline = time.monotonic() + _ACK_TIMEOUT
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not self._aborted() and not self._store.check(keys):
                time.sleep(_POLL)

    def _lead(self, error: Exception, call: EngineCall) -> Exception:
        known = _engine_error(error, call)
        self._publish("seen by", known)
        cause = known or self._ask_leaders(error, call)
        self._publish("cause at", cause)
        return cause

    def _ask_leaders(self, error: Exception, call: EngineCall) -> Exception:
        """Ask the other leaders for their observations, because a connection was closed or timed out."""
        others = {number for number in range(len(self._hosts)) if number != self._mine}
        self._pause()
        deadline = time.monotonic() + _LEADER_TIMEOUT
        while others and time.monotonic() < deadline:
            if self._aborted():
                return GroupAborted(ENDED)
            for number in sorted(others):
                if self._store.check([f"seen by {number}"]):
                    others.remove(number)
                    message = msgspec.json.decode(self._store.get(f"seen by {number}"), type=FailureMessage)
                    if message.text:
                        return _rebuild(message)
            time.sleep(_POLL)
        ranks = [rank for number in others for rank in self._hosts[number]]
        late = "timed out" in str(error).lower()
        if not ranks:
            return translate(error, _name(call), call.timeout)
        who = self._format_ranks(ranks)
        where = "on another host" if len(others) == 1 else "on other hosts"
        if late:
            return CollectiveTimeout(
                f"{_name(call)}: {who} {where} did not come within the timeout of {call.timeout:g} s"
            )
        have = "have" if len(ranks) > 1 else "has"
        return PeerLost(f"{_name(call)}: {who} {where} {have} ended, or cannot be reached: {gloo_message(error)}")

    def _follow(self, error: Exception, call: EngineCall) -> Exception:
        known = _engine_error(error, call) or error
        if isinstance(known, PeerLost):  # it may be this host's leader, which then cannot report
            self._publish("seen by", known)
        if not isinstance(known, GroupAborted | CollectiveTimeout):
            return known
        self._pause()
        deadline = time.monotonic() + _FOLLOWER_TIMEOUT
        while time.monotonic() < deadline and not self._aborted():
            if self._store.check([f"cause at {self._mine}"]):
                message = msgspec.json.decode(self._store.get(f"cause at {self._mine}"), type=FailureMessage)
                self._store.set(f"read by {self._rank}", "")
                return _rebuild(message)
            time.sleep(_POLL)
        return known

    def _pause(self) -> None:
        deadline = time.monotonic() + _DELAY
        while time.monotonic() < deadline and not self._aborted():
            time.sleep(_POLL)

    def _publish(self, how: str, error: Exception | None) -> None:
        message = FailureMessage(type(error).__name__, str(error)) if error else FailureMessage()
        self._store.set(f"{how} {self._mine}", msgspec.json.encode(message))


def _rebuild(message: FailureMessage) -> Exception:
    error: Exception = _KINDS.get(message.kind, PeerLost)(message.text)
    return error


def _engine_error(error: Exception, call: EngineCall) -> Exception | None:
    """Return an engine's own error, or None if it is gloo's. The inner engine names the step it was running; name the
    call instead.
    """
    if not isinstance(error, tuple(_KINDS.values())):
        return None
    text = re.sub(r" \(of this group: \d+\)", "", str(error))  # ranks within the host
    text = re.sub(r"timeout of [\d.]+ s", f"timeout of {call.timeout:g} s", text)
    part = next((name for name in _CALL_NAMES if text.startswith((f"{name} ", f"{name}:"))), "")
    return _rebuild(FailureMessage(type(error).__name__, f"{_name(call)}{text.removeprefix(part)}" if part else text))


def translate(error: Exception, what: str, timeout: float) -> Exception:
    """Translate an error of gloo; return any other one unchanged."""
    if isinstance(error, tuple(_KINDS.values())) or not _GLOO.search(str(error)):
        return error
    if "timed out" in str(error).lower():
        return CollectiveTimeout(f"{what} timed out after {timeout:g} s")
    return PeerLost(f"{what}: peer lost, it has ended or cannot be reached: {gloo_message(error)}")


def gloo_message(error: Exception) -> str:
    """Return gloo's message without source location and advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).splitlines()[0].partition(". This ")[0]


def _name(call: EngineCall) -> str:
    return call.kind.name.lower()
