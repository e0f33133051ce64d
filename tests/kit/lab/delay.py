"""Adds latency and loss between two interfaces, in user space, for a kernel without netem.

usage: delay.py INTERFACE INTERFACE MS PERCENT     forwards frames between the two, with this delay in each
direction
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

EVERY_PROTOCOL = 3
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23


def main(near: str, far: str, ms: str, percent: str) -> None:
    late, loss = float(ms) / 1000, float(percent) / 100
    one, two = _listen(near), _listen(far)
    peer = {one: two, two: one}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([one, two], [], [], pause)[0]:
            for frame in _frames(source):
                if random.random() >= loss:
                    waiting.append((time.monotonic() + late, peer[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, frame = waiting.popleft()
            try:
                to.send(frame)
            except OSError as error:
                print(f"{error}: {len(frame)} bytes", file=sys.stderr)


def _listen(interface: str) -> socket.socket:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    raw.bind((interface, 0))
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 25)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    return raw


def _frames(source: socket.socket) -> list[bytes]:
    found: list[bytes] = []
    try:
        while len(found) < 64:
            found.append(source.recv(65535))
    except BlockingIOError:
        pass
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
