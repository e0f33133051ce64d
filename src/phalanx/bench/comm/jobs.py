"""Starts the ranks that measure, and hears what they say: under phalanx run, or under mpirun where MPI takes part."""

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

from phalanx.bench import contenders, launch
from phalanx.bench.comm import settings
from phalanx.bench.comm.cells import Word, device_of, heard
from phalanx.bench.comm.settings import Settings
from phalanx.bench.contenders import CONTENDERS
from phalanx.errors import OptionError

_SCRIPT = "phalanx.bench.scripts.comm"
_SILENCE = 300.0  # seconds without a word after which it is ended
_KEPT = 12  # of the last lines that were something else
MPI = ("mpi", "mpi4py")


@dataclass(frozen=True)
class Job:
    """One number of ranks. `where`: options of phalanx run; ranks None: they say it."""

    wanted: Settings
    ranks: int | None
    where: tuple[str, ...] = ()

    @property
    def by_mpi(self) -> bool:
        return any(name in MPI for name in self.wanted.backends)

    def line(self) -> list[str]:
        told = ["-m", _SCRIPT, *settings.words(self.wanted), "--stream"]
        if self.by_mpi:
            crowded = (self.ranks or 1) > len(os.sched_getaffinity(0))
            # Not bound: a backend's threads would share the one core of their rank. Too many for the cores: they yield.
            bound = ["--bind-to", "none", *(["--oversubscribe"] if crowded else [])]
            return ["mpirun", "-n", str(self.ranks), *bound, sys.executable, *told]
        size = [] if self.ranks is None else ["-g", str(self.ranks)]
        cpu = [] if any(device_of(name) == "cuda" for name in self.wanted.backends) else ["--cpu"]
        return [
            sys.executable,
            "-m",
            "phalanx",
            "run",
            *size,
            *cpu,
            "--quiet",
            "--stall-timeout",
            "off",
            *self.where,
            *told,
        ]

    def run(self, inherited: Mapping[str, str], hear: Callable[[Word], None]) -> str:
        """To its end. Why it failed, or nothing."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            # A home of its own: this shall not stand in the list of runs. Other machines have their own.
            own = contenders.environment(CONTENDERS["phalanx"], self.ranks or 2, inherited, folder)
            environ = dict(inherited) if self.where else own
            if self.by_mpi and os.geteuid() == 0:
                environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            return _listen(self.line(), environ, hear)


def _listen(line: Sequence[str], environ: Mapping[str, str], hear: Callable[[Word], None]) -> str:
    process = subprocess.Popen(
        list(line),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    said: deque[str] = deque(maxlen=_KEPT)
    out = process.stdout
    rest = b""
    try:
        while out is not None:
            if not select.select([out], [], [], _SILENCE)[0]:
                return f"nothing heard for {_SILENCE:.0f} s; the last was: {' / '.join(said)}"
            new = os.read(out.fileno(), 1 << 16)
            if not new:
                break
            *lines, rest = (rest + new).split(b"\n")
            for one in lines:
                text = one.decode(errors="replace")
                word = heard(text)
                if word is not None:
                    hear(word)
                elif text.strip():
                    said.append(text.strip())
                    sys.stderr.write(f"{text}\n")
        code = process.wait()
        return f"exit code {code}: {' / '.join(said) or 'nothing said'}" if code else ""
    finally:
        if process.poll() is None:
            launch.stop(process)
        if out is not None:
            out.close()


# -- what there is


def usual(gpus: int, *, mpi: bool = True) -> list[str]:
    """Backends that can be measured here."""
    if gpus:
        return ["nccl"]
    return ["shm", "regions", "gloo", *(MPI if mpi and not mpi_missing() else ())]


def mpi_missing() -> str:
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"


def check(wanted: Settings, where: Sequence[str]) -> None:
    """`where`: options that are phalanx run's, or nobody's."""
    named = [name for name in wanted.backends if name in MPI]
    if not named:
        return
    if where:
        raise OptionError(
            f"{where[0]} says phalanx run how to start ranks, but for {named[0]} mpirun starts them",
            fix=f"leave {named[0]} out; or mpirun -n 8 --host a,b python -m {_SCRIPT} --backends {named[0]}",
        )
    if missing := mpi_missing():
        raise OptionError(
            f"{named[0]} cannot be measured: {missing}", fix="apt-get install openmpi-bin; pip install 'phalanx[mpi]'"
        )
