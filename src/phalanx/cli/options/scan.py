"""Finds the options in a command line, up to the script. Their values are still text.

Uses argparse, because torchrun does: abbreviations, `--option=value` and `-r3` work the same way, and everything after
the script is left alone. argparse's own messages are not used.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from phalanx.cli.options.option import Option
from phalanx.cli.options.table import OPTIONS, options_of
from phalanx.errors import OptionError


class HelpRequested(Exception):  # noqa: N818  # not an error: the text goes to stdout, and the exit code is 0
    """Raised if the user asked for a text (help, a completion script) instead of a run."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Given(NamedTuple):
    """An option on the command line or in a PET_ variable."""

    name: str  # as the user spelled it
    values: tuple[str, ...]  # empty for a flag


class Scan(NamedTuple):
    """A command line, divided into options, script and arguments of the script."""

    given: dict[str, Given]  # by Option.dest
    script: str  # empty: missing
    args: tuple[str, ...]


def scan(argv: Sequence[str], verb: str) -> Scan:
    """Divide a command line. Raise OptionError, or HelpRequested for --help."""
    parser = _Parser(verb)
    try:
        found, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        if error.argument_name is not None:
            raise parser.misused(error.argument_name, argv) from None
        # Only the script can be missing. With a placeholder the rest of the line can be checked.
        found, unknown = parser.parse_known_args([*argv, ""])
    if unknown:
        raise _unknown(unknown[0], verb, argv)
    if any(given.name == "-n" and "p" in given.values for given in found.given.values()):
        raise _unknown("-np", verb, argv)  # an option of mpirun; argparse would read it as -n p
    return Scan(found.given, found.script, tuple(found.args))


class _Parser(argparse.ArgumentParser):
    def __init__(self, verb: str) -> None:
        # argparse formats every option once to check it. One formatter of a fixed width avoids a new one for each
        # option, and a query of the terminal size.
        formatter = argparse.HelpFormatter("", width=80)
        super().__init__(add_help=False, exit_on_error=False, formatter_class=lambda **_: formatter)
        self.verb = verb
        self.set_defaults(given={})
        self._by_name: dict[str, Option] = {}
        # An abbreviation that torchrun accepts has the same meaning here, whatever options phalanx adds.
        self._torchrun = {
            name for option in options_of(verb) if option.origin == "torchrun" for name in option.torchrun_spellings
        }
        for option in options_of(verb):
            names = [*option.spellings]
            names += [f"{name}={value}" for name in names for value in option.attached]
            self._by_name["/".join(names)] = option
            action = _Help if option.name in ("--help", "--help-all") else _Keep
            self.add_argument(*names, dest=option.dest, action=action, nargs=None if option.kind else 0)
        self.add_argument("script")
        self.add_argument("args", nargs=argparse.REMAINDER)

    def error(self, message: str) -> Any:
        """Raise instead of exiting."""
        raise argparse.ArgumentError(None, message)

    def misused(self, name: str, argv: Sequence[str]) -> OptionError:
        """Return the error for an option without its value, or for a flag with one."""
        option = self._by_name[name]
        typed = next((word for word in argv if word in option.spellings), option.name)
        example = f"phalanx {self.verb} {typed}"
        if option.kind:
            expected = f"expected {option.kind.expected}"
            fix = f"{example} {option.kind.example} …"
            return OptionError(f"{typed} needs a value", details=[expected], fix=fix)
        if option.attached:
            values = " or ".join(f"{option.name}={value}" for value in option.attached)
            return OptionError(f"{option.name} has an unknown value", details=[f"expected {values}"], fix=values)
        return OptionError(f"{typed} takes no value: it is a flag", fix=f"{example} …")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the options that an abbreviation may stand for."""
        found: list[Any] = super()._get_option_tuples(option_string)
        theirs = [match for match in found if match[1] in self._torchrun]
        if len(theirs) == 1:
            return theirs
        if len({match[0] for match in found}) < 2:
            return found[:1]
        # Not raised here: argparse also calls this for the arguments of the script.
        return [(_Ambiguous(option_string, [match[1] for match in found], self.verb), *found[0][1:])]


class _Keep(argparse.Action):
    def __call__(self, _: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, __, attached = (option_string or "").partition("=")
        new = (values,) if isinstance(values, str) else (attached,) if attached else ()
        before = namespace.given.get(self.dest)
        namespace.given[self.dest] = Given(name, new if before is None else before.values + new)


class _Help(argparse.Action):
    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        from phalanx.cli.options.text import help_text

        raise HelpRequested(help_text(parser.verb, everything=self.dest == "help_all"))


class _Ambiguous(argparse.Action):
    def __init__(self, typed: str, candidates: Iterable[str], verb: str) -> None:
        super().__init__([typed], dest="ambiguous", nargs="?")
        self.typed, self.candidates, self.verb = typed.partition("=")[0], candidates, verb

    def __call__(self, *_: Any, **__: Any) -> None:
        names = dict.fromkeys(name if "_" in self.typed else name.replace("_", "-") for name in self.candidates)
        raise OptionError(
            f"{self.typed} is ambiguous: it could be {', '.join(names)}",
            fix=f"phalanx {self.verb} {next(iter(names))} …",
        )


_SCRIPT_OPTIONS = "options of the script go after its name"

# Names of the same options in other launchers.
_OTHER_LAUNCHERS = {
    "--num-processes": "-g",
    "--num-gpus": "-g",
    "--ranks": "-g",
    "--workers": "-g",
    "--world-size": "-g",
    "--gpus": "-g",
    "--np": "-g",
    "-np": "-g",
    "--num-machines": "-n",
    "--num-nodes": "-n",
    "--machine-rank": "-i",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--include": "--devices",
    "--gpu-ids": "--devices",
}


def _unknown(token: str, verb: str, argv: Sequence[str]) -> OptionError:
    import difflib

    typed, _, value = token.partition("=")
    value = value or _value_after(token, argv)
    for option in OPTIONS:
        if option.only not in ("", verb) and typed in option.spellings:
            return OptionError(
                f"{typed} is not an option of phalanx {verb}, but of phalanx {option.only}",
                fix=f"phalanx {option.only} {typed} …",
            )
    if typed in _OTHER_LAUNCHERS:
        return _meant(typed, _OTHER_LAUNCHERS[typed], verb, value)
    # Compared without the leading dashes: --lr is not close to --color.
    known = {name[2:]: name for option in options_of(verb) for name in option.spellings if name[1] == "-"}
    known |= {name[2:]: ours for name, ours in _OTHER_LAUNCHERS.items()}
    bare = typed.lstrip("-")
    close = [
        *difflib.get_close_matches(bare, known, 1),
        *difflib.get_close_matches(bare.replace("_", "-"), known, 1),
    ]
    near = [known[name] for name in close]
    if near:
        return _meant(typed, near[0], verb, value)
    return OptionError(
        f"{typed} is not an option of phalanx {verb}",
        details=[_SCRIPT_OPTIONS],
        fix=f"phalanx {verb} --help-all lists all",
    )


def _value_after(token: str, argv: Sequence[str]) -> str:
    """Return the number after an option, as in `-np 2`. Another word may be the script."""
    after = argv[argv.index(token) + 1 :] if token in argv else []
    return after[0] if after and after[0].isdecimal() else ""


def _meant(typed: str, option: str, verb: str, value: str) -> OptionError:
    return OptionError(
        f"{typed} is not an option of phalanx {verb}; did you mean {option}?",
        details=[_SCRIPT_OPTIONS],
        fix=f"phalanx {verb} {option}{f' {value}' if value else ''} …",
    )
