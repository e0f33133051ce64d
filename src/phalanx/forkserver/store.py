"""Hosts the c10d TCPStore, so that it outlives rank 0 and there is no race for a port.

The listening socket comes from the agent: it was bound before anything started, to one address. Also executed as a
program, so it imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_INTERVAL = 1.0  # seconds between two heartbeats


def host(fd: int, address: str, port: int, heartbeat: int | None, *, outlives: bool) -> None:
    """Serve until killed, or until the agent is gone.

    Write to the pipe `heartbeat` each time that the store has answered; None: nobody watches it. `outlives`: the end
    of the fork server does not end this process, which the agent adopts.
    """
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    while heartbeat is None:
        signal.pause()
    os.set_blocking(heartbeat, False)
    parent = os.getppid()
    if outlives:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    while True:
        store.check(["phalanx/heartbeat"])
        try:
            os.write(heartbeat, b".")
        except BlockingIOError:  # the agent is busy, or stopped
            pass
        except BrokenPipeError:  # the agent is gone
            return
        if os.getppid() != parent:  # the agent has adopted this process
            parent = os.getppid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        time.sleep(_INTERVAL)


if __name__ == "__main__":
    del sys.path[0]  # this folder: torch must not import our modules by mistake
    _fd, _address, _port, _heartbeat, _outlives = sys.argv[1:]
    host(int(_fd), _address, int(_port), int(_heartbeat), outlives=_outlives == "1")
