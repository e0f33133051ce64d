"""`phalanx run`: parses the options, finds out how nodes join, makes the plan, and runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.cli.launch_context import LaunchContext, detect_context
from phalanx.cli.options import HelpRequested, RunOptions, parse_run
from phalanx.cli.planning import make_plan
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.interrupts import deferred
from phalanx.errors import UsageError
from phalanx.launcher.api import decline_to_join, run_plan
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunFolder

if TYPE_CHECKING:  # imports before the fork server starts would delay it
    from phalanx.launcher.agent.run_hook import RunHook


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
            workers_given=options.workers.count is not None or options.workers.slots is not None,
        )
    return begin(options, environ, context)


def begin(options: RunOptions, environ: Mapping[str, str], context: LaunchContext, hook: RunHook | None = None) -> int:
    """Start the run on this node and return its exit code. `context` says how it joins other nodes."""
    try:
        with deferred():
            plan = make_plan(options, environ, context)
    except UsageError as error:
        if context.rendezvous is not None:
            decline_to_join(context.rendezvous, str(error))
        raise
    return run_plan(plan, environ, hook=hook, findings=_findings)


def _findings(plan: Plan, folder: RunFolder) -> list[str]:
    """Return the doctor's findings about this machine, from checks that take no time. Usually empty."""
    from phalanx.doctor.preflight import preflight

    nodes = plan.rendezvous.expected if plan.rendezvous is not None else 1
    found = preflight(folder.path, nodes=nodes, ranks=len(plan.seats))
    return [
        "\n  ".join(filter(None, (finding.fact, finding.cause, finding.fix and f"fix: {finding.fix}")))
        for finding in found
    ]
