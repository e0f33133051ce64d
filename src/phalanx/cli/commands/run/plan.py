"""`phalanx plan …`: shows what `phalanx run` would do with the same arguments."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from phalanx.cli.expected_nodes import ExpectedNodes, expected_nodes
from phalanx.cli.launch_context import LaunchContext, detect_context
from phalanx.cli.options import HelpRequested, parse_plan
from phalanx.cli.planning import make_plan
from phalanx.cluster.affinity import spell
from phalanx.cluster.placement import Seat
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.ranks import topology
from phalanx.contract.variables import INTERFACES
from phalanx.contract.visible import visible
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import run_folder


def main(argv: list[str]) -> int:
    """Run `phalanx plan`. Return the exit code."""
    environ = environment()
    try:
        options, as_json = parse_plan(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    context = (
        detect_context(options, environ, run_folder.home(environ)) if options.nodes.hosts is None else LaunchContext()
    )
    plan = make_plan(options, environ, context)
    seen = expected_nodes(options, context, len(plan.seats), os.uname().nodename)
    facts = describe(plan, environ, seen, cpu=options.workers.cpu)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        _show(facts)
    return 0


def describe(
    plan: Plan, environ: Mapping[str, str], seen: ExpectedNodes | None = None, *, cpu: bool = False
) -> dict[str, Any]:
    """Return the plan as plain values, for the table and for JSON."""
    seats = plan.seats if seen is None else seen.seats or ()
    nodes = [list(on_node) for _, on_node in groupby(seats, lambda seat: seat.placement.node_rank)]
    if seats and seen is not None:
        encoded = topology.encode([[seat.rank for seat in on_node] for on_node in nodes])
        plan = replace(plan, group=replace(plan.group, topology=encoded))
    environments = {
        seat.rank: _changed(
            replace(plan, group=replace(plan.group, seats=tuple(on_node))), seat, environ, several=seen is not None
        )
        for on_node in nodes
        for seat in on_node
    }
    shared = _shared(list(environments.values())) if environments else {}
    return {
        "run": plan.run_id,
        "command": plan.command.line(0),
        "way": "fresh: one interpreter per rank" if plan.start.fresh else "fork: torch is imported once",
        "world_size": len(seats) or None,
        "nodes": None if seen is None else _nodes(seen),
        "source": None if seen is None else seen.source,
        "least_nodes": _least(plan),
        "spares": plan.rendezvous.spares if plan.rendezvous is not None else plan.group.spares.count,
        "meeting": _meeting(plan),
        "store": f"{plan.group.master_addr}:{plan.group.master_port or 'a free port'}"
        if seen is None
        else "a free port of node 0, on the address by which the others reach it",
        "restarts": plan.recovery.max_restarts,
        "recovery": _recovery(plan),
        "environment": shared,
        "ranks": [
            {
                "rank": seat.rank,
                "node": seat.placement.node_rank,
                "local_rank": seat.local_rank,
                "device": _device(seat, several=seen is not None, cpu=cpu),
                "device_name": None if seat.slot.device is None else seat.slot.device.name,
                "cores": spell(seat.slot.cores) if seat.slot.cores else "all",
                "environment": {k: v for k, v in environments[seat.rank].items() if k not in shared},
            }
            for seat in seats
        ],
        "torchrun": shlex.join(equivalent(plan)) if seen is None else None,
        "notes": [*plan.remarks.notes, *plan.remarks.warnings],
    }


def _device(seat: Seat, *, several: bool, cpu: bool) -> str | None:
    """Return the device of a rank. Devices of other nodes are unknown until they join."""
    if seat.slot.device is not None:
        return str(seat.slot.device)
    return "(its own)" if several and not cpu else None


def _nodes(seen: ExpectedNodes) -> list[dict[str, Any]]:
    """Return the nodes with their ranks, as far as the sizes of all previous nodes are known."""
    found: list[dict[str, Any]] = []
    first: int | None = 0
    for node, expected in enumerate(seen.nodes):
        last = first + expected.workers - 1 if first is not None and expected.workers else None
        found.append(
            {
                "node": node,
                "host": expected.host or None,
                "workers": expected.workers,
                "ranks": None if last is None or first is None else f"{first}-{last}" if last > first else str(first),
            }
        )
        first = None if last is None else last + 1
    return found


def _least(plan: Plan) -> int | None:
    """Return the minimum number of nodes of an elastic run."""
    rendezvous = plan.rendezvous
    return rendezvous.least if rendezvous is not None and 0 < rendezvous.least < rendezvous.expected else None


def _recovery(plan: Plan) -> str:
    """Return what follows a failure."""
    if not plan.recovery.max_restarts_given:
        return "phalanx.main: recovers as long as training makes progress; any other script: the run ends"
    if not plan.recovery.max_restarts:
        return "none (--max-restarts 0): the run ends"
    times = "once" if plan.recovery.max_restarts == 1 else f"{plan.recovery.max_restarts} times"
    return f"{times}; the count is reset after {plan.recovery.restart_window:g} s without a failure"


def _meeting(plan: Plan) -> dict[str, Any] | None:
    rendezvous = plan.rendezvous
    if rendezvous is None:
        return None
    return {
        "leads": rendezvous.leads,
        "node": rendezvous.member,
        "host": rendezvous.location.host,
        "port": rendezvous.location.port or None,
        "token": str(rendezvous.token),
    }


def _changed(plan: Plan, seat: Seat, environ: Mapping[str, str], *, several: bool) -> dict[str, str]:
    """Return the variables that differ from this shell. The run folder and port are unknown until the run starts."""
    whole = plan.environment(
        seat,
        attempt=0,
        run="RUN",
        folder="RUN",
        rank_folder=f"RUN/attempt_0/{seat.rank}",
        port=plan.group.master_port,
        line="(free)",
        memory="(free)",
    )
    if not plan.group.master_port or several:
        whole["MASTER_PORT"] = "(free)"
    if several:
        whole["MASTER_ADDR"] = "(of node 0)"
        whole |= {name: "(towards the others)" for name in INTERFACES if name not in environ}
    return {name: value for name, value in whole.items() if environ.get(name) != value}


def _shared(environments: list[dict[str, str]]) -> dict[str, str]:
    first = environments[0]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in environments)}


def equivalent(plan: Plan) -> list[str]:
    """Return the closest torchrun command."""
    words = ["torchrun", "--nproc-per-node", str(len(plan.seats))]
    words += (
        ["--master-addr", plan.group.master_addr, "--master-port", str(plan.group.master_port)]
        if plan.group.master_port
        else ["--standalone"]
    )
    if plan.recovery.max_restarts:
        words += ["--max-restarts", str(plan.recovery.max_restarts)]
    if plan.group.role != "default":
        words += ["--role", plan.group.role]
    if plan.devices.virtual_local_rank:
        words.append("--virtual-local-rank")
    if plan.output.log_dir:
        words += ["--log-dir", plan.output.log_dir]
    words += {"module": ["-m"], "program": ["--no-python"], "path": ["--run-path"]}.get(plan.command.kind, [])
    if plan.command.local_rank_option:
        words[:1] = ["python", "-m", "torch.distributed.launch"]
    return [*words, plan.command.target, *plan.command.args]


def _show(facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide = None if sys.stdout.isatty() else 200  # in a file or a pipe, values are not divided into several lines
    console = Console(soft_wrap=True, highlight=False, width=wide)

    def line(name: str, value: str) -> None:
        console.print(Text.assemble((f"{name:<12}", "bold"), visible(value)))

    line("run", facts["run"])
    line("command", shlex.join(facts["command"]))
    line("start", facts["way"])
    line("store", facts["store"])
    if facts["torchrun"] is not None:
        line("torchrun", facts["torchrun"])
    if facts["nodes"] is not None:
        least, most = facts["least_nodes"], len(facts["nodes"])
        line("nodes", f"{f'{least} to ' if least else ''}{most}, by {facts['source']}")
        for node in facts["nodes"]:
            some = "s" if node["workers"] != 1 else ""
            ranks = f"rank{some} {node['ranks']}" if node["ranks"] else "ranks: known when all have joined"
            line("", f"{node['node']}  {node['host'] or '?'}: {node['workers'] or '?'} worker{some}, {ranks}")
    if facts["meeting"] is not None:
        meeting = facts["meeting"]
        where = f"{meeting['host'] or 'node 0'}:{meeting['port'] or 'a free port'}"
        line("meeting", f"{where}, token: {meeting['token']}")
    if facts["spares"]:
        what, count = "worker" if facts["nodes"] is None else "node", facts["spares"]
        line("spares", f"{count} {what}{'s' if count > 1 else ''} on standby")
    line("recovery", facts["recovery"])
    for note in facts["notes"]:
        line("note", note)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "node", "local", "device", "cores", "own environment"):
        table.add_column(title, overflow="fold")
    for rank in facts["ranks"]:
        device = "cpu" if rank["device"] is None else f"{rank['device']} {rank['device_name'] or ''}"
        own = " ".join(f"{k}={v}" for k, v in rank["environment"].items())
        cells = (rank["rank"], rank["node"], rank["local_rank"], device, rank["cores"], own)
        table.add_row(*(Text(visible(str(cell))) for cell in cells))
    if not facts["ranks"]:
        return
    console.print()
    console.print(table)
    console.print()
    console.print(Text("environment of every rank", style="bold"))
    for name, value in facts["environment"].items():
        console.print(Text(f"  {visible(f'{name}={value}')}"))
