"""The entry point of `phalanx`: finds the verb, imports only its module, and prints errors."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import importlib
import io
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

from phalanx.contract.interrupts import deferred
from phalanx.contract.visible import visible
from phalanx.errors import PhalanxError, UsageError
from phalanx.forkserver import log

# Verbs by purpose, each with its description. `command(verb)` returns its module, which is in a package per group.
GROUPS = {
    "Run": {
        "run": "start a script on every device of this machine, or of several",
        "plan": "show what `run` would do: ranks, devices, cores, environment",
        "chaos": "run a script and inject faults: does it recover?",
        "warm": "keep torch imported for the next run",
    },
    "Debug": {
        "why": "show which rank hangs or failed, at which line and why",
        "attach": "open a debugger in one rank of a run",
        "lint": "check a script for code that hangs or gives wrong results",
        "doctor": "check this machine, or several and the network between them",
    },
    "Observe": {
        "watch": "show a run, live or ended, in this terminal or in a browser",
        "logs": "print what the ranks of a run have written; -f follows it",
        "ui": "show all runs in a browser: filter, compare, delete",
        "report": "write an HTML report of a run",
        "compare": "compare loss and throughput of runs",
    },
    "Manage": {
        "ps": "list runs",
        "stop": "end a run",
    },
    "Learn": {
        "demo": "show a training and a failure, in a few seconds",
        "tour": "show every collective on real ranks",
        "bench": "benchmark phalanx against other launchers",
    },
}
VERBS = {verb: description for verbs in GROUPS.values() for verb, description in verbs.items()}

HIDDEN = ("node",)  # started by `run --hosts`, not by users

# Verbs of other programs -> verbs of phalanx.
_OTHER_NAMES = {
    "launch": "run",
    "train": "run",
    "start": "run",
    "exec": "run",
    "explain": "plan",
    "debug": "attach",
    "ls": "ps",
    "list": "ps",
    "status": "ps",
    "dashboard": "ui",
    "web": "ui",
    "top": "watch",
    "show": "watch",
    "tail": "logs",
    "log": "logs",
    "cat": "logs",
    "kill": "stop",
    "cancel": "stop",
    "check": "doctor",
    "test": "doctor",
    "benchmark": "bench",
}


def command(verb: str) -> ModuleType:
    """Return the module of a verb, which has `main(argv) -> exit code`: `command("ps").main([])`."""
    group = next((title for title, verbs in GROUPS.items() if verb in verbs), "Run")  # hidden verbs belong to runs
    return importlib.import_module(f"phalanx.cli.commands.{group.lower()}.{verb}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit code. `argv` defaults to the command line of this process."""
    if argv is not None:
        return _main(list(argv))
    code = _main(sys.argv[1:])
    if sys.argv[1:2] == ["run"]:
        _exit(code)
    return code


def _exit(code: int) -> None:
    """Exit without tearing down the interpreter, which would take as long as everything else after the last rank.

    Return if a thread is still running or a stream cannot be flushed. Python then exits as usual.
    """
    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code & 0xFF)


def _main(args: list[str]) -> int:
    _fill_standard_descriptors()
    _print_anything()
    try:
        wrong = log.configure()
        if wrong is not None:
            raise UsageError(wrong, fix="PHALANX_LOG=debug phalanx …")
        return _dispatch(args)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {visible(str(error))}\n")
        _write_report(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader is gone (`| head`). The interpreter must not report that when it flushes.
        sys.stdout = None
        return 141
    except KeyboardInterrupt:
        if args[:1] in (["run"], ["chaos"]):  # before there is a run, whose agent reports it
            sys.stderr.write("phalanx: stopped by Ctrl-C\n")
        return 130


def _write_report(error: PhalanxError) -> None:
    from phalanx.cluster.sources.surroundings import environment
    from phalanx.contract import error_report

    error_report.write(error, environment())


def _fill_standard_descriptors() -> None:
    """Open /dev/null for closed descriptors (`<&-`). Otherwise a rank could read a socket as its stdin."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _print_anything() -> None:
    """Print file names as their bytes, and escape characters that the encoding lacks (LC_ALL=C)."""
    codecs.register_error("phalanx", _bytes_or_escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="phalanx")


def _bytes_or_escape(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _dispatch(args: list[str]) -> int:
    if args[:1] == ["help"] and len(args) > 1:
        args = [*args[1:], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0 if args else 2
    if args[0] in ("-V", "--version", "version"):
        from phalanx.version import __version__

        sys.stdout.write(f"phalanx {__version__}\n")
        return 0
    verb, rest = args[0], args[1:]
    if verb not in VERBS and verb not in HIDDEN:
        raise _unknown(verb, rest)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder has been removed", fix="cd to one that exists") from None
    with deferred():
        module = command(verb)
    code: int = module.main(rest)
    return code


def _unknown(verb: str, rest: list[str]) -> UsageError:
    import difflib
    import shlex

    if verb.startswith("-") or verb.endswith(".py") or os.path.exists(verb):
        return UsageError(f"{verb} is not a verb", fix=shlex.join(["phalanx", "run", verb, *rest]))
    meant = _OTHER_NAMES.get(verb) or next(iter(difflib.get_close_matches(verb, VERBS, n=1)), "")
    return UsageError(
        f"{verb} is not a verb of phalanx" + (f"; did you mean {meant}: {VERBS[meant]}?" if meant else ""),
        details=[] if meant else [f"verbs: {', '.join(VERBS)}"],
        fix=shlex.join(["phalanx", meant, *rest]) if meant else "phalanx --help",
    )


def _help() -> str:
    """Return the help of `phalanx`, which fits a terminal of 80 columns and 24 rows."""
    columns = [max(map(len, names)) + 2 for names in (GROUPS, VERBS)]
    lines = [
        f"{title if not number else '':<{columns[0]}}{verb:<{columns[1]}}{what}\n"
        for title, verbs in GROUPS.items()
        for number, (verb, what) in enumerate(verbs.items())
    ]
    return (
        "phalanx: distributed PyTorch training that starts, survives and explains itself\n"
        "  phalanx run -g 4 train.py         4 ranks; without -g: one per GPU\n"
        "  phalanx run --hosts a:8,b:2 …     over ssh; in Slurm: srun phalanx run …\n\n"
        f"{''.join(lines)}\n"
        "`phalanx help VERB` shows its options. `phalanx run` takes those of torchrun.\n"
    )
