"""Resolves the rendezvous address from torchrun's options, as torchrun does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from phalanx.cli.options.read import read
from phalanx.cli.options.values import ADDRESS, ENDPOINT, endpoint
from phalanx.errors import OptionError

STATIC_PORT = 29500
C10D_PORT = 29400


class RendezvousAddress(NamedTuple):
    """The run id and the address of node 0."""

    run_id: str | None  # None: a random one
    address: str | None  # None: not given
    port: int | None  # None: a free port
    notes: tuple[str, ...] = ()


def resolve_rendezvous(values: Any, names: dict[str, str], max_nodes: int, verb: str) -> RendezvousAddress:
    """Return where the nodes join. `names` has the given options as the user spelled them."""

    def unused(dests: Iterable[str], why: str) -> tuple[str, ...]:
        # A single node always uses a loopback address.
        idle = [
            names[dest]
            for dest in dests
            if dest in names and not (dest == "master_addr" and values.master_addr in ("127.0.0.1", "localhost"))
        ]
        return (f"{', '.join(idle)} not used: {why}",) if idle else ()

    if values.master:
        _take_master(values, names, verb)
    run_id = values.rdzv_id or None
    several = max_nodes > 1
    if values.standalone:
        why = "with --standalone the port is a free one and the id is random"
        return RendezvousAddress(
            None, None, None, unused(("rdzv_endpoint", "rdzv_id", "master_addr", "master_port"), why)
        )
    if values.rdzv_backend == "static":
        if values.rdzv_endpoint:
            host, port = _endpoint(values, names, verb)
            if port is None:
                raise _no_port(values.rdzv_endpoint, names, verb)
            notes = unused(("master_addr", "master_port"), f"{names['rdzv_endpoint']} says it")
            return RendezvousAddress(run_id, host, port or None, notes)
        if values.master_port is None and not several:
            why = "on one node without --master-port, the port is a free one and the id is random"
            return RendezvousAddress(None, None, None, unused(("rdzv_id", "master_addr"), why))
        port = STATIC_PORT if values.master_port is None else values.master_port
        if values.master_addr is None:
            return RendezvousAddress(run_id, None if several else "127.0.0.1", port or None)
        return RendezvousAddress(run_id, _host(values, names, verb), port or None)

    backend = f"{names['rdzv_backend']} {values.rdzv_backend}"
    notes = unused(("master_addr", "master_port"), f"with {backend} the address is --rdzv-endpoint's")
    if values.rdzv_backend != "c10d":
        etcd = f"{backend} has no effect: nodes meet at node 0, and no etcd server is contacted"
        return RendezvousAddress(run_id, None, None, (etcd, *notes))
    if not values.rdzv_endpoint or values.rdzv_conf.get("store_type") == "file":
        return RendezvousAddress(run_id, None, C10D_PORT if several else None, notes)
    host, port = _endpoint(values, names, verb)
    # Other nodes must know the port. On one node, any free port works unless one was given.
    return RendezvousAddress(run_id, host, C10D_PORT if port is None and several else port or None, notes)


def _take_master(values: Any, names: dict[str, str], verb: str) -> None:
    """Replace --master HOST[:PORT] by --master-addr and --master-port."""
    for other in ("master_addr", "rdzv_endpoint"):
        if other in names and names[other].startswith("-"):
            raise OptionError(
                f"{names['master']} {values.master} and {names[other]} {getattr(values, other)} "
                "both say where node 0 is",
                fix=f"phalanx {verb} --master {values.master} …",
            )
    host, port = read(ENDPOINT._replace(read=endpoint), names["master"], values.master, {}, verb)
    values.master_addr, values.rdzv_endpoint, values.rdzv_backend = host, "", "static"
    names["master_addr"] = names["master"]
    if port is not None:
        values.master_port = port


def _endpoint(values: Any, names: Mapping[str, str], verb: str) -> tuple[str, int | None]:
    found: tuple[str, int | None] = read(
        ENDPOINT._replace(read=endpoint), names["rdzv_endpoint"], values.rdzv_endpoint, {}, verb
    )
    return found


def _host(values: Any, names: Mapping[str, str], verb: str) -> str:
    # Parsed with a port appended, as in torchrun: an IPv6 address then needs no brackets.
    kind = ADDRESS._replace(read=lambda address: endpoint(f"{address}:0")[0])
    return str(read(kind, names["master_addr"], values.master_addr, {}, verb))


def _no_port(seen: str, names: Mapping[str, str], verb: str) -> OptionError:
    return OptionError(
        f'{names["rdzv_endpoint"]} is "{seen}": it has no port',
        details=["expected host:port; a host alone will do with --rdzv-backend c10d"],
        fix=f"phalanx {verb} --rdzv-endpoint {seen}:{STATIC_PORT} …",
    )
