"""Renders the options for `phalanx run --help`. docs/reference/options.md has the same: tools/reference.py."""

from __future__ import annotations

import textwrap

from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OFTEN, OPTIONS, SECTIONS, options_of

WIDTH = 100
_COLUMN = 34
_GLUE = "\xa0"  # textwrap does not break here


def help_text(verb: str, *, everything: bool = False) -> str:
    """Return the text of `phalanx VERB --help`, or of `phalanx VERB --help-all`."""
    first = {
        "run": "Runs a script in several processes: one per GPU of this machine, or as many as -g says.",
        "chaos": "Runs a script as phalanx run does, and injects faults. --seed repeats a fault plan.",
        "plan": "Shows what phalanx run would do with the same arguments, and runs nothing.",
    }[verb]
    lines = [
        f"usage: phalanx {verb} [options] script [arguments of the script]",
        f"       phalanx {verb} [options] -m package.module [arguments of the module]",
        f"       phalanx {verb} [options] - [arguments]        a script from standard input, for every rank",
        "",
        first,
    ]
    options = options_of(verb)
    if not everything:
        own = [option for option in options if option.only]
        options = (*own, *_HELP) if own else tuple(option for option in options if option.section == OFTEN)
    for section in SECTIONS:
        entries = [line for option in options if option.section == section for line in _entry(option)]
        if entries:
            lines += ["", f"{section}:", *entries]
    return "\n".join([*lines, "", *(_RULES if everything else _more(verb))]) + "\n"


_HELP = tuple(option for option in OPTIONS if option.name in ("--help", "--help-all"))
_RULES = (
    "Accepts every torchrun option, with the same meaning. Put options before the script; everything",
    "after it is passed to the script. Underscores may replace dashes (--log_dir), and unique prefixes",
    "are accepted (--log-d). torchrun options take their defaults from PET_ variables: PET_NNODES,",
    "PET_MAX_RESTARTS.",
)


def _more(verb: str) -> tuple[str, ...]:
    if verb == "run":
        return ("Put options before the script. Every torchrun option works: phalanx run --help-all lists them.",)
    return (
        "Accepts every option of phalanx run, too: phalanx run --help lists those that are used most,",
        f"phalanx {verb} --help-all lists all. Put options before the script.",
    )


def _entry(option: Option) -> list[str]:
    names = typed(option)
    text = option.help + (f" (default:{_GLUE}{option.default})" if option.default else "")
    described = [line.replace(_GLUE, " ") for line in textwrap.wrap(text, WIDTH - _COLUMN)]
    if len(names) > _COLUMN - 3:
        return [f"  {names}", *(" " * _COLUMN + line for line in described)]
    return [f"  {names:<{_COLUMN - 2}}{described[0]}", *(" " * _COLUMN + line for line in described[1:])]


def typed(option: Option) -> str:
    """Return the names of an option and its value, as help and documentation show them."""
    names = ", ".join(option.shown)
    if option.kind:
        return f"{names} {option.kind.metavar}"
    return names + (f"[={'|'.join(option.attached)}]" if option.attached else "")
