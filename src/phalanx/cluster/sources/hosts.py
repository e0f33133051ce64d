"""Parses --hosts, and the host files of Open MPI, MPICH, DeepSpeed and Horovod."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from phalanx.contract.ranks.placement import MAX_WORKERS

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_NUMBER = re.compile(r"\d{1,5}", re.ASCII)
_SPAN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host of --hosts or of a host file."""

    name: str  # for ssh: host or user@host
    slots: int | None = None  # None: one per device
    devices: str | None = None  # as for --devices: "0-7", "1,3"

    @property
    def workers(self) -> int | None:
        """The number of workers; None: one per device."""
        if self.devices is None:
            return self.slots
        spans = [part.partition("-") for part in self.devices.split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:8,b:2` (slots), `a:0-7,b:1,3` (devices), `user@a:4`, `[fd00::1]:8`. Raises ValueError."""
    entries: list[tuple[str, list[str]]] = []  # name, and the parts after its colon
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            raise ValueError("it has an empty entry" if text.strip() else "it is empty")
        if not _SPAN.fullmatch(entry):
            name, given = _split(entry)
            entries.append((name, [] if given is None else [given]))
        elif not entries or not entries[-1][1]:
            raise ValueError(f"{entry} is not a host (devices follow a colon: HOST:1,3)")
        else:
            entries[-1][1].append(entry)
    hosts = tuple(_host(name, given) for name, given in entries)
    seen: set[str] = set()
    for host in hosts:
        if _bare(host.name) in seen:
            raise ValueError(f"it names {_bare(host.name)} twice")
        seen.add(_bare(host.name))
    return hosts


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parse one host per line: `a slots=4 max_slots=8`, `a:4`, or `a`. Slots of a host on several lines are added."""
    found: dict[str, Host] = {}
    lines: dict[str, int] = {}  # number of lines per host without slots
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            host = _line(content)
            before = found.setdefault(_bare(host.name), host)
            if before.name != host.name:
                raise ValueError(f"{host.name} was {before.name} before")
            if host.slots is None:
                lines[host.name] = lines.get(host.name, 0) + 1
            if (host.slots is None) != (before.slots is None):
                raise ValueError(f"{host.name} is listed both with slots and without")
        except ValueError as why:
            raise ValueError(f"line {number}: {why}") from None
        if before is not host and host.slots is not None and before.slots is not None:
            found[_bare(host.name)] = replace(host, slots=before.slots + host.slots)
    if not found:
        raise ValueError("it names no host")
    # If a plain name occurs twice, the file has one line per slot, as batch systems write it.
    counted = any(count > 1 for count in lines.values())
    return tuple(
        replace(host, slots=lines[host.name]) if counted and host.name in lines else host for host in found.values()
    )


def _line(content: str) -> Host:
    first, *words = re.sub(r"\s*=\s*", "=", content).split()
    if "=" in first:
        raise ValueError(f"“{first}” is not a host")
    name, given = _split(first)
    slots = None if given is None else _slots(name, given)
    options: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in ("slots", "max_slots"):
            raise ValueError(f"“{word}” is unknown; expected slots=N or max_slots=N")
        if key in options or (key == "slots" and slots is not None):
            raise ValueError(
                f"“{word}” gives the slots of {name} twice" if key == "slots" else f"“{word}” is given twice"
            )
        options[key] = _slots(name, value)
    slots = options.get("slots", slots)
    if "max_slots" in options and options["max_slots"] < (slots or 1):
        raise ValueError(f"{slots} slots are more than max_slots={options['max_slots']}")
    return Host(name, slots)


def _split(entry: str) -> tuple[str, str | None]:
    """Split `user@[fd00::1]:8` into user@fd00::1 and 8. None: there is no colon."""
    user, at, rest = entry.rpartition("@")
    if at and not _NAME.fullmatch(user):
        raise ValueError(f"“{entry}” has no proper user before the @")
    if rest.startswith("["):
        address, closed, rest = rest[1:].partition("]")
        host = _ipv6(entry, address if closed else "")
        colon, given = rest[:1], rest[1:]
        if colon not in ("", ":"):
            raise ValueError(f"“{entry}” has {rest!r} behind its address")
    else:
        host, colon, given = rest.partition(":")
        if ":" in given:
            raise ValueError(f"“{entry}” has more than one colon (an IPv6 address goes in brackets: [fd00::1]:8)")
        if not _NAME.fullmatch(host):
            raise ValueError(f"“{host or entry}” is not a host name")
    if colon and not given:
        raise ValueError(f"“{entry}” has nothing behind its colon")
    return f"{user}{at}{host}", given if colon else None


def _ipv6(entry: str, address: str) -> str:
    try:
        if "%" in address:
            raise ValueError
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        raise ValueError(f"“{entry}” has no IPv6 address in its brackets") from None


def _host(name: str, given: list[str]) -> Host:
    if not given:
        return Host(name)
    if len(given) == 1 and "-" not in given[0]:
        return Host(name, slots=_slots(name, given[0]))
    seen: set[int] = set()
    for part in given:
        span = _SPAN.fullmatch(part)
        if span is None:
            raise ValueError(f"“{part}” behind {name} is not a number of slots, a device or a range of devices")
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise ValueError(f"the range {part} of {name} runs backwards")
        if last >= MAX_WORKERS:
            raise ValueError(f"“{part}” behind {name} names device {last}; the highest is {MAX_WORKERS - 1}")
        devices = set(range(first, last + 1))
        if seen & devices:
            raise ValueError(f"it names device {min(seen & devices)} of {name} twice")
        seen |= devices
    return Host(name, devices=",".join(given))


def _slots(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"“{text}” is not a number of slots for {name}")
    if int(text) < 1:
        raise ValueError(f"{name} takes at least 1 slot, not {text} (device 0 alone is {name}:0-0 in --hosts)")
    if int(text) > MAX_WORKERS:
        raise ValueError(f"{name} takes at most {MAX_WORKERS} slots, not {text}")
    return int(text)


def _bare(name: str) -> str:
    """Return the name without the user, in lower case as DNS compares names."""
    return name.rpartition("@")[2].lower()
