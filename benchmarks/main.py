"""The entry point of `phalanx bench`: finds the benchmark by name and runs it."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import UsageError


@dataclass(frozen=True)
class Benchmark:
    """A name that `phalanx bench` accepts. `module` has `main(argv, inherited) -> exit code`."""

    module: str
    description: str


BENCHMARKS = {
    "launch": Benchmark("launch.benchmark", "from the command to the first all_reduce and the first training step"),
    "exit": Benchmark("launch.exit", "from the last line of the script to the prompt"),
    "join": Benchmark("join.benchmark", "until every node has joined the leader"),
    "store": Benchmark("store.benchmark", "what it costs that only ranks of the run reach the store"),
    "scale": Benchmark("scale.benchmark", "what thousands of simulated nodes cost a real leader"),
    "comm": Benchmark("comm.benchmark", "latency and bandwidth of every collective and link, for each backend"),
    "step": Benchmark("training.step", "a training step, compared with the same loop in raw PyTorch DDP"),
    "checkpoint": Benchmark("training.checkpoint", "how long a checkpoint blocks training"),
    "recover": Benchmark("recover.benchmark", "from the death of a rank to the next committed step; goodput"),
    "explain": Benchmark("explain.benchmark", "the overhead of the probe, and the time to diagnose a stalled rank"),
    "watch": Benchmark("watch.benchmark", "the overhead of viewers, and how fast the page of many ranks is"),
}


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run the benchmark that `argv` names and return its exit code. `inherited` is the environment of the command."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        raise UsageError(f"there is no benchmark {argv[0]}", fix=f"phalanx bench {next(iter(BENCHMARKS))}")
    # Raise an exception, so that `with` blocks end the processes that are being measured.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[argv[0]].module}")
    code: int = module.main(argv[1:], inherited)
    return code


def _help() -> str:
    width = max(map(len, BENCHMARKS)) + 2
    lines = "".join(f"  {name:<{width}}{one.description}\n" for name, one in BENCHMARKS.items())
    return f"usage: phalanx bench NAME [options]\n\nCompare phalanx with its alternatives on this machine.\n\n{lines}"
