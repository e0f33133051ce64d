"""Why `phalanx run` would not start the test: its own words, as findings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from phalanx.doctor.finding import Finding

CHECK = "start"
_SPEAKER = "phalanx: "
_FIX = "fix: "


def findings(text: str, hosts: Collection[str] = ()) -> list[Finding]:
    """One for each thing that was said, or for each host where several are named. Nothing: nothing was understood."""
    blocks = [block for said in _blocks(text.splitlines(), _SPEAKER) for block in _by_host(said, hosts)]
    # What has a reason or a remedy. A line by itself is a note, unless there is nothing else.
    found = [_finding(block, hosts) for block in blocks if len(block) > 1] or [_finding(one, hosts) for one in blocks]
    return list(dict.fromkeys(found))


def _blocks(lines: list[str], begin: str) -> Iterator[list[str]]:
    """Each line that begins so, without that, and what is indented below it."""
    block: list[str] = []
    for line in [*lines, begin]:
        if line.startswith(begin):
            if block:
                yield block
            block = [line.removeprefix(begin)]
        elif block and line.startswith("  "):
            block.append(line.removeprefix("  "))


def _by_host(block: list[str], hosts: Collection[str]) -> Iterator[list[str]]:
    """ "2 of 3 hosts cannot take part" has a block of its own for each of them."""
    several = [[]] if not re.match(r"\d+ of \d+ hosts ", block[0]) else _split(block[1:], hosts)
    if all(several):
        yield from several
    else:
        yield block


def _split(lines: list[str], hosts: Collection[str]) -> list[list[str]]:
    blocks: list[list[str]] = []
    for line in lines:
        if _host(line, hosts):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line.removeprefix("  "))
    return blocks or [[]]


def _host(line: str, hosts: Collection[str]) -> str:
    return next((host for host in hosts if line.startswith(f"{host}: ")), "")


def _finding(block: list[str], hosts: Collection[str]) -> Finding:
    host = _host(block[0], hosts)
    details = [line for line in block[1:] if not line.startswith(_FIX)]
    fixes = [line.removeprefix(_FIX) for line in block[1:] if line.startswith(_FIX)]
    return Finding(
        CHECK,
        "red",
        block[0].removeprefix(f"{host}: ") if host else block[0],
        "; ".join(line.strip() for line in details),
        "; ".join(fixes) or "phalanx run says the same, with the same hosts",
        host,
    )
