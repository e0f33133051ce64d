"""The Python object for a run that `phalanx.launch` has started.

A job is a separate process, `phalanx run`: its signals and forks do not affect the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher import function_call
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.launcher.viewers import views

_LOOK = 0.02  # seconds between two checks for output of the process


class Job:
    """`job = phalanx.launch("train.py")`: a run that was started. A `with` statement stops it at its end."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        show: bool,
        folder: str | None = None,
    ) -> None:
        self._home = run_folder.home(env)
        self._call = folder  # folder of the function and its results, until they are read
        self._results: list[Any] | None = None
        self._record: RunRecord | None = None
        self._last_output: list[bytes] = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx", "run", *arguments],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, args=(show,), name="phalanx-job", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else f"ended with exit code {code}"
        return f"<Job {self._record.id if self._record is not None else 'starting'}: {state}>"

    def _read(self, show: bool) -> None:
        """Keep the output of the launcher, which an error message needs, and show it."""
        assert self._process.stderr is not None  # noqa: S101
        with self._process.stderr as stream:
            while part := os.read(stream.fileno(), 1 << 16):
                self._last_output = [*self._last_output[-100:], part]
                if show:
                    with contextlib.suppress(OSError, ValueError):
                        sys.stderr.write(part.decode(errors="replace"))
                        sys.stderr.flush()

    # -- state

    @property
    def name(self) -> str:
        """`job.name`: the name of the run, as `phalanx ps` shows it."""
        return self._found().id

    @property
    def folder(self) -> str:
        """`job.folder`: where logs, events and samples of the run are."""
        return self._found().folder

    @property
    def running(self) -> bool:
        """`job.running`: whether a process of the run is left."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """`job.exit_code`: the exit code of the run. None while it runs; 128 + N if signal N has ended it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def _found(self) -> RunRecord:
        """Return the record that the process writes when it starts; its name is known first."""
        while self._record is None:
            ended = self._process.poll() is not None
            pid = self._process.pid
            self._record = next((run for run in run_folder.all_runs(self._home) if run.pid == pid and run.here), None)
            if self._record is None and ended:
                self._reader.join()
                raise LaunchError("the run ended before it began", details=self._last_lines())
            time.sleep(0 if self._record is not None else _LOOK)
        return run_folder.read(self._record.folder) or self._record

    def _last_lines(self) -> list[str]:
        return b"".join(self._last_output).decode(errors="replace").splitlines()[-20:]

    # -- actions

    def wait(self, timeout: float | None = None) -> int:
        """`job.wait()`: wait until every process of the run has ended; return the exit code.

        Raises TimeoutError after `timeout` seconds; the run continues.
        """
        if timeout is not None and not isinstance(timeout, int | float):
            raise UsageError(f"timeout is {timeout!r}, expected seconds", fix="job.wait(60)")
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self!r} after {timeout:g} s") from None
        self._reader.join()
        folder, self._call = self._call, None
        try:
            if folder is not None and self.exit_code == 0:
                self._results = function_call.results(folder)
        finally:
            _remove(folder)
        return self.exit_code or 0

    def result(self, timeout: float | None = None) -> list[Any] | None:
        """`job.result()`: wait for the end; return what the function returned on each rank (None for a script).

        Raises LaunchError if the run has failed, with the cause that the console shows.
        """
        code = self.wait(timeout)
        if code != 0:
            name = self._record.id if self._record is not None else "the run"
            raise LaunchError(f"{name} ended with exit code {code}", details=self._last_lines())
        return self._results

    def logs(self, rank: int = 0, stream: Literal["stdout", "stderr"] = "stdout") -> str:
        """`job.logs(rank=2)`: return the output of a rank so far, in the newest attempt."""
        if stream not in ("stdout", "stderr"):
            raise UsageError(f"stream is {stream!r}, expected stdout or stderr", fix='job.logs(stream="stderr")')
        if not isinstance(rank, int):
            raise UsageError(f"rank is {rank!r}, expected a number", fix="job.logs(rank=0)")
        record = self._found()
        if not 0 <= rank < record.world_size:
            raise UsageError(
                f"there is no rank {rank}: {record.id} has ranks 0 to {record.world_size - 1}", fix="job.logs(rank=0)"
            )
        parts = [entry.path for entry in os.scandir(record.folder) if entry.name.startswith("node_")]
        folders = {rank: path for part in (record.folder, *parts) for rank, path in log_reader.folders(part).items()}
        path = os.path.join(folders.get(rank, record.folder), f"{stream}.log")
        with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
            return file.read()
        return ""  # it has not begun

    def why(self) -> str:
        """`job.why()`: return which rank is at fault, where and why, like `phalanx why`: of a live run or a finished
        one.
        """
        record = self._found()
        answers: list[str] = []

        def ask() -> None:  # in a thread: the caller may be in an event loop, e.g. a notebook
            answers.append(asyncio.run(views.of(record).why()).report)

        thread = threading.Thread(target=ask, name="phalanx-why")
        thread.start()
        thread.join()
        if not answers:
            raise LaunchError(f"{record.id} does not answer", fix=f"phalanx why {record.id}")
        return answers[0]

    def stop(self, timeout: float = 60.0) -> int:
        """`job.stop()`: end the run and wait for it; workers get SIGTERM and time to finish. Returns the exit code."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout)
        except TimeoutError:
            self._process.send_signal(signal.SIGINT)  # the second signal: end at once
            return self.wait(timeout)


def start_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None,
    show: bool,
) -> Job:
    """Start a run in which every rank calls a function. `options` are those of `phalanx run`."""
    folder = tempfile.mkdtemp(prefix="phalanx-call-")  # mode 0700
    try:
        function_call.write(folder, function, args)
        return Job([*options, "-m", function_call.__name__, folder], env=env, cwd=cwd, show=show, folder=folder)
    except BaseException:
        _remove(folder)
        raise


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
