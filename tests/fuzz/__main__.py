"""`python -m tests.fuzz [--seed S] [--share 0.1] [--target NAME] [--case N]`: the campaign, a part, or one case."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from tests.fuzz import campaign
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all cases (default: 1)")
    parser.add_argument("--share", type=float, default=1.0, help="part of the campaign to run (default: 1, all of it)")
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--case", type=int, help="only this case of the target, and show its traceback")
    options = parser.parse_args()
    if options.case is not None and options.target is None:
        parser.error("--case needs --target")
    chosen = [TARGETS[options.target]] if options.target else list(TARGETS.values())
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.environ["PHALANX_HOME"] = os.path.join(folder, "home")
        os.chdir(folder)
        outcomes = []
        for target in chosen:
            numbers = range(int(target.cases * options.share)) if options.case is None else [options.case]
            outcomes.append(campaign.run(target, options.seed, numbers))
        return 0 if campaign.report(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
