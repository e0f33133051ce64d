"""Launchers that are compared: the command that starts a script on N ranks of this machine, and its environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.errors import LaunchError, UsageError

_PHALANX = (sys.executable, "-P", "-m", "phalanx")

# A run, a shell or a scheduler may have set these; they would change the measurement.
_FOREIGN = ("PET_", "PHALANX_", "TORCHELASTIC_", "ACCELERATE_", "GROUP_", "ROLE_")
_FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    # Packages are installed compiled. With this variable, a checkout of phalanx would be compiled in every launch.
    "PYTHONDONTWRITEBYTECODE",
}


@dataclass(frozen=True)
class Launcher:
    """A launcher, and how it starts a script."""

    name: str
    label: str
    command: Callable[[int, str], list[str]]  # (ranks, script) -> command line
    fork_server: str = ""  # the kind that a phalanx run must have used for its time to count
    package: str = "torch"


def _phalanx(ranks: int, script: str) -> list[str]:
    return [*_PHALANX, "run", "-g", str(ranks), "--cpu", script]


def _torchrun(ranks: int, script: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]


def _accelerate(ranks: int, script: str) -> list[str]:
    # With --cpu it starts one process, and more only through mpirun. With --multi_gpu it starts several, and the
    # script chooses the backend, so gloo works too; but then it refuses a single process.
    path = ["--multi_gpu", "--main_process_port", "0"] if ranks > 1 else ["--cpu"]
    size = ["--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *path, *size, script]


LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("phalanx", "phalanx", _phalanx, fork_server="cold"),
        Launcher("warm", "phalanx, warm", _phalanx, fork_server="warm"),
        Launcher("torchrun", "torchrun", _torchrun),
        Launcher("accelerate", "accelerate launch", _accelerate, package="accelerate"),
    )
}


def check_installed(launcher: Launcher) -> None:
    """Raise UsageError if the package of a launcher is not installed."""
    if importlib.util.find_spec(launcher.package) is None:
        raise UsageError(
            f"{launcher.label} cannot be measured: {launcher.package} is not installed",
            fix="pip install -e '.[bench]', or leave it out of --contenders",
        )


def home(launcher: Launcher, folder: str) -> str:
    """Return the PHALANX_HOME of a launcher: each has its own, so that none finds the warm fork server of another."""
    return os.path.join(folder, f"home-{launcher.name}")


def environment(launcher: Launcher, ranks: int, inherited: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment of a launch: the same for all, except PHALANX_HOME and variables that accelerate does not
    set.
    """
    kept = {
        name: value for name, value in inherited.items() if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    kept |= {
        "OMP_NUM_THREADS": "1",  # every launcher sets it for several ranks; set here for one rank too
        "TMPDIR": folder,  # torchrun does not delete its log folders
        "HF_HOME": os.path.join(folder, "huggingface"),  # no defaults from the user's accelerate config
        "PHALANX_HOME": home(launcher, folder),
    }
    if launcher.name == "accelerate" and ranks == 1:
        # Its single process gets no variables of a process group.
        kept |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return kept


@contextlib.contextmanager
def kept_warm(launcher: Launcher, inherited: Mapping[str, str], folder: str) -> Iterator[None]:
    """Keep a warm fork server for a launcher during the block."""
    environ = environment(launcher, 1, inherited, folder)
    _warm(["--for", "15m"], environ, folder)
    try:
        yield
    finally:
        _warm(["--stop"], environ, folder)


def _warm(words: list[str], environ: dict[str, str], folder: str) -> None:
    # Output goes to a file: the warm fork server must not keep a pipe open.
    log = os.path.join(folder, "warm.log")
    with open(log, "wb") as file:
        done = subprocess.run(
            [*_PHALANX, "warm", *words],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    if done.returncode:
        with open(log, errors="replace") as text:
            lines = text.read().splitlines()[-5:]
        raise LaunchError(
            f"phalanx warm {' '.join(words)} failed with code {done.returncode}",
            details=lines,
            fix="leave warm out of --contenders",
        )
