"""Hosts the c10d TCPStore, so that it outlives rank 0 and there is no race for a port.

The listening socket comes from the agent: it was bound before anything started, to one address.
"""

from __future__ import annotations

import signal
import sys


def host(fd: int, address: str, port: int) -> None:
    """Serve until killed."""
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    while store:
        signal.pause()


if __name__ == "__main__":
    del sys.path[0]  # this folder: torch must not import our modules by mistake
    host(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
