"""The environment of a worker. The names are torchrun's, so that scripts work unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.contract.ranks.placement import RankPlacement

if TYPE_CHECKING:
    from phalanx.contract.messages.worker_messages import Assignment

# Variables of phalanx. All others that a worker reads are torchrun's.
HOME = "PHALANX_HOME"  # directory of runs
RUN = "PHALANX_RUN"  # the run's name, as `phalanx ps` shows it
RUN_FOLDER = "PHALANX_RUN_FOLDER"
LINE = "PHALANX_AGENT"  # address of the agent, for a worker that can regroup: contract/messages/worker_messages.py
# address for requests of memory that outlives the worker: contract/messages/snapshot_messages.py
MEMORY = "PHALANX_MEMORY"
TOPOLOGY = "PHALANX_TOPOLOGY"  # which ranks share a node: contract/ranks/topology.py
TOKEN = "PHALANX_TOKEN"  # admits a node; workers do not have it  # noqa: S105
ERROR_FORMAT = "PHALANX_ERROR_FORMAT"  # "json": also write the error of a command as JSON, contract/error_report.py
LIVE_BAR = "PHALANX_LIVE_BAR"  # "1": stderr is a pipe whose reader shows progress bars
PAGE_KEY = "PHALANX_PAGE_KEY"  # admits a browser, or a Prometheus that scrapes many runs; workers do not have it

CHECKPOINTS = "PHALANX_CHECKPOINTS"  # their folder: `--checkpoints`
CHECKPOINT_EVERY = "PHALANX_CHECKPOINT_EVERY"
CHECKPOINT_KEY = "PHALANX_CHECKPOINT_KEY"  # the path of the file with the key that signs them
SNAPSHOT_EVERY = "PHALANX_SNAPSHOT_EVERY"  # the same, or one of OFF; not set: default
OFF = ("off", "0")
ON_NAN = "PHALANX_ON_NAN"  # report, rollback or stop; not set: report

# The interface that a library uses. Without these variables, libraries resolve the name of this machine.
INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}

# Libraries read it while they are imported, so it is set before the fork server imports them.
THREADS = "OMP_NUM_THREADS"


def for_cuda(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that CUDA reads when a process begins to use it."""
    return {name: value for name, value in environ.items() if name.startswith("CUDA_")}


@dataclass(frozen=True)
class WorkerVariables:
    """All environment variables that describe a worker."""

    placement: RankPlacement
    role: str
    run_id: str
    run: str  # its name: the same on every node
    run_folder: str
    address: str  # of the store
    port: int
    attempt: int
    max_restarts: int
    error_file: str
    signals: str  # names with commas between them
    topology: str = ""
    line: str = ""
    memory: str = ""


def worker_environment(member: WorkerVariables, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker. `inherited`: the environment that it inherits."""
    return {
        **rank_variables(member),
        "ROLE_NAME": member.role,
        "TORCHELASTIC_RESTART_COUNT": str(member.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(member.max_restarts),
        "TORCHELASTIC_RUN_ID": member.run_id,
        # The agent hosts the store: every rank joins it as a client, and none binds the port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": member.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": member.signals,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        RUN: member.run,
        RUN_FOLDER: member.run_folder,
        LINE: member.line,
        MEMORY: member.memory,
    }


def rank_variables(member: WorkerVariables | Assignment) -> dict[str, str]:
    """Return the variables of the rank, which change when the group changes."""
    placement = member.placement
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.node_count),
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": member.address,
        "MASTER_PORT": str(member.port),
        TOPOLOGY: member.topology,
    }
