"""Detects options of phalanx that were typed after the script, and are therefore passed to the script."""

from __future__ import annotations

import re
import shlex

from phalanx.cli.options.run_options import ScriptOptions
from phalanx.cli.options.table import options_of

# Libraries that make options from names of functions, classes or files: the options that they accept are not in the
# script's text.
_GENERIC_PARSERS = re.compile(r"\b(fire|hydra|tyro|typer|absl|jsonargparse|HfArgumentParser|parse_known_args)\b")
_SHARED = {"-h", "--help"}  # after the script, these are for the script


def misplaced(script: ScriptOptions, verb: str = "run") -> str | None:
    """Return a note about an option of phalanx after the script, if the script does not seem to have that option."""
    if script.kind != "script" or not script.args:
        return None
    kinds = {name: option for option in options_of(verb) for name in option.spellings if name not in _SHARED}
    words = script.args[: script.args.index("--")] if "--" in script.args else script.args
    found = next((place for place, word in enumerate(words) if word.partition("=")[0] in kinds), None)
    if found is None:
        return None
    name = words[found].partition("=")[0]
    try:
        with open(script.target, errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    if _GENERIC_PARSERS.search(text) or f'"{name}"' in text or f"'{name}'" in text:
        return None
    length = 2 if kinds[name].kind and "=" not in words[found] else 1
    option, rest = words[found : found + length], [*script.args[:found], *script.args[found + length :]]
    right = shlex.join(["phalanx", verb, *option, script.target, *rest])
    return f"{shlex.join(option)} is passed to {script.target}. Options of phalanx go before the script: {right}"
