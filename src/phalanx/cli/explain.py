"""`phalanx explain …`: what `phalanx run` with the same arguments would do, before anything starts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from phalanx.cli.options import HelpRequested, parse_explain
from phalanx.cli.planning import make_plan
from phalanx.cluster.affinity import spell
from phalanx.cluster.placement import Seat
from phalanx.cluster.sources.surroundings import environment
from phalanx.launch.plan import Plan


def main(argv: list[str]) -> int:
    environ = environment()
    try:
        options, as_json = parse_explain(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    plan = make_plan(options, environ)
    facts = describe(plan, environ)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=1) + "\n")
    else:
        _show(facts)
    return 0


def describe(plan: Plan, environ: Mapping[str, str]) -> dict[str, Any]:
    """The plan as plain values: what the table shows is what the JSON holds."""
    environments = {seat.rank: _changed(plan, seat, environ) for seat in plan.seats}
    shared = _shared(list(environments.values()))
    return {
        "run": plan.run_id,
        "command": plan.command.line(0),
        "way": "fresh: an interpreter a rank" if plan.start.fresh else "fork: torch is imported once",
        "world_size": plan.placement.world_size,
        "store": f"{plan.master_addr}:{plan.master_port or 'a free port'}",
        "restarts": plan.max_restarts,
        "environment": shared,
        "ranks": [
            {
                "rank": seat.rank,
                "node": seat.node,
                "local_rank": seat.local_rank,
                "device": None if seat.slot.device is None else str(seat.slot.device),
                "device_name": None if seat.slot.device is None else seat.slot.device.name,
                "cores": spell(seat.slot.cores) if seat.slot.cores else "all",
                "environment": {k: v for k, v in environments[seat.rank].items() if k not in shared},
            }
            for seat in plan.seats
        ],
        "torchrun": shlex.join(equivalent(plan)),
        "notes": list(plan.notes),
    }


def _changed(plan: Plan, seat: Seat, environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker has and this shell has not; the run folder and port are known only once the run starts."""
    whole = plan.environment(
        seat, attempt=0, folder="RUN", rank_folder=f"RUN/attempt_0/{seat.rank}", port=plan.master_port
    )
    if not plan.master_port:
        whole["MASTER_PORT"] = "(free)"
    return {name: value for name, value in whole.items() if environ.get(name) != value}


def _shared(environments: list[dict[str, str]]) -> dict[str, str]:
    first = environments[0]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in environments)}


def equivalent(plan: Plan) -> list[str]:
    """The torchrun command that comes closest."""
    words = ["torchrun", "--nproc-per-node", str(len(plan.seats))]
    words += (
        ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
        if plan.master_port
        else ["--standalone"]
    )
    if plan.max_restarts:
        words += ["--max-restarts", str(plan.max_restarts)]
    if plan.role != "default":
        words += ["--role", plan.role]
    if plan.virtual_local_rank:
        words.append("--virtual-local-rank")
    if plan.log_dir:
        words += ["--log-dir", plan.log_dir]
    words += {"module": ["-m"], "program": ["--no-python"], "path": ["--run-path"], "script": []}[plan.command.kind]
    if plan.command.local_rank_option:
        words[:1] = ["python", "-m", "torch.distributed.launch"]
    return [*words, plan.command.target, *plan.command.args]


def _show(facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)

    def line(name: str, value: str) -> None:
        console.print(Text.assemble((f"{name:<12}", "bold"), value))

    line("run", facts["run"])
    line("command", shlex.join(facts["command"]))
    line("start", facts["way"])
    line("store", facts["store"])
    line("torchrun", facts["torchrun"])
    for note in facts["notes"]:
        line("note", note)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("rank", "node", "local", "device", "cores", "environment of its own"):
        table.add_column(title, overflow="fold")
    for rank in facts["ranks"]:
        device = "cpu" if rank["device"] is None else f"{rank['device']} {rank['device_name']}"
        own = " ".join(f"{k}={v}" for k, v in rank["environment"].items())
        cells = (rank["rank"], rank["node"], rank["local_rank"], device, rank["cores"], own)
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print()
    console.print(table)
    console.print()
    console.print(Text("every rank has", style="bold"))
    for name, value in facts["environment"].items():
        console.print(Text(f"  {name}={value}"))
