"""The options as text: `phalanx run --help`, and docs/options.md.

python -m phalanx.cli.options.text > docs/options.md
"""

from __future__ import annotations

import textwrap

from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OPTIONS, SECTIONS, options_of

WIDTH = 100
_COLUMN = 34
_GLUE = "\xa0"  # textwrap does not break here


def help_text(verb: str) -> str:
    options = options_of(verb)
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
        "Accepts every torchrun option, with the same meaning.",
    ]
    for section in SECTIONS:
        lines += ["", f"{section}:"]
        for option in options:
            if option.section == section:
                lines += _entry(option)
    lines += [
        "",
        "Put options before the script; everything after it is passed to the script. Underscores may replace",
        "dashes (--log_dir), and unique prefixes are accepted (--log-d). torchrun options take their defaults",
        "from PET_ variables: PET_NNODES, PET_MAX_RESTARTS.",
    ]
    return "\n".join(lines) + "\n"


def _entry(option: Option) -> list[str]:
    typed = _typed(option)
    text = option.help + (f" (default:{_GLUE}{option.default})" if option.default else "")
    described = [line.replace(_GLUE, " ") for line in textwrap.wrap(text, WIDTH - _COLUMN)]
    if len(typed) > _COLUMN - 3:
        return [f"  {typed}", *(" " * _COLUMN + line for line in described)]
    return [f"  {typed:<{_COLUMN - 2}}{described[0]}", *(" " * _COLUMN + line for line in described[1:])]


def _typed(option: Option) -> str:
    names = ", ".join(option.shown)
    if option.kind:
        return f"{names} {option.kind.metavar}"
    return names + (f"[={'|'.join(option.attached)}]" if option.attached else "")


def markdown() -> str:
    lines = [
        "# Options of `phalanx run`",
        "",
        "`phalanx run [options] script [arguments]`. `phalanx plan` and `phalanx chaos` take the same.",
        "",
        "Every option of torchrun is one here, and means the same. Options stand before the script; whatever",
        "is behind it belongs to the script. Underscores do for dashes (`--log_dir`), the beginning of a",
        "name for the whole (`--log-d`), if no other option begins so. A variable gives the default of an",
        "option that is not on the command line; for a flag it is 1 or 0.",
        "",
        "This page is made by `python -m phalanx.cli.options.text > docs/options.md`.",
    ]
    for section in SECTIONS:
        lines += [
            "",
            f"## {section}",
            "",
            "| option | default | variable | from | |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(option) for option in OPTIONS if option.section == section]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> str:
    default = f"`{option.default}`" if option.default else ""
    variable = f"`{option.variable}`" if option.variable else ""
    text = option.help
    if option.only:
        text += f" Only `phalanx {option.only}`."
    if option.section == SECTIONS[-1]:
        text += f" Here {option.no_effect}."
    cells = (f"`{_typed(option)}`", default, variable, option.origin, text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(markdown(), end="")
