"""Many seeded kills on real NCCL ranks: all are recovered, and the end is to the bit that of an undisturbed run.

python tests/gpu/campaign.py [--ranks N] [--kills N] [--seeds N,N] [NAME …]     names are those of CAMPAIGNS
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from survive import Outcome, accounted, again, run

LIMIT = 540.0
EVERY = "2s"


@dataclass(frozen=True)
class Campaign:
    seeds: tuple[int, ...]
    kills: int  # with each seed
    steps: int = 40  # for each kill: enough that the last one comes before the end
    told: dict[str, Any] = field(default_factory=dict)


CAMPAIGNS = {
    "ddp": Campaign((1, 2, 3, 4), 50, told={"pause": 0.03}),
    "hsdp": Campaign((1, 2), 50, told={"strategy": "hsdp", "pause": 0.02}),
    "fsdp": Campaign((1,), 50, told={"strategy": "fsdp", "pause": 0.02}),
    "compile": Campaign((1,), 50, told={"compile": True, "pause": 0.03}),
}


def judged(name: str, seed: int, found: Outcome, *, kills: int, steps: int, samples: int, digest: str) -> bool:
    told = re.search(r"chaos: (\d+) faults? .*", found.text)
    facts = {
        "exit code 0": found.code == 0,
        "all recovered": "all recovered" in found.text,
        "same end": bool(digest) and found.end.get("digest") == digest,
        "samples exact": accounted(found, steps, samples),
        f"{kills} kills": bool(told) and int(told[1]) == kills,
        "no step done again": name == "fsdp" or not again(found.text),
        "nothing left": not [pid for pid in found.pids if Path(f"/proc/{pid}").exists()],
    }
    good = all(facts.values())
    wrong = ", ".join(fact for fact, holds in facts.items() if not holds)
    print(
        f"{'ok    ' if good else 'FAILED'} {name}, seed {seed}: {len(found.pids)} processes, "
        f"{again(found.text)} steps done again; {told[0] if told else 'no kill'}{'; not: ' + wrong if wrong else ''}",
        flush=True,
    )
    if not good:
        print(found.text[-4000:], flush=True)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / f"campaign-{name}-{seed}.txt").write_text(found.text)
    return good


def used() -> int:
    """Processes that have a context on a GPU."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return len(asked.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*CAMPAIGNS], choices=CAMPAIGNS, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, help="in place of a campaign's own number")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))])
    asked = parser.parse_args()
    failed = 0
    for name in asked.names:
        campaign = CAMPAIGNS[name]
        kills, samples = asked.kills or campaign.kills, 2 * asked.ranks
        steps = kills * campaign.steps
        shared = {"steps": steps, "samples": samples, "limit": LIMIT}
        quiet = run(asked.ranks, **{**campaign.told, **shared, "pause": 0.0})
        print(f"      {name}, undisturbed: code {quiet.code}, {steps} steps in {quiet.seconds:.0f} s", flush=True)
        if quiet.code != 0:
            print(quiet.text[-3000:], flush=True)
        for seed in asked.seeds or campaign.seeds:
            options = ["--times", str(kills), "--kill-every", EVERY, "--seed", str(seed)]
            found = run(asked.ranks, options, command="chaos", **campaign.told, **shared)
            digest = quiet.end.get("digest", "")
            failed += not judged(name, seed, found, kills=kills, steps=steps, samples=samples, digest=digest)
    left = used()
    print(f"{failed} failed, {left} processes left on the GPU")
    return failed + left


if __name__ == "__main__":
    sys.exit(main())
