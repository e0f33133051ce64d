"""The kinds of values that options take. Each parses a text, or raises a ValueError with the reason."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.contract import hyperparameters
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.contract.ranks.placement import MAX_NODES, MAX_RANKS, MAX_WORKERS
from phalanx.contract.variables import OFF
from phalanx.launcher.output.filters import Std, Streams

if TYPE_CHECKING:
    from phalanx.cluster.sources.hosts import Host

_LONGEST = 366 * 86400.0  # seconds: system timers overflow far above this
_HIGHEST = 1 << 31  # limit of numbers that have no other limit


class ValueKind(NamedTuple):
    """How the value of an option is written, parsed and explained."""

    metavar: str
    read: Callable[[str], Any]
    expected: str  # completes the sentence "expected …"
    example: str  # a valid value
    repeated: bool = False  # all values count if the option is given several times


def text(value: str) -> str:
    """Return the text as it is."""
    return value


def file_name(value: str) -> str:
    """Return the name of a file. Refuse an empty text."""
    if not value:
        raise ValueError("it is empty")
    return value


def text_or_none(value: str) -> str | None:
    """Return the text; None if it is empty."""
    return value or None


def number(value: str, least: int, most: int | None = None) -> int:
    """Parse a whole number within limits."""
    try:
        found = int(value)
    except ValueError:
        raise ValueError("a number is missing" if not value.strip() else f'"{value}" is not a whole number') from None
    if found < least:
        raise ValueError(f"{found} is less than {least}")
    if most is not None and found > most:
        raise ValueError(f"{found} is more than {most}")
    return found


def numbers(value: str, least: int, most: int) -> tuple[int, ...]:
    """Parse whole numbers, separated by commas."""
    return tuple(number(part, least, most) for part in value.split(","))


def seconds(value: str) -> float:
    """Parse a number of seconds."""
    try:
        found = float(value)
    except ValueError:
        raise ValueError("it is not a number") from None
    if not math.isfinite(found) or found < 0:
        raise ValueError("it is negative or not finite")
    return _at_most_a_year(found)


def duration(value: str) -> float:
    """Parse `90`, `90s`, `15m` or `2h` into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip().lower())
    if match is None:
        raise ValueError("it is not a duration")
    found = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if found <= 0:
        raise ValueError("it must be more than 0")
    return _at_most_a_year(found)


def _at_most_a_year(found: float) -> float:
    if found > _LONGEST:
        raise ValueError("it is more than a year")
    return found


def duration_or_off(value: str) -> float | None:
    """Parse a duration, or `off` into None."""
    return None if value.strip() in OFF else duration(value)


def linger(value: str) -> float | None:
    """Parse a duration, 0, or `forever` into None."""
    if value.strip() == "forever":
        return None
    return 0.0 if re.fullmatch(r"0+[smh]?", value.strip()) else duration(value)


def interval(value: str) -> str:
    """Check a number of steps or a time. The worker parses it."""
    if not re.fullmatch(r"0*[1-9]\d*[smh]?", value.strip()):
        raise ValueError("it is neither a number of steps nor a time")
    return value.strip()


def interval_or_off(value: str) -> str:
    """Check a number of steps, a time, or `off`."""
    return value.strip() if value.strip() in OFF else interval(value)


def nodes(value: str) -> tuple[int, int]:
    """Parse `2` or `1:4` into the minimum and maximum number of nodes."""
    parts = value.split(":")
    if len(parts) > 2:
        raise ValueError("it has more than one colon")
    least, most = number(parts[0], 1, MAX_NODES), number(parts[-1], 1, MAX_NODES)
    if least > most:
        raise ValueError(f"the minimum, {least}, is more than the maximum, {most}")
    return least, most


def workers(value: str) -> int | str:
    """Parse a number of workers, or one of torchrun's words for it."""
    if value in ("auto", "gpu", "cpu", "xpu"):
        return value
    return number(value, 1, MAX_WORKERS)


def streams(value: str) -> Streams:
    """Parse `3`, or `0:1,1:3` per local rank."""
    if re.fullmatch("[0-3]", value):
        return Streams(Std(int(value)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        raise ValueError("it names no streams")
    pairs = (part.split(":") for part in value.split(","))
    return Streams(Std.NONE, {int(rank): Std(int(which)) for rank, which in pairs})


def ranks(value: str) -> frozenset[int] | None:
    """Parse `0,2,4-7`. As in torchrun, an empty text is no filter: None."""
    found: set[int] = set()
    for part in value.split(",") if value else ():
        first, dash, last = part.partition("-")
        start = number(first, 0, MAX_RANKS)
        stop = number(last, start, MAX_RANKS) if dash else start
        found.update(range(start, stop + 1))
    return frozenset(found) or None


def stdin_rank(value: str) -> int | None:
    """Parse a rank, or `none` into None."""
    return None if value == "none" else number(value, 0, MAX_RANKS)


def filters(value: str) -> tuple[str, ...]:
    """Split at commas; a doubled comma is a literal comma."""
    return tuple(part.replace("\0", ",") for part in value.replace(",,", "\0").split(","))


def signals(value: str) -> tuple[signal.Signals, ...]:
    """Parse names of signals, with or without SIG."""
    found: dict[signal.Signals, None] = {}
    for part in value.split(","):
        name = part.strip().upper()
        name = name if name.startswith("SIG") else f"SIG{name}"
        if name not in signal.Signals.__members__:
            raise ValueError(f'"{part.strip()}" is not a signal of this system')
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"no process can handle {name}")
        found[signal.Signals[name]] = None
    return tuple(found)


def preemption(value: str) -> tuple[signal.Signals, ...]:
    """Parse names of signals, or `none`."""
    return () if value == "none" else signals(value)


def devices(value: str) -> tuple[str, ...]:
    """Check device indices, ranges of them, and UUIDs."""
    found = tuple(part.strip() for part in value.split(","))
    for part in found:
        if not re.fullmatch(r"\d+(\s*-\s*\d+)?|(GPU|MIG)-\S+", part):
            raise ValueError(f'"{part}" is not a device' if part else "a device is missing")
    return found


def modules(value: str) -> tuple[str, ...]:
    """Check names of modules."""
    found = tuple(part.strip() for part in value.split(","))
    for part in found:
        if not all(name.isidentifier() for name in part.split(".")):
            raise ValueError(f'"{part}" is not the name of a module')
    return found


def faults(value: str) -> tuple[str, ...]:
    """Check kinds of faults for `phalanx chaos`."""
    from phalanx.launcher.chaos import KINDS

    found = tuple(part.strip() for part in value.split(","))
    for kind in (kind for part in found for kind in part.split("+")):
        if kind not in KINDS:
            raise ValueError(f'"{kind}" is none of {", ".join(KINDS)}' if kind else "a kind is missing")
    return found


def run_name(value: str) -> str:
    """Parse the name of a run, which is also the name of its folder."""
    if not value:
        raise ValueError("it is empty")
    wrong = re.search(r"[^\w.-]", value)
    if wrong:
        raise ValueError(f'"{wrong[0]}" is not allowed')
    if value[0] in "._-":
        raise ValueError(f"it starts with {value[0]}")
    if len(value) > 64:
        raise ValueError(f"it has {len(value)} characters")
    if value.startswith("node_"):
        raise ValueError("names that start with node_ are reserved")
    return value


def variable(value: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, content = value.partition("=")
    if not equals:
        raise ValueError("it has no =")
    if not name:
        raise ValueError("the name is missing")
    return name, content


def parameter(value: str) -> tuple[str, Hyperparameter]:
    """Parse NAME=VALUE, where the value is a number, true, false, null or a text."""
    name, content = variable(value)
    return name, hyperparameters.value(content)


def pairs(value: str) -> dict[str, str]:
    """Parse torchrun's `key=value,key=value`."""
    found: dict[str, str] = {}
    for part in value.strip().split(",") if value.strip() else ():
        key, _, content = (piece.strip() for piece in part.partition("="))
        if not key or not content:
            raise ValueError(f'"{part}" is not key=value')
        found[key] = content
    return found


def endpoint(value: str) -> tuple[str, int | None]:
    """Parse `host`, `host:port` or `[v6]:port` as torchrun does. The port may be None."""
    where = value.strip()
    host, colon, port = (where, "", "") if where.startswith("[") and where.endswith("]") else where.rpartition(":")
    if not colon:
        host = where
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(f'"{host}" is not the name or the address of a host')
    return host, number(port, 0, 65535) if colon else None


def hosts(value: str) -> tuple[Host, ...]:
    """Parse `a:8,b:2`, or `a:0-7,b:1,3` with devices."""
    from phalanx.cluster.sources.hosts import parse_hosts

    return parse_hosts(value)


def one_of(*choices: str) -> ValueKind:
    """Return a kind that accepts only these choices."""

    def read(value: str) -> str:
        if value not in choices:
            raise ValueError  # `expected` has the choices
        return value

    return ValueKind("|".join(choices), read, f"one of {', '.join(choices)}", choices[0])


NODES = ValueKind("N|MIN:MAX", nodes, "a number of nodes, or the minimum and maximum: 2 or 1:4", "2")
SLOTS = ValueKind(
    "N[,N…]",
    lambda value: numbers(value, 1, MAX_WORKERS),
    f"the number of workers per node, 1 to {MAX_WORKERS}: 8, or 8,2 for two nodes",
    "8",
)
WORKERS = ValueKind(
    "N|auto|gpu|cpu|xpu", workers, f"a number of workers, 1 to {MAX_WORKERS}, or auto, gpu, cpu, xpu", "4"
)
ID = ValueKind("ID", lambda value: number(value, 0, _HIGHEST), "a whole number, 0 or more", "0")
TIMES = ValueKind("N", lambda value: number(value, 0, _HIGHEST), "a whole number, 0 or more", "3")
PORT = ValueKind("PORT", lambda value: number(value, 0, 65535), "a port from 0 to 65535; 0 is a free port", "29500")
SECONDS = ValueKind("SECONDS", seconds, "seconds", "30")
DURATION = ValueKind("TIME", duration, "seconds, or a number with s, m or h: 90, 90s, 15m, 2h", "15m")
DURATION_OR_OFF = ValueKind("TIME|off", duration_or_off, "seconds, a number with s, m or h, or off: 30, 5m, off", "30s")
LINGER = ValueKind("TIME|forever", linger, "seconds, a number with s, m or h, 0, or forever: 90, 5m, 0, forever", "2m")
STREAMS = ValueKind("N|RANK:N,…", streams, "0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank: 0:1,1:3", "3")
RANKS = ValueKind("RANK,…", ranks, "ranks, separated by commas; 4-7 is 4,5,6,7", "0,4-7")
STDIN = ValueKind("RANK|none", stdin_rank, "the rank that reads this terminal, or none", "0")
FILTERS = ValueKind("TEXT,…", filters, "texts, separated by commas", "apple,orange")
SIGNALS = ValueKind("SIG,…", signals, "signals, separated by commas", "SIGTERM,SIGINT,SIGUSR1")
PREEMPTION = ValueKind("SIG,…|none", preemption, "signals, separated by commas, or none", "SIGTERM,SIGUSR1")
DEVICES = ValueKind("ID,…", devices, "device indices or UUIDs, separated by commas; 0-3 is 0,1,2,3", "0,2,5")
FAULTS = ValueKind("KIND,…", faults, "kinds of faults, separated by commas", "kill,segv,stop")
MODULES = ValueKind("MODULE,…", modules, "modules, separated by commas", "transformers,datasets")
VARIABLE = ValueKind("NAME=VALUE", variable, "NAME=VALUE", "NAME=VALUE", repeated=True)
PARAMETER = ValueKind("NAME=VALUE", parameter, "NAME=VALUE", "lr=0.1", repeated=True)
PAIRS = ValueKind("KEY=VALUE,…", pairs, "key=value pairs, separated by commas", "timeout=900")
ENDPOINT = ValueKind("HOST[:PORT]", text, "host:port", "localhost:29500")
ADDRESS = ValueKind("ADDRESS", text, "a name or an address", "127.0.0.1")
HOSTS = ValueKind(
    "HOST[:N],…", hosts, "hosts, separated by commas: a:8,b:2, or a:0-7,b:1,3 for exact devices", "a:8,b:2"
)
INTERVAL = ValueKind("N|TIME", interval, "a number of steps, or a time: 100, 30s, 10m, 2h", "10m")
SNAPSHOTS = ValueKind("N|TIME|off", interval_or_off, "a number of steps, a time, or off: 100, 30s, 10m, off", "30s")
FILE = ValueKind("FILE", text, "a file", "hostfile")
KEY_FILE = ValueKind("FILE", file_name, "a file with a key", "checkpoint.key")
FOLDER = ValueKind("DIR", text, "a folder", "logs")
NAME = ValueKind("NAME", text, "a name", "trainer")
RUN_NAME = ValueKind(
    "NAME", run_name, "up to 64 letters, digits and . _ -, starting with a letter or digit", "resnet-lr0.1"
)
TEMPLATE = ValueKind("TEXT", text_or_none, "a text", "'[${rank}]: '")
