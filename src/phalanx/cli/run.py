"""`phalanx run`: plan, start the zygote, and only then import what supervises: both take their time side by side."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass

from phalanx.cli.options import HelpRequested, parse_run
from phalanx.cli.planning import make_plan
from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import LaunchError
from phalanx.launch import lessons, port, runfolder, warmth, zygotes
from phalanx.launch.lessons import Lesson
from phalanx.launch.plan import Plan
from phalanx.launch.runfolder import RunFolder, RunRecord
from phalanx.launch.zygote import kernel
from phalanx.launch.zygotes import Zygote

_TORCH = ("torch", "torch.distributed")


def main(argv: list[str]) -> int:
    environ = environment()
    try:
        options = parse_run(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    plan = make_plan(options, environ)
    base = runfolder.home(environ)
    listener = port.listen(plan.master_addr, plan.master_port)
    with listener:
        folder = _folder(plan, base)
        try:
            return _supervise(plan, folder, _start(plan, base, folder), listener)
        finally:
            folder.close()


def _folder(plan: Plan, base: str) -> RunFolder:
    try:
        return runfolder.create(plan.run_id, base=base, log_dir=plan.log_dir)
    except OSError as error:
        where = plan.log_dir or base
        raise LaunchError(
            f"the run folder cannot be made in {where}: {error.strerror}",
            fix="phalanx run --log-dir SOMEWHERE …"
            if plan.log_dir
            else "set PHALANX_HOME to a folder that can be written",
        ) from error


@dataclass(frozen=True)
class Started:
    """What is under way by the time the supervisor is imported."""

    zygote: Zygote
    lesson: Lesson | None = None
    words: tuple[str, ...] = ()  # to say, once there is a console


def _start(plan: Plan, base: str, folder: RunFolder) -> Started:
    """A warm zygote if there is one that fits, else a cold one; or fresh interpreters if asked."""
    log = os.open(f"{folder.path}/zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if plan.start.fresh:
            return Started(zygotes.fresh(plan.environ, log=log))
        found, words = _warm(plan, base)
        if found is not None:
            return Started(found, words=tuple(words))
        lesson = lessons.recall(plan.command, base)
        required = [*_TORCH, *plan.start.preload]
        zygote = zygotes.cold(plan.command, plan.environ, required=required, welcome=lesson.modules, log=log)
        return Started(zygote, lesson, tuple(words))
    finally:
        os.close(log)


def _warm(plan: Plan, base: str) -> tuple[Zygote | None, list[str]]:
    if not plan.start.warm and not plan.start.keep_warm:
        return None, []
    place = warmth.place(base, plan.command.python, plan.environ)
    found = warmth.find(place, plan.start.preload, plan.start.keep_warm)
    if isinstance(found, Zygote):
        return found, []
    words = [f"the warm zygote is not used: {found}"] if found else []
    if not plan.start.keep_warm:
        return None, words
    modules = [*warmth.MODULES, *plan.start.preload]
    warmth.start(place, plan.command.python, plan.environ, modules, plan.start.keep_warm)
    found = warmth.find(place, plan.start.preload, plan.start.keep_warm)
    if isinstance(found, Zygote):
        return found, words
    return None, [*words, f"nothing could be kept warm ({found}); see {place.log}"]


def _supervise(plan: Plan, folder: RunFolder, started: Started, listener: socket.socket) -> int:
    import asyncio

    from phalanx.contract import events
    from phalanx.launch.console import Console
    from phalanx.launch.supervisor import Supervisor

    now = time.time()
    command = plan.command.line(0)
    pid = os.getpid()
    folder.record(
        RunRecord(
            id=folder.name,
            pid=pid,
            pid_started=kernel.start_time(pid) or 0,
            command=command,
            cwd=os.getcwd(),
            folder=folder.path,
            world_size=plan.placement.world_size,
            started=now,
        )
    )
    folder.event(
        events.RunStarted(
            time=now, run=folder.name, command=tuple(command), world_size=plan.placement.world_size, pid=pid
        )
    )
    console = Console(plan.placement.world_size, prefixes=plan.showing.prefixes, colour=plan.showing.colour)
    if plan.showing.events:
        folder.echo = console.say
    code = 1
    try:
        if not plan.showing.quiet:
            for line in (_announcement(plan, folder), *plan.notes, *started.words):
                console.say(line)
        supervisor = Supervisor(
            plan, folder=folder, console=console, zygote=started.zygote, lesson=started.lesson, listener=listener
        )
        code = asyncio.run(supervisor.run())
        return code
    finally:
        folder.event(events.RunEnded(time=time.time(), code=code, seconds=round(time.time() - now, 3)))
        folder.ended(code)
        console.close()


def _announcement(plan: Plan, folder: RunFolder) -> str:
    ranks = plan.placement.world_size
    return f"{folder.name}: {ranks} rank{'s' if ranks != 1 else ''}, output in {folder.path}"
