"""`phalanx chaos`: a run whose workers are killed now and then, by a plan that can be repeated."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

from phalanx.cli import run
from phalanx.cli.gathering import look_around
from phalanx.cli.options import HelpRequested, RunOptions, parse_chaos
from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import OptionError, PhalanxError, UsageError
from phalanx.launch import runfolder
from phalanx.launch.chaos import Chaos


def main(argv: list[str]) -> int:
    environ = environment()
    try:
        options, values = parse_chaos(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    _check_behind(options.args)
    if options.hosts is not None:
        raise UsageError("phalanx chaos disturbs the workers of one node, and --hosts starts several")
    around = look_around(options, environ, runfolder.home(environ))
    if around.allocation is not None:
        raise UsageError("phalanx chaos disturbs the workers of one node", fix="srun phalanx chaos …")
    chaos = Chaos(
        seed=values.seed if values.seed is not None else secrets.randbelow(1 << 16),
        every=values.kill_every,
        kinds=values.faults,
        times=values.times,
        ranks=values.victims,
        patient=_mentions_us(options),
    )
    sys.stderr.write(f"phalanx: chaos: {', '.join(chaos.kinds)} every {chaos.every:g} s, --seed {chaos.seed}\n")
    code = 1
    try:
        code = run.begin(options, environ, around, chaos)
    except PhalanxError as error:
        code = error.exit_code
        raise
    finally:
        sys.stderr.write(f"phalanx: {chaos.summary(code)}\n")
    return code


def _check_behind(args: Sequence[str]) -> None:
    """What stands behind the script is the script's; but no script has an option of this name."""
    for word in args:
        if word.partition("=")[0] == "--kill-every":
            raise OptionError(
                "--kill-every stands behind the script, where it is an option of the script's",
                fix="phalanx chaos --kill-every 5s --seed 1 train.py …",
            )


def _mentions_us(options: RunOptions) -> bool:
    """A script that has nothing to do with phalanx never calls, and need not be waited for."""
    if options.kind == "module" or not os.path.isfile(options.script):
        return True
    with open(options.script, errors="replace") as file:
        return "phalanx" in file.read()
