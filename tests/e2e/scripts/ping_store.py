"""ping_store.py FILE: connect to the store, say "store HOST PORT", and connect again when FILE is there."""

import os
import socket
import sys
import time

VALIDATE, PING = b"\x00" + (0x3C85F7CE).to_bytes(4, sys.byteorder), b"\x0dping"


def ping() -> bytes:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(where, timeout=60) as sock:
        sock.sendall(VALIDATE + PING)
        return sock.recv(4, socket.MSG_WAITALL)


assert ping() == b"ping"
print("store", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
assert ping() == b"ping"
print("again", flush=True)
