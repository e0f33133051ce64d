"""The kinds of value that options take. Each reads a text, or raises a ValueError that says why it cannot."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.contract.variables import OFF

if TYPE_CHECKING:
    from phalanx.cluster.sources.hosts import Host

_HIGHEST_RANK = 1 << 20  # far above any world; bounds what a mistyped range can cost


class ValueKind(NamedTuple):
    metavar: str
    read: Callable[[str], Any]
    expected: str  # completes the sentence "expected …"
    example: str  # a value that is right


class Streams(NamedTuple):
    """Which of a worker's streams: 1 is stdout, 2 is stderr, 3 both, 0 neither."""

    every: int = 0
    by_local_rank: Mapping[int, int] = {}

    def of(self, local_rank: int) -> int:
        return self.by_local_rank.get(local_rank, self.every)


MOST_RANKS = 1 << 20  # far above any world: bounds what a mistyped range can cost


def text(value: str) -> str:
    return value


def number(value: str, least: int, most: int | None = None) -> int:
    try:
        found = int(value)
    except ValueError:
        raise ValueError("nothing is there" if not value.strip() else f'"{value}" is not a whole number') from None
    if found < least:
        raise ValueError(f"{found} is less than {least}")
    if most is not None and found > most:
        raise ValueError(f"{found} is more than {most}")
    return found


def numbers(value: str, least: int) -> tuple[int, ...]:
    return tuple(number(part, least) for part in value.split(","))


def seconds(value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        raise ValueError("it is not a number") from None
    if not math.isfinite(found) or found < 0:
        raise ValueError("it is not a time that can be waited for")
    return found


def duration(value: str) -> float:
    """`90`, `90s`, `15m`, `2h` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip().lower())
    if match is None:
        raise ValueError("it is not a duration")
    found = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if found <= 0:
        raise ValueError("it is no time at all")
    return found


def duration_or_off(value: str) -> float | None:
    return None if value.strip() in OFF else duration(value)


def linger(value: str) -> float | None:
    """Seconds; None: for as long as they like."""
    if value.strip() == "forever":
        return None
    return 0.0 if re.fullmatch(r"0+[smh]?", value.strip()) else duration(value)


def interval(value: str) -> str:
    """Steps or a time; read again where it is used."""
    if not re.fullmatch(r"0*[1-9]\d*[smh]?", value.strip()):
        raise ValueError("it is neither a number of steps nor a time")
    return value.strip()


def interval_or_off(value: str) -> str:
    return value.strip() if value.strip() in OFF else interval(value)


def nodes(value: str) -> tuple[int, int]:
    parts = value.split(":")
    if len(parts) > 2:
        raise ValueError("it has more than one colon")
    least, most = number(parts[0], 1), number(parts[-1], 1)
    if least > most:
        raise ValueError(f"the least, {least}, is more than the most, {most}")
    return least, most


def workers(value: str) -> int | str:
    if value in ("auto", "gpu", "cpu", "xpu"):
        return value
    return number(value, 1)


def streams(value: str) -> Streams:
    if re.fullmatch("[0-3]", value):
        return Streams(int(value))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        raise ValueError("it names no streams")
    pairs = (part.split(":") for part in value.split(","))
    return Streams(0, {int(rank): int(which) for rank, which in pairs})


def ranks(value: str) -> frozenset[int] | None:
    """`0,2,4-7`; no rank at all is no filter, as in torchrun."""
    found: set[int] = set()
    for part in value.split(",") if value else ():
        first, dash, last = part.partition("-")
        start = number(first, 0)
        stop = number(last, start, _HIGHEST_RANK) if dash else start
        found.update(range(start, stop + 1))
    return frozenset(found) or None


def stdin_rank(value: str) -> int | None:
    return None if value == "none" else number(value, 0)


def filters(value: str) -> tuple[str, ...]:
    """Split at commas, but a doubled comma stands for one."""
    return tuple(part.replace("\0", ",") for part in value.replace(",,", "\0").split(","))


def signals(value: str) -> tuple[signal.Signals, ...]:
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
    return () if value == "none" else signals(value)


def devices(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    for part in found:
        if not re.fullmatch(r"\d+(\s*-\s*\d+)?|(GPU|MIG)-\S+", part):
            raise ValueError(f'"{part}" is not a device' if part else "nothing is there")
    return found


def modules(value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    for part in found:
        if not all(name.isidentifier() for name in part.split(".")):
            raise ValueError(f'"{part}" is not the name of a module')
    return found


def faults(value: str) -> tuple[str, ...]:
    from phalanx.launch.chaos import KINDS

    found = tuple(part.strip() for part in value.split(","))
    for part in found:
        if part not in KINDS:
            raise ValueError(f'"{part}" is none of {", ".join(KINDS)}' if part else "nothing is there")
    return found


def variable(value: str) -> tuple[str, str]:
    name, equals, content = value.partition("=")
    if not equals:
        raise ValueError("it has no =")
    if not name:
        raise ValueError("no name is before the =")
    return name, content


def pairs(value: str) -> dict[str, str]:
    """torchrun's `key=value,key=value`."""
    found: dict[str, str] = {}
    for part in value.strip().split(",") if value.strip() else ():
        key, _, content = (piece.strip() for piece in part.partition("="))
        if not key or not content:
            raise ValueError(f'"{part}" is not key=value')
        found[key] = content
    return found


def endpoint(value: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]:port`: host and port, read as torchrun reads them."""
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
    from phalanx.cluster.sources.hosts import parse_hosts

    return parse_hosts(value)


def one_of(*choices: str) -> ValueKind:
    def read(value: str) -> str:
        if value not in choices:
            raise ValueError  # what is expected says it all
        return value

    return ValueKind("|".join(choices), read, f"one of {', '.join(choices)}", choices[0])


NODES = ValueKind("N|MIN:MAX", nodes, "a number of nodes, or the least and the most: 2 or 1:4", "2")
SLOTS = ValueKind(
    "N[,N…]", lambda value: numbers(value, 1), "how many workers each node has: 8, or 8,2 for two nodes", "8"
)
WORKERS = ValueKind("N|auto|gpu|cpu|xpu", workers, "a number of workers from 1 on, or auto, gpu, cpu, xpu", "4")
ID = ValueKind("ID", lambda value: number(value, 0), "a whole number from 0 on", "0")
TIMES = ValueKind("N", lambda value: number(value, 0), "a whole number from 0 on", "3")
PORT = ValueKind("PORT", lambda value: number(value, 0, 65535), "a port from 0 to 65535; 0 takes a free one", "29500")
SECONDS = ValueKind("SECONDS", seconds, "seconds", "30")
DURATION = ValueKind("TIME", duration, "seconds, or a number with s, m or h: 90, 90s, 15m, 2h", "15m")
DURATION_OR_OFF = ValueKind("TIME|off", duration_or_off, "seconds, a number with s, m or h, or off: 30, 5m, off", "30s")
LINGER = ValueKind("TIME|forever", linger, "seconds, a number with s, m or h, 0, or forever: 90, 5m, 0, forever", "2m")
STREAMS = ValueKind("N|RANK:N,…", streams, "0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank: 0:1,1:3", "3")
RANKS = ValueKind("RANK,…", ranks, "ranks with commas between them; 4-7 is 4,5,6,7", "0,4-7")
STDIN = ValueKind("RANK|none", stdin_rank, "the rank that reads this terminal, or none", "0")
FILTERS = ValueKind("TEXT,…", filters, "texts with commas between them", "apple,orange")
SIGNALS = ValueKind("SIG,…", signals, "names of signals with commas between them", "SIGTERM,SIGINT,SIGUSR1")
PREEMPTION = ValueKind(
    "SIG,…|none", preemption, "names of signals with commas between them, or none", "SIGTERM,SIGUSR1"
)
DEVICES = ValueKind(
    "ID,…", devices, "numbers of devices, with commas between them, or their UUIDs; 0-3 is 0,1,2,3", "0,2,5"
)
FAULTS = ValueKind("KIND,…", faults, "kinds of faults with commas between them", "kill,segv,stop")
MODULES = ValueKind("MODULE,…", modules, "names of modules with commas between them", "transformers,datasets")
VARIABLE = ValueKind("NAME=VALUE", variable, "NAME=VALUE", "NAME=VALUE")
PAIRS = ValueKind("KEY=VALUE,…", pairs, "key=value, with commas between them", "timeout=900")
ENDPOINT = ValueKind("HOST[:PORT]", text, "host:port", "localhost:29500")
ADDRESS = ValueKind("ADDRESS", text, "a name or an address", "127.0.0.1")
HOSTS = ValueKind(
    "HOST[:N],…", hosts, "hosts with commas between them: a:8,b:2, or a:0-7,b:1,3 for exact devices", "a:8,b:2"
)
INTERVAL = ValueKind("N|TIME", interval, "a number of steps, or a time: 100, 30s, 10m, 2h", "10m")
SNAPSHOTS = ValueKind("N|TIME|off", interval_or_off, "a number of steps, a time, or off: 100, 30s, 10m, off", "30s")
FILE = ValueKind("FILE", text, "a file", "hostfile")
FOLDER = ValueKind("DIR", text, "a folder", "logs")
NAME = ValueKind("NAME", text, "a name", "trainer")
TEMPLATE = ValueKind("TEXT", text, "a text", "'[${rank}]: '")
