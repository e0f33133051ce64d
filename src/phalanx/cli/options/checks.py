"""Combines options that depend on each other, and raises if they conflict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.options.scan import Given
from phalanx.cli.options.table import OPTIONS
from phalanx.contract.ranks.placement import MAX_RANKS
from phalanx.errors import OptionError

if TYPE_CHECKING:
    from phalanx.cluster.sources.hosts import Host


def script_kind(values: Any, script: str, verb: str) -> Literal["script", "stdin", "module", "path", "program"]:
    """Return how the script is run: --module, --run-path, --no-python or plain Python."""
    if values.run_path:
        return "path"
    if values.no_python and values.module:
        raise OptionError(
            "--no-python and --module contradict each other: a module needs Python to run it",
            fix=f"phalanx {verb} -m package.module, or phalanx {verb} --no-python ./program",
        )
    if values.no_python or values.module:
        return "program" if values.no_python else "module"
    return "stdin" if script == "-" else "script"


def count_nodes(values: Any, given: Mapping[str, Given], verb: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes."""
    least, most = values.nnodes
    if "nnodes" not in given and values.slots is not None and len(values.slots) > 1 and not values.standalone:
        least = most = len(values.slots)  # -g 8,2 is two nodes
    if not values.standalone:
        return least, most
    if least > 1:
        both = f"{_typed(given['standalone'])} and {_typed(given['nnodes'])}"
        raise OptionError(
            f"{both} contradict each other: one node or several?",
            fix=f"phalanx {verb} --standalone …, or phalanx {verb} --nnodes {least} --master-addr HOST …",
        )
    return 1, 1


def check_node_rank(values: Any, given: Mapping[str, Given], most: int, verb: str) -> None:
    """Raise if --node-rank is not one of the nodes or spares."""
    # With these, torchrun numbers the nodes itself and ignores --node-rank.
    if values.standalone or values.rdzv_backend != "static" or (values.node_rank or 0) < most:
        return
    raise OptionError(
        f"{_typed(given['node_rank'])} is beyond the last node: there {'is' if most == 1 else 'are'} {most}, "
        "counted from 0",
        fix=f"phalanx {verb} --nnodes {values.node_rank + 1} --node-rank {values.node_rank} …",
    )


def check_spares(values: Any, given: Mapping[str, Given], hosts: tuple[Host, ...] | None, verb: str) -> None:
    """Raise if spares are requested over ssh: all nodes end with the terminal, and none is replaced."""
    least, most = values.nnodes
    elastic = "nnodes" in given and least < most
    if hosts is None or not (values.spares or elastic):
        return
    nodes = f"{least}:{most}" if elastic else str(len(hosts))
    spares = f" --spares {values.spares}" if values.spares else ""
    raise OptionError(
        f"{_typed(given['spares' if values.spares else 'nnodes'])} and "
        f"{_typed(given['hosts' if values.hosts else 'hostfile'])}: nodes that are started over ssh from one terminal "
        "are a fixed number",
        fix=f"on each node: phalanx {verb} -n {nodes}{spares} --master HOST …",
    )


def check_cpu(values: Any, given: Mapping[str, Given], verb: str) -> None:
    """Raise if --cpu is combined with devices."""
    if not values.cpu:
        return
    against = "devices" if values.devices else "nproc_per_node" if values.nproc_per_node in ("gpu", "xpu") else None
    if against:
        raise OptionError(
            f"--cpu and {_typed(given[against])} contradict each other",
            fix=f"phalanx {verb} --cpu -g 4 …, or leave --cpu out",
        )


def slots_per_node(values: Any, given: Mapping[str, Given], most: int, verb: str) -> tuple[int, ...] | None:
    """Return the number of workers of each node, as given by -g."""
    listed: tuple[int, ...] | None = values.slots
    if listed is None or len(listed) == most:
        return listed
    if len(listed) == 1:
        return listed * most
    typed = _typed(given["slots"])
    here = f"-i {values.node_rank or 0}"
    raise OptionError(
        f"{typed} is for {len(listed)} nodes, but there {'is' if most == 1 else 'are'} {most}",
        details=["expected one number per node, or one number for all"],
        fix=f"phalanx {verb} -n {len(listed)} {typed} {here} …, or phalanx {verb} -g {listed[0]} …",
    )


def check_ranks(values: Any, slots: tuple[int, ...] | None, most: int, verb: str) -> None:
    """Raise if there would be more ranks than a run can have."""
    workers = values.nproc_per_node if isinstance(values.nproc_per_node, int) else 1
    ranks = sum(slots) if slots is not None else workers * most
    if ranks > MAX_RANKS:
        raise OptionError(
            f"{most} nodes with {ranks // most} workers each are {ranks} ranks: a run has at most {MAX_RANKS}",
            fix=f"phalanx {verb} -n {MAX_RANKS // (ranks // most)} -g {ranks // most} …",
        )


def workers_on_this_node(values: Any, given: Mapping[str, Given], slots: tuple[int, ...] | None, verb: str) -> Any:
    """Return the number of workers from -g or --nproc-per-node. -g overrides PET_NPROC_PER_NODE."""
    if slots is None:
        return values.nproc_per_node
    if values.node_rank is not None and values.node_rank < len(slots):
        possible = {slots[values.node_rank]}
    else:
        possible = set(slots)
    nproc = given.get("nproc_per_node")
    if nproc and nproc.name.startswith("-"):
        if values.nproc_per_node not in possible:
            raise OptionError(
                f"{_typed(given['slots'])} and {_typed(nproc)} contradict each other",
                fix=f"phalanx {verb} {_typed(given['slots'])} …, without {nproc.name}",
            )
        return values.nproc_per_node
    return possible.pop() if len(possible) == 1 else None


def hosts_of(values: Any, given: Mapping[str, Given], verb: str) -> tuple[Host, ...] | None:
    """Return the hosts of --hosts or --hostfile. -g sets their number of workers."""
    if values.hostfile and values.hosts:
        raise OptionError("--hosts and --hostfile contradict each other", fix=f"phalanx {verb} --hosts a:8,b:2 …")
    found = _read_hostfile(values.hostfile, verb) if values.hostfile else values.hosts
    if not found:
        return None
    which = "hosts" if values.hosts else "hostfile"
    for against in ("node_rank", "standalone", "rdzv_endpoint"):
        if against in given and given[against].name.startswith("-"):
            raise OptionError(
                f"{_typed(given[which])} and {_typed(given[against])} contradict each other: "
                "from one terminal, or by hand on each node?",
                fix=f"phalanx {verb} {_typed(given[which])} …",
            )
    if "nnodes" in given and values.nnodes[1] != len(found):
        raise OptionError(
            f"{_typed(given[which])} names {len(found)} hosts, but {_typed(given['nnodes'])}",
            fix=f"phalanx {verb} {_typed(given[which])} …, without {given['nnodes'].name}",
        )
    if values.slots is None:
        return tuple(found)
    if any(host.slots is not None or host.devices is not None for host in found) or len(values.slots) > 1:
        raise OptionError(
            f"{_typed(given[which])} and {_typed(given['slots'])} both say how many workers there are",
            fix=f"phalanx {verb} --hosts a:8,b:2 …, or phalanx {verb} --hosts a,b -g 4 …",
        )
    return tuple(replace(host, slots=values.slots[0]) for host in found)


def _read_hostfile(path: str, verb: str) -> tuple[Host, ...]:
    from phalanx.cluster.sources.hosts import parse_hostfile

    try:
        with open(path) as file:
            return parse_hostfile(file.read(1 << 20))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--hostfile {path} cannot be read: {error}", fix=f"phalanx {verb} --hosts a:8,b:2 …"
        ) from None
    except ValueError as error:
        raise OptionError(
            f"--hostfile {path}: {error}",
            details=["expected one host per line: `a slots=8`, `a:8`, or `a`"],
            fix=f"phalanx {verb} --hosts a:8,b:2 … needs no file",
        ) from None


def notes(values: Any, given: Mapping[str, Given]) -> list[str]:
    """Return one line per option that was given and has no effect."""
    found = []
    for option in OPTIONS:
        value = getattr(values, option.dest, None)
        if not option.no_effect or option.dest not in given or value in ({}, "null", "console"):
            continue
        keys = f" ({', '.join(value)})" if isinstance(value, dict) else ""
        found.append(f"{given[option.dest].name}{keys} has no effect: {option.no_effect}")
    return found


def _typed(given: Given) -> str:
    if given.name.startswith("PET_"):
        return f"{given.name}={given.values[-1]}"
    return " ".join((given.name, *given.values[-1:]))


def check_page(at: str | None) -> None:
    """Raise if the address of the browser page is not valid."""
    if at is not None:
        from phalanx.watch.page import address

        address.parse(at)
