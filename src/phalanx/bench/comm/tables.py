"""What was measured, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from phalanx.bench.comm import links, promises
from phalanx.bench.comm.cells import Cell, Hello, Results
from phalanx.bench.comm.comparison import Change
from phalanx.bench.comm.traffic import COPY, write_size
from phalanx.bench.report import verdict
from phalanx.bench.results import Target

_WIDTH = 150  # where there is no terminal, or one that cannot show numbers side by side
_LEAST = 100
_MOST = 12  # lines on where a backend is behind another


def show(results: Results, judged: Sequence[Target], changes: Sequence[Change], *, details: bool) -> None:
    console = Console()
    if not sys.stdout.isatty() or console.width < _LEAST:
        console = Console(width=_WIDTH)
    for hello in results.hellos:
        cells = [cell for cell in results.cells if cell.ranks == hello.ranks and cell.operation != COPY]
        if cells:
            alone = details or len(hello.backends) < 2
            _put(console, _each(results, hello, cells) if alone else _beside(results, hello))
            _limit(console, results, hello)
        for backend in hello.backends:
            of = [link for link in results.links if (link.ranks, link.backend) == (hello.ranks, backend)]
            if len(of) > 2 or (of and len(hello.nodes) > 1):
                _put(console, links.table(of))
    if results.steps:
        _put(console, _steps(results))
    if changes:
        _put(console, _changes(changes))
    _words(console, results, judged)


def _put(console: Console, table: Table) -> None:
    """Its title on one line, however narrow it is."""
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


def _title(hello: Hello) -> str:
    nodes = f" on {len(hello.nodes)} nodes" if len(hello.nodes) > 1 else ""
    devices = ", ".join(dict.fromkeys(hello.devices))
    return f"{hello.ranks} rank{'s' if hello.ranks > 1 else ''}{nodes}, {devices}"


def _each(results: Results, hello: Hello, cells: Sequence[Cell]) -> Table:
    """As nccl-tests do it: a line for every cell."""
    left = ("operation", "place", "type", "size", "backend")
    table = _new(_title(hello), left, ("µs", "p50", "p99", "GB/s", "bus GB/s", "of limit", "wrong"))
    for cell in cells:
        names = (cell.operation, cell.place, cell.dtype, write_size(cell.size), cell.backend)
        if not cell.rounds:
            table.add_row(*names, cell.failure[:30], *[""] * 6)
            continue
        times = map(_time, (cell.seconds, cell.p50, cell.p99))
        table.add_row(*names, *times, _speed(cell.algorithm), _speed(cell.bus), _share(results, cell), str(cell.wrong))
    return table


def _beside(results: Results, hello: Hello) -> Table:
    """A line for every operation and size, backends beside each other."""
    first, *rest_ = hello.backends
    others = [name for name in rest_ if name != "regions"]  # which is the same, with tensors elsewhere
    columns = [f"{name} µs" for name in hello.backends] + [f"by {name}" for name in others]
    columns += ["p50", "p99", "bus GB/s", "of limit"]
    title = f"{_title(hello)}. By …: {first} is so many times as fast as that; the last columns are {first}'s too"
    table = _new(title, ("operation", "size"), columns)
    by_key: dict[tuple[object, ...], dict[str, Cell]] = {}
    for cell in results.cells:
        if cell.ranks == hello.ranks and cell.operation != COPY:
            by_key.setdefault(cell.key, {})[cell.backend] = cell
    for cells in by_key.values():
        some = next(iter(cells.values()))
        own = cells.get(first)
        times = [_time(cells[name].seconds) if name in cells and cells[name].rounds else "-" for name in hello.backends]
        ratios = []
        for name in others:
            other = cells.get(name)
            good = own is not None and other is not None and own.rounds and other.rounds
            ratios.append(f"{1 / promises.ratio(own, other)[0]:.2f}x" if good and own and other else "")
        rest = [""] * 4
        if own is not None and own.rounds:
            rest = [_time(own.p50), _time(own.p99), _speed(own.bus), _share(results, own)]
        place = " in place" if some.place == "in" and some.operation.endswith("_tensor") else ""
        kind = "" if some.dtype in ("float32", "uint8") else f" {some.dtype}"
        table.add_row(f"{some.operation}{place}{kind}", write_size(some.size), *times, *ratios, *rest)
    return table


def _limit(console: Console, results: Results, hello: Hello) -> None:
    copies = [cell for cell in results.cells if (cell.ranks, cell.operation) == (hello.ranks, COPY) and cell.rounds]
    if not copies:
        return
    speeds = ", ".join(
        f"{write_size(cell.size)} {_speed(cell.algorithm)} ({_time(cell.seconds)} µs)" for cell in copies
    )
    console.print(f"memory, every rank copying at once, GB/s of each: {speeds}", highlight=False, soft_wrap=True)


def _steps(results: Results) -> Table:
    title = "DDP, 8 × Linear(1024), batch 8: a training step"
    table = _new(title, ("ranks", "backend"), ("ms", "steps/s"))
    for one in results.steps:
        numbers = (f"{one.seconds * 1e3:.2f}", f"{1 / one.seconds:.1f}") if one.rounds else (one.failure[:60], "")
        table.add_row(str(one.ranks), one.backend, *numbers)
    return table


def _changes(changes: Sequence[Change]) -> Table:
    title = "beside the earlier run: time now by time then"
    table = _new(title, ("ranks", "operation", "type", "size", "backend"), ("µs then", "µs now", "ratio", "noise", ""))
    for one in changes:
        cell = one.cell
        style = {"slower": "red", "faster": "green"}.get(one.word, "")
        names = (str(cell.ranks), cell.operation, cell.dtype, write_size(cell.size), cell.backend)
        times = (_time(one.before), _time(cell.seconds), f"{one.ratio:.2f}", f"± {one.noise:.2f}", one.word)
        table.add_row(*names, *times, style=style)
    return table


def _words(console: Console, results: Results, judged: Sequence[Target]) -> None:
    def line(head: str, text: str) -> None:
        console.print(f"{head:<14}{text}", markup=False, highlight=False, soft_wrap=True)

    for target in judged:
        line(verdict(target), f"{target.what}: {target.evidence}")
    behind = promises.laggards(results, "shm", ("gloo", "mpi"))
    for text in behind[:_MOST]:
        line("behind", text)
    if len(behind) > _MOST:
        line("behind", f"and {len(behind) - _MOST} more")
    for one in links.slow(results.links):
        line("slow", one.text(next((hello for hello in results.hellos if hello.ranks == one.link.ranks), None)))
    failures: dict[str, list[str]] = {}
    for cell in results.cells:
        where = f"{cell.operation} {write_size(cell.size)}, {cell.backend}, {cell.ranks} ranks"
        if cell.wrong:
            line("WRONG", f"{where}: {cell.wrong} elements are not what they should be")
        if cell.failure:
            failures.setdefault(cell.failure, []).append(where)
    for failure, (first, *others) in failures.items():
        line("failed", f"{first}{f' and {len(others)} more' if others else ''}: {failure}")
    for note in results.notes:
        line("note", f"{note.ranks} ranks: {note.text}")


def _time(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.1f}" if micro < 1000 else f"{micro:,.0f}"


def _speed(bytes_: float) -> str:
    speed = bytes_ / 1e9
    return f"{speed:.2f}" if speed < 100 else f"{speed:.0f}"


def _share(results: Results, cell: Cell) -> str:
    share = results.share(cell)
    return "" if share is None else f"{share:.0%}"
