"""What looks like a secret is not shown to strangers: a file to be shared has to say less than a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "•••"

# Every pattern begins with something rare, and is bounded: logs are long, and nobody has chosen what is in them.
_NAMES = r"(?:token|secret|passwd|password|api[_-]?key|access[_-]?key|private[_-]?key|credential)s?"
_VALUE = r"[^\s\"'\\<>&,;]{1,4096}"
_OPTION = re.compile(rf"^--?[A-Za-z0-9_-]*{_NAMES}$", re.IGNORECASE)
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
# `token: int`, `tokens=512`: numbers of tokens are what trainings talk about all day
_HARMLESS = re.compile(r"^[0-9.,]+[kKmMbB]?[)\]}]*$|^(?:None|True|False|true|false|null|str|int|float)$")


def hidden(text: str) -> str:
    """The same with what looks like a secret masked."""
    for pattern in (_NAMED, _AFTER, _BEARER, _LINK, _USER):
        text = pattern.sub(_masked, text)
    return _SHAPES.sub(MASK, text)


def command(words: Sequence[str]) -> list[str]:
    """Of a command line: also a word that stands alone behind `--api-key`."""
    told: list[str] = []
    for index, word in enumerate(words):
        after = index > 0 and _OPTION.match(words[index - 1]) and not _HARMLESS.match(word)
        told.append(MASK if after and not word.startswith("-") else hidden(word))
    return told


def _masked(match: re.Match[str]) -> str:
    return match[0] if _HARMLESS.match(match["value"]) else match["name"] + MASK
