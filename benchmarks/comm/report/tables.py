"""The results on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.comm.report.comparison import Change
from benchmarks.comm.report.links import link_table
from benchmarks.comm.report.targets import ratio, slower_cases
from benchmarks.comm.results import CommResults, Measurement, WorldInfo, slow_links
from benchmarks.comm.traffic import COPY, format_size
from benchmarks.common.output import print_line, print_targets
from benchmarks.common.targets import Target

_WIDTH = 150  # without a terminal, or with one of less than _MIN_WIDTH columns
_MIN_WIDTH = 100
_MAX_SLOWER = 12  # lines about operations in which shm is slower than another backend


def show(results: CommResults, judged: Sequence[Target], changes: Sequence[Change], *, details: bool) -> None:
    """Print everything; with `details`, one line per measurement instead of backends side by side."""
    console = Console()
    if not sys.stdout.isatty() or console.width < _MIN_WIDTH:
        console = Console(width=_WIDTH)
    for world in results.worlds:
        measurements = [
            measurement
            for measurement in results.measurements
            if measurement.ranks == world.ranks and measurement.operation != COPY
        ]
        if measurements:
            alone = details or len(world.backends) < 2
            _put(console, _each(results, world, measurements) if alone else _beside(results, world))
            _limit(console, results, world)
        for backend in world.backends:
            of = [link for link in results.links if (link.ranks, link.backend) == (world.ranks, backend)]
            if len(of) > 2 or (of and len(world.nodes) > 1):
                _put(console, link_table(of))
    if results.steps:
        _put(console, _steps(results))
    if changes:
        _put(console, _changes(changes))
    _messages(console, results, judged)


def _put(console: Console, table: Table) -> None:
    """Print a table, with its title on one line."""
    title, table.title = table.title, None
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)


def _new(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _title(world: WorldInfo) -> str:
    nodes = f" on {len(world.nodes)} nodes" if len(world.nodes) > 1 else ""
    devices = ", ".join(dict.fromkeys(world.devices))
    return f"{world.ranks} rank{'s' if world.ranks > 1 else ''}{nodes}, {devices}"


def _each(results: CommResults, world: WorldInfo, measurements: Sequence[Measurement]) -> Table:
    """One line per measurement, as in nccl-tests."""
    left = ("operation", "place", "type", "size", "backend")
    table = _new(_title(world), left, ("µs", "p50", "p99", "GB/s", "bus GB/s", "of limit", "wrong"))
    for measurement in measurements:
        names = (
            measurement.operation,
            measurement.place,
            measurement.dtype,
            format_size(measurement.size),
            measurement.backend,
        )
        if not measurement.rounds:
            table.add_row(*names, measurement.failure[:30], *[""] * 6)
            continue
        times = map(_time, (measurement.seconds, measurement.p50, measurement.p99))
        table.add_row(
            *names,
            *times,
            _speed(measurement.algorithm),
            _speed(measurement.bus),
            _share(results, measurement),
            str(measurement.wrong),
        )
    return table


def _beside(results: CommResults, world: WorldInfo) -> Table:
    """One line per operation and size, with the backends side by side."""
    first, *rest_ = world.backends
    others = [name for name in rest_ if name != "regions"]  # regions is shm with tensors elsewhere
    columns = [f"{name} µs" for name in world.backends] + [f"vs {name}" for name in others]
    columns += ["p50", "p99", "bus GB/s", "of limit"]
    title = f"{_title(world)}. vs: how many times as fast {first} is; the last columns are those of {first}"
    table = _new(title, ("operation", "size"), columns)
    by_key: dict[tuple[object, ...], dict[str, Measurement]] = {}
    for measurement in results.measurements:
        if measurement.ranks == world.ranks and measurement.operation != COPY:
            by_key.setdefault(measurement.key, {})[measurement.backend] = measurement
    for measurements in by_key.values():
        some = next(iter(measurements.values()))
        own = measurements.get(first)
        times = [
            _time(measurements[name].seconds) if name in measurements and measurements[name].rounds else "-"
            for name in world.backends
        ]
        ratios = []
        for name in others:
            other = measurements.get(name)
            good = own is not None and other is not None and own.rounds and other.rounds
            ratios.append(f"{1 / ratio(own, other)[0]:.2f}x" if good and own and other else "")
        rest = [""] * 4
        if own is not None and own.rounds:
            rest = [_time(own.p50), _time(own.p99), _speed(own.bus), _share(results, own)]
        place = " in place" if some.place == "in" and some.operation.endswith("_tensor") else ""
        kind = "" if some.dtype in ("float32", "uint8") else f" {some.dtype}"
        table.add_row(f"{some.operation}{place}{kind}", format_size(some.size), *times, *ratios, *rest)
    return table


def _limit(console: Console, results: CommResults, world: WorldInfo) -> None:
    copies = [
        measurement
        for measurement in results.measurements
        if (measurement.ranks, measurement.operation) == (world.ranks, COPY) and measurement.rounds
    ]
    if not copies:
        return
    speeds = ", ".join(
        f"{format_size(measurement.size)} {_speed(measurement.algorithm)} ({_time(measurement.seconds)} µs)"
        for measurement in copies
    )
    console.print(
        f"memory, every rank copying at the same time, GB/s per rank: {speeds}", highlight=False, soft_wrap=True
    )


def _steps(results: CommResults) -> Table:
    title = "DDP, 8 × Linear(1024), batch 8: a training step"
    table = _new(title, ("ranks", "backend"), ("ms", "steps/s"))
    for one in results.steps:
        numbers = (f"{one.seconds * 1e3:.2f}", f"{1 / one.seconds:.1f}") if one.rounds else (one.failure[:60], "")
        table.add_row(str(one.ranks), one.backend, *numbers)
    return table


def _changes(changes: Sequence[Change]) -> Table:
    title = "compared with the earlier run: time now / time then"
    table = _new(title, ("ranks", "operation", "type", "size", "backend"), ("µs then", "µs now", "ratio", "noise", ""))
    for one in changes:
        measurement = one.measurement
        style = {"slower": "red", "faster": "green"}.get(one.word, "")
        names = (
            str(measurement.ranks),
            measurement.operation,
            measurement.dtype,
            format_size(measurement.size),
            measurement.backend,
        )
        times = (_time(one.before), _time(measurement.seconds), f"{one.ratio:.2f}", f"± {one.noise:.2f}", one.word)
        table.add_row(*names, *times, style=style)
    return table


def _messages(console: Console, results: CommResults, judged: Sequence[Target]) -> None:
    print_targets(console, judged)
    slower = slower_cases(results, "shm", ("gloo", "mpi"))
    for text in slower[:_MAX_SLOWER]:
        print_line(console, "slower", text)
    if len(slower) > _MAX_SLOWER:
        print_line(console, "slower", f"and {len(slower) - _MAX_SLOWER} more")
    for one in slow_links(results.links):
        world = next((world for world in results.worlds if world.ranks == one.link.ranks), None)
        print_line(console, "slow link", one.text(world))
    failures: dict[str, list[str]] = {}
    for measurement in results.measurements:
        where = (
            f"{measurement.operation} {format_size(measurement.size)}, {measurement.backend}, {measurement.ranks} ranks"
        )
        if measurement.wrong:
            print_line(console, "WRONG", f"{where}: {measurement.wrong} wrong elements")
        if measurement.failure:
            failures.setdefault(measurement.failure, []).append(where)
    for failure, (first, *others) in failures.items():
        print_line(console, "failed", f"{first}{f' and {len(others)} more' if others else ''}: {failure}")
    for note in results.notes:
        print_line(console, "note", f"{note.ranks} ranks: {note.text}")


def _time(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.1f}" if micro < 1000 else f"{micro:,.0f}"


def _speed(bytes_: float) -> str:
    speed = bytes_ / 1e9
    return f"{speed:.2f}" if speed < 100 else f"{speed:.0f}"


def _share(results: CommResults, measurement: Measurement) -> str:
    share = results.share(measurement)
    return "" if share is None else f"{share:.0%}"
