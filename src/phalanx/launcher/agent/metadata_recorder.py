"""Records the metadata of a run: what ran, from which commit, with which versions, on which machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from phalanx.contract import events
from phalanx.launcher.workers.watched import WatchContext

if TYPE_CHECKING:
    from phalanx.contract.hyperparameters import Hyperparameter
    from phalanx.contract.run_metadata import RunMetadata
    from phalanx.launcher.runs.git_state import GitReader

logger = logging.getLogger(__name__)

_DELAY = 0.3  # seconds from the start of the workers: git would compete with them for the cores
_INTERVAL = 1.0  # seconds between two checks for hyperparameters of the script
_END_TIMEOUT = 1.0  # seconds that the end of a run waits for unknown values


class MetadataRecorder:
    """Writes metadata.json and publishes it, from a thread that begins shortly after the workers were started.

    The run does not wait for it, because git and the disk may be slow. At the end of a run it has one more second.
    """

    def __init__(self, context: WatchContext) -> None:
        self._context = context
        self._ending = threading.Event()
        self._stop = threading.Event()
        self._collected = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._git: GitReader | None = None
        self._led = False  # this node has led the run; another one may, if it is lost

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of its child processes, which other code must not end."""
        return self._git.pids if self._git is not None else frozenset()

    def start(self) -> None:
        """Start the thread, if this is the first attempt."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            thread = threading.Thread(target=self._run, name="phalanx-metadata", daemon=True)
            with contextlib.suppress(RuntimeError):  # the kernel allows no more threads
                thread.start()
                self._thread = thread

    async def end(self) -> None:
        """Wait for a short time until everything is recorded, and end the thread."""
        self.start()  # a run that has failed before its first worker
        if self._thread is None:
            return
        try:
            await asyncio.to_thread(self._finish)
        except RuntimeError:  # the kernel allows no more threads
            self._ending.set()
            self._stop.set()
        await asyncio.sleep(0)  # publish what the thread has passed to the event loop

    def _finish(self) -> None:
        thread, end = self._thread, time.monotonic() + _END_TIMEOUT
        self._ending.set()
        self._collected.wait(_END_TIMEOUT)
        self._stop.set()
        if not self._collected.is_set() and self._git is not None:
            self._git.cancel()
        if thread is not None:
            thread.join(max(0.2, end - time.monotonic()))

    # -- the thread

    def _run(self) -> None:
        self._ending.wait(_DELAY)
        try:
            self._record()
        except Exception:  # it must not end the run
            logger.debug("cannot record the metadata of the run", exc_info=True)
        finally:
            self._collected.set()

    def _record(self) -> None:
        from phalanx.launcher.runs import metadata
        from phalanx.launcher.runs.git_state import GitError, GitReader

        plan, folder = self._context.agent.plan, self._context.folder
        record = folder.recorded
        if record is None:
            return
        found = metadata.describe(record, plan.command, plan.hyperparameters)
        found = metadata.surveyed(found, plan.command.python, plan.environ)
        where = found.script if plan.command.kind in ("script", "path") else record.cwd
        self._git = GitReader(where, plan.environ)
        try:
            found = metadata.with_git(found, self._git.read())
        except (GitError, OSError) as error:
            found = metadata.with_git(found, None, str(error))
        given: dict[str, Hyperparameter] | None = None
        while True:
            ending = self._stop.is_set()
            now_given = metadata.given_by_script(folder.path)
            leads, led = self._context.links.leads, self._led
            if now_given != given or not self._collected.is_set() or leads != led:
                given, self._led = now_given, leads
                whole = metadata.with_given(found, given or {})
                metadata.write(folder.path, whole)
                self._publish(metadata.without_diff(whole))
                self._collected.set()
            if ending:
                return
            self._stop.wait(_INTERVAL)

    def _publish(self, found: RunMetadata) -> None:
        """Send the metadata to viewers, from the event loop. The leader's metadata counts for all nodes."""

        def publish() -> None:
            if self._context.links.leads:
                self._context.folder.event(events.RunDescribed(time=time.time(), metadata=found))

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(publish)
