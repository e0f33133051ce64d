"""Runs one node of a run, from its plan to the exit code.

The fork server is started first and imports torch; meanwhile this process imports the agent. A warm one has already
imported torch, and meanwhile checks for changed files. Imports here before that delay it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.contract.home import is_temporary
from phalanx.contract.interrupts import RecordedInterrupt, recorded
from phalanx.errors import LaunchError
from phalanx.forkserver import linux
from phalanx.launcher.forking import fork_servers, preload_hints, warm_pool
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.preload_hints import PreloadHints
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord

if TYPE_CHECKING:
    from phalanx.launcher.agent.run_hook import RunHook
    from phalanx.launcher.coordination.coordinator import Coordinator
    from phalanx.launcher.output.console.console import Console

Findings = Callable[[Plan, RunFolder], Sequence[str]]  # problems of this host


def run_node(
    plan: Plan,
    environ: Mapping[str, str],
    sockets: list[socket.socket],
    *,
    hook: RunHook | None = None,
    findings: Findings = lambda _plan, _folder: (),
) -> int:
    """Run the workers of this node until the run is over; return its exit code.

    sockets   on which this node listens for others, or for its store; they are closed at the end
    findings  returns lines about this host to show at the start
    """
    if plan.command.kind == "stdin":
        _keep_standard_input()
    base = run_folder.home(environ)
    with contextlib.ExitStack() as open_:
        for sock in sockets:
            open_.enter_context(sock)
        if hook is not None:
            hook.opened(sockets)
        interrupt = open_.enter_context(recorded())  # a run with a folder ends as "stopped by Ctrl-C", by its agent
        folder = _create_folder(plan, base)
        try:
            started = _start(plan, base, folder)
            return _supervise(plan, folder, started, sockets, hook=hook, findings=_stoppable(findings, interrupt))
        finally:
            folder.close()


def _stoppable(findings: Findings, interrupt: RecordedInterrupt) -> Findings:
    """Return `findings` that Ctrl-C ends: a broken driver may not answer."""

    def found(plan: Plan, folder: RunFolder) -> Sequence[str]:
        try:
            with interrupt.raised():
                return findings(plan, folder)
        except KeyboardInterrupt:
            return ()

    return found


def _keep_standard_input() -> None:
    """Read the script of `phalanx run -` once, so that each rank can read it. A memory file replaces descriptor 0."""
    kept = os.memfd_create("stdin", os.MFD_CLOEXEC)
    while part := os.read(0, 1 << 20):
        os.write(kept, part)
    os.dup2(kept, 0)
    os.close(kept)


def _create_folder(plan: Plan, base: str) -> RunFolder:
    try:
        # "none" is torchrun's name for a run without a name; a member takes the leader's name when it joins.
        follows = plan.rendezvous is not None and not plan.rendezvous.leads
        given = plan.output.name or (plan.run_id if plan.run_id != "none" else None)
        name = given if given and not follows else run_folder.make_run_id(plan.command.target)
        return run_folder.create(name, base=base, log_dir=plan.output.log_dir)
    except OSError as error:
        where = str(error.filename or plan.output.log_dir or base)
        in_log_dir = plan.output.log_dir is not None and not where.startswith(base)
        raise LaunchError(
            f"the run folder cannot be made in {where}: {error.strerror}",
            fix=f"{'--log-dir' if in_log_dir else 'set PHALANX_HOME to'} a folder that can be written",
        ) from error


@dataclass(frozen=True)
class StartedForkServer:
    """A fork server that imports while the agent is imported."""

    client: ForkServerClient
    hints: PreloadHints | None = None
    notes: tuple[str, ...] = ()  # to show when there is a console


def _start(plan: Plan, base: str, folder: RunFolder) -> StartedForkServer:
    started = _started(plan, base, folder)
    if folder.note:
        return replace(started, notes=(folder.note, *started.notes))
    if is_temporary(base):
        note = f"the home folder cannot be used: runs are kept in {base} (PHALANX_HOME sets another folder)"
        return replace(started, notes=(note, *started.notes))
    return started


def _started(plan: Plan, base: str, folder: RunFolder) -> StartedForkServer:
    """Return a warm fork server if one matches, otherwise a cold one; or fresh interpreters if requested."""
    log = folder.open_log(fork_servers.LOG)
    try:
        if plan.start.fresh:
            return StartedForkServer(fork_servers.make(plan, None, log=log))
        hints = preload_hints.load(plan.command, base, plan.environ)
        if hints.varying:
            return StartedForkServer(fork_servers.make(plan, None, log=log), notes=(_varies(plan, hints),))
        notes = [_assumes(plan, hints)] if hints.variables else []
        found, more = _warm(plan, base, hints)
        return StartedForkServer(found or fork_servers.make(plan, hints, log=log), hints, (*notes, *more))
    finally:
        os.close(log)


def _assumes(plan: Plan, hints: PreloadHints) -> str:
    values = ", ".join(name if value is None else f"{name}={value}" for name, value in hints.variables.items())
    return f"{os.path.basename(plan.command.target)} sets {values} before it imports torch: imported with that"


def _varies(plan: Plan, hints: PreloadHints) -> str:
    script, names = os.path.basename(plan.command.target), ", ".join(hints.varying)
    return f"{script} sets {names} before it imports torch, to several values: one interpreter per rank (as --fresh)"


def _warm(plan: Plan, base: str, hints: PreloadHints) -> tuple[ForkServerClient | None, list[str]]:
    if not plan.start.warm and not plan.start.keep_warm:
        return None, []
    environ = hints.applied(plan.environ)
    place = warm_pool.place(base, plan.command.python, environ)
    found = warm_pool.find(place, plan.start.preload, plan.start.keep_warm, meanwhile=_import_agent)
    if isinstance(found, ForkServerClient):
        return found, []
    notes = [f"the warm fork server is not used: {found}"] if found else []
    if not plan.start.keep_warm:
        return None, notes
    modules = [*warm_pool.MODULES, *plan.start.preload]
    warm_pool.start(place, plan.command.python, environ, modules, plan.start.keep_warm)
    found = warm_pool.find(place, plan.start.preload, plan.start.keep_warm, meanwhile=_import_agent)
    if isinstance(found, ForkServerClient):
        return found, notes
    return None, [*notes, f"nothing could be kept warm ({found}); see {place.log}"]


def _import_agent() -> None:
    """Import what the run needs next, while a warm fork server prepares."""
    import phalanx.launcher.agent.agent  # noqa: F401


def _supervise(
    plan: Plan,
    folder: RunFolder,
    started: StartedForkServer,
    sockets: list[socket.socket],
    *,
    hook: RunHook | None,
    findings: Findings,
) -> int:
    from phalanx.contract import events
    from phalanx.launcher.output.console.console import Console

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
            world_size=plan.group.world_size,
            started=now,
            host=os.uname().nodename,
            name=folder.given,
        )
    )
    folder.event(
        events.RunStarted(time=now, run=folder.name, command=tuple(command), world_size=plan.group.world_size, pid=pid)
    )
    for text in plan.remarks.warnings:
        folder.event(events.NoteEvent(time=now, text=text))
    # With several nodes no rank is alone, however many this one has.
    world = plan.group.world_size if plan.rendezvous is None else 2
    console = Console(world, prefixes=_prefixes(plan), colour=plan.output.use_color(plan.environ))
    if plan.output.print_events:
        folder.echo = console.say
    folder.tell = console.say
    code = 1
    try:
        if not plan.output.quiet:
            notes = (*plan.remarks.notes, *plan.remarks.warnings, *started.notes, *findings(plan, folder))
            for line in (*_announcement(plan, folder, sockets), *notes):
                console.say(line)
        import asyncio

        code = asyncio.run(_supervised(plan, folder, console, started, sockets, hook=hook))
    finally:
        folder.event(
            events.RunEnded(
                time=time.time(), code=code, seconds=round(time.time() - now, 3), preempted=folder.is_preempted(code)
            )
        )
        folder.ended(code)
        console.close()
    return code


async def _supervised(
    plan: Plan,
    folder: RunFolder,
    console: Console,
    started: StartedForkServer,
    sockets: list[socket.socket],
    *,
    hook: RunHook | None,
) -> int:
    from phalanx.launcher.agent.agent import NodeAgent

    coordinator = _coordinator(plan, folder, console, sockets)
    agent = NodeAgent(
        plan,
        folder=folder,
        console=console,
        fork_server=started.client,
        preload_hints=started.hints,
        coordinator=coordinator,
        hook=hook,
    )
    return await agent.run()


def _coordinator(plan: Plan, folder: RunFolder, console: Console, sockets: list[socket.socket]) -> Coordinator:
    if plan.rendezvous is None:
        from phalanx.launcher.coordination.single_node import SingleNodeCoordinator

        return SingleNodeCoordinator(
            replace(plan, group=replace(plan.group, master_port=sockets[0].getsockname()[1])), folder, sockets[0]
        )
    from phalanx.launcher.coordination.context import NodeContext

    context = NodeContext(plan, plan.rendezvous, folder, console, sockets)
    if plan.rendezvous.leads:
        from phalanx.launcher.coordination.leader.coordinator import LeaderCoordinator

        return LeaderCoordinator(context)
    if plan.rendezvous.elastic:
        from phalanx.launcher.coordination.follower.failover import FailoverCoordinator

        return FailoverCoordinator(context)
    from phalanx.launcher.coordination.follower.coordinator import FollowerCoordinator

    return FollowerCoordinator(context)


def _prefixes(plan: Plan) -> dict[int, str]:
    prefixes = {seat.rank: plan.line_prefix(seat, os.uname().nodename) for seat in plan.seats}
    return {rank: text for rank, text in prefixes.items() if text is not None}


def _announcement(plan: Plan, folder: RunFolder, sockets: list[socket.socket]) -> list[str]:
    rendezvous = plan.rendezvous
    if rendezvous is None:
        ranks = plan.group.world_size
        return [f"{folder.name}: {ranks} rank{'s' if ranks != 1 else ''}, output in {folder.path}"]
    if not rendezvous.leads:
        return []
    from phalanx.control.endpoint import Endpoint

    where = ", ".join(str(Endpoint(*sock.getsockname()[:2])) for sock in sockets)
    lines = [f"{folder.name}: {rendezvous.expected} {rendezvous.noun}s, meeting at {where}, output in {folder.path}"]
    if not rendezvous.token.key:
        lines.append("--no-auth: there is no token, so anyone who reaches the port can join")
    return lines
