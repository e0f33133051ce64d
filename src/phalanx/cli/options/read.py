"""Parses the text of options, from the command line or from environment variables, into values."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from phalanx.cli.options.option import Option
from phalanx.cli.options.scan import Given
from phalanx.cli.options.table import options_of
from phalanx.cli.options.values import ValueKind
from phalanx.errors import OptionError


def from_environment(environ: Mapping[str, str], verb: str) -> dict[str, Given]:
    """Return the options that PET_ variables set, by `Option.dest`."""
    named = ((option, option.variable) for option in options_of(verb) if option.variable)
    return {option.dest: Given(name, (environ[name],)) for option, name in named if name in environ}


def read_all(given: Mapping[str, Given], environ: Mapping[str, str], verb: str) -> SimpleNamespace:
    """Return a value for every option, by `Option.dest`."""
    values = SimpleNamespace()
    for option in options_of(verb):
        setattr(values, option.dest, _value(option, given.get(option.dest), environ, verb))
    return values


def read(kind: ValueKind, name: str, text: str, environ: Mapping[str, str], verb: str) -> Any:
    """Parse one text. Raise an OptionError with the option, what was expected, and a valid example."""
    try:
        return kind.read(text)
    except ValueError as error:
        details = [f"expected {kind.expected}"]
        example = kind.example
        if name == "--env" and text.isidentifier():
            example = f"{text}=VALUE"
            if text in environ:
                details.append(f"{text} is set here, and the workers inherit it")
        fix = f"phalanx {verb} {name} {example} …" if name.startswith("-") else f"{name}={example}"
        why = f": {error}" if str(error) else ""
        raise OptionError(f'{name} is "{text}"{why}', details=details, fix=fix) from None


def with_fallback(option: Option, value: Any, environ: Mapping[str, str], verb: str) -> Any:
    """Return `value`; if it is not given, the value of the option's fallback variable."""
    if value is not None or option.fallback not in environ or option.kind is None:
        return value
    return read(option.kind, option.fallback, environ[option.fallback], environ, verb)


def _value(option: Option, given: Given | None, environ: Mapping[str, str], verb: str) -> Any:
    if option.kind is None:
        return _flag(option, given)
    if given is None:
        return None if option.default is None else option.kind.read(option.default)
    if not given.values:  # `--grace=--`: argparse drops a value of two dashes
        expected = [f"expected {option.kind.expected}"]
        fix = f"phalanx {verb} {given.name} {option.kind.example} …"
        raise OptionError(f"{given.name} needs a value", details=expected, fix=fix)
    # As in torchrun, the last value counts.
    texts = given.values if option.kind.repeated else given.values[-1:]
    found = [read(option.kind, given.name, text, environ, verb) for text in texts]
    return found if option.kind.repeated else found[0]


def _flag(option: Option, given: Given | None) -> bool | str:
    """Return whether a flag is on, or its attached value."""
    if given is None:
        return False
    if option.attached:
        return (option.attached[0], *given.values)[-1]
    if given.name != option.variable:
        return True
    try:
        return bool(int(given.values[0]))
    except ValueError:
        raise OptionError(
            f'{given.name} is "{given.values[0]}"',
            details=["expected 1 (on) or 0 (off)"],
            fix=f"{given.name}=1",
        ) from None
