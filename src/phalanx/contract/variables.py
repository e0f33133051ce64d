"""The environment of a worker. The names are torchrun's, so that scripts find what they look for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.contract.ranks.placement import RankPlacement

if TYPE_CHECKING:
    from phalanx.contract.messages.worker_messages import Assignment

# Ours. Everything else that a worker reads is torchrun's.
HOME = "PHALANX_HOME"  # where runs are remembered
RUN = "PHALANX_RUN"  # the run's name, as `phalanx ps` shows it
RUN_FOLDER = "PHALANX_RUN_FOLDER"
LINE = "PHALANX_AGENT"  # where a worker that can regroup reaches its agent: contract/messages/worker_messages.py
MEMORY = "PHALANX_MEMORY"  # where a worker asks for memory that outlives it: contract/messages/snapshot_messages.py
TOPOLOGY = "PHALANX_TOPOLOGY"  # which ranks share a node: contract/ranks/topology.py
TOKEN = "PHALANX_TOKEN"  # lets a node in; no worker has it  # noqa: S105
ERROR_FORMAT = "PHALANX_ERROR_FORMAT"  # "json": also write the error of a command as JSON, contract/error_report.py
LIVE_BAR = "PHALANX_LIVE_BAR"  # "1": stderr is a pipe, but what reads it shows progress bars
PAGE_KEY = "PHALANX_PAGE_KEY"  # lets a browser in, or a Prometheus that looks at many runs; no worker has it

CHECKPOINTS = "PHALANX_CHECKPOINTS"  # their folder: `--checkpoints`
CHECKPOINT_EVERY = "PHALANX_CHECKPOINT_EVERY"
CHECKPOINT_KEY = "PHALANX_CHECKPOINT_KEY"  # the path of the file with the key that signs them
SNAPSHOT_EVERY = "PHALANX_SNAPSHOT_EVERY"  # the same, or one of OFF; not set: default
OFF = ("off", "0")
ON_NAN = "PHALANX_ON_NAN"  # report, rollback or stop; not set: report

# Which interface a library is to use. Left to themselves, libraries ask what this machine's name resolves to.
INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}", "TP_SOCKET_IFNAME": "{}"}

# Read by libraries while they are imported, so set before the fork server imports them.
THREADS = "OMP_NUM_THREADS"


def for_cuda(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that CUDA reads when a process begins to use it."""
    return {name: value for name, value in environ.items() if name.startswith("CUDA_")}


@dataclass(frozen=True)
class WorkerVariables:
    """All that the environment says about a worker."""

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
    """Return the variables of a worker. `inherited`: what it has besides."""
    return {
        **rank_variables(member),
        "ROLE_NAME": member.role,
        "TORCHELASTIC_RESTART_COUNT": str(member.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(member.max_restarts),
        "TORCHELASTIC_RUN_ID": member.run_id,
        # The store is ours: every rank joins it as a client, and none fights for the port.
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
