"""The identity of this process, from recorded environments: one table per launcher."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import UsageError
from phalanx.worker.rendezvous.identity import Identity, identify
from tests.cluster.test_mpi import intel, mpich, open_mpi4, open_mpi5
from tests.cluster.test_slurm import BATCH, PAIR, SALLOC, step

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
TORCHRUN = {
    **MASTER,
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PHALANX = {**TORCHRUN, "PHALANX_RUN": "train-1", "PHALANX_RUN_FOLDER": "/runs/train-1", "PHALANX_TOPOLOGY": "2*2"}
NONE = (None, None, None)
HAND = {**MASTER, "RANK": "1", "WORLD_SIZE": "2"}


def facts(found: Identity) -> tuple[Any, ...]:
    given = found.placement
    return (given.rank, given.world_size, given.local_rank, given.local_world_size, given.node_rank)


# environment, launcher, (rank, world size, local rank, local world size, node), (address, port, hosted, hosts_store)
FOUND = [
    ({}, "nobody", (0, 1, None, None, None), (None, None, False, True)),
    (MASTER, "nobody", (0, 1, None, None, None), (None, None, False, True)),  # left over in a shell
    (PHALANX, "phalanx run", (3, 4, 1, 2, 1), ("node1", 4000, True, False)),
    (TORCHRUN, "torchrun", (3, 4, 1, 2, 1), ("node1", 4000, True, False)),
    ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "spawn-7"}, "phalanx.spawn", (3, 4, 1, 2, 1), ("node1", 4000, True, False)),
    (
        {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"},
        "accelerate launch",
        (3, 4, 1, 2, 1),
        ("node1", 4000, True, False),
    ),
    (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False", "RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0"},
        "torchrun",
        (0, 4, 0, 2, 0),
        ("node1", 4000, False, True),
    ),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch", (0, 1, None, None, None), (None, None, False, True)),
    (HAND, "hand-set variables", (1, 2, None, None, None), ("node1", 4000, False, False)),
    ({**HAND, "RANK": "0"}, "hand-set variables", (0, 2, None, None, None), ("node1", 4000, False, True)),
    (
        {**HAND, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
        "hand-set variables",
        (1, 2, 0, 1, 1),
        ("node1", 4000, False, False),
    ),
    # No address: all ranks are on this machine.
    (
        {"RANK": "1", "WORLD_SIZE": "2"},
        "hand-set variables",
        (1, 2, None, None, None),
        ("127.0.0.1", 29500, False, False),
    ),
    ({"WORLD_SIZE": "1"}, "hand-set variables", (0, 1, None, None, None), (None, None, False, True)),
    # srun
    (PAIR[0], "Slurm", (0, 2, 0, 1, 0), ("node1", 23683, False, True)),
    (PAIR[1], "Slurm", (1, 2, 0, 1, 1), ("node1", 23683, False, False)),
    ({**PAIR[1], **MASTER}, "Slurm", (1, 2, 0, 1, 1), ("node1", 4000, False, False)),
    # Rank 0 is on the second node: the first task of the first node hosts the store.
    (
        step("PROCID=0 LOCALID=0 NODEID=1", size=3, tasks="2,1"),
        "Slurm",
        (0, 3, 0, 1, 1),
        ("node1", 23683, False, False),
    ),
    (
        step("PROCID=1 LOCALID=0 NODEID=0", size=3, tasks="2,1"),
        "Slurm",
        (1, 3, 0, 2, 0),
        ("node1", 23683, False, True),
    ),
    # But rank 0 hosts it if the user has given an address.
    (
        {**step("PROCID=0 LOCALID=0 NODEID=1", size=3, tasks="2,1"), **MASTER},
        "Slurm",
        (0, 3, 0, 1, 1),
        ("node1", 4000, False, True),
    ),
    ({**PAIR[1], **HAND}, "hand-set variables", (1, 2, None, None, None), ("node1", 4000, False, False)),
    ({**PAIR[1], **TORCHRUN}, "torchrun", (3, 4, 1, 2, 1), ("node1", 4000, True, False)),
    # Not a task: a batch script, a shell of salloc.
    (BATCH, "nobody", (0, 1, None, None, None), (None, None, False, True)),
    (SALLOC, "nobody", (0, 1, None, None, None), (None, None, False, True)),
    # mpirun
    (open_mpi4(2, 3, 0, 1, 2), "Open MPI", (2, 3, 0, 1, None), (None, None, False, False)),
    (open_mpi5(1, 2, 0, 1), "Open MPI", (1, 2, 0, None, None), (None, None, False, False)),
    ({**open_mpi5(1, 2, 1, 2), **MASTER}, "Open MPI", (1, 2, 1, 2, None), ("node1", 4000, False, False)),
    (intel(0, 2, 0, 2), "Intel MPI", (0, 2, 0, 2, None), (None, None, False, True)),
    ({**mpich(1, 2, 1, 2), **MASTER}, "MPICH", (1, 2, 1, 2, None), ("node1", 4000, False, False)),
    # MPICH gives the job no name. All ranks are on this machine, or their hosts are unknown.
    (mpich(1, 2, 1, 2), "MPICH", (1, 2, 1, 2, None), ("127.0.0.1", 29500, False, False)),
    (mpich(1, 2, 0, 1), "MPICH", (1, 2, 0, None, None), (None, None, False, False)),
    # A missing port is no error if it is not needed: with a method or a store.
    (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
        "hand-set variables",
        (0, 2, *NONE),
        ("a", None, False, True),
    ),
]


@pytest.mark.parametrize(("environ", "launcher", "place", "master"), FOUND)
def test_who_started_it(
    environ: dict[str, str], launcher: str, place: tuple[Any, ...], master: tuple[Any, ...]
) -> None:
    found = identify(environ)
    assert (found.launcher, facts(found)) == (launcher, place)
    assert (found.address, found.port, found.hosted, found.hosts_store) == master
    assert found.assumed == (found.address == "127.0.0.1")


def test_what_phalanx_run_says_beside() -> None:
    found = identify(PHALANX)
    assert (found.topology, found.folder, found.attempt) == ("2*2", "/runs/train-1", "train-1.2")
    assert identify(TORCHRUN).folder is None


# environment, what the message says
REFUSED = [
    (
        {"RANK": "0"},
        ("RANK is set, but WORLD_SIZE is not", "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "RANK=0 WO"),
    ),
    ({"WORLD_SIZE": "4"}, ("WORLD_SIZE is set, but RANK is not", "set: WORLD_SIZE=4", "WORLD_SIZE=4 MASTER_ADDR")),
    ({"LOCAL_RANK": "1"}, ("LOCAL_RANK is set, but RANK and WORLD_SIZE are not", "phalanx run")),
    ({**HAND, "RANK": "2"}, ("RANK=2 cannot be", "expected from 0 to 1")),
    ({**HAND, "RANK": "one"}, ("RANK='one' is not a number",)),
    ({**HAND, "WORLD_SIZE": "0"}, ("WORLD_SIZE=0 cannot be",)),
    ({**HAND, "RANK": "2000000", "WORLD_SIZE": "3000000"}, ("WORLD_SIZE=3000000 cannot be", "from 1 to 1048576")),
    ({**HAND, "LOCAL_RANK": "2000000"}, ("LOCAL_RANK=2000000 cannot be", "from 0 to 1048575")),
    ({**HAND, "NODE_RANK": "2000000"}, ("NODE_RANK=2000000 cannot be",)),
    ({**HAND, "NODE_RANK": "99999999999"}, ("NODE_RANK=99999999999 cannot be", "from 0 to 1048575")),
    (
        {**mpich(0, 2, 0, 1), "PMI_SIZE": "2000000"},
        ("MPICH says where this process runs, but PMI_SIZE=2000000 cannot be",),
    ),
    ({**HAND, "MASTER_PORT": "70000"}, ("MASTER_PORT=70000 cannot be", "65535")),
    ({**PAIR[1], "WORLD_SIZE": "5"}, ("WORLD_SIZE=5 and Slurm, where it is 2, contradict", "unset WORLD_SIZE")),
    ({**TORCHRUN, "WORLD_SIZE": ""}, ("torchrun says where this process runs, but WORLD_SIZE is not set",)),
]


@pytest.mark.parametrize(("environ", "seen"), REFUSED)
def test_half_set(environ: dict[str, str], seen: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        identify(environ)
    for text in seen:
        assert text in str(caught.value)


# environment, arguments, (launcher, rank, world size), hosts_store
GIVEN = [
    ({}, {"rank": 1, "world_size": 3}, ("arguments", 1, 3), False),
    ({}, {"rank": 0, "world_size": 3}, ("arguments", 0, 3), True),
    ({}, {"world_size": 1}, ("arguments", 0, 1), True),
    ({"RANK": "0"}, {"world_size": 2}, ("hand-set variables", 0, 2), True),
    ({"RANK": "0"}, {"rank": 1, "world_size": 2}, ("arguments", 1, 2), False),
    (HAND, {"rank": 1, "world_size": 2}, ("hand-set variables", 1, 2), False),
    (HAND, {"rank": 0}, ("hand-set variables", 0, 2), True),
    (TORCHRUN, {"rank": 0, "world_size": 2}, ("torchrun", 0, 2), False),
    ({"RANK": "x"}, {"rank": 1, "world_size": 2}, ("arguments", 1, 2), False),
    (mpich(1, 2, 0, 1), {"rank": 1, "world_size": 2}, ("MPICH", 1, 2), False),
]


@pytest.mark.parametrize(("environ", "arguments", "found", "hosts_store"), GIVEN)
def test_arguments_win(
    environ: dict[str, str], arguments: dict[str, int], found: tuple[str, int, int], hosts_store: bool
) -> None:
    identity = identify(environ, **arguments)
    assert (identity.launcher, identity.rank, identity.world_size) == found
    assert identity.hosts_store == hosts_store


def test_a_contradiction_is_named() -> None:
    (note,) = identify(TORCHRUN, rank=0, world_size=2).notes
    assert note == "rank 0 of 2 was given, and is used; torchrun says rank 3 of 4"
    assert identify(TORCHRUN, rank=3, world_size=4).notes == ()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2 is not valid"),
        ({"rank": 0, "world_size": 0}, "expected world_size >= 1"),
        ({"rank": 2_000_000, "world_size": 3_000_000}, "world_size 3000000 is not valid"),
        ({"rank": 1}, "rank=1 was given, but the world_size is not known"),
        ({"world_size": 2}, "world_size=2 was given, but the rank is not known"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, int], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        identify({}, **arguments)
    assert seen in str(caught.value)
