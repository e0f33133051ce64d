"""Run the lighthouse of torchft and N replicas of a script, and restart each replica when it ends.

python torchft_replicas.py N SCRIPT ARGUMENT...
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]


def start(number: int, address: str) -> subprocess.Popen[bytes]:
    """Start one replica."""
    variables = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": address}
    return subprocess.Popen([sys.executable, *sys.argv[2:]], env={**os.environ, **variables})


def main() -> None:
    """Keep all replicas running until terminated."""
    # The settings of its README, with the default heartbeat timeout of 5 s.
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10000, heartbeat_timeout_ms=5000
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    replicas: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    poll = select.poll()

    def begin(number: int) -> None:
        process = start(number, lighthouse.address())
        handle = os.pidfd_open(process.pid)
        replicas[handle] = (number, process)
        poll.register(handle, select.POLLIN)

    try:
        for number in range(int(sys.argv[1])):
            begin(number)
        while True:
            for handle, _ in poll.poll():
                poll.unregister(handle)
                os.close(handle)
                number, process = replicas.pop(handle)
                process.wait()
                begin(number)
    finally:
        for _, process in replicas.values():
            process.kill()
            process.wait()


main()
