"""The command line of `phalanx run` as a value: every option parsed and checked, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, get_type_hints

from phalanx.cli.options import checks
from phalanx.cli.options.read import from_environment, read_all, with_fallback
from phalanx.cli.options.rendezvous import resolve_rendezvous
from phalanx.cli.options.scan import Given, HelpRequested, Scan, scan
from phalanx.cli.options.table import options_of
from phalanx.cluster.sources.hosts import Host
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.errors import OptionError
from phalanx.launcher.options import (
    HangOptions,
    OutputOptions,
    RecoveryOptions,
    ShutdownOptions,
    StartOptions,
    ViewerOptions,
)

# The fields have no defaults: table.py has them.


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What every worker runs."""

    kind: Literal["script", "stdin", "module", "path", "program"]
    target: str
    args: tuple[str, ...]
    python: str | None  # PYTHON_EXEC
    local_rank_option: str  # "--local-rank" or "--local_rank" if the script expects it as an argument, else empty
    env: Mapping[str, str]
    hyperparameters: tuple[tuple[str, Hyperparameter], ...]
    stdin_rank: int | None  # the global rank that reads stdin


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How many workers a node has, and on which devices."""

    count: int | Literal["auto", "gpu", "cpu", "xpu"] | None  # workers on this node; None: not given
    slots: tuple[int, ...] | None  # workers per node, for `max_nodes` nodes
    devices: tuple[str, ...] | None
    cpu: bool
    isolate: bool
    share_gpu: bool
    virtual_local_rank: bool
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None
    role: str


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Which nodes take part."""

    hosts: tuple[Host, ...] | None  # hosts to start over ssh
    count_given: bool
    standalone: bool
    min_nodes: int
    max_nodes: int
    node_rank: int | None  # None: not given
    spares: int


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """Where and how nodes join. All times are in seconds."""

    run_id: str | None  # None: a random one
    master_addr: str | None  # None: not given
    master_port: int | None  # None: a free port
    join_timeout: float
    last_call: float
    node_timeout: float
    token_file: str | None
    no_auth: bool
    attach_from: Literal["leader", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The parsed command line: `parse_run(["-g", "4", "train.py", "--lr", "0.1"], os.environ)`.

    Each option of table.py sets the field that its row names, such as `output.tee`.
    """

    script: ScriptOptions
    workers: WorkerOptions
    nodes: NodeOptions
    rendezvous: RendezvousOptions
    start: StartOptions
    recovery: RecoveryOptions
    hang: HangOptions
    shutdown: ShutdownOptions
    output: OutputOptions
    viewers: ViewerOptions
    notes: tuple[str, ...]  # one line per option that was given and has no effect


GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(RunOptions).items() if is_dataclass(kind)}


def parse_run(argv: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    """Parse the command line of `phalanx run`. Raise OptionError, or HelpRequested."""
    return _parse(argv, environ, "run")[0]


def parse_plan(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunOptions, bool]:
    """Return the options of the planned run, and whether to print JSON."""
    options, values = _parse(argv, environ, "plan")
    return options, bool(values.json)


def parse_chaos(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunOptions, Any]:
    """Return the options of the run, and the values of the options that only `phalanx chaos` has."""
    return _parse(argv, environ, "chaos")


def _parse(argv: Sequence[str], environ: Mapping[str, str], verb: str) -> tuple[RunOptions, Any]:
    found = scan(argv, verb)
    given = {**from_environment(environ, verb), **found.given}
    values = read_all(given, environ, verb)
    if values.print_completion:
        from phalanx.cli.options.completion import completion

        raise HelpRequested(completion(values.print_completion))
    if not found.script:
        raise OptionError(
            "there is no script to run", fix=f"phalanx {verb} train.py, or phalanx {verb} -m package.module"
        )
    combined = _combined(values, found, given, environ, verb)
    return _grouped(values, combined, environ, verb), values


def _combined(
    values: Any, found: Scan, given: Mapping[str, Given], environ: Mapping[str, str], verb: str
) -> dict[str, Any]:
    """Return the fields that depend on more than one option, after checking that the options agree."""
    hosts = checks.hosts_of(values, given, verb)
    min_nodes, max_nodes = checks.count_nodes(values, given, verb)
    where = resolve_rendezvous(values, {dest: this.name for dest, this in given.items()}, max_nodes, verb)
    checks.check_node_rank(values, given, max_nodes + (values.spares if max_nodes > 1 else 0), verb)
    checks.check_page(values.page_at)
    checks.check_spares(values, given, hosts, verb)
    checks.check_cpu(values, given, verb)
    slots = checks.slots_per_node(values, given, max_nodes, verb)
    checks.check_ranks(values, slots, max_nodes, verb)
    return {
        "script.kind": checks.script_kind(values, found.script, verb),
        "script.target": found.script,
        "script.args": found.args,
        "script.python": environ.get("PYTHON_EXEC"),
        "script.env": {**_exported(values, verb), **dict(values.env or ())},
        "workers.count": checks.workers_on_this_node(values, given, slots, verb),
        "workers.slots": slots,
        "nodes.hosts": hosts,
        "nodes.count_given": "nnodes" in given or max_nodes > 1,
        "nodes.min_nodes": min_nodes,
        "nodes.max_nodes": max_nodes,
        "rendezvous.run_id": where.run_id,
        "rendezvous.master_addr": where.address,
        "rendezvous.master_port": where.port,
        "recovery.max_restarts_given": "max_restarts" in given,
        "viewers.page": False if values.no_page else True if values.page or values.page_at else None,
        "notes": (*where.notes, *checks.notes(values, given)),
    }


def _exported(values: Any, verb: str) -> dict[str, str]:
    found = {
        option.exports: option.field_value(getattr(values, option.dest))
        for option in options_of(verb)
        if option.exports
    }
    return {name: value for name, value in found.items() if value}


def _grouped(values: Any, combined: Mapping[str, Any], environ: Mapping[str, str], verb: str) -> RunOptions:
    fields: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for option in options_of(verb):
        if option.field:
            value = with_fallback(option, getattr(values, option.dest), environ, verb)
            group, _, name = option.field.partition(".")
            fields[group][name] = option.field_value(value)
    for path, value in combined.items():
        group, _, name = path.partition(".")
        if name:
            fields[group][name] = value
    groups = {group: cls(**fields[group]) for group, cls in GROUPS.items()}
    return RunOptions(**groups, notes=combined["notes"])
