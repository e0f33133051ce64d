"""Reads the state of the git repository that contains a script, within a time limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping

from phalanx.contract.run_metadata import GitState

TIMEOUT = 5.0  # seconds for all commands together
MOST_DIFF = 1 << 18  # bytes of the diff that are kept
_MOST = 1 << 16  # bytes of any other answer

# No lock that another git would wait for, no program named in the configuration of the repository, no pager.
_GIT = (
    "git",
    "--no-optional-locks",
    "--no-pager",
    "-c",
    "core.fsmonitor=false",
    "-c",
    f"core.hooksPath={os.devnull}",
    "-c",
    "core.quotePath=false",
)
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", "HEAD", "--")


class GitError(Exception):
    """git is missing, reports an error, or does not answer."""


class GitReader:
    """Reads the state of one repository: `GitReader("/home/me/train.py", environ).read()`.

    `read` blocks, up to `timeout` seconds and longer on a disk that does not respond: call it in a thread. `cancel` may
    be called from another one.
    """

    def __init__(self, path: str, environ: Mapping[str, str], *, timeout: float = TIMEOUT) -> None:
        self._path = path
        # GIT_DIR and the like may name another repository: the one of a hook that started this process.
        self._environ = {name: text for name, text in environ.items() if not name.startswith("GIT_")}
        self._environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
        self._timeout = timeout
        self._end = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    @property
    def pids(self) -> frozenset[int]:
        """Return the pid of the git that is running."""
        process = self._process
        return frozenset() if process is None else frozenset((process.pid,))

    def cancel(self) -> None:
        """End the git that is running. `read` then raises GitError."""
        self._cancelled = True
        process = self._process
        if process is not None:
            _kill(process)

    def read(self) -> GitState | None:
        """Return the state. None: the path is in no repository. Raises GitError."""
        folder = self._path if os.path.isdir(self._path) else os.path.dirname(self._path)
        root = repository(folder)
        if root is None:
            return None
        self._end = time.monotonic() + self._timeout
        head, _ = self._git(root, "rev-parse", "--verify", "--quiet", "HEAD", codes=(0, 1))
        branch, _ = self._git(root, "symbolic-ref", "--quiet", "--short", "HEAD", codes=(0, 1))
        commit = head.decode(errors="replace").strip()
        diff, more = self._git(root, *_DIFF, most=MOST_DIFF) if commit else (b"", False)
        untracked = not commit or not self._tracked(root)
        return GitState(
            root=root,
            commit=commit,
            branch=branch.decode(errors="replace").strip(),
            dirty=bool(diff) or untracked,
            diff=diff.decode(errors="replace"),
            diff_truncated=more,
        )

    def _tracked(self, root: str) -> bool:
        """Return whether the script is tracked by the repository, not only in its folder."""
        if os.path.isdir(self._path):
            return True
        found, _ = self._git(root, "ls-files", "--", os.path.realpath(self._path))
        return bool(found)

    def _git(self, root: str, *arguments: str, most: int = _MOST, codes: tuple[int, ...] = (0,)) -> tuple[bytes, bool]:
        """Return the output of a git command, and whether there was more of it."""
        try:
            process = subprocess.Popen(
                [*_GIT, *arguments],
                cwd=root,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is for the workers
            )
        except FileNotFoundError:
            raise GitError("git is not installed") from None
        except OSError as error:
            raise GitError(f"git cannot be started: {error.strerror}") from None
        self._process = process
        try:
            with process.stdout:  # type: ignore[union-attr]  # it is a pipe
                found = self._output(process, most + 1)
            if len(found) > most:
                _kill(process)
                return found[:most], True
            code = process.wait(max(0.1, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late() from None
        finally:
            _kill(process)
            self._process = None
        if code not in codes:
            raise GitError(f"git {arguments[0]} failed with exit code {code}")
        return found, False

    def _output(self, process: subprocess.Popen[bytes], most: int) -> bytes:
        assert process.stdout is not None  # noqa: S101
        found = bytearray()
        while len(found) < most:
            left = self._end - time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, left))
            if not ready or self._cancelled:
                raise self._late()
            data = os.read(process.stdout.fileno(), most - len(found))
            if not data:
                break
            found += data
        return bytes(found)

    def _late(self) -> GitError:
        return GitError("the run ended before git answered" if self._cancelled else _SLOW.format(self._timeout))


_SLOW = "git did not answer within {:g} s"


def repository(folder: str) -> str | None:
    """Return the folder of the repository that contains a folder, without starting git."""
    folder = os.path.realpath(folder or ".")
    while True:
        if os.path.lexists(os.path.join(folder, ".git")):
            return folder
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and reap it, unless it does not react even to that: on a disk that does not respond."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(0.5)
