"""`phalanx run`: plan, start the fork server, then import the agent: both take their time side by side."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.cli.launch_context import LaunchContext, detect_context
from phalanx.cli.options import HelpRequested, RunOptions, parse_run
from phalanx.cli.planning import make_plan
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.home import is_temporary
from phalanx.errors import LaunchError, UsageError
from phalanx.forkserver import linux
from phalanx.launcher.coordination import port
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.forking import fork_servers, preload_hints, warm_pool
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord

if TYPE_CHECKING:  # whatever is imported before the fork server is started delays it
    from phalanx.launcher.agent.agent import RunHook
    from phalanx.launcher.coordination.coordinator import Coordinator
    from phalanx.launcher.output.console import Console


def main(argv: list[str]) -> int:
    """Run `phalanx run`. Return the exit code of the run."""
    environ = environment()
    try:
        options = parse_run(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    if options.nodes.hosts is not None:
        from phalanx.cli import hosts

        return hosts.start(options, options.nodes.hosts, environ, begin)
    context = detect_context(options, environ, run_folder.home(environ))
    if context.allocation is not None:
        from phalanx.launcher.remote.srun import hand_over

        hand_over(
            context.allocation,
            argv,
            environ,
            workers_told=options.workers.count is not None or options.workers.slots is not None,
        )
    return begin(options, environ, context)


def begin(
    options: RunOptions, environ: Mapping[str, str], context: LaunchContext, outside: RunHook | None = None
) -> int:
    """Start the run on this node and return its exit code. `context` says how it joins other nodes."""
    gathering = context.rendezvous
    if gathering is None:
        plan = make_plan(options, environ, context)
        return _run(plan, environ, [port.listen(plan.master_addr, plan.master_port)], outside)
    try:
        plan = make_plan(options, environ, context)
    except UsageError as error:
        _excuse(gathering, str(error))
        raise
    from phalanx.launcher.coordination.hosting import open_failover_sockets, open_leader_sockets

    leads, sockets = open_leader_sockets(gathering)
    if gathering.elastic and not leads:
        sockets = open_failover_sockets(gathering)
    return _run(replace(plan, rendezvous=replace(gathering, leads=leads)), environ, sockets, outside)


def _excuse(gathering: RendezvousConfig, why: str) -> None:
    """Whoever waits at node 0 hears why this node does not come."""
    if gathering.leads is not False:
        return
    import asyncio

    from phalanx.launcher.coordination.follower import excuse

    asyncio.run(excuse(gathering, why))


def _run(plan: Plan, environ: Mapping[str, str], sockets: list[socket.socket], outside: RunHook | None) -> int:
    if plan.command.kind == "stdin":
        _keep_standard_input()
    base = run_folder.home(environ)
    with contextlib.ExitStack() as open_:
        for sock in sockets:
            open_.enter_context(sock)
        if outside is not None:
            outside.opened(sockets)
        folder = _folder(plan, base)
        try:
            return _supervise(plan, folder, _start(plan, base, folder), sockets, outside)
        finally:
            folder.close()


def _keep_standard_input() -> None:
    """`phalanx run -`: read the script once, so that each rank can read it. Memory takes the place of descriptor 0."""
    kept = os.memfd_create("stdin", os.MFD_CLOEXEC)
    while part := os.read(0, 1 << 20):
        os.write(kept, part)
    os.dup2(kept, 0)
    os.close(kept)


def _folder(plan: Plan, base: str) -> RunFolder:
    try:
        # "none" is what torchrun calls a run that nobody has named; a member takes the leader's name when it joins.
        follows = plan.rendezvous is not None and not plan.rendezvous.leads
        name = run_folder.make_run_id(plan.command.target) if follows or plan.run_id == "none" else plan.run_id
        return run_folder.create(name, base=base, log_dir=plan.output.log_dir)
    except OSError as error:
        where = str(error.filename or plan.output.log_dir or base)
        in_log_dir = plan.output.log_dir is not None and not where.startswith(base)
        raise LaunchError(
            f"the run folder cannot be made in {where}: {error.strerror}",
            fix=f"{'--log-dir' if in_log_dir else 'set PHALANX_HOME to'} a folder that can be written",
        ) from error


@dataclass(frozen=True)
class Started:
    """What is under way by the time the agent is imported."""

    fork_server: ForkServerClient
    lesson: PreloadHints | None = None
    words: tuple[str, ...] = ()  # to say, once there is a console


def _start(plan: Plan, base: str, folder: RunFolder) -> Started:
    started = _started(plan, base, folder)
    if is_temporary(base):
        word = f"the home folder cannot be written: runs are kept in {base} (PHALANX_HOME sets another folder)"
        return replace(started, words=(word, *started.words))
    return started


def _started(plan: Plan, base: str, folder: RunFolder) -> Started:
    """A warm fork server if there is one that fits, else a cold one; or fresh interpreters if asked."""
    log = os.open(f"{folder.path}/forkserver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if plan.start.fresh:
            return Started(fork_servers.make(plan, None, log=log))
        lesson = preload_hints.load(plan.command, base, plan.environ)
        if lesson.varying:
            return Started(fork_servers.make(plan, None, log=log), words=(_varies(plan, lesson),))
        words = [_assumes(plan, lesson)] if lesson.variables else []
        found, more = _warm(plan, base, lesson)
        return Started(found or fork_servers.make(plan, lesson, log=log), lesson, (*words, *more))
    finally:
        os.close(log)


def _assumes(plan: Plan, lesson: PreloadHints) -> str:
    values = ", ".join(name if value is None else f"{name}={value}" for name, value in lesson.variables.items())
    return f"{os.path.basename(plan.command.target)} sets {values} before it imports torch: imported with that"


def _varies(plan: Plan, lesson: PreloadHints) -> str:
    script, names = os.path.basename(plan.command.target), ", ".join(lesson.varying)
    return f"{script} sets {names} before it imports torch, to several values: one interpreter per rank (as --fresh)"


def _warm(plan: Plan, base: str, lesson: PreloadHints) -> tuple[ForkServerClient | None, list[str]]:
    if not plan.start.warm and not plan.start.keep_warm:
        return None, []
    environ = lesson.applied(plan.environ)
    place = warm_pool.place(base, plan.command.python, environ)
    found = warm_pool.find(place, plan.start.preload, plan.start.keep_warm)
    if isinstance(found, ForkServerClient):
        return found, []
    words = [f"the warm fork server is not used: {found}"] if found else []
    if not plan.start.keep_warm:
        return None, words
    modules = [*warm_pool.MODULES, *plan.start.preload]
    warm_pool.start(place, plan.command.python, environ, modules, plan.start.keep_warm)
    found = warm_pool.find(place, plan.start.preload, plan.start.keep_warm)
    if isinstance(found, ForkServerClient):
        return found, words
    return None, [*words, f"nothing could be kept warm ({found}); see {place.log}"]


def _supervise(
    plan: Plan, folder: RunFolder, started: Started, sockets: list[socket.socket], outside: RunHook | None
) -> int:
    from phalanx.contract import events
    from phalanx.launcher.output.console import Console

    now = time.time()
    command = plan.command.line(0)
    pid = os.getpid()
    folder.record(
        RunRecord(
            id=folder.name,
            pid=pid,
            pid_started=linux.start_time(pid) or 0,
            command=command,
            cwd=os.getcwd(),
            folder=folder.path,
            world_size=plan.placement.world_size,
            started=now,
            host=os.uname().nodename,
        )
    )
    folder.event(
        events.RunStarted(
            time=now, run=folder.name, command=tuple(command), world_size=plan.placement.world_size, pid=pid
        )
    )
    # Among several nodes no rank is alone, however many this one has.
    world = plan.placement.world_size if plan.rendezvous is None else 2
    console = Console(world, prefixes=_prefixes(plan), colour=plan.output.use_color)
    if plan.output.print_events:
        folder.echo = console.say
    code = 1
    try:
        if not plan.output.quiet:
            for line in (*_announcement(plan, folder, sockets), *plan.notes, *started.words, *_findings(plan, folder)):
                console.say(line)
        import asyncio

        code = asyncio.run(_supervised(plan, folder, console, started, sockets, outside=outside))
        return code
    finally:
        folder.event(events.RunEnded(time=time.time(), code=code, seconds=round(time.time() - now, 3)))
        folder.ended(code)
        console.close()


def _findings(plan: Plan, folder: RunFolder) -> list[str]:
    """What the doctor would say about this machine, as far as that costs nothing: mostly nothing at all."""
    from phalanx.doctor.preflight import preflight

    nodes = plan.rendezvous.expected if plan.rendezvous is not None else 1
    found = preflight(folder.path, nodes=nodes, ranks=len(plan.seats))
    return [
        "\n  ".join(filter(None, (finding.fact, finding.cause, finding.fix and f"fix: {finding.fix}")))
        for finding in found
    ]


async def _supervised(
    plan: Plan,
    folder: RunFolder,
    console: Console,
    started: Started,
    sockets: list[socket.socket],
    *,
    outside: RunHook | None,
) -> int:
    from phalanx.launcher.agent.agent import NodeAgent

    coordinator = _coordinator(plan, folder, console, sockets)
    agent = NodeAgent(
        plan,
        folder=folder,
        console=console,
        fork_server=started.fork_server,
        preload_hints=started.lesson,
        coordinator=coordinator,
        hook=outside,
    )
    return await agent.run()


def _coordinator(plan: Plan, folder: RunFolder, console: Console, sockets: list[socket.socket]) -> Coordinator:
    if plan.rendezvous is None:
        from phalanx.launcher.coordination.coordinator import SingleNodeCoordinator

        return SingleNodeCoordinator(replace(plan, master_port=sockets[0].getsockname()[1]), folder, sockets[0])
    if plan.rendezvous.leads:
        from phalanx.launcher.coordination.leader import LeaderCoordinator

        return LeaderCoordinator(plan, plan.rendezvous, folder, console, sockets)
    if plan.rendezvous.elastic:
        from phalanx.launcher.coordination.failover import FailoverCoordinator

        return FailoverCoordinator(plan, plan.rendezvous, folder, console, sockets)
    from phalanx.launcher.coordination.follower import FollowerCoordinator

    return FollowerCoordinator(plan, plan.rendezvous, folder, console)


def _prefixes(plan: Plan) -> dict[int, str]:
    prefixes = {seat.rank: plan.line_prefix(seat, os.uname().nodename) for seat in plan.seats}
    return {rank: text for rank, text in prefixes.items() if text is not None}


def _announcement(plan: Plan, folder: RunFolder, sockets: list[socket.socket]) -> list[str]:
    gathering = plan.rendezvous
    if gathering is None:
        ranks = plan.placement.world_size
        return [f"{folder.name}: {ranks} rank{'s' if ranks != 1 else ''}, output in {folder.path}"]
    if not gathering.leads:
        return []
    from phalanx.control.member import Endpoint

    where = ", ".join(str(Endpoint(*sock.getsockname()[:2])) for sock in sockets)
    lines = [f"{folder.name}: {gathering.expected} {gathering.noun}s, meeting at {where}, output in {folder.path}"]
    if not gathering.token.key:
        lines.append("--no-auth: there is no token, so whoever reaches the port gets in")
    return lines
