"""How many nodes can one leader manage? `phalanx bench scale`.

The leader is real: `phalanx run` as node 0, with its own ranks, its run folder and its page. All other nodes are
simulated in a few processes, over real TLS connections of this machine: they send telemetry every second and print
1,000 lines per second in total. One of them dies every 10 s. In the end all ranks wait for one, which is a stall.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.common import output
from benchmarks.common.machine import machine_info
from benchmarks.common.options import positive_numbers
from benchmarks.common.targets import Target, any_missed
from benchmarks.scale.measurement import ScaleSample, measure
from phalanx.contract.ranks.placement import MAX_NODES, MAX_WORKERS
from phalanx.errors import OptionError

CORES, MEMORY, REGROUP = 1.0, 1 << 30, 3.0  # targets: CPU cores, bytes, seconds
GROWTH = 32 << 20  # bytes of growth between quarters of the time that count as noise
DESCRIPTORS = 16  # the same for open descriptors
_LATE = 1.0  # seconds: a simulator that is later than this was starved


def targets(sample: ScaleSample) -> list[Target]:
    """Judge all targets of one measurement."""
    of = f"{sample.nodes:,} nodes"
    what = (
        f"{of}: leader below {CORES:.0f} core in steady state",
        f"{of}: leader below {MEMORY >> 30} GiB in steady state",
        f"{of}: new ranks on all nodes within {REGROUP:.0f} s of a loss",
        f"{of}: memory and open files of the leader do not grow",
    )
    if sample.failure or not sample.seconds:
        return [Target(each, sample.failure or "not measured", None) for each in what]
    cores = f"{sample.steady_cores:.2f} cores (median; {sample.mean_cores:.2f} on average, with all losses)"
    worst = max(sample.regroups, default=0.0)
    losses = f"{worst:.2f} s (worst of {len(sample.regroups)})" if sample.regroups else "no node has died"
    growth, files = sample.growth, sample.descriptor_growth
    found = [
        Target(what[0], cores, sample.steady_cores < CORES),
        Target(what[1], f"{sample.peak_memory >> 20} MiB", sample.peak_memory < MEMORY),
        Target(what[2], losses, worst <= REGROUP if sample.regroups else None),
    ]
    if growth is None or files is None:
        return [*found, Target(what[3], "too short: --seconds 600", None)]
    grown = f"{growth / 2**20:+.1f} MiB and {files:+d} descriptors"
    text = f"{grown} from the second to the last quarter of {sample.seconds[-1].at:.0f} s"
    return [*found, Target(what[3], text, growth < GROWTH and files < DESCRIPTORS)]


def remarks(sample: ScaleSample) -> list[str]:
    """Return reasons to doubt a measurement."""
    found = []
    if sample.late > _LATE:
        found.append(
            f"{sample.nodes:,} nodes: the simulator was up to {sample.late:.1f} s late, because it has the same cores"
        )
    if sample.lost:
        found.append(f"{sample.nodes:,} nodes: the leader dropped {len(sample.lost)} nodes; {sample.lost[0]}")
    return found


def _show(samples: Sequence[ScaleSample]) -> None:
    console = output.make_console()
    columns = (
        *("nodes", "ranks", "join s", "cores", "memory", "regroup s"),
        *("event to page s", "verdict s", "run folder", "simulator"),
    )
    table = output.make_table("One leader: medians, and the worst in brackets", (), columns)
    for one in samples:
        if one.failure:
            table.add_row(f"{one.nodes:,}", f"{one.ranks:,}", *["-"] * (len(columns) - 2))
            continue
        pages = [seconds for kind in ("fault", "recovered") for seconds in one.pages.get(kind, ())]
        table.add_row(
            f"{one.nodes:,}",
            f"{one.ranks:,}",
            f"{one.join:.1f}",
            f"{one.steady_cores:.2f}",
            f"{one.peak_memory >> 20} MiB",
            _spread(one.regroups),
            _spread(pages),
            f"{one.verdict:.1f}",
            f"{one.folder >> 20} MiB",
            f"{one.simulator_cores:.2f} cores",
        )
    console.print(table)
    for one in samples:
        output.print_targets(console, targets(one))
        for text in remarks(one):
            output.print_line(console, "remark", text)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "-"


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench scale` and return its exit code."""
    options = _parser().parse_args(argv)
    sizes = positive_numbers("--nodes", options.nodes, "64,1024")
    if sizes[0] < 2 or sizes[-1] > MAX_NODES:
        raise OptionError(f"--nodes {options.nodes}: between 2 and {MAX_NODES} are possible", fix="--nodes 64,1024")
    if not 1 <= options.ranks_per_node <= MAX_WORKERS:
        raise OptionError(
            f"--ranks-per-node {options.ranks_per_node}: between 1 and {MAX_WORKERS} are possible",
            fix="--ranks-per-node 8",
        )
    if options.seconds < 2:
        raise OptionError(f"--seconds {options.seconds:g}: at least 2 are needed", fix="--seconds 60")
    before = machine_info()
    samples = []
    for nodes in sizes:

        def note(text: str, title: str = f"{nodes} nodes") -> None:
            output.progress(title, text)

        samples.append(measure(nodes, options.ranks_per_node, options.seconds, inherited, note))
        if samples[-1].failure:
            note(f"failed: {samples[-1].failure}")
    judged = [target for sample in samples for target in targets(sample)]
    results = {
        "settings": {"nodes": sizes, "ranks_per_node": options.ranks_per_node, "seconds": options.seconds},
        "samples": [{**asdict(one), "cores": one.steady_cores, "mean_cores": one.mean_cores} for one in samples],
        "targets": [asdict(target) for target in judged],
    }
    output.write_json(options.json, "scale", before, results)
    sys.stdout.flush()
    _show(samples)
    return 1 if any(sample.failure for sample in samples) or any_missed(judged) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench scale",
        description="What a run of many nodes costs its leader: CPU, memory, the time until all nodes have their new "
        "ranks after one has died, and until an event is on the page. The leader is real; the other nodes are "
        "simulated on this machine, so that they share its cores.",
    )
    parser.add_argument("--nodes", default="64,1024,4096", metavar="N,N", help="numbers of nodes (64,1024,4096)")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="ranks per node (8)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="seconds of work per size (60)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser
