"""The run on the whole screen of a terminal: listens to its events, to keys and to signals, and paints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from phalanx.contract.events import ClusterSample, MetricsMeasured
from phalanx.errors import PhalanxError
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import frame
from phalanx.watch.screen.canvas import Canvas
from phalanx.watch.screen.hands import RunActions
from phalanx.watch.screen.keys import Keys
from phalanx.watch.screen.paint import Painter
from phalanx.watch.screen.signs import signs
from phalanx.watch.screen.terminal import Terminal
from phalanx.watch.screen.view import Pane, View
from phalanx.watch.source import Source, WhyAnswer

_PAUSE = 1.0  # seconds between two frames that nobody has asked for: each takes time from ranks that have all cores
_AT_ONCE = 0.03  # where somebody has typed
_LOOK = 1.0  # seconds between two looks at the log
_ESCAPE = 0.05  # seconds after which an escape was the key itself
_LINGER = 1.0  # seconds that the last state of a run stays, where its own terminal is waiting
_TYPING = 1.5  # seconds between two digits of a number
_PATIENCE = 2.0  # seconds for questions that are still under way when somebody leaves
_HEED = 200  # events between two looks at anything else


def show(source: Source, *, hands: RunActions, environ: Mapping[str, str], held: bool = False) -> int:
    """Until somebody leaves. `held`: below `phalanx run`, whose terminal this is; it goes with the run."""
    return asyncio.run(Screen(source, hands, environ, held=held).run())


class Screen:
    def __init__(self, source: Source, hands: RunActions, environ: Mapping[str, str], *, held: bool) -> None:
        self._source = source
        self._hands = hands
        self._signs = signs(environ)
        self._painter = Painter(colour=not environ.get("NO_COLOR"), ascii_only=self._signs.ascii_only)
        self._scene = RunModel(run=source.run)
        self._view = View(held=held, able=source.alive)
        self._keys = Keys()
        self._news = asyncio.Event()  # there is something to paint
        self._hurry = asyncio.Event()  # somebody has typed
        self._turned = asyncio.Event()  # another rank is chosen
        self._left = asyncio.Event()
        self._lapse: asyncio.TimerHandle | None = None  # of an escape
        self._typing: asyncio.TimerHandle | None = None  # of a number
        self._away = False  # the terminal is somebody else's
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._went_wrong)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._left.set)
        loop.add_signal_handler(signal.SIGWINCH, self._repaint)
        # Below a run, that has got it as well, and to leave is not for us to decide. Heard and not ignored: else a
        # debugger that we start would ignore it too.
        loop.add_signal_handler(signal.SIGINT, (lambda: None) if self._view.held else self._left.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was held back until here (screening.py)
        with Terminal() as terminal:
            loop.add_signal_handler(signal.SIGTSTP, self._begin_away, terminal, "suspend")
            loop.add_signal_handler(signal.SIGCONT, self._went_on, terminal)
            loop.add_reader(terminal.fd, self._typed, terminal)
            for work in (self._listen(), self._follow(), self._paint(terminal), self._tick(terminal)):
                self._start(work)
            try:
                await self._left.wait()
            finally:
                loop.remove_reader(terminal.fd)
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed is not None:
            raise self._failed
        _leave_behind(_PATIENCE)
        return 0

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._fail(task.exception())

    def _went_wrong(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # a connection that has broken is told where it is read
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        """What nobody has thought of ends the screen, and is told on a terminal that is as it was."""
        if error is not None:
            self._failed = self._failed or error
            self._left.set()

    # -- what comes

    async def _listen(self) -> None:
        seen = 0
        try:
            async for event in self._source.events():
                self._scene.see(event)
                self._news.set()
                if not isinstance(event, ClusterSample | MetricsMeasured):  # something has happened
                    self._hurry.set()
                seen += 1
                if seen % _HEED == 0:
                    await asyncio.sleep(0)
        except (PhalanxError, OSError) as error:
            self._view.word = f"nothing more is heard of it: {error}"
        self._view.over, self._view.able = True, False
        self._view.question = ""
        self._news.set()
        if self._view.held:
            await asyncio.sleep(_LINGER)
            self._left.set()

    async def _follow(self) -> None:
        """The log of the chosen rank."""
        view = self._view
        while True:
            if view.rank in self._scene.ranks:
                view.tail.turn(view.rank, view.stream)
                before = view.tail.came
                try:
                    if await view.tail.read(self._source, whole=view.back > 0):
                        self._news.set()
                    if view.back:  # whoever has scrolled back stays where he is
                        view.back = max(0, min(view.back + view.tail.came - before, len(view.tail.lines) - 1))
                    view.tail.trouble = ""
                except (PhalanxError, OSError) as error:
                    if view.tail.trouble != str(error):
                        view.tail.trouble = str(error)
                        self._news.set()
            self._turned.clear()
            await _within(_LOOK, self._turned)

    async def _tick(self, terminal: Terminal) -> None:
        """The time that it runs."""
        while not self._view.over:
            await asyncio.sleep(1.0 - time.time() % 1.0)
            self._news.set()
            if not terminal.in_front:  # the run was stopped, but not by us: a shell has the terminal
                self._begin_away(terminal, "step back")

    # -- what is seen

    async def _paint(self, terminal: Terminal) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if not self._away and not terminal.busy:
                rows, columns = terminal.size()
                now = self._scene.now if self._view.over else time.time()
                lines = frame.draw(self._scene, self._view, Canvas(columns, rows, self._signs), now)
                terminal.write(self._painter.frame(lines, columns, rows))
            elif terminal.busy:
                self._news.set()
            self._hurry.clear()
            await asyncio.sleep(_AT_ONCE)
            await _within(_PAUSE - _AT_ONCE, self._hurry)

    def _repaint(self) -> None:
        self._painter.forget()
        self._news.set()

    # -- what is typed

    def _typed(self, terminal: Terminal) -> None:
        try:
            data = os.read(terminal.fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            self._left.set()
            return
        if self._lapse is not None:
            self._lapse.cancel()
        self._pressed(self._keys.feed(data), terminal)
        if self._keys.halfway:
            loop = asyncio.get_running_loop()
            self._lapse = loop.call_later(_ESCAPE, lambda: self._pressed(self._keys.lapse(), terminal))

    def _pressed(self, keys: list[str], terminal: Terminal | None = None) -> None:
        view = self._view
        for key in keys:
            if view.over and view.held:
                self._left.set()
                return
            was = (view.rank, view.stream)
            wish = view.press(key, self._scene)
            if (view.rank, view.stream) != was:
                self._turned.set()
            self._grant(wish, terminal)
        if keys:
            self._news.set()
            self._hurry.set()
            if self._typing is not None:
                self._typing.cancel()
            if view.typed:
                self._typing = asyncio.get_running_loop().call_later(_TYPING, self._typed_through)

    def _typed_through(self) -> None:
        self._view.typed = ""
        self._news.set()

    def _grant(self, wish: str, terminal: Terminal | None) -> None:
        match wish:
            case "leave":
                self._left.set()
            case "repaint":
                self._repaint()
            case "stop" | "end now":
                self._start(self._stop(now=wish == "end now"))
            case "stacks":
                self._view.pane = Pane("stacks", ["asking all ranks ..."])
                self._start(self._stacks(self._view.pane))
            case "suspend" | "debugger" if terminal is not None:
                self._begin_away(terminal, wish)

    async def _stop(self, *, now: bool) -> None:
        try:
            await asyncio.to_thread(self._hands.end_now if now else self._hands.stop)
        except PhalanxError as error:
            self._view.word, self._view.question = str(error), ""
        self._news.set()

    async def _stacks(self, pane: Pane) -> None:
        try:
            found = await self._source.why()
            pane.text = told(found, self._view.rank)
        except (PhalanxError, OSError) as error:
            pane.text = str(error).splitlines()
        self._news.set()

    # -- when the terminal is somebody else's

    def _begin_away(self, terminal: Terminal, why: str) -> None:
        if not self._away and not self._left.is_set():
            self._away = True
            self._start(self._be_away(terminal, why))

    async def _be_away(self, terminal: Terminal, why: str) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(terminal.fd)
        loop.remove_signal_handler(signal.SIGTSTP)
        try:
            if why == "suspend":
                await terminal.suspend()
            elif why == "step back":
                await terminal.step_back()
            else:
                words = self._hands.debugger(self._view.rank)
                await terminal.lend(words, hint="phalanx: Enter goes back to the screen\n")
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
        loop.add_reader(terminal.fd, self._typed, terminal)
        self._repaint()

    def _went_on(self, terminal: Terminal) -> None:
        if not self._away:
            terminal.again()
            self._repaint()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):  # not wait_for, which before Python 3.12 may swallow that it is cancelled
        async with asyncio.timeout(seconds):
            await event.wait()


def _leave_behind(seconds: float) -> None:
    """A question that nobody answers does not keep the shell waiting."""

    def leave() -> None:
        time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()


def told(found: WhyAnswer, first: int) -> list[str]:
    """The stacks of the chosen rank before those of the others."""
    lines = found.report.splitlines()
    for rank in sorted(found.stacks, key=lambda rank: (rank != first, rank)):
        lines += ["", f"rank {rank}", *(f"  {line}" for line in found.stacks[rank].splitlines())]
    return lines
