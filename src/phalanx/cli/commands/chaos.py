"""`phalanx chaos`: a run whose workers are killed now and then, by a plan that can be repeated."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from phalanx.cli.commands import run
from phalanx.cli.options import HelpRequested, RunOptions, parse_chaos
from phalanx.cli.surroundings import look_around
from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import OptionError, PhalanxError, UsageError
from phalanx.launch.chaos import Chaos
from phalanx.launch.runs import run_folder

_OURS = "--kill-every"


def main(argv: list[str]) -> int:
    environ = environment()
    try:
        options, values = _parse(argv, environ)
    except HelpRequested as help_:
        sys.stdout.write(str(help_))
        return 0
    if options.hosts is not None:
        raise UsageError("phalanx chaos disturbs the workers of one node, and --hosts starts several")
    around = look_around(options, environ, run_folder.home(environ))
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


def _parse(argv: list[str], environ: Mapping[str, str]) -> tuple[RunOptions, Any]:
    """What stands behind the script is the script's; but no script has a --kill-every: it and what follows is ours."""
    options, values = parse_chaos(argv, environ)
    behind = [word for word in options.args if word.partition("=")[0] == _OURS]
    if not behind:
        return options, values
    place = len(argv) - argv[::-1].index(behind[-1]) - 1
    moved = parse_chaos([*argv[place:], *argv[:place]], environ)
    if moved[0].script != options.script:
        raise OptionError(
            f"{_OURS} stands behind the script, and what follows it is not all ours",
            details=[f"seen: {' '.join(argv[place:])}"],
            fix=f"phalanx chaos {_OURS} 5s --seed 1 {options.script} …",
        )
    return moved


def _mentions_us(options: RunOptions) -> bool:
    """A script that has nothing to do with phalanx never calls, and need not be waited for."""
    if options.kind == "module" or not os.path.isfile(options.script):
        return True
    with open(options.script, errors="replace") as file:
        return "phalanx" in file.read()
