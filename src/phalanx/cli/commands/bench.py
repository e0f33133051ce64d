"""`phalanx bench QUESTION`: measure phalanx beside its peers. Each question is a file in the bench room."""

from __future__ import annotations

import importlib
import signal
import sys

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import UsageError

# question -> what it measures; the module of the same name in phalanx.bench has `main(argv, environment) -> exit code`.
QUESTIONS = {
    "launch": "from the command to the first all_reduce and the first training step",
    "exit": "from the last line of the script to the prompt",
    "join": "from the first call until every node is in the leader's roster",
    "comm": "every collective and point to point: latency, bandwidth, beside memory and other backends",
    "step": "a training step beside the same loop in raw PyTorch DDP",
    "checkpoint": "for how long training stands still for a checkpoint",
    "recover": "what a dead rank costs: from the kill to the next committed step, goodput, many in a row",
    "explain": "what it costs to be watched, and how soon who is wrong is named",
    "watch": "what it costs to be looked at, and how soon a page of many ranks shows something",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0 if argv else 2
    if argv[0] not in QUESTIONS:
        raise UsageError(f"phalanx bench does not measure {argv[0]}", fix=f"phalanx bench {next(iter(QUESTIONS))}")
    # As an exception, so that what is being measured is ended with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    module = importlib.import_module(f"phalanx.bench.{argv[0]}")
    code: int = module.main(argv[1:], environment())
    return code


def _help() -> str:
    width = max(map(len, QUESTIONS)) + 2
    questions = "".join(f"  {name:<{width}}{what}\n" for name, what in QUESTIONS.items())
    return f"usage: phalanx bench QUESTION [options]\n\nMeasure phalanx beside its peers, in one run.\n\n{questions}"
