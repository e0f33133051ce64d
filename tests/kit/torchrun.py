"""torchrun, imported once: a process that has it forks one for every launch, which costs seconds less.

    with Torchrun() as torchrun:
        result = torchrun("--nproc-per-node", "2", "train.py")

It is torchrun's own main function, in a separate process, session and environment; workers are started as usual.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this file is also the program of the process, which must not import anything else
    from tests.kit.cli import Env, Result

RUN = "torch.distributed.run"


class Torchrun:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = (sys.executable, __file__, str(theirs.fileno()))
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._process.wait()

    def __call__(
        self, *args: str, module: str = RUN, env: Env | None = None, cwd: str | None = None, timeout: float = 60
    ) -> Result:
        """Run it to its end."""
        from tests.kit.cli import Result, environment

        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="torchrun-") as tmp,  # folder of its logs
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            open(os.devnull) as nothing,
        ):
            changes = {"TMPDIR": tmp, **(env or {})}
            order = {"module": module, "args": args, "env": environment(changes), "cwd": cwd or os.getcwd()}
            socket.send_fds(self._sock, [json.dumps(order).encode()], [nothing.fileno(), out.fileno(), err.fileno()])
            self._sock.settimeout(timeout)
            try:
                code = int(self._sock.recv(64))
            except TimeoutError:
                self._process.kill()
                code = None
            raw = [_all(file.fileno()) for file in (out, err)]
            text = [data.decode(errors="replace") for data in raw]
            assert code is not None, f"torchrun {' '.join(args)}: did not end in {timeout:g} s\n{''.join(text)}"
            return Result(code, *text, time.monotonic() - start, *raw)


def _all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _serve(sock: socket.socket) -> dict[str, Any]:
    """Serve until there are no more requests. Returns the request, in a process that becomes torchrun."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 18, 3)
        if not data:
            sys.exit()
        pid = os.fork()
        if not pid:
            os.setsid()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            sock.close()
        for fd in fds:
            os.close(fd)
        if not pid:
            return json.loads(data)  # type: ignore[no-any-return]
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            sock.send(str(code).encode())


if __name__ == "__main__":
    del sys.path[0]  # this folder: torch must not import our modules by mistake
    importlib.import_module(RUN)
    gc.collect()
    gc.freeze()  # otherwise the exit of each fork would scan everything that was ever imported
    _order = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(_order["env"])
    os.chdir(_order["cwd"])
    tempfile.tempdir = None
    sys.argv = [_order["module"], *_order["args"]]
    sys.exit(importlib.import_module(_order["module"]).main(_order["args"]))
