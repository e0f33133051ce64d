"""Where the main thread is: its phase, its place in the user's code, and what it waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from types import CodeType, FrameType
from typing import Any

from . import flight_recorder, phases, stacks, status_slot

_NUMBERS = {phase: number for number, phase in enumerate(status_slot.PHASES)}
_WINDOW = 50  # looks: five seconds
_FULL = 5  # looks, of which one is written down with all that it saw, as long as the script gets on: read once a second
_MOST = 4096  # code objects that are remembered
_LONG = 1.0  # seconds in one place, after which it is worth while to ask what is pending

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")

# While a collective is pending, who sleeps in one of these waits for it: `Work.wait` and CUDA leave no frame.
_MAY_WAIT = ("idle", "forward", "backward", "optimizer")


class Sampler:
    """The text of a page:

    phase, place [file, line, function]: the innermost of the user's own
    groups: [{id, name, nccl, enqueued, completed}]
    call: {op, group, seq, dtypes, shapes, peer, tag, reduction}: what it has been waiting in for a while
    batches: how many the DataLoader has given that it was last seen in
    moved: when it was last seen to do anything, in seconds of `time.monotonic`
    places: how many pieces of code it was seen in, in the last 50 looks. One or two: it waits, or goes round in circles
    over: when the script was first seen to have run its last line, likewise
    threads: names of the threads that Python waits for then
    ending: Python has called its atexit functions, but for those that were registered before the script began
    teardown: when the last of them returned; code: the exit code, as far as that is known by then
    deaf: the script has taken the signal by which stacks are asked for: it is not to be sent
    """

    def __init__(self, own: status_slot.StatusSlot, number: int) -> None:
        self._page = own
        self._looks = 0
        self._moves = 0
        self._phases = [0] * len(status_slot.PHASES)
        self._kinds: dict[int, tuple[CodeType, phases.CodeKind]] = {}
        self._before: tuple[int, int, int] = (0, 0, 0)
        self._done: tuple[int, ...] = ()
        self._moved = 0
        self._recent: deque[int] = deque(maxlen=_WINDOW)
        self._groups: list[dict[str, Any]] = []
        self._call: dict[str, Any] = {}
        self._sought = False  # what is pending, since it moved
        self._batches = 0
        self._over = 0  # when the script had run its last line
        self._written: dict[str, Any] = {}
        self._number = number  # of the signal by which stacks are asked for, and whose it was
        self._handler = signal.getsignal(number)
        self._state = f"/proc/self/task/{threading.main_thread().native_id}/stat"
        self.phase = "idle"

    @property
    def still(self) -> float:
        """Seconds that the main thread has been where it is."""
        return max(0.0, (time.monotonic_ns() - self._moved) / 1e9) if self._moved else 0.0

    def publish(self, now: int) -> None:
        frame = stacks.main()
        if frame is None:
            return
        here = (id(frame), id(frame.f_code), frame.f_lasti)
        phase, place, calls = self._look(frame)
        del frame  # while we are without Python's lock it may return, and what it had is not ours to drop
        stays, full = here == self._before, self._looks % _FULL == 0
        # Whoever has just come to torch.distributed may be recording a group's very first call, and that list of
        # torch's has no lock.
        if stays or (not calls and (full or phase == "backward")):
            with contextlib.suppress(Exception):  # of a torch that tells it otherwise: there is more to publish
                self._groups = flight_recorder.groups()
        moved = self._follow(here, now)
        if phase in _MAY_WAIT and self._waits(phase, moved):
            phase = "collective"
        self.phase = phase
        self._looks += 1
        number = _NUMBERS[phase]
        self._phases[number] += 1
        self._page.look(now, self._looks, self._moves, number, self._phases[number])
        if not stays and not full:
            return
        if phase == "data":
            self._batches = _batches(stacks.main()) or self._batches
        text = {
            "phase": phase,
            "place": place,
            "batches": self._batches,
            "groups": self._groups,
            "call": self._waited_in(phase, moved, now),
            "moved": round(self._moved / 1e9, 3),
            "places": len(set(self._recent)),
        }
        if signal.getsignal(self._number) is not self._handler:
            text["deaf"] = True
        if getattr(threading, "_SHUTTING_DOWN", False):
            self._over = self._over or now
            text |= {"over": round(self._over / 1e9, 3), "threads": stacks.awaited()}
        if text != self._written:
            self._page.write(text)
            self._written = text

    def end(self, *, over: bool) -> None:
        """What happens from now on nobody sees but the kernel. `over`: the script has run its last line."""
        text: dict[str, Any] = {"phase": "idle", "place": [], "groups": self._groups, "ending": True}
        if over:
            self._over = self._over or time.monotonic_ns()
            text["over"] = round(self._over / 1e9, 3)
        self._written = text
        self._page.write(text)

    def teardown(self, code: int) -> None:
        """Nothing of Python's own is left to be done, but to take everything apart."""
        self._page.write({**self._written, "teardown": round(time.monotonic(), 3), "code": code})

    def _follow(self, here: tuple[int, int, int], now: int) -> bool:
        """It is elsewhere, or it is here again: a step and some collectives later."""
        done = (self._page.steps, *(group["enqueued"] for group in self._groups))
        moved = here != self._before or done != self._done
        if moved:
            self._moves += 1
            self._moved = now
            self._before, self._done, self._call, self._sought = here, done, {}, False
        self._recent.append(here[1])
        return moved

    def _look(self, frame: FrameType | None) -> tuple[str, list[Any], bool]:
        """Phase, place, and whether the innermost frame is torch.distributed's. The innermost that is known counts."""
        kinds = self._kinds
        phase = ""
        place: list[Any] = []
        calls: bool | None = None
        inside = False  # in a function of the user's
        while frame is not None and not (phase and place):
            code = frame.f_code
            known = kinds.get(id(code))
            if known is None:
                known = self._learn(code)
            kind = known[1]
            if calls is None:
                calls = kind.calls
            if kind.own:
                inside = inside or not kind.top
                if not place:
                    place = [code.co_filename, frame.f_lineno or 0, code.co_name]
            if not phase:
                phase = ("idle" if inside else "import") if kind.loads else kind.phase
            frame = frame.f_back
        return phase or "idle", place, bool(calls)

    def _learn(self, code: CodeType) -> tuple[CodeType, phases.CodeKind]:
        """By its number, and kept so that no other gets that: a code object's own hash is a hash of all its parts."""
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
        known = self._kinds[id(code)] = (code, phases.kind(code))
        return known

    def _waits(self, phase: str, moved: bool) -> bool:
        """A collective is pending, and the main thread does nothing else than wait for it."""
        pending = [group for group in self._groups if group["enqueued"] > group["completed"]]
        if not pending:
            return False
        if phase != "backward" and moved:
            return False
        if any(group["nccl"] for group in pending) and not moved:
            return True  # who waits for CUDA may well spin
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

    def _waited_in(self, phase: str, moved: bool, now: int) -> dict[str, Any]:
        if not moved and not self._call and phase in ("collective", "join"):
            self._call = flight_recorder.present(stacks.main())
            if not self._call and not self._sought and now - self._moved > _LONG * 1e9:
                self._sought = True  # all that is recorded is read for that: once
                self._call = flight_recorder.pending()
            group = self._call.get("group")
            counts = [known["enqueued"] for known in self._groups if known["name"] == group]
            if counts and "seq" not in self._call:
                self._call["seq"] = counts[0]
        return self._call


def _batches(frame: FrameType | None) -> int:
    """Of a DataLoader of torch's that the main thread is in, by its own count: an evaluation has no steps."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__next__" and code.co_filename.endswith(_LOADER):
            return int(getattr(frame.f_locals.get("self"), "_num_yielded", 0))
        frame = frame.f_back
    return 0
