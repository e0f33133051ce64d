"""The API to start a run, used from Python and by the command line.

    job = phalanx.launch("train.py", ["--lr", "0.1"], workers=4)
    job.wait()                      # its exit code
    print(job.logs(rank=2))

    job = phalanx.launch(train, [0.1], workers=4)
    losses = job.result()           # what the function returned on each rank

`launch` starts `phalanx run` as a separate process. That command creates a plan and passes it to `run_plan`, as do
`phalanx chaos` and `phalanx node`: every run is a call of `run_plan` on each of its nodes.

`phalanx run` imports this module before it starts the fork server. Imports here delay that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError
from phalanx.launcher.coordination import port
from phalanx.launcher.node_run import Findings, run_node
from phalanx.launcher.plan import Plan

if TYPE_CHECKING:
    from phalanx.launcher.agent.run_hook import RunHook
    from phalanx.launcher.job import Job
    from phalanx.launcher.rendezvous_config import RendezvousConfig


def launch(
    target: str | os.PathLike[str] | Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int | str | None = None,
    nodes: int | str | None = None,
    cpu: bool = False,
    max_restarts: int | None = None,
    name: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Job:
    """`phalanx.launch("train.py", ["--lr", "0.1"], workers=4)`: start a run, and return at once.

    - `target`: Path of a script, or a function that is called as target(*args) on every rank.
    - `args`: Arguments of the script (strings) or of the function (anything that can be pickled).
    - `workers`: Workers per node (`-g`). Default: one per GPU, else one.
    - `nodes`: Number of nodes (`-n`). Default: 1.
    - `cpu`: Use CPU workers even if GPUs are available.
    - `max_restarts`: Maximum number of recoveries. Default: as for `phalanx run`.
    - `name`: Name of the run (`--name`). Default: script or function, date and time.
    - `hyperparameters`: To record with the run (`--param`). Default: those in the arguments of the script, or the
      arguments of the function that are numbers, truth values or texts.
    - `options`: Any other options of `phalanx run`, such as ["--stall-timeout", "2m"].
    - `env`: Variables to set for the run, in addition to those of this process.
    - `cwd`: Working directory of the workers. Default: that of this process.
    - `show`: Show the output of the run on the standard output and error of this process.
    """
    from phalanx.contract.messages.function_call import check_caller
    from phalanx.launcher.function_call import simple_arguments
    from phalanx.launcher.job import Job, start_call
    from phalanx.launcher.runs.run_folder import make_run_id

    check_caller("launch")
    _check_types(target, args, options)
    if hyperparameters is None and callable(target):
        hyperparameters = simple_arguments(target, args)
    if name is None and callable(target):
        name = make_run_id(getattr(target, "__name__", "").strip("<>"))
    line = [*_flags(workers, nodes, max_restarts, cpu=cpu), *_named(name, hyperparameters or {}), *options]
    environ = {**environment(), **(env or {})}
    if not callable(target):
        return Job([*line, os.fspath(target), *_texts(os.fspath(target), args)], env=environ, cwd=cwd, show=show)
    if "torch" in sys.modules and "--preload" not in options:
        line += ["--preload", "torch"]
    return start_call(target, args, line, env=environ, cwd=cwd, show=show)


def _check_types(target: object, args: object, options: object) -> None:
    """Raise unless the target can be started, and arguments and options are lists of words, not one text."""
    if not callable(target) and (isinstance(target, bytes) or not isinstance(target, str | os.PathLike)):
        raise UsageError(
            f"launch() was given {target!r}, expected the path of a script or a function",
            fix='phalanx.launch("train.py", workers=4), or phalanx.launch(train, [0.1], workers=4)',
        )
    given = getattr(target, "__name__", "train") if callable(target) else f'"{target}"'
    for name, value, fix in (
        ("args", args, f"phalanx.launch({given}, {[args] if callable(target) else str(args).split()!r})"),
        ("options", options, f"phalanx.launch({given}, options={str(options).split()!r})"),
    ):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise UsageError(f"{name} is {value!r}, expected a list", fix=fix)


def _texts(script: str, args: Sequence[Any]) -> Sequence[str]:
    wrong = next((one for one in args if not isinstance(one, str)), None)
    if wrong is not None:
        raise UsageError(
            f"an argument of {script} is a {type(wrong).__name__}, expected text",
            fix=f"phalanx.launch({script!r}, [str(…), …])",
        )
    return args


def _flags(workers: int | str | None, nodes: int | str | None, max_restarts: int | None, *, cpu: bool) -> list[str]:
    given = {"-g": workers, "-n": nodes, "--max-restarts": max_restarts}
    found = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*found, "--cpu"] if cpu else found


def _named(name: str | None, given: Mapping[str, Any]) -> list[str]:
    from phalanx.contract.hyperparameters import as_text, recordable

    flags = ["--name", name] if name is not None else []
    for one, value in recordable(given).items():
        flags += ["--param", f"{one}={as_text(value)}"]
    return flags


def run_plan(
    plan: Plan,
    environ: Mapping[str, str],
    *,
    hook: RunHook | None = None,
    findings: Findings = lambda _plan, _folder: (),
) -> int:
    """Run the part of a plan that is for this node, in this process, until the run is over. Return its exit code.

    plan      What to run: see `phalanx.cli.planning.make_plan`. A plan with a rendezvous joins other nodes.
    environ   Environment of this process: where runs are stored.
    hook      Called at the start, at the end and on signals: `phalanx chaos`, ssh.
    findings  Returns lines about this host to show at the start.
    """
    rendezvous = plan.rendezvous
    if rendezvous is None:
        sockets = [port.listen(plan.group.master_addr, plan.group.master_port)]
        return run_node(plan, environ, sockets, hook=hook, findings=findings)
    from phalanx.launcher.coordination.hosting import open_failover_sockets, open_leader_sockets

    leads, sockets = open_leader_sockets(rendezvous)
    if rendezvous.elastic and not leads:
        sockets = open_failover_sockets(rendezvous)
    plan = replace(plan, rendezvous=replace(rendezvous, leads=leads))
    return run_node(plan, environ, sockets, hook=hook, findings=findings)


def decline_to_join(rendezvous: RendezvousConfig, why: str) -> None:
    """Tell the leader that this node has no plan and does not join, and why. Do nothing if this node may lead."""
    if rendezvous.leads is not False:
        return
    import asyncio

    from phalanx.launcher.coordination.follower.leader_link import decline

    asyncio.run(decline(rendezvous, why))
