"""The run on the whole screen of a terminal: handles events, keys and signals, and draws."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from phalanx.contract.events import ClusterSample, MetricsMeasured
from phalanx.errors import PhalanxError
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.status import RunStatus
from phalanx.watch.screen import frame
from phalanx.watch.screen.signs import signs
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.terminal.keys import Keyboard
from phalanx.watch.screen.terminal.paint import Painter
from phalanx.watch.screen.terminal.terminal import Terminal
from phalanx.watch.screen.view import Pane, View
from phalanx.watch.source import Source, WhyAnswer

_PAUSE = 1.0  # seconds between two frames without a key: drawing takes CPU time from the ranks
_AT_ONCE = 0.03  # seconds after a key
_POLL = 1.0  # seconds between two reads of the log
_LINGER = 1.0  # seconds for which `run --screen` shows the final state
_TYPING = 1.5  # seconds between two digits of a number
_LEAVE_TIMEOUT = 2.0  # seconds for requests that are still running when the user leaves
_BATCH = 200  # events that are folded before other tasks run


def show(source: Source, *, actions: RunActions, environ: Mapping[str, str], owned_by_run: bool = False) -> int:
    """Show the run until the user leaves.

    `owned_by_run`: started by `phalanx run --screen`, in its terminal; it ends with the run.
    """
    return asyncio.run(RunScreen(source, actions, environ, owned_by_run=owned_by_run).run())


class RunActions(Protocol):
    """What a user can do from the screen. Viewers cannot change a run themselves: the caller passes this in."""

    def debugger(self, rank: int) -> Sequence[str]:
        """Return the command that debugs a rank in the terminal."""
        ...

    def stop(self) -> None:
        """Stop the run as SIGTERM does. Does not wait. Raises PhalanxError."""
        ...

    def interrupt(self) -> None:
        """Stop the run as Ctrl-C does. Does not wait. Raises PhalanxError."""
        ...

    def end_now(self) -> None:
        """Stop the run without a grace period, as a second Ctrl-C does."""
        ...


class RunScreen:
    """The screen of one run."""

    def __init__(self, source: Source, actions: RunActions, environ: Mapping[str, str], *, owned_by_run: bool) -> None:
        self._source = source
        self._actions = actions
        self._signs = signs(environ)
        self._painter = Painter(colour=not environ.get("NO_COLOR"), ascii_only=self._signs.ascii_only)
        self._model = RunModel(RunStatus(source.run))
        self._view = View(owned_by_run=owned_by_run, able=source.alive)
        self._changed = asyncio.Event()  # there is something to draw
        self._hurry = asyncio.Event()  # draw at once
        self._rank_changed = asyncio.Event()  # another log is to be shown
        self._left = asyncio.Event()
        self._keyboard = Keyboard(gone=self._left.set)
        self._typing_timer: asyncio.TimerHandle | None = None  # of a rank number
        self._away = False  # another program uses the terminal
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None

    async def run(self) -> int:
        """Show the run until the user leaves. Returns the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unexpected)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._left.set)
        loop.add_signal_handler(signal.SIGWINCH, self._repaint)
        # Under `phalanx run` the run gets the signal as well and decides. A handler instead of SIG_IGN, which debuggers
        # that are started here would inherit.
        loop.add_signal_handler(signal.SIGINT, (lambda: None) if self._view.owned_by_run else self._left.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until here (launcher/viewers/terminal.py)
        with Terminal() as terminal:
            loop.add_signal_handler(signal.SIGTSTP, self._begin_away, terminal, "suspend")
            loop.add_signal_handler(signal.SIGCONT, self._continued, terminal)
            self._keyboard.listen(terminal.fd, lambda keys: self._pressed(keys, terminal))
            for work in (self._listen(), self._follow(), self._paint(terminal), self._tick(terminal)):
                self._start(work)
            try:
                await self._left.wait()
            finally:
                self._keyboard.ignore()
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed is not None:
            raise self._failed
        _leave_behind(_LEAVE_TIMEOUT)
        return 0

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._fail(task.exception())

    def _unexpected(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # a lost connection is handled where it is read
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        """Leave because of an unexpected error. It is raised after the terminal is restored."""
        if error is not None:
            self._failed = self._failed or error
            self._left.set()

    # -- events and logs

    async def _listen(self) -> None:
        seen = 0
        try:
            async for event in self._source.events():
                self._model.apply(event)
                self._changed.set()
                if not isinstance(event, ClusterSample | MetricsMeasured):  # not a periodic event
                    self._hurry.set()
                seen += 1
                if seen % _BATCH == 0:
                    await asyncio.sleep(0)
        except (PhalanxError, OSError) as error:
            self._view.word = f"no more updates: {error}"
        self._view.over, self._view.able = True, False
        self._view.question = ""
        self._changed.set()
        if self._view.owned_by_run:
            await asyncio.sleep(_LINGER)
            self._left.set()

    async def _follow(self) -> None:
        """Follow the log of the chosen rank."""
        view = self._view
        while True:
            if view.rank in self._model.ranks:
                view.tail.switch(view.rank, view.stream)
                if await view.tail.update(self._source):
                    self._changed.set()
            self._rank_changed.clear()
            await _within(_POLL, self._rank_changed)

    async def _tick(self, terminal: Terminal) -> None:
        """Redraw once per second, for the elapsed time."""
        while not self._view.over:
            await asyncio.sleep(1.0 - time.time() % 1.0)
            self._changed.set()
            if not terminal.in_front:  # a shell has the terminal: the job was stopped from outside
                self._begin_away(terminal, "step back")

    # -- drawing

    async def _paint(self, terminal: Terminal) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._away and not terminal.busy:
                rows, columns = terminal.size()
                now = self._model.now if self._view.over else time.time()
                lines = frame.draw(self._model, self._view, Canvas(columns, rows, self._signs), now)
                terminal.write(self._painter.frame(lines, columns, rows))
            elif terminal.busy:
                self._changed.set()
            self._hurry.clear()
            await asyncio.sleep(_AT_ONCE)
            await _within(_PAUSE - _AT_ONCE, self._hurry)

    def _repaint(self) -> None:
        self._painter.forget()
        self._changed.set()

    # -- keys

    def _pressed(self, keys: list[str], terminal: Terminal) -> None:
        view = self._view
        for key in keys:
            if view.over and view.owned_by_run:
                self._left.set()
                return
            was = (view.rank, view.stream)
            action = view.press(key, self._model)
            if (view.rank, view.stream) != was:
                self._rank_changed.set()
            self._handle(action, terminal)
        if keys:
            self._changed.set()
            self._hurry.set()
            if self._typing_timer is not None:
                self._typing_timer.cancel()
            if view.typed:
                self._typing_timer = asyncio.get_running_loop().call_later(_TYPING, self._number_done)

    def _number_done(self) -> None:
        self._view.typed = ""
        self._changed.set()

    def _handle(self, action: str, terminal: Terminal) -> None:
        match action:
            case "leave":
                self._left.set()
            case "repaint":
                self._repaint()
            case "stop":
                self._start(self._stop(self._actions.stop))
            case "interrupt":
                self._start(self._stop(self._actions.interrupt))
            case "end now":
                self._start(self._stop(self._actions.end_now))
            case "stacks":
                self._view.pane = Pane("stacks", ["asking all ranks ..."])
                self._start(self._stacks(self._view.pane))
            case "suspend" | "debugger":
                self._begin_away(terminal, action)

    async def _stop(self, stop: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(stop)
        except PhalanxError as error:
            self._view.word, self._view.question = str(error), ""
        self._changed.set()

    async def _stacks(self, pane: Pane) -> None:
        try:
            found = await self._source.why()
            pane.text = stack_lines(found, self._view.rank)
        except (PhalanxError, OSError) as error:
            pane.text = str(error).splitlines()
        self._changed.set()

    # -- while another program uses the terminal

    def _begin_away(self, terminal: Terminal, why: str) -> None:
        if not self._away and not self._left.is_set():
            self._away = True
            self._start(self._be_away(terminal, why))

    async def _be_away(self, terminal: Terminal, why: str) -> None:
        loop = asyncio.get_running_loop()
        self._keyboard.ignore()
        loop.remove_signal_handler(signal.SIGTSTP)
        try:
            if why == "suspend":
                await terminal.suspend()
            elif why == "step back":
                await terminal.step_back()
            else:
                words = self._actions.debugger(self._view.rank)
                await terminal.lend(words, hint="phalanx: press Enter to return to the screen\n")
        except (OSError, PhalanxError) as error:
            self._view.word = str(error)
            try:
                terminal.enter()
            except OSError:
                self._left.set()
                return
        finally:
            self._away = False
        loop.add_signal_handler(signal.SIGTSTP, self._begin_away, terminal, "suspend")
        self._keyboard.listen(terminal.fd, lambda keys: self._pressed(keys, terminal))
        self._repaint()

    def _continued(self, terminal: Terminal) -> None:
        if not self._away:
            terminal.reenter()
            self._repaint()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):  # not wait_for, which may swallow a cancellation before Python 3.12
        async with asyncio.timeout(seconds):
            await event.wait()


def _leave_behind(seconds: float) -> None:
    """Exit after some seconds, even if a request in another thread is never answered."""

    def leave() -> None:
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()


def stack_lines(found: WhyAnswer, first: int) -> list[str]:
    """Return the report and the stacks, those of rank `first` before the others."""
    lines = found.report.splitlines()
    for rank in sorted(found.stacks, key=lambda rank: (rank != first, rank)):
        lines += ["", f"rank {rank}", *(f"  {line}" for line in found.stacks[rank].splitlines())]
    return lines
