"""Reads the rank of this process from the variables of its launcher: one reader per launcher. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from phalanx.cluster.sources import launchers
from phalanx.cluster.sources.task import SchedulerTask, Variables
from phalanx.contract.ranks.placement import MAX_RANKS, PartialPlacement
from phalanx.contract.variables import RUN, RUN_FOLDER, TOPOLOGY
from phalanx.errors import UsageError

DEFAULT_PORT = 29500  # torchrun's
LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 30000)  # below the ephemeral ports of the kernel

BY_HAND = "RANK={rank} WORLD_SIZE={size} MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 python …"
OR_RUN = "   (or phalanx run …, which sets them all)"


ALONE = PartialPlacement(rank=0, world_size=1)


@dataclass(frozen=True)
class Identity:
    """What the launcher provides, before the ranks meet. None: not provided."""

    launcher: str  # for messages
    placement: PartialPlacement = ALONE
    address: str | None = None  # of the store; None, or no port: `methods.choose` reports what is missing
    port: int | None = None
    assumed: bool = False  # the address was not given: all ranks are expected on one host
    hosted: bool = False  # the launcher hosts the store, not a rank
    hosts_store: bool = True  # this rank hosts the store
    job: str = ""  # the same in all ranks of the job and in no other; safe as a file name
    attempt: str = ""  # for a job that is restarted with the same store
    generation: int | None = None  # of a group that can regroup
    topology: str = ""  # as encoded by `phalanx run`
    folder: str | None = None
    notes: tuple[str, ...] = ()  # what was found and ignored

    @property
    def rank(self) -> int:
        """The rank, as in its placement."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """The world size, as in its placement."""
        return self.placement.world_size

    @property
    def nobody(self) -> bool:
        """Whether there is no launcher."""
        return self.launcher == NOBODY

    @property
    def other_nodes(self) -> bool:
        """Whether some ranks are known to be on other nodes."""
        local_world_size = self.placement.local_world_size
        return local_world_size is not None and local_world_size < self.world_size


NOBODY = "nobody"
PHALANX = "phalanx run"
SPAWN = "phalanx.spawn"
TORCHRUN = "torchrun"
ACCELERATE = "accelerate launch"
HAND = "hand-set variables"
ARGUMENTS = "arguments"


def identify(environ: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> Identity:
    """Return the identity of this process. `rank` and `world_size`, if given, take precedence over the environment."""
    try:
        found = _read(environ)
    except UsageError:
        if rank is None or world_size is None:
            return _half_given(environ, rank, world_size)
        found = _nobody(environ)  # everything was given by hand, as the error message advises
    if rank is None and world_size is None:
        return found
    return _with_arguments(found, environ, rank, world_size)


def _read(environ: Mapping[str, str]) -> Identity:
    for reader in (_elastic, _scheduler, _hand_set):
        if (found := reader(environ)) is not None:
            return found
    return _nobody(environ)


def _elastic(environ: Mapping[str, str]) -> Identity | None:
    """Read the variables of `phalanx run`, torchrun, phalanx.spawn and accelerate launch."""
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or "RANK" not in environ:
        return None
    launcher = ACCELERATE if _accelerate(environ) else TORCHRUN
    if RUN in environ or run_id.startswith("spawn-"):
        launcher = PHALANX if RUN in environ else SPAWN
    variables = Variables(launcher, environ, fix=f"start the script again with {launcher}, or by hand: {_by_hand()}")
    size = variables.size("WORLD_SIZE")
    rank = variables.index("RANK", below=size)
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Identity(
        launcher,
        PartialPlacement(
            rank=rank,
            world_size=size,
            local_rank=variables.index("LOCAL_RANK"),
            local_world_size=variables.size("LOCAL_WORLD_SIZE", below=size + 1),
            node_rank=variables.index("GROUP_RANK") if variables.text("GROUP_RANK") else None,
        ),
        address=variables.needed("MASTER_ADDR"),
        port=variables.number("MASTER_PORT", least=1, below=1 << 16),
        hosted=hosted,
        hosts_store=rank == 0 and not hosted,
        # torchrun keeps its store when it restarts the ranks, with the keys of the dead ones. A phalanx run has a name
        # that all nodes know; its id may differ between the tasks of a scheduler.
        attempt=f"{environ.get(RUN, run_id)}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        topology=environ.get(TOPOLOGY, "") if launcher == PHALANX else "",
        folder=environ.get(RUN_FOLDER) or None,
    )


def _scheduler(environ: Mapping[str, str]) -> Identity | None:
    """Read the variables of a task of srun or mpirun. RANK and WORLD_SIZE, if set, take precedence."""
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return None
    task = launchers.find(environ)
    if not isinstance(task, SchedulerTask):
        return None
    placement = task.placement
    for name, value in (("RANK", placement.rank), ("WORLD_SIZE", placement.world_size)):
        if environ.get(name) and environ[name] != str(value):
            raise UsageError(
                f"{name}={environ[name]} and {task.source}, where it is {value}, contradict each other",
                details=[f"{task.source} says: {_listed(task.variables)}"],
                fix=f"unset {name}, or set both RANK and WORLD_SIZE",
            )
    variables = Variables(task.source, environ, fix="unset MASTER_ADDR and MASTER_PORT, or set both")
    address, port = variables.text("MASTER_ADDR"), None
    assumed, hosts_store = False, placement.rank == 0
    if variables.text("MASTER_PORT"):
        port = variables.number("MASTER_PORT", least=1, below=1 << 16)
    elif task.job:
        port = _PORTS[zlib.crc32(task.job.encode()) % len(_PORTS)]
    if address is None and task.hosts:
        address = task.hosts[0]
        # Rank 0 need not be on the first node of the list: that depends on the distribution of Slurm.
        hosts_store = (placement.node_rank, placement.local_rank) == (0, 0)
    elif address is None and not task.job and placement.local_world_size == placement.world_size:
        address, port, assumed = LOOPBACK, port or DEFAULT_PORT, True
    # it may not know about the others on this node
    if placement.node_count is None and placement.local_world_size == 1:
        placement = replace(placement, local_world_size=None)
    return Identity(
        task.source,
        placement,
        address=address,
        port=port if address is not None else None,
        assumed=assumed,
        hosts_store=hosts_store,
        job=task.job,
    )


def _hand_set(environ: Mapping[str, str]) -> Identity | None:
    variables = Variables("The environment", environ, fix=_by_hand() + OR_RUN)
    present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if variables.text(name) is not None]
    if not present:
        return None
    if variables.text("WORLD_SIZE") is not None and variables.size("WORLD_SIZE") == 1 and "RANK" not in present:
        return Identity(HAND, address=None)
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in present]
    if missing:
        others = [name for name in ("MASTER_ADDR", "MASTER_PORT") if variables.text(name) is None]
        raise UsageError(
            f"{' and '.join(present)} {'is' if len(present) == 1 else 'are'} set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: the other ranks are not known",
            details=[f"set: {_listed(variables.found)}", f"missing: {', '.join([*missing, *others])}"],
            fix=_by_hand(environ.get("RANK"), environ.get("WORLD_SIZE")) + OR_RUN,
        )
    size = variables.size("WORLD_SIZE")
    rank = variables.index("RANK", below=size)
    local_size = variables.size("LOCAL_WORLD_SIZE", below=size + 1) if variables.text("LOCAL_WORLD_SIZE") else None
    return Identity(
        ACCELERATE if _accelerate(environ) else HAND,
        PartialPlacement(
            rank=rank,
            world_size=size,
            local_rank=variables.index("LOCAL_RANK") if "LOCAL_RANK" in present else None,
            local_world_size=local_size,
            node_rank=next(
                (variables.index(name) for name in ("GROUP_RANK", "NODE_RANK") if variables.text(name)), None
            ),
        ),
        hosts_store=rank == 0,
        **_master(variables),
    )


def _nobody(environ: Mapping[str, str]) -> Identity:
    return Identity(ACCELERATE if _accelerate(environ) else NOBODY)


def _half_given(environ: Mapping[str, str], rank: int | None, world_size: int | None) -> Identity:
    """Read the environment, with one of the two values given as an argument."""
    given = dict(environ)
    if rank is not None:
        given["RANK"] = str(rank)
    if world_size is not None:
        given["WORLD_SIZE"] = str(world_size)
    return _read(given)


def _with_arguments(found: Identity, environ: Mapping[str, str], rank: int | None, world_size: int | None) -> Identity:
    if found.nobody or (found.launcher == ACCELERATE and found.address is None):
        if rank is None or world_size is None:
            if world_size == 1 or (rank == 0 and world_size is None):
                return replace(found, launcher=ARGUMENTS)
            given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
            raise UsageError(
                f"{given}={rank if world_size is None else world_size} was given, but the {missing} is not known",
                fix=f"phalanx.init(rank={rank or 0}, world_size={world_size or 2}), or phalanx run …",
            )
        _check(rank, world_size)
        variables = Variables("The environment", environ, fix=_by_hand(rank, world_size))
        placement = PartialPlacement(rank=rank, world_size=world_size)
        return Identity(ARGUMENTS, placement, hosts_store=rank == 0, **_master(variables))
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    _check(rank, world_size)
    if (rank, world_size) == (found.rank, found.world_size):
        return found
    note = (
        f"rank {rank} of {world_size} was given, and is used; "
        f"{found.launcher} says rank {found.rank} of {found.world_size}"
    )
    # The launcher's nodes apply to its own ranks only: which rank is on which node is determined when the ranks meet.
    return replace(
        found,
        placement=PartialPlacement(rank=rank, world_size=world_size),
        hosts_store=rank == 0 and not found.hosted,
        attempt=f"{found.attempt}.{world_size}",
        topology="",
        notes=(*found.notes, note),
    )


def _check(rank: int, world_size: int) -> None:
    if world_size > MAX_RANKS:
        raise UsageError(
            f"world_size {world_size} is not valid",
            details=[f"expected 1 to {MAX_RANKS}"],
            fix="phalanx.init(rank=0, world_size=2), with the number of processes",
        )
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of {world_size} is not valid",
            details=[f"expected a rank from 0 to {world_size - 1}" if world_size > 0 else "expected world_size >= 1"],
            fix=f"phalanx.init(rank=0, world_size={max(world_size, 1)})",
        )


class Master(TypedDict):
    """MASTER_ADDR and MASTER_PORT."""

    address: str
    port: int | None
    assumed: bool


def _master(variables: Variables) -> Master:
    """Return MASTER_ADDR and MASTER_PORT as set by hand; without them all ranks are on this host."""
    address = variables.text("MASTER_ADDR")
    port = variables.number("MASTER_PORT", least=1, below=1 << 16) if variables.text("MASTER_PORT") else None
    if address is None:
        return {"address": LOOPBACK, "port": port or DEFAULT_PORT, "assumed": True}
    return {"address": address, "port": port, "assumed": False}


def _accelerate(environ: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in environ


def _by_hand(rank: str | int | None = None, size: str | int | None = None) -> str:
    return BY_HAND.format(rank="0" if rank is None else rank, size="2" if size is None else size)


def _listed(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
