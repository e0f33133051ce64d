"""`python -m tests.chaos [--seed S] [--faults 1000] [--kind NAME] [--round N]`: the campaign, a part, or one round."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile

from tests.chaos import campaign
from tests.chaos.kinds import KINDS
from tests.kit import cli, ports, state

ALL = sum(kind.faults for kind in KINDS.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all faults (default: 1)")
    parser.add_argument("--faults", type=int, help=f"number of faults (default: {ALL:,}, or all of the kind)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; may be repeated")
    parser.add_argument("--round", type=int, help="only this round of the kind; --faults is the number of its faults")
    options = parser.parse_args()
    if options.round is not None and len(options.kind or ()) != 1:
        parser.error("--round needs one --kind")
    chosen = [KINDS[name] for name in options.kind or KINDS]
    share = options.faults / sum(kind.faults for kind in chosen) if options.faults else 1.0
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        _enter(folder)
        try:
            outcomes = []
            for kind in chosen:
                if kind.needs_root and os.geteuid() != 0:
                    print(f"{kind.name}: not run, it needs root", flush=True)
                    continue
                rounds = list(enumerate(kind.rounds(share)))
                if options.round is not None:
                    rounds = [(options.round, options.faults or kind.per_round)]
                outcomes.append(campaign.run(kind, options.seed, rounds))
                print(outcomes[-1], flush=True)
        finally:
            cli.shut_down()
        return 0 if campaign.report(outcomes) else 1


def _enter(folder: str) -> None:
    """Give commands their own folders, and make this process the parent of their leftovers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    state.adopt_orphans()
    ports.claim()
    for name in [
        name for name in os.environ if name.startswith(("PHALANX_", "PET_", "SLURM_", "OMPI_", "TORCHELASTIC_"))
    ]:
        del os.environ[name]
    os.makedirs(f"{folder}/tmp")
    os.environ.update(TMPDIR=f"{folder}/tmp", PHALANX_HOME=f"{folder}/home", OMP_NUM_THREADS="1")
    tempfile.tempdir = f"{folder}/tmp"


if __name__ == "__main__":
    sys.exit(main())
