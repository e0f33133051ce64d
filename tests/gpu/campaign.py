"""Many seeded kills on real NCCL ranks: all are recovered, and the end is to the bit that of an undisturbed run.

python tests/gpu/campaign.py [NAME …]      names are those of CAMPAIGNS; all of them if none is named

Several runs of a campaign go on at the same time, on the same devices: what counts here is not the time they take.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from survive import Outcome, again, exact, run

RANKS = 4
SAMPLES = 8
LIMIT = 540.0


@dataclass(frozen=True)
class Campaign:
    runs: int
    kills: int  # of each run
    steps: int
    every: str = "3s"
    told: dict[str, Any] = field(default_factory=dict)

    def seeds(self) -> range:
        return range(1, self.runs + 1)


CAMPAIGNS = {
    "ddp": Campaign(4, 50, 2500, told={"pause": 0.03}),
    "hsdp": Campaign(2, 50, 2000, told={"strategy": "hsdp", "pause": 0.02}),
    "fsdp": Campaign(1, 50, 2000, told={"strategy": "fsdp", "pause": 0.02}),
    "compile": Campaign(1, 50, 2500, every="5s", told={"compile": True, "pause": 0.03}),
}


def undisturbed(campaign: Campaign) -> Outcome:
    return run(RANKS, limit=LIMIT, steps=campaign.steps, **{**campaign.told, "pause": 0.0})


def disturbed(campaign: Campaign, seed: int) -> Outcome:
    options = ["--times", str(campaign.kills), "--kill-every", campaign.every, "--seed", str(seed)]
    return run(RANKS, options, limit=LIMIT, command="chaos", steps=campaign.steps, **campaign.told)


def judged(name: str, campaign: Campaign, seed: int, found: Outcome, digest: str) -> bool:
    kills = re.search(r"chaos: (\d+) faults? .*", found.text)
    struck = int(kills[1]) if kills else 0
    facts = {
        "exit code 0": found.code == 0,
        "all recovered": "all recovered" in found.text,
        "same end": bool(digest) and found.end.get("digest") == digest,
        "samples exact": exact(found.steps(), campaign.steps, SAMPLES),
        f"{campaign.kills} kills": struck == campaign.kills,
        "nothing left": not [pid for pid in found.pids if Path(f"/proc/{pid}").exists()],
    }
    good = all(facts.values())
    wrong = ", ".join(fact for fact, holds in facts.items() if not holds)
    print(
        f"{'ok    ' if good else 'FAILED'} {name}, seed {seed}: {len(found.pids)} processes, "
        f"{again(found.text)} steps done again; {kills[0] if kills else 'no kill'}{'; not: ' + wrong if wrong else ''}",
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


def main(names: list[str]) -> int:
    failed, began = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max_workers=32) as pool:
        chosen = {name: CAMPAIGNS[name] for name in names or CAMPAIGNS}
        plain = {name: pool.submit(undisturbed, campaign) for name, campaign in chosen.items()}
        runs = {
            (name, seed): pool.submit(disturbed, campaign, seed)
            for name, campaign in chosen.items()
            for seed in campaign.seeds()
        }
        for (name, seed), future in runs.items():
            quiet = plain[name].result()
            if quiet.code != 0:
                print(f"undisturbed {name}: code {quiet.code}\n{quiet.text[-3000:]}", flush=True)
            failed += not judged(name, chosen[name], seed, future.result(), quiet.end.get("digest", ""))
    left = used()
    print(f"{len(runs)} runs, {failed} failed, {left} processes left on the GPU, {time.monotonic() - began:.0f} s")
    return failed + left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
