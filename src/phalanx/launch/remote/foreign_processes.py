"""Ranks of a job that phalanx did not start: which processes they are, as far as can be seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import UsageError
from phalanx.forkserver import linux

# Who says which rank a process is: torchrun and its like, Slurm, Open MPI, MPICH.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class ForeignProcess:
    pid: int
    rank: int
    world_size: int


def below(pids: Sequence[int]) -> list[ForeignProcess]:
    """The ranks among these processes and all that they have started, by rank."""
    found: dict[int, ForeignProcess] = {}
    for pid in pids:
        if linux.start_time(pid) is None:
            raise UsageError(f"there is no process {pid} here", fix="ps -ef | grep python")
        for one in (pid, *linux.descendants(pid)):
            rank = _rank(one)
            # A rank's own children inherit its variables: the first on the way down is the rank itself.
            if rank is not None and rank.rank not in found:
                found[rank.rank] = rank
    if found:
        return [found[rank] for rank in sorted(found)]
    return [ForeignProcess(pid, index, len(pids)) for index, pid in enumerate(pids)]


def _rank(pid: int) -> ForeignProcess | None:
    """Python with a rank in its environment. Not this one, which srun may have started among the job's own."""
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
    """Where a Slurm job runs."""
    if not job.isdigit():
        raise UsageError(f"--slurm {job}: a job is a number", fix="squeue --me")
    squeue, scontrol = _slurm("squeue"), _slurm("scontrol")
    done = _run([squeue, "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%N"])
    if not done.stdout.strip():
        raise UsageError(f"no job {job} is running", details=done.stderr.strip().splitlines()[:1], fix="squeue --me")
    return _run([scontrol, "show", "hostnames", done.stdout.strip()]).stdout.split()


def of_job(job: str) -> list[int]:
    """The processes of a Slurm job on this node."""
    program = _slurm("scontrol")
    done = _run([program, "listpids", job])
    pids = [int(words[0]) for line in done.stdout.splitlines()[1:] if (words := line.split()) and words[0].isdigit()]
    if not pids:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(
            f"job {job} has no process on this node", details=said[:1], fix=f"squeue -j {job} shows where it runs"
        )
    return [pid for pid in pids if linux.start_time(pid) is not None]


def _slurm(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise UsageError(f"there is no {name} here: this is no node of a Slurm cluster", fix="phalanx why --pid PID")
    return program


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
