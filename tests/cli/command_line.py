"""Parses command lines for tests."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from phalanx.cli.options import RunOptions, parse_run


def parse(line: str, **environ: str) -> RunOptions:
    return parse_run(shlex.split(line), environ)


def fields(options: RunOptions, names: Iterable[str]) -> dict[str, Any]:
    return {name: attrgetter(name)(options) for name in names}
