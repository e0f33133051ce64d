"""Ends a worker when the fork server or the agent ends.

Every worker ends with its fork server, by a signal of the kernel. A worker with a channel to its agent can survive: the
agent, a sub-reaper, adopts it, and the channel shows when the agent has ended.
"""

from __future__ import annotations

import os
import signal
import threading

from phalanx.forkserver import linux


class ParentDeath:
    """Lets this worker outlive its fork server, but not its agent."""

    def __init__(self) -> None:
        self._fork_server = os.getppid()
        self._parent = self._fork_server
        self._outlives = False

    def outlive(self, agent: int) -> bool:
        """Outlive the fork server from now on. False: not possible, because the agent would not adopt this process.

        That is the case if the fork server is a fork of a warm one. The kernel keeps the setting per thread, so only
        the main thread can change it.
        """
        if threading.current_thread() is not threading.main_thread() or linux.parent(self._fork_server) != agent:
            return False
        linux.die_with_parent(0, 0)
        self._outlives = True
        return True

    def check(self) -> None:
        """End with the agent from now on, if it has adopted this process. Called by the thread of the channel."""
        if self._outlives and os.getppid() != self._parent:
            self._parent = os.getppid()
            linux.die_with_parent(self._parent)

    def agent_gone(self) -> None:
        """Exit if the fork server, which would end this process, has ended, too."""
        if self._outlives and os.getppid() != self._fork_server:
            os.kill(os.getpid(), signal.SIGKILL)

    def restore(self) -> None:
        """End with the parent again: the channel is about to be closed."""
        if self._outlives and threading.current_thread() is threading.main_thread():
            self._outlives = False
            linux.die_with_parent(os.getppid())
