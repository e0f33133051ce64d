"""`phalanx chaos`: runs a script and injects faults, with a plan that a seed makes repeatable."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from phalanx.cli.commands.run import run
from phalanx.cli.launch_context import detect_context
from phalanx.cli.options import HelpRequested, RunOptions, parse_chaos
from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import OptionError, PhalanxError, UsageError
from phalanx.launcher.chaos import Chaos
from phalanx.launcher.runs import run_folder

_OURS = "--kill-every"


def main(argv: list[str]) -> int:
    """Run `phalanx chaos`. Return the exit code of the run."""
    environ = environment()
    try:
        options, values = _parse(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    if options.nodes.hosts is not None:
        raise UsageError("phalanx chaos injects faults on one node, and --hosts starts several")
    context = detect_context(options, environ, run_folder.home(environ))
    if context.allocation is not None:
        raise UsageError("phalanx chaos injects faults on one node", fix="srun phalanx chaos …")
    chaos = Chaos(
        seed=values.seed if values.seed is not None else secrets.randbelow(1 << 16),
        every=values.kill_every,
        kinds=values.faults,
        times=values.times,
        ranks=values.victims,
        patient=_uses_phalanx(options),
    )
    sys.stderr.write(f"phalanx: chaos: {', '.join(chaos.kinds)} every {chaos.every:g} s, --seed {chaos.seed}\n")
    code = 1
    try:
        code = run.begin(options, environ, context, chaos)
    except PhalanxError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        sys.stderr.write(f"phalanx: {chaos.summary(code)}\n")
    return code


def _parse(argv: list[str], environ: Mapping[str, str]) -> tuple[RunOptions, Any]:
    """Parse the command line. `--kill-every` and the options after it are also accepted after the script."""
    options, values = parse_chaos(argv, environ)
    after = [word for word in options.script.args if word.partition("=")[0] == _OURS]
    if not after:
        return options, values
    place = len(argv) - argv[::-1].index(after[-1]) - 1
    moved = parse_chaos([*argv[place:], *argv[:place]], environ)
    if moved[0].script.target != options.script.target:
        raise OptionError(
            f"{_OURS} is after the script, and is followed by arguments that are not options of phalanx",
            details=[f"found: {' '.join(argv[place:])}"],
            fix=f"phalanx chaos {_OURS} 5s --seed 1 {options.script.target} …",
        )
    return moved


def _uses_phalanx(options: RunOptions) -> bool:
    """Return whether the script may use phalanx. Faults wait until such a script has started training."""
    if options.script.kind == "module" or not os.path.isfile(options.script.target):
        return True
    with open(options.script.target, errors="replace") as file:
        return "phalanx" in file.read()
