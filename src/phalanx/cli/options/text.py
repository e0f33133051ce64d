"""Renders the options for `phalanx run --help`. tools/reference.py makes docs/reference/options.md from the same
table.
"""

from __future__ import annotations

import textwrap

from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OFTEN, OPTIONS, SECTIONS, options_of

WIDTH = 100
_COLUMN = 34
_BRIEF_COLUMN = 28  # column of the descriptions in `phalanx run --help`, which fits a terminal of 80 columns
_GLUE = "\xa0"  # textwrap does not break a line here


def help_text(verb: str, *, everything: bool = False) -> str:
    """Return the text of `phalanx VERB --help`, or of `phalanx VERB --help-all`."""
    first = {
        "run": "Runs a script in several processes: one per GPU, or as many as -g says.",
        "chaos": "Runs a script as phalanx run does, and injects faults. --seed repeats a fault plan.",
        "plan": "Shows what phalanx run would do with the same arguments, and runs nothing.",
    }[verb]
    lines = [
        f"usage: phalanx {verb} [options] script [arguments of the script]",
        f"       phalanx {verb} [options] -m package.module [arguments of the module]",
        f"       phalanx {verb} [options] - [arguments]        a script from standard input",
        "",
        first,
    ]
    options = options_of(verb)
    own = [option for option in options if option.only]
    if not everything and not own:
        often = [_brief_entry(option) for option in options if option.section == OFTEN]
        return "\n".join([*lines, "", *often, "", _MORE]) + "\n"
    if not everything:
        options = (*own, *_HELP)
    for section in SECTIONS:
        entries = [line for option in options if option.section == section for line in _entry(option)]
        if entries:
            lines += ["", f"{section}:", *entries]
    return "\n".join([*lines, "", *(_RULES if everything else _more(verb))]) + "\n"


_HELP = tuple(option for option in OPTIONS if option.name in ("--help", "--help-all"))
_RULES = (
    "Accepts every torchrun option, with the same meaning except for those of the last group. Put",
    "options before the script; everything after it is passed to the script. Underscores may replace",
    "dashes (--log_dir), and unique prefixes are accepted (--log-d). torchrun options take their",
    "defaults from PET_ variables: PET_NNODES, PET_MAX_RESTARTS.",
)


_MORE = "Put options before the script. Every torchrun option works: see --help-all."


def _more(verb: str) -> tuple[str, ...]:
    return (
        "Accepts every option of phalanx run, too: phalanx run --help lists those that are used most,",
        f"phalanx {verb} --help-all lists all. Put options before the script.",
    )


def _brief_entry(option: Option) -> str:
    """Return one line about an option: as much as fits."""
    names = typed(option._replace(aliases=tuple(name for name in option.aliases if not name.startswith("--"))))
    text = option.brief or option.help.partition(". ")[0].removesuffix(".") + "."
    return f"  {names:<{_BRIEF_COLUMN - 2}}{text}{f' Default: {option.default}.' if option.default else ''}"


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
