"""Many seeded kills on real NCCL ranks: all are recovered, and the result is bitwise equal to one without kills.

python tests/gpu/campaign.py [--ranks N] [--kills N] [--seeds N,N] [--jobs N] [NAME …]     names are those of CAMPAIGNS
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from survive import Outcome, accounted, again, run

LIMIT = 540.0
EVERY = "1s"


@dataclass(frozen=True)
class Campaign:
    seeds: tuple[int, ...]
    kills: int  # per seed
    steps: int = 30  # per kill: enough that the last kill comes before the end
    settings: dict[str, Any] = field(default_factory=dict)


CAMPAIGNS = {
    "ddp": Campaign((1, 2, 3, 4), 50, settings={"pause": 0.03}),
    "hsdp": Campaign((1, 2), 50, settings={"strategy": "hsdp", "pause": 0.02}),
    "fsdp": Campaign((1,), 50, settings={"strategy": "fsdp", "pause": 0.02}),
    "compile": Campaign((1,), 50, settings={"compile": True, "pause": 0.03}),
}


def one_run(name: str, seed: int | None, asked: argparse.Namespace) -> Outcome:
    """Run a campaign with a seed; None: without kills."""
    campaign, kills = CAMPAIGNS[name], kills_of(name, asked)
    settings = {**campaign.settings, "steps": kills * campaign.steps, "samples": 2 * asked.ranks, "limit": LIMIT}
    if seed is None:
        return run(asked.ranks, **{**settings, "pause": 0.0})
    options = ["--times", str(kills), "--kill-every", EVERY, "--seed", str(seed)]
    return run(asked.ranks, options, command="chaos", **settings)


def kills_of(name: str, asked: argparse.Namespace) -> int:
    return int(asked.kills or CAMPAIGNS[name].kills)


def judged(name: str, seed: int, found: Outcome, asked: argparse.Namespace, digest: str) -> bool:
    kills = kills_of(name, asked)
    done = re.search(r"chaos: (\d+) faults? .*", found.text)
    facts = {
        "exit code 0": found.code == 0,
        "all recovered": "all recovered" in found.text,
        "same end": bool(digest) and found.end.get("digest") == digest,
        "samples exact": accounted(found, kills * CAMPAIGNS[name].steps, 2 * asked.ranks),
        f"{kills} kills": bool(done) and int(done[1]) == kills,
        "no step done again": name == "fsdp" or not again(found.text),
        "survivors stayed": "cannot leave" not in found.text and len(found.pids) <= asked.ranks + kills,
        "nothing left": not [pid for pid in found.pids if Path(f"/proc/{pid}").exists()],
    }
    good = all(facts.values())
    wrong = ", ".join(fact for fact, holds in facts.items() if not holds)
    print(
        f"{'ok    ' if good else 'FAILED'} {name}, seed {seed}: {len(found.pids)} processes, "
        f"{again(found.text)} steps done again; growth per recovery {found.growth()}; "
        f"{done[0] if done else 'no kill'}{'; not: ' + wrong if wrong else ''}",
        flush=True,
    )
    if not good:
        print(found.text[-4000:], flush=True)
    if out := os.environ.get("OUT"):
        (Path(out) / f"campaign-{name}-{seed}.txt").write_text(found.text)
        if not good:  # with stacks and evidence, if it has stalled
            shutil.make_archive(f"{out}/campaign-{name}-{seed}", "gztar", found.folder / "home" / "runs")
    return good


def used() -> int:
    """Return the number of processes that have a context on a GPU."""
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
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    asked = parser.parse_args()
    failed = 0
    quiet: dict[str, Outcome] = {}
    waiting: dict[tuple[str, int], Outcome] = {}  # until the undisturbed run of that name has ended
    with ThreadPoolExecutor(asked.jobs) as pool:
        turns = [(name, seed) for name in asked.names for seed in (None, *(asked.seeds or CAMPAIGNS[name].seeds))]
        futures = {pool.submit(one_run, name, seed, asked): (name, seed) for name, seed in turns}
        for future in as_completed(futures):
            name, seed = futures[future]
            if seed is None:
                quiet[name] = future.result()
                print(f"      {name}, undisturbed: code {quiet[name].code}, {quiet[name].seconds:.0f} s", flush=True)
                if quiet[name].code != 0:
                    print(quiet[name].text[-3000:], flush=True)
            else:
                waiting[name, seed] = future.result()
            for other, number in [key for key in waiting if key[0] in quiet]:
                digest = quiet[other].end.get("digest", "")
                failed += not judged(other, number, waiting.pop((other, number)), asked, digest)
    left = used()
    print(f"{failed} failed, {left} processes left on the GPU")
    return failed + left


if __name__ == "__main__":
    sys.exit(main())
