"""Hides what looks like a secret in files that are meant to be shared."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "•••"

# Every pattern begins with a rare literal and is bounded: logs are long and contain anything.
_NAMES = r"(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|private[_-]?key|credential)s?"
_VALUE = r"[^\s\"'\\<>&,;]{1,4096}"
_OPTION = re.compile(rf"^--?[A-Za-z0-9_-]*{_NAMES}$", re.IGNORECASE)
_SECRET = re.compile(rf"{_NAMES}$", re.IGNORECASE)
_NAMED = re.compile(rf"(?P<name>{_NAMES}[\"']?\s{{0,4}}[=:]\s{{0,4}}[\"']?)(?P<value>{_VALUE})", re.IGNORECASE)
_AFTER = re.compile(
    rf"(?P<name>(?<![\w-])--?(?:[A-Za-z][A-Za-z0-9_-]{{0,31}})?{_NAMES}\s{{1,4}})(?P<value>{_VALUE})", re.IGNORECASE
)
_BEARER = re.compile(rf"(?P<name>\bBearer\s+)(?P<value>{_VALUE})", re.IGNORECASE)
_LINK = re.compile(r"(?P<name>https?://[^\s#\"'<>]{0,512}#)(?P<value>[0-9A-Za-z_-]{16,})")  # the key of a page
_USER = re.compile(r"(?P<name>://[^\s/:@\"']{0,64}:)(?P<value>[^\s/@\"'\\]{1,256})(?=@)")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{16,})\b"
)
# `token: int`, `tokens=512`: training scripts often log numbers of tokens
_HARMLESS = re.compile(r"^[0-9.,]+[kKmMbB]?[)\]}]*$|^(?:None|True|False|true|false|null|str|int|float)$")


def hidden(text: str) -> str:
    """Return `text` with everything masked that looks like a secret."""
    for pattern in (_NAMED, _AFTER, _BEARER, _LINK, _USER):
        text = pattern.sub(_masked, text)
    return _SHAPES.sub(MASK, text)


def command(words: Sequence[str]) -> list[str]:
    """Return a masked command line. A word after an option such as `--api-key` is masked as well."""
    masked: list[str] = []
    for index, word in enumerate(words):
        after = index > 0 and _OPTION.match(words[index - 1]) and not _HARMLESS.match(word)
        masked.append(MASK if after and not word.startswith("-") else hidden(word))
    return masked


def value_of(name: str, text: str) -> str:
    """Return the masked value of a named field: all of it, if the name is that of a secret."""
    return MASK if _SECRET.search(name) and not _HARMLESS.match(text) else hidden(text)


def _masked(match: re.Match[str]) -> str:
    return match[0] if _HARMLESS.match(match["value"]) else match["name"] + MASK
