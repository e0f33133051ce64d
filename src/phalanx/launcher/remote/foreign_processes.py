"""Finds the ranks of a job that phalanx did not start among processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import UsageError
from phalanx.forkserver import linux

# Set by torchrun and similar launchers, Slurm, Open MPI, MPICH.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class ForeignProcess:
    """A process that is a rank of a job."""

    pid: int
    rank: int
    world_size: int


def below(pids: Sequence[int]) -> list[ForeignProcess]:
    """Return the ranks among these processes and their descendants, ordered by rank."""
    found: dict[int, ForeignProcess] = {}
    for pid in pids:
        if linux.start_time(pid) is None:
            raise UsageError(f"there is no process {pid} here", fix="ps -ef | grep python")
        for one in (pid, *linux.descendants(pid)):
            rank = _rank(one)
            # Children inherit the variables of a rank: the topmost process is the rank.
            if rank is not None and rank.rank not in found:
                found[rank.rank] = rank
    if found:
        return [found[rank] for rank in sorted(found)]
    return [ForeignProcess(pid, index, len(pids)) for index, pid in enumerate(pids)]


def _rank(pid: int) -> ForeignProcess | None:
    """Return the rank of a Python process, by its environment. Excludes this process, which srun may have started."""
    if pid == os.getpid():
        return None
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            environ = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return None
    rank = _first(environ, _RANKS)
    if rank is None or "python" not in program:
        return None
    return ForeignProcess(pid, rank, _first(environ, _SIZES) or 0)


def _first(environ: dict[str, str], names: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def nodes_of(job: str) -> list[str]:
    """Return the hosts of a Slurm job."""
    if not job.isdigit():
        raise UsageError(f"--slurm {job}: a job is a number", fix="squeue --me")
    squeue, scontrol = _slurm("squeue"), _slurm("scontrol")
    done = _run([squeue, "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%N"])
    if not done.stdout.strip():
        raise UsageError(f"no job {job} is running", details=done.stderr.strip().splitlines()[:1], fix="squeue --me")
    return _run([scontrol, "show", "hostnames", done.stdout.strip()]).stdout.split()


def of_job(job: str) -> list[int]:
    """Return the pids of a Slurm job on this node."""
    program = _slurm("scontrol")
    done = _run([program, "listpids", job])
    pids = [int(words[0]) for line in done.stdout.splitlines()[1:] if (words := line.split()) and words[0].isdigit()]
    if not pids:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(
            f"job {job} has no process on this node", details=output[:1], fix=f"squeue -j {job} shows where it runs"
        )
    return [pid for pid in pids if linux.start_time(pid) is not None]


def _slurm(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise UsageError(f"{name} was not found: this is not a node of a Slurm cluster", fix="phalanx why --pid PID")
    return program


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
