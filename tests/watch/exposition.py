"""A strict parser of the text format of Prometheus, version 0.0.4: anything unknown is an error."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    kind: str = ""
    help: str = ""
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)  # by name and labels


def read(text: str) -> dict[str, Family]:
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert re.fullmatch(_NAME, name)
            assert name not in families, "all lines of a metric stand together"
            families[name], current = Family(help=words), name
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert not families[name].samples
            assert kind in ("counter", "gauge", "histogram")
            families[name].kind = kind
        else:
            _sample(line, current, families[current])
    for name, family in families.items():
        assert family.kind
        assert family.samples, "a family without samples is noise"
        _check(name, family)
    return families


def _sample(line: str, current: str, family: Family) -> None:
    match = _SAMPLE.fullmatch(line)
    assert match, line
    name, labels, value = match[1], _labels(match[2] or ""), float(match[3])
    endings = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
    assert name in [current + ending for ending in endings]
    assert (name, labels) not in family.samples, f"twice: {line}"
    family.samples[name, labels] = value


def _labels(text: str) -> Labels:
    found, at = [], 0
    while at < len(text):
        match = _LABEL.match(text, at)
        assert match, text[at:]
        found.append((match[1], re.sub(r'\\["\\n]', lambda escaped: _UNESCAPED[escaped[0]], match[2])))
        at = match.end()
    assert not text.endswith(",")
    assert len({name for name, _ in found}) == len(found)
    return tuple(sorted(found))


def _check(name: str, family: Family) -> None:
    if family.kind == "counter":
        assert name.endswith("_total")
        assert all(value >= 0 for value in family.samples.values())
    if family.kind != "histogram":
        return
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample.endswith("_bucket"):
            rest = tuple(pair for pair in labels if pair[0] != "le")
            groups.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    for labels, buckets in groups.items():
        bounds, counts = zip(*buckets, strict=True)
        assert list(bounds) == sorted(bounds)
        assert bounds[-1] == math.inf
        assert list(counts) == sorted(counts), "buckets are cumulative"
        assert family.samples[f"{name}_count", labels] == counts[-1]
        assert f"{name}_sum" in {sample for sample, other in family.samples if other == labels}
