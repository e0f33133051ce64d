"""Starts the ranks with phalanx run, or with mpirun if MPI takes part, and reads their results."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comm.results import Message, decode, device_of
from benchmarks.comm.settings import CommSettings, to_arguments
from benchmarks.common import launchers, processes
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.paths import script
from phalanx.errors import OptionError

_TIMEOUT = 300.0  # seconds without output after which the ranks are stopped
_KEPT = 12  # last lines of other output
MPI = ("mpi", "mpi4py")


@dataclass(frozen=True)
class Job:
    """The measurement with one number of ranks. `run_options` are for phalanx run; if `ranks` is None, they give the
    number.
    """

    settings: CommSettings
    ranks: int | None
    run_options: tuple[str, ...] = ()

    @property
    def by_mpi(self) -> bool:
        """Whether mpirun starts the ranks."""
        return any(name in MPI for name in self.settings.backends)

    def command(self) -> list[str]:
        """Return the command that starts the ranks."""
        measured = [script("comm.py"), *to_arguments(self.settings), "--stream"]
        if self.by_mpi:
            crowded = (self.ranks or 1) > len(os.sched_getaffinity(0))
            # Not bound to cores: the threads of a backend would share the one core of their rank.
            bound = ["--bind-to", "none", *(["--oversubscribe"] if crowded else [])]
            return ["mpirun", "-n", str(self.ranks), *bound, sys.executable, *measured]
        size = [] if self.ranks is None else ["-g", str(self.ranks)]
        cpu = [] if any(device_of(name) == "cuda" for name in self.settings.backends) else ["--cpu"]
        return [
            sys.executable,
            "-P",
            "-m",
            "phalanx",
            "run",
            *size,
            *cpu,
            "--quiet",
            "--stall-timeout",
            "off",
            *self.run_options,
            *measured,
        ]

    def run(self, inherited: Mapping[str, str], receive: Callable[[Message], None]) -> str:
        """Run to the end, passing every message to `receive`; return why it failed, or an empty string."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            # A separate PHALANX_HOME keeps this run out of `phalanx ps`. Other hosts have their own.
            own = launchers.environment(LAUNCHERS["phalanx"], self.ranks or 2, inherited, folder)
            environ = dict(inherited) if self.run_options else own
            if self.by_mpi and os.geteuid() == 0:
                environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            return _read(self.command(), environ, receive)


def _read(command: Sequence[str], environ: Mapping[str, str], receive: Callable[[Message], None]) -> str:
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    other: deque[str] = deque(maxlen=_KEPT)
    out = process.stdout
    rest = b""
    try:
        while out is not None:
            if not select.select([out], [], [], _TIMEOUT)[0]:
                return f"no output for {_TIMEOUT:.0f} s; the last lines: {' / '.join(other)}"
            new = os.read(out.fileno(), 1 << 16)
            if not new:
                break
            *lines, rest = (rest + new).split(b"\n")
            for one in lines:
                text = one.decode(errors="replace")
                message = decode(text)
                if message is not None:
                    receive(message)
                elif text.strip():
                    other.append(text.strip())
                    sys.stderr.write(f"{text}\n")
        code = process.wait()
        return f"exit code {code}: {' / '.join(other) or 'no output'}" if code else ""
    finally:
        if process.poll() is None:
            processes.stop(process)
        if out is not None:
            out.close()


def default_backends(gpus: int, *, mpi: bool = True) -> list[str]:
    """Return the backends that can be measured here."""
    if gpus:
        return ["nccl"]
    return ["shm", "regions", "gloo", *(MPI if mpi and not mpi_missing() else ())]


def mpi_missing() -> str:
    """Return what MPI lacks on this machine, or an empty string."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed"
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


def check(settings: CommSettings, run_options: Sequence[str]) -> None:
    """Raise OptionError if MPI was requested and cannot be measured."""
    named = [name for name in settings.backends if name in MPI]
    if not named:
        return
    if run_options:
        raise OptionError(
            f"{run_options[0]} is an option of phalanx run, but {named[0]} needs ranks that mpirun starts",
            fix=f"leave {named[0]} out; or mpirun -n 8 --host a,b python {script('comm.py')} --backends {named[0]}",
        )
    if missing := mpi_missing():
        raise OptionError(
            f"{named[0]} cannot be measured: {missing}", fix="apt-get install openmpi-bin; pip install 'phalanx[mpi]'"
        )
