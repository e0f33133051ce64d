"""Samples the main thread: its phase, its place in user code, and the operation it waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from .. import log, thread_frames
from ..board import status_slot
from . import movement, phases, stacks
from .collectives import current_call, group_progress, recorded_calls

_NUMBERS = {phase: number for number, phase in enumerate(status_slot.PHASES)}
_FULL_EVERY = 5  # while the script makes progress, every fifth sample is written in full: it is read once per second
_STILL = 1.0  # seconds in one place after which pending collectives are looked up

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")

# While a collective is pending, a thread that sleeps in one of these phases waits for it: `Work.wait` and CUDA leave no
# frame.
_MAY_WAIT = ("idle", "forward", "backward", "optimizer")
# A thread that stays asleep here computes nothing. Not backward: there the main thread sleeps while other threads
# compute.
_MAY_SLEEP = ("idle", "forward", "optimizer")


class Sampler:
    """Writes the text of a status slot:

    phase, place [file, line, function]: the innermost frame of user code
    groups: [{id, name, nccl, enqueued, completed}]
    call: {op, group, seq, dtypes, shapes, peer, tag, reduction}: what it has been waiting in for a while
    batches: how many the DataLoader that it was last seen in has returned
    moved: when it last made progress, in seconds of `time.monotonic`
    places: number of code objects seen in the last 50 samples. One or two: it waits, or is in a loop
    over: when the script was first seen to have run its last line, likewise
    threads: names of the threads that Python waits for then
    ending: Python has called its atexit functions, except those registered before the script began
    teardown: when the last of them returned; code: the exit code, as far as known by then
    signal_taken: the script uses the signal that requests stacks: do not send it
    """

    def __init__(self, own: status_slot.StatusSlot, number: int) -> None:
        self._slot = own
        self._samples = 0
        self._phases = [0] * len(status_slot.PHASES)
        self._stacks = phases.StackClassifier()
        self._movement = movement.Movement()
        self._groups: list[dict[str, Any]] = []
        self._call: dict[str, Any] = {}
        self._searched = False  # pending collectives were looked up since it last moved
        self._batches = 0
        self._finished_at = 0  # when the script had run its last line
        self._written: dict[str, Any] = {}
        self._signal = number  # of the signal that requests stacks, and its handler
        self._handler = signal.getsignal(number)
        self._state = f"/proc/self/task/{threading.main_thread().native_id}/stat"
        self.phase = "idle"

    @property
    def still(self) -> float:
        """Seconds since the main thread last moved."""
        return self._movement.still

    def publish(self, now: int) -> None:
        """Take a sample of the main thread and write it to the status slot."""
        with thread_frames.reading():
            frame = stacks.main()
            if frame is None:
                return
            here = (id(frame), id(frame.f_code), frame.f_lasti)
            phase, place, calls = self._stacks.classify(frame)
            del frame  # it may return while we do not hold the GIL; this thread must not be the one to free its locals
        stays, full = self._movement.stays(here), self._samples % _FULL_EVERY == 0
        # A thread that has just entered torch.distributed may be recording the first call of a group, and torch's list
        # has no lock.
        if stays or (not calls and (full or phase == "backward")):
            try:
                self._groups = group_progress.progress()
            except Exception:  # another version of torch: publish the rest
                log.swallowed("forkserver.probe.sampler")
        counts = (self._slot.steps, *(group["enqueued"] for group in self._groups))
        moved = self._movement.update(here, counts, now)
        if moved:
            self._call, self._searched = {}, False
        if phase in _MAY_WAIT and self._waits(phase, moved):
            phase = "collective"
        self.phase = phase
        self._samples += 1
        number = _NUMBERS["sleep" if phase in _MAY_SLEEP and not moved and self._sleeps() else phase]
        self._phases[number] += 1
        self._slot.look(now, self._samples, self._movement.moves, number, self._phases[number])
        if not stays and not full:
            return
        if phase == "data":
            with thread_frames.reading():
                self._batches = _batches(stacks.main()) or self._batches
        text = {
            "phase": phase,
            "place": place,
            "batches": self._batches,
            "groups": self._groups,
            "call": self._current_call(phase, moved, now),
            "moved": round(self._movement.moved / 1e9, 3),
            "places": self._movement.places,
        }
        if signal.getsignal(self._signal) is not self._handler:
            text["signal_taken"] = True
        if getattr(threading, "_SHUTTING_DOWN", False):
            self._finished_at = self._finished_at or now
            text |= {"over": round(self._finished_at / 1e9, 3), "threads": stacks.non_daemon()}
        if text != self._written:
            self._slot.write(text)
            self._written = text

    def end(self, *, over: bool) -> None:
        """Publish that sampling has ended. `over`: the script has run its last line."""
        text: dict[str, Any] = {"phase": "idle", "place": [], "groups": self._groups, "ending": True}
        if over:
            self._finished_at = self._finished_at or time.monotonic_ns()
            text["over"] = round(self._finished_at / 1e9, 3)
        self._written = text
        self._slot.write(text)

    def teardown(self, code: int) -> None:
        """Publish that only the teardown of the interpreter remains."""
        self._slot.write({**self._written, "teardown": round(time.monotonic(), 3), "code": code})

    def _waits(self, phase: str, moved: bool) -> bool:
        """Return whether a collective is pending and the main thread only waits for it."""
        pending = [group for group in self._groups if group["enqueued"] > group["completed"]]
        if not pending:
            return False
        if phase != "backward" and moved:
            return False
        if any(group["nccl"] for group in pending) and not moved:
            return True  # a thread that waits for CUDA may spin
        return self._sleeps()

    def _sleeps(self) -> bool:
        try:
            fd = os.open(self._state, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            text = os.read(fd, 256)
        finally:
            os.close(fd)
        return text[text.rfind(b")") + 2 : text.rfind(b")") + 3] in (b"S", b"D")

    def _current_call(self, phase: str, moved: bool, now: int) -> dict[str, Any]:
        if not moved and not self._call and phase in ("collective", "join"):
            with thread_frames.reading():
                self._call = current_call.find(stacks.main())
            if not self._call and not self._searched and now - self._movement.moved > _STILL * 1e9:
                self._searched = True  # expensive, reads all records: do it once
                self._call = recorded_calls.pending()
            group = self._call.get("group")
            counts = [known["enqueued"] for known in self._groups if known["name"] == group]
            if counts and "seq" not in self._call:
                self._call["seq"] = counts[0]
        return self._call


def _batches(frame: FrameType | None) -> int:
    """Return the batch count of the torch DataLoader that the main thread is in: an evaluation has no steps."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__next__" and code.co_filename.endswith(_LOADER):
            return int(getattr(frame.f_locals.get("self"), "_num_yielded", 0))
        frame = frame.f_back
    return 0
