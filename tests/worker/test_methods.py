"""Where the ranks rendezvous, from a URL and from the launcher's variables."""

from __future__ import annotations

import pytest

from phalanx.errors import UsageError
from phalanx.worker.rendezvous.identity import Identity, identify
from phalanx.worker.rendezvous.membership import describe
from phalanx.worker.rendezvous.methods import MeetingPoint, RendezvousMethod, choose, parse
from tests.cluster.test_mpi import mpich, open_mpi4
from tests.cluster.test_slurm import PAIR


@pytest.mark.parametrize(
    ("text", "place", "rank", "size"),
    [
        (None, None, None, None),
        ("env://", None, None, None),
        ("env://?rank=1&world_size=2", None, 1, 2),
        ("tcp://node1:4000", ("tcp", "node1", 4000, ""), None, None),
        ("tcp://[fd00::1]:4000?rank=0&world_size=3", ("tcp", "fd00::1", 4000, ""), 0, 3),
        ("file:///shared/a%20b", ("file", "", 0, "/shared/a b"), None, None),
    ],
)
def test_urls(text: str | None, place: tuple[str, str, int, str] | None, rank: int | None, size: int | None) -> None:
    found = parse(text)
    assert (found.rank, found.world_size) == (rank, size)
    seen = None if found.place is None else (found.place.kind, found.place.host, found.place.port, found.place.path)
    assert seen == place


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("tcp://node1", "tcp://HOST:PORT"),
        ("tcp://node1:99999", "tcp://HOST:PORT"),
        ("file://shared/path", 'method="file:///shared/path"'),
        ("file:///", "does not name a file"),
        ("node1:4000", "expected env://, tcp://HOST:PORT or file:///SHARED/PATH"),
        ("tcp://node1:4000?rank=x", "rank=x in the method"),
    ],
)
def test_urls_that_say_nothing(text: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert seen in str(caught.value)


MPI = identify(open_mpi4(1, 2, 0, 1, 2))


@pytest.mark.parametrize(
    ("identity", "method", "given", "place"),
    [
        (Identity("nobody"), None, False, "alone"),
        (identify({"RANK": "0", "WORLD_SIZE": "2"}), None, False, "127.0.0.1 port 29500 (MASTER_ADDR is not set)"),
        (identify(PAIR[1]), None, False, "node1 port 23683 (the first node of Slurm)"),
        (identify(PAIR[1]), "file:///shared/x", False, "the file /shared/x"),
        (identify(PAIR[1]), None, True, "the store that was given"),
        (MPI, None, False, "the file /home/x/meetings/openmpi-4277862401-a89add97db25.store"),
        (MPI, "tcp://node3:5", False, "node3 port 5 (method=tcp://node3:5)"),
    ],
)
def test_places(identity: Identity, method: str | None, given: bool, place: str) -> None:
    found = choose(identity, parse(method), {"PHALANX_HOME": "/home/x"}, given=given)
    assert (found.kind if found == MeetingPoint("alone") else str(found)) == place


HALF = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
NAMELESS = mpich(1, 2, 0, 1)


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        (HALF, ("MASTER_ADDR is set, but MASTER_PORT is not", "MASTER_ADDR=a MASTER_PORT=29500")),
        (NAMELESS, ("MPICH does not name its job", "-genv MASTER_ADDR")),
        ({**NAMELESS, "MASTER_ADDR": "a"}, ("MASTER_PORT is not",)),
    ],
)
def test_nowhere(environ: dict[str, str], seen: tuple[str, ...]) -> None:
    identity = identify(environ)
    with pytest.raises(UsageError) as caught:
        choose(identity, parse(None), environ)
    for text in seen:
        assert text in str(caught.value)
    # An explicit address wins.
    assert choose(identity, parse("tcp://node3:5"), environ).host == "node3"


@pytest.mark.parametrize(("local", "shown"), [("2", ""), ("1", ", which no other host can reach")])
def test_loopback_is_explained_unless_all_ranks_are_on_this_host(local: str, shown: str) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000", "RANK": "0", "WORLD_SIZE": "2"}
    identity = identify({**environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local})
    assert describe(MeetingPoint("tcp", "127.0.0.1", 4000), identity) == f"127.0.0.1 port 4000{shown}"


def test_env_is_the_default() -> None:
    assert parse("env://") == parse(None) == RendezvousMethod(None)
