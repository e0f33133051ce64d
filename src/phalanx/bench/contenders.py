"""Who is measured: the command that starts a script on N ranks of this machine, and its environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.errors import LaunchError, UsageError

_PHALANX = (sys.executable, "-m", "phalanx")

# A run, a user's shell or a scheduler may have set these; they would change what is measured.
_FOREIGN = ("PET_", "PHALANX_", "TORCHELASTIC_", "ACCELERATE_", "GROUP_", "ROLE_")
_FOREIGN_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    # Installed packages come compiled. Where phalanx runs from a checkout, this would compile it anew in every launch.
    "PYTHONDONTWRITEBYTECODE",
}


@dataclass(frozen=True)
class Contender:
    name: str
    label: str
    line: Callable[[int, str], list[str]]  # (ranks, script) -> command
    way: str = ""  # how a phalanx run must have made its workers for its time to count
    package: str = "torch"


def _phalanx(ranks: int, script: str) -> list[str]:
    return [*_PHALANX, "run", "-g", str(ranks), "--cpu", script]


def _torchrun(ranks: int, script: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]


def _accelerate(ranks: int, script: str) -> list[str]:
    # With --cpu it starts one process, and more only through mpirun. What starts several by itself is the path
    # called multi-GPU; the script decides the backend, so it serves for gloo too. It refuses a single process.
    path = ["--multi_gpu", "--main_process_port", "0"] if ranks > 1 else ["--cpu"]
    size = ["--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *path, *size, script]


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("phalanx", "phalanx", _phalanx, way="cold"),
        Contender("warm", "phalanx, warm", _phalanx, way="warm"),
        Contender("torchrun", "torchrun", _torchrun),
        Contender("accelerate", "accelerate launch", _accelerate, package="accelerate"),
    )
}


def check_installed(contender: Contender) -> None:
    if importlib.util.find_spec(contender.package) is None:
        raise UsageError(
            f"{contender.label} cannot be measured: {contender.package} is not installed",
            fix="pip install 'phalanx[bench]', or leave it out of --contenders",
        )


def home(contender: Contender, folder: str) -> str:
    """The PHALANX_HOME of this contender: what is warm in the one is never found by the other."""
    return os.path.join(folder, f"home-{contender.name}")


def environment(contender: Contender, ranks: int, inherited: Mapping[str, str], folder: str) -> dict[str, str]:
    """The same for all, but for the place of phalanx's state and what accelerate leaves to the script."""
    kept = {
        name: value for name, value in inherited.items() if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    kept |= {
        "OMP_NUM_THREADS": "1",  # what every launcher sets for several ranks; set for one too, so that all compare
        "TMPDIR": folder,  # torchrun leaves its log folders behind
        "HF_HOME": os.path.join(folder, "huggingface"),  # no defaults from the user's accelerate config
        "PHALANX_HOME": home(contender, folder),
    }
    if contender.name == "accelerate" and ranks == 1:
        # Its single process is a plain one, and is told nothing of a group.
        kept |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return kept


@contextlib.contextmanager
def kept_warm(contender: Contender, inherited: Mapping[str, str], folder: str) -> Iterator[None]:
    """torch stays imported for this contender for as long as the block lasts."""
    environ = environment(contender, 1, inherited, folder)
    _warm(["--for", "15m"], environ, folder)
    try:
        yield
    finally:
        _warm(["--stop"], environ, folder)


def _warm(words: list[str], environ: dict[str, str], folder: str) -> None:
    # Output into a file: what stays behind must not hold a pipe of ours open.
    log = os.path.join(folder, "warm.log")
    with open(log, "wb") as file:
        done = subprocess.run(
            [*_PHALANX, "warm", *words], env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    if done.returncode:
        with open(log, errors="replace") as text:
            said = text.read().splitlines()[-5:]
        raise LaunchError(
            f"phalanx warm {' '.join(words)} failed with code {done.returncode}",
            details=said,
            fix="leave warm out of --contenders",
        )
