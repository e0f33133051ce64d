"""What is the cost of restricting the store to ranks of the run?

The same with and without the gate in front of the store, in turn: a run whose ranks form their first group (`--no-auth`
opens the gate), and clients that set and get values. torch's own server runs in both cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.common import launchers, output, processes, ratios
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import machine_info
from benchmarks.common.options import positive_numbers
from benchmarks.common.paths import script
from benchmarks.common.targets import Target, any_missed
from phalanx.errors import OptionError
from phalanx.forkserver import linux

LIMIT, TARGET_RANKS = 1.05, 64
_STORE = os.path.join(os.path.dirname(linux.__file__), "store")
_TIMEOUT = 300.0  # seconds for one run
_KINDS = ("without", "with")
_GROUP, _FORMED = "from the command to the first all_reduce", "of that, after the last rank has called init"
_GATE = "from the command, if only the last part differed"


@dataclass(frozen=True)
class GateSample:
    """One measurement with or without the gate. `value` is None where it failed."""

    what: str
    unit: str
    gate: bool
    round: int
    value: float | None
    failure: str = ""


@dataclass(frozen=True)
class GateRow:
    """All rounds of one measurement: medians, and the median of the ratios of the rounds."""

    what: str
    unit: str
    rounds: int
    without: float | None
    with_gate: float | None
    ratio: float | None
    lowest: float | None
    highest: float | None


def rows(samples: Sequence[GateSample]) -> list[GateRow]:
    """Return one row per measurement. A round counts if it succeeded with and without the gate."""
    found = []
    for what, unit in dict.fromkeys((sample.what, sample.unit) for sample in samples):
        own = [sample for sample in samples if sample.what == what and sample.value is not None]
        values = {
            gate: {one.round: one.value for one in own if one.gate is gate and one.value} for gate in (False, True)
        }
        both = sorted(values[False].keys() & values[True].keys())
        quotients = [values[True][number] / values[False][number] for number in both]
        found.append(
            GateRow(
                what,
                unit,
                len(both),
                ratios.median([values[False][number] for number in both]),
                ratios.median([values[True][number] for number in both]),
                ratios.median(quotients),
                min(quotients, default=None),
                max(quotients, default=None),
            )
        )
    return found


def with_gate_only(samples: Sequence[GateSample]) -> list[GateSample]:
    """Return how long each run would have taken from the command on, if only its last part differed."""
    values = {(one.what, one.gate, one.round): one.value for one in samples}
    made = []
    for (what, gate, number), value in values.items():
        before, after = values.get((_GROUP, False, number)), values.get((_FORMED, False, number))
        if what == _FORMED and value is not None and before is not None and after is not None:
            made.append(GateSample(_GATE, "s", gate, number, round(before - after + value, 3)))
    return made


def target(found: Sequence[GateRow], ranks: int) -> Target:
    """Judge the first group, from the command on.

    Without a token there is no TLS either, whose import takes longer than the gate: so only the last part is compared.
    """
    what = f"the first group of {TARGET_RANKS} ranks at most {LIMIT - 1:.0%} slower, from the command on"
    row = next((row for row in found if row.what == _GATE), None)
    if ranks != TARGET_RANKS or row is None or row.ratio is None:
        return Target(what, "not measured", None)
    return Target(what, f"ratio {row.ratio:.2f} ({row.lowest:.2f}..{row.highest:.2f})", row.ratio <= LIMIT)


@dataclass(frozen=True)
class _Turn:
    """One round, with or without the gate."""

    gate: bool
    round: int
    environ: Mapping[str, str]
    folder: str

    def sample(self, what: str, unit: str, value: float | None, failure: str = "") -> GateSample:
        return GateSample(what, unit, self.gate, self.round, value, failure)


def first_group(turn: _Turn, ranks: int) -> list[GateSample]:
    """Start a run of one node that others could join, and wait for its first all_reduce."""
    stamps = os.path.join(turn.folder, "stamps")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(stamps)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = LAUNCHERS["phalanx"].command(ranks, script("first_group.py"))
    command[-1:-1] = [*where, *([] if turn.gate else ["--no-auth"])]
    start = time.time()
    failure = processes.run_logged(command, {**turn.environ, "BENCH_STAMPS": stamps}, turn.folder, _TIMEOUT)
    lines = []
    with contextlib.suppress(FileNotFoundError), open(stamps) as file:
        lines = [line.split() for line in file]
    if not failure and (len(lines) != ranks or any(int(line[2]) != ranks for line in lines)):
        failure = f"{len(lines)} of {ranks} ranks reached the first all_reduce"
    if failure:
        return [turn.sample(_GROUP, "s", None, failure)]
    called, reached = max(float(line[0]) for line in lines), max(float(line[1]) for line in lines)
    return [
        turn.sample(_GROUP, "s", round(reached - start, 3)),
        turn.sample(_FORMED, "s", round(reached - called, 3)),
    ]


@dataclass
class _Store:
    """A store process, started like by `phalanx run --fresh`."""

    port: int
    process: subprocess.Popen[bytes]
    link: socket.socket

    def drain(self) -> None:
        """Read its heartbeats."""
        with contextlib.suppress(BlockingIOError):
            while self.link.recv(4096):
                pass


@contextlib.contextmanager
def _hosted(gate: bool, environ: Mapping[str, str]) -> Iterator[_Store]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = json.dumps({"address": "127.0.0.1", "port": listener.getsockname()[1], "gate": gate})
    command = [sys.executable, _STORE, str(listener.fileno()), str(theirs.fileno()), order]
    with ours, theirs, listener:
        process = subprocess.Popen(command, env=environ, pass_fds=(listener.fileno(), theirs.fileno()))
        try:
            ours.settimeout(_TIMEOUT)
            ours.recv(4096)  # it answers
            ours.setblocking(False)
            yield _Store(listener.getsockname()[1], process, ours)
        finally:
            process.kill()
            process.wait()


def round_trips(turn: _Turn, store: _Store, clients: int, seconds: float) -> list[GateSample]:
    """Count the operations of clients that set and get values, and the CPU time of the store."""
    count = f"{clients} client{'s' * (clients > 1)}"
    rate, cpu = f"round trips, {count}", f"CPU time of the store for one, {count}"
    store.drain()
    before = processes.cpu_seconds(store.process.pid)
    words = [sys.executable, script("round_trips.py"), str(store.port), str(clients), str(seconds)]
    done = subprocess.run(words, env=turn.environ, stdout=subprocess.PIPE, timeout=_TIMEOUT, check=False)
    if done.returncode or int(done.stdout) <= 0:
        return [turn.sample(rate, "per s", None, f"exit code {done.returncode}")]
    trips, used = int(done.stdout), processes.cpu_seconds(store.process.pid) - before
    return [
        turn.sample(rate, "per s", round(trips / seconds, 1)),
        turn.sample(cpu, "µs", round(used / trips * 1e6, 1)),
    ]


def measure(
    ranks: int, clients: Sequence[int], seconds: float, repeat: int, inherited: Mapping[str, str]
) -> list[GateSample]:
    """Run all rounds, with and without the gate in turn."""
    samples: list[GateSample] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        environ = launchers.environment(LAUNCHERS["phalanx"], ranks, inherited, folder)
        stores = {gate: stack.enter_context(_hosted(gate, environ)) for gate in (False, True)}
        for number in range(repeat):
            for kind in ratios.rotated(_KINDS, number):
                turn = _Turn(kind == "with", number, environ, folder)
                made = first_group(turn, ranks)
                for each in clients:
                    made += round_trips(turn, stores[turn.gate], each, seconds)
                for one in made:
                    text = one.failure or f"{one.value:g} {one.unit}"
                    output.progress(f"round {number + 1} of {repeat}", f"{kind:<9}{one.what:<45}{text}")
                samples += made
    return samples


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench store` and return its exit code."""
    options = _parser().parse_args(argv)
    if options.ranks < 1 or options.repeat < 1 or options.seconds <= 0:
        raise OptionError("--ranks and --repeat must be at least 1, --seconds positive", fix="--ranks 64 --repeat 5")
    clients = positive_numbers("--clients", options.clients, "1,4")
    machine = machine_info()
    samples = measure(options.ranks, clients, options.seconds, options.repeat, inherited)
    found = rows([*samples, *with_gate_only(samples)])
    judged = target(found, options.ranks)
    console = output.make_console()
    title = f"the gate of the store, {options.ranks} ranks; load average {machine.load_before[0]:.1f} before"
    table = output.make_table(title, ["medians"], ["without", "with", "ratio", "of rounds"])
    for row in found:
        values = [f"{value:.4g} {row.unit}" if value is not None else "-" for value in (row.without, row.with_gate)]
        spread = f"{row.lowest:.2f}..{row.highest:.2f}" if row.ratio is not None else "-"
        table.add_row(row.what, *values, f"{row.ratio:.2f}" if row.ratio is not None else "-", spread)
    console.print(table)
    output.print_targets(console, [judged])
    results = {"samples": [asdict(one) for one in samples], "rows": [asdict(row) for row in found]}
    output.write_json(options.json, "store", machine, {**results, "target": asdict(judged)})
    return 1 if any(sample.failure for sample in samples) or any_missed([judged]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench store",
        description="The first group of a run, and round trips to the store, with and without the gate that admits "
        "only ranks of the run.",
    )
    parser.add_argument("--ranks", type=int, default=64, metavar="N", help="number of ranks of the run (64)")
    parser.add_argument("--clients", default="1,4", metavar="N,M", help="numbers of clients (1,4)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of round trips per measurement (2)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (5)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all results to FILE")
    return parser
