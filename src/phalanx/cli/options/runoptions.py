"""The command line of `phalanx run` as a value: every option read, checked, and brought to its meaning."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from phalanx.cli.options import checks
from phalanx.cli.options.read import from_environment, read, read_all
from phalanx.cli.options.rendezvous import rendezvous
from phalanx.cli.options.scan import Given, HelpRequested, Scan, scan
from phalanx.cli.options.values import SECONDS, Streams
from phalanx.cluster.sources.hosts import Host
from phalanx.contract.variables import CHECKPOINT_EVERY, CHECKPOINTS, SNAPSHOT_EVERY
from phalanx.errors import OptionError

__all__ = ["HelpRequested", "RunOptions", "Streams", "parse_chaos", "parse_plan", "parse_run"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`parse_run(["-g", "4", "train.py", "--lr", "0.1"], os.environ)`"""

    # what is run
    kind: Literal["script", "stdin", "module", "path", "program"]
    script: str
    args: tuple[str, ...]
    python: str | None  # PYTHON_EXEC
    local_rank_option: str  # "--local-rank" or "--local_rank" if the script wants it as an argument, else empty
    env: Mapping[str, str]
    stdin: int | None  # the global rank that reads the terminal

    # where
    hosts: tuple[Host, ...] | None  # to start over ssh
    nodes_told: bool  # how many there are was said
    standalone: bool
    min_nodes: int
    max_nodes: int
    node_id: int | None  # None: not told
    workers: int | Literal["auto", "gpu", "cpu", "xpu"] | None  # on this node; None: not told
    slots: tuple[int, ...] | None  # of each node, max_nodes of them
    devices: tuple[str, ...] | None
    cpu: bool
    isolate: bool
    share_gpu: bool
    virtual_local_rank: bool
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None
    role: str

    # how they meet
    run_id: str | None  # None: a random one
    master_addr: str | None  # None: not told
    master_port: int | None  # None: a free one
    local_addr: str | None
    join_timeout: float
    last_call: float
    spares: int
    node_timeout: float
    token_file: str | None
    no_auth: bool

    # output
    log_dir: str | None
    redirects: Streams
    tee: Streams
    log_line_prefix_template: str | None
    show_ranks: frozenset[int] | None  # None: all
    local_ranks: frozenset[int] | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    event_log_handler: Literal["null", "console"]
    color: Literal["auto", "always", "never"]
    quiet: bool
    timings: bool
    screen: bool
    page: bool | None  # None: not told
    page_at: str | None

    # start and end
    preload: tuple[str, ...]
    fresh: bool
    warm: bool  # use what an earlier run kept warm
    keep_warm: float | None  # seconds
    max_restarts: int
    restarts_told: bool
    restart_window: float  # seconds
    worker_timeout: float  # seconds
    stall_timeout: float | None  # seconds; None: nobody looks for it
    on_hang: Literal["report", "kill", "stop"]
    signals: tuple[signal.Signals, ...]
    shutdown_timeout: float | None  # seconds; None: not told
    preempt_signals: tuple[signal.Signals, ...]
    grace: float  # seconds
    linger: float | None  # seconds; None: what ranks left running stays
    check_collectives: bool

    notes: tuple[str, ...]  # a line for each option that was given and has no effect


def parse_run(argv: Sequence[str], environ: Mapping[str, str]) -> RunOptions:
    return _parse(argv, environ, "run")[0]


def parse_plan(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunOptions, bool]:
    """The options of the planned run, and whether JSON is wanted."""
    options, values = _parse(argv, environ, "plan")
    return options, bool(values.json)


def parse_chaos(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunOptions, Any]:
    """The options of the run, and the values of those that only `phalanx chaos` has."""
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
    return _meaning(values, found, given, environ, verb), values


def _meaning(values: Any, found: Scan, given: Mapping[str, Given], environ: Mapping[str, str], verb: str) -> RunOptions:
    hosts = checks.hosts_of(values, given, verb)
    min_nodes, max_nodes = checks.count_nodes(values, given, verb)
    where = rendezvous(values, {dest: this.name for dest, this in given.items()}, max_nodes, verb)
    checks.check_node_id(values, given, max_nodes + (values.spares if max_nodes > 1 else 0), verb)
    checks.check_page(values.page_at)
    checks.check_spares(values, given, hosts, verb)
    checks.check_cpu(values, given, verb)
    slots = checks.slots_of_nodes(values, given, max_nodes, verb)
    return RunOptions(
        kind=checks.what_kind(values, found.script, verb),
        script=found.script,
        args=found.args,
        python=environ.get("PYTHON_EXEC"),
        local_rank_option={"dash": "--local-rank", "underscore": "--local_rank"}.get(values.pass_local_rank, ""),
        env={**_checkpoints(values), **dict(values.env or ())},
        stdin=values.stdin,
        hosts=hosts,
        nodes_told="nnodes" in given or max_nodes > 1,
        standalone=values.standalone,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_id=values.node_rank,
        workers=checks.workers_here(values, given, slots, verb),
        slots=slots,
        devices=values.devices,
        cpu=values.cpu,
        isolate=values.isolate,
        share_gpu=values.share_gpu,
        virtual_local_rank=values.virtual_local_rank,
        numa_binding=values.numa_binding,
        role=values.role,
        run_id=where.run_id,
        master_addr=where.address,
        master_port=where.port,
        local_addr=values.local_addr,
        join_timeout=values.join_timeout,
        last_call=values.last_call,
        spares=values.spares,
        node_timeout=values.node_timeout,
        token_file=values.token_file,
        no_auth=values.no_auth,
        log_dir=values.log_dir,
        redirects=values.redirects,
        tee=values.tee,
        log_line_prefix_template=values.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        or None,
        show_ranks=values.show_ranks,
        local_ranks=values.local_ranks_filter,
        duplicate_stdout_filters=values.duplicate_stdout_filters or (),
        duplicate_stderr_filters=values.duplicate_stderr_filters or (),
        event_log_handler="console" if values.event_log_handler == "console" else "null",
        color=values.color,
        quiet=values.quiet,
        timings=values.timings,
        screen=values.screen,
        page=False if values.no_page else True if values.page or values.page_at else None,
        page_at=values.page_at,
        preload=values.preload or (),
        fresh=values.fresh,
        warm=not values.no_warm,
        keep_warm=values.keep_warm,
        max_restarts=values.max_restarts,
        restarts_told="max_restarts" in given,
        restart_window=values.restart_window,
        worker_timeout=values.worker_timeout,
        stall_timeout=values.stall_timeout,
        on_hang=values.on_hang,
        signals=values.signals_to_handle,
        shutdown_timeout=_shutdown_timeout(values.shutdown_timeout, environ, verb),
        preempt_signals=values.preempt_signal,
        grace=values.grace,
        linger=values.linger,
        check_collectives=values.check_collectives,
        notes=(*where.notes, *checks.notes(values, given)),
    )


def _checkpoints(values: Any) -> dict[str, str]:
    """For `run.keep` in the script; the folder as it is seen from here."""
    told = {
        CHECKPOINTS: values.checkpoints and os.path.abspath(values.checkpoints),
        CHECKPOINT_EVERY: values.checkpoint_every,
        SNAPSHOT_EVERY: values.snapshot_every,
    }
    return {name: value for name, value in told.items() if value}


def _shutdown_timeout(told: float | None, environ: Mapping[str, str], verb: str) -> float | None:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if told is not None or name not in environ:
        return told
    return cast(float, read(SECONDS, name, environ[name], environ, verb))
