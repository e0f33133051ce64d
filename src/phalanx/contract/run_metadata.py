"""The recorded metadata of a run: metadata.json in the run folder.

docs/reference/run-folder.md documents every field. The environment is not recorded: it may contain secrets.
"""

from __future__ import annotations

import msgspec

from phalanx.contract.hyperparameters import Hyperparameter

SCHEMA = 1  # increased when a field changes its meaning; new fields do not increase it
FILE = "metadata.json"


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the git repository that contains the script."""

    root: str  # folder of the repository
    commit: str = ""  # full hash; empty: the repository has no commit yet
    branch: str = ""  # empty: detached
    dirty: bool = False  # tracked files differ from the commit, or there are untracked files
    diff: str = ""  # `git diff HEAD`; empty in events, `phalanx ps --json` and on the page
    diff_truncated: bool = False  # the diff was longer than the limit


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a MIG slice, that a worker of this run can use."""

    index: int
    name: str
    memory: int = 0  # bytes; 0: unknown


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The host of a node."""

    host: str
    system: str = ""  # Linux 6.8.0 x86_64
    cpu: str = ""  # model name
    cpus: int = 0  # logical CPUs that this process may use
    memory: int = 0  # bytes
    gpus: tuple[GpuInfo, ...] = ()
    driver: str = ""  # version of the NVIDIA driver; empty: there is none


class RunMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The content of metadata.json: what ran, from which commit, with which versions, on which machine."""

    schema: int = SCHEMA
    run: str  # id: unique on this machine
    name: str  # as given with --name; several runs may have the same one
    started: float  # seconds since 1970
    command: tuple[str, ...]  # of local rank 0, as for a new process
    script: str  # absolute path of the script, or the name of the module or program
    arguments: tuple[str, ...] = ()  # of the script, as given
    cwd: str = ""
    hyperparameters: dict[str, Hyperparameter] = {}  # given by the script or the caller, else read from `arguments`
    git: GitState | None = None  # None: the script is in no git repository, git is missing, or it did not answer
    versions: dict[str, str] = {}  # python, torch, cuda, nccl, phalanx; only those that are installed
    machine: Machine | None = None  # None: not known yet
    notes: tuple[str, ...] = ()  # what could not be determined, and why
