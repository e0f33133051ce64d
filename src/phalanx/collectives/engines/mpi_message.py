"""Messages in progress through MPI, and the intervals of polling MPI for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives.errors import CollectiveTimeout, GroupAborted

from .mpi_library import ErrorTranslation, mark_failed
from .threaded import ENDED

_EAGER = 0.0005  # seconds of polling without sleeping
_BYTES_PER_SECOND = 2e8  # polls longer for large data, at this rate, because MPI transfers data only when polled
_SHORT, _LONG = 0.00002, 0.001  # seconds between later polls


class MpiPolling:
    """Poll intervals. MPI makes progress only when polled: poll often at first, then rarely, to leave the core to
    others.

    With more ranks than cores MPI itself yields on each poll.
    """

    def __init__(self, size: int = 0) -> None:
        self._begun = time.monotonic()
        self._eager = _EAGER + size / _BYTES_PER_SECOND

    @property
    def waited(self) -> float:
        """Seconds since the first poll."""
        return time.monotonic() - self._begun

    def rest(self) -> None:
        """Sleep until the next poll."""
        waited = self.waited
        if waited > self._eager:  # sched_yield costs more than a sleep on a busy host
            time.sleep(min(_LONG, max(_SHORT, waited / 100)))


class MpiMessage:
    """A message in progress (engine.PendingCall).

    status  an MPI.Status for it
    lock    held during calls of MPI
    ended   returns whether the group was aborted
    """

    def __init__(
        self,
        what: str,
        request: Any,
        tensor: torch.Tensor,
        timeout: float,
        *,
        status: Any,
        lock: Any,
        ended: Callable[[], bool],
    ) -> None:
        self._what = what
        self._request = request
        self._tensor: torch.Tensor | None = tensor  # must live while MPI reads or writes it
        self._timeout = timeout
        self._status = status
        self._lock = lock
        self._has_ended = ended
        self._testing = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether it is known to have finished, without polling MPI (flight_recorder.py)."""
        return self._tensor is None

    def done(self) -> bool:
        """Return whether the message has been transferred."""
        with self._testing:
            if self._tensor is not None:
                with self._lock, ErrorTranslation(self._what):
                    over = self._request.Test(self._status)
                self._tensor = None if over else self._tensor
            return self._tensor is None

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for the message; return whether it has been transferred."""
        polling = MpiPolling(self._tensor.nbytes if self._tensor is not None else 0)
        while not self.done():
            if self._has_ended():
                mark_failed(self._tensor, self._request)
                raise GroupAborted(ENDED)
            if timeout and polling.waited > timeout:
                return False
            if self._timeout and polling.waited > self._timeout:
                mark_failed(self._tensor, self._request)
                raise CollectiveTimeout(f"{self._what} timed out: it waited {self._timeout:g} s for another rank")
            polling.rest()
        return True

    @property
    def source(self) -> int:
        """The rank that the message came from."""
        return int(self._status.Get_source())
