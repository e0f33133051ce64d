"""Hyperparameters of a run: read from the arguments of its script, or passed by it. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Hyperparameter = str | int | float | bool | None

FILE = "hyperparameters.json"  # in the run folder: what rank 0 passed to `phalanx.init` or `phalanx.main`
MOST = 500  # number that is recorded
MOST_BYTES = 1 << 20  # of the file
_LONGEST_NAME = 100  # characters
_LONGEST = 500  # characters of a text

_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d{0,17}|\d*\.\d+|\d+\.)(?:[eE][+-]?\d{1,3})?")
_INTEGER = re.compile(r"[+-]?\d+")
_WORDS: dict[str, Hyperparameter] = {"true": True, "false": False, "null": None, "none": None}
_ASSIGNED = re.compile(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)  # as in Hydra and OmegaConf: model.depth=3


def from_arguments(arguments: Sequence[str]) -> dict[str, Hyperparameter]:
    """Guess hyperparameters from the arguments of a script: `--lr 0.1 --epochs=3 --amp model.depth=2`.

    An option without a value is True; several words after an option are one text. Words before the first option are
    ignored, except NAME=VALUE. Only the script knows whether a word after an option is its value, so this is a guess.
    """
    found: dict[str, list[str]] = {}
    current: str | None = None
    for word in arguments:
        if word == "--":
            break
        if word.startswith("-") and not _NUMBER.fullmatch(word) and word != "-":
            name, equals, text = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            current = None if equals else name
            if name:
                found[name] = [text] if equals else []
        elif (assigned := _ASSIGNED.fullmatch(word)) and not (current and not found[current]):
            current = None
            found[assigned[1]] = [assigned[2]]
        elif current:
            found[current].append(word)
    return recordable({name: value(" ".join(words)) if words else True for name, words in found.items()})


def value(text: str) -> Hyperparameter:
    """Return a text as the number, truth value or text that it represents. Quotes make it a text: `"3"`."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if _INTEGER.fullmatch(text) else float(text)
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


def as_text(given: Hyperparameter) -> str:
    """Return a text that `value` converts back to the same value."""
    if isinstance(given, str):
        same = value(given)
        return given if isinstance(same, str) and same == given else json.dumps(given)
    return json.dumps(given)


def recordable(given: Mapping[str, Any]) -> dict[str, Hyperparameter]:
    """Return hyperparameters in the form in which they are recorded: numbers, truth values, None, and the text of
    anything else.
    """
    return {str(name)[:_LONGEST_NAME]: _recordable(one) for name, one in list(given.items())[:MOST]}


def _recordable(given: Any) -> Hyperparameter:
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int) and abs(given) < 1 << 63:
        return int(given)
    if isinstance(given, float) and math.isfinite(given):
        return float(given)
    text = str(given)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
