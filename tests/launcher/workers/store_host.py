"""A store in a process, started like by `phalanx run --fresh`, and callers of another user."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.forkserver import linux

NOBODY = 65534
STORE = Path(linux.__file__).parent / "store"
# The requests of clients of torch's store: a byte for the query, then its fields.
HELLO = bytes([0]) + struct.pack("=I", 0x3C85F7CE)
COUNT = bytes([7])
DELETE = bytes([8])
PING = bytes([13]) + b"ping"
TIMEOUT = 60.0


class HostedStore:
    """A store, and the agent's end of its socket."""

    def __init__(self, port: int, pid: int, agent: socket.socket) -> None:
        self.port = port
        self.pid = pid
        self.agent = agent

    def client(self) -> Any:
        """Return torch's client of it."""
        from torch.distributed import TCPStore

        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=TIMEOUT))

    def connect(self) -> socket.socket:
        """Return a connection that has not sent anything."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)

    def listens_on(self) -> list[tuple[str, int]]:
        """Return the addresses and ports on which it listens."""
        inodes = set()
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        found = [line[1].split(":") for line in lines if line[3] == "0A" and line[9] in inodes]
        return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]

    def message(self) -> dict[str, Any]:
        """Return the next message for the agent."""
        data = self.agent.recv(4096)
        assert data, "the store has ended"
        message: dict[str, Any] = json.loads(data)
        return message

    def wait_for(self, kind: str) -> dict[str, Any]:
        """Return the next message of this kind."""
        while (message := self.message())["is"] != kind:
            pass
        return message


@contextlib.contextmanager
def hosted(address: str = "127.0.0.1", *, before: str = "", **order: bool) -> Iterator[HostedStore]:
    """Host a store; `before`: Python to run first in its process; `order`: the rest of the order."""
    listener = socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(TIMEOUT)
    port = listener.getsockname()[1]
    whole = {"address": address, "port": port, **order}
    words = [str(listener.fileno()), str(theirs.fileno()), json.dumps(whole)]
    line = [sys.executable, str(STORE), *words]
    if before:
        run = f"{before}\nimport runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, ''); "
        line = [sys.executable, "-c", f"{run}runpy.run_path(sys.argv[0])", *line[1:]]
        line[3] = str(STORE / "__main__.py")
    with listener, theirs:
        process = subprocess.Popen(line, pass_fds=(listener.fileno(), theirs.fileno()))
    try:
        yield HostedStore(port, process.pid, ours)
    finally:
        process.kill()
        process.wait()
        ours.close()


def answered(sock: socket.socket, query: bytes, size: int) -> bytes:
    """Return the answer to a query: `size` bytes, or fewer if the connection is closed."""
    found = b""
    with contextlib.suppress(ConnectionError):
        sock.sendall(query)
        while len(found) < size and (more := sock.recv(size - len(found))):
            found += more
    return found


@contextlib.contextmanager
def of_nobody(script: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Start a process of another user that runs a script, and keeps its open files until its input ends.

    It becomes that user after its imports: the folder of the packages may not be accessible to others.
    """
    imports = "import encodings.idna, os, socket, sys\n"
    become = f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
    code = f"{imports}{become}{script}\nprint('done', flush=True)\nsys.stdin.read()"
    line = [sys.executable, "-I", "-c", code, *map(str, words)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
