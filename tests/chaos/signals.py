"""Signals at random times, sent by `phalanx chaos`: to ranks, to the store and to the fork server."""

from __future__ import annotations

import re
from collections.abc import Callable

from phalanx.contract import events
from tests.chaos import oracle
from tests.chaos.campaign import Round, RoundResult
from tests.kit.cli import start

SILENT = ("--worker-timeout", "4s")  # longer than a healthy rank waits for a core on a loaded machine
_DONE = re.compile(r"chaos: no more faults, (\d+) of (\d+) recovered")


def injected(err: str) -> list[tuple[float, bool]]:
    """Return when `phalanx chaos` has injected each fault, and whether it hit a rank: a group survives the others."""
    notes = [event for event in oracle.happened(err) if isinstance(event, events.NoteEvent)]
    return [(note.time, " to rank " in note.text) for note in notes if note.text.startswith("chaos: fault ")]


def sent(
    *kinds: str, options: tuple[str, ...] = (), ranks: tuple[int, ...] = (2, 2, 3)
) -> Callable[[Round], RoundResult]:
    """Return a kind in which `phalanx chaos` injects these faults, at random times."""

    def run_round(this: Round) -> RoundResult:
        count = this.chance.choice(ranks)
        seed = this.chance.randrange(1 << 16)
        faults = ("--kill-every", "0.3s", "--seed", str(seed), "--faults", ",".join(kinds), "--times", str(this.faults))
        words = ("-g", str(count), "--cpu", *options, oracle.SCRIPT, str(this.folder), "[]")
        with start("chaos", *faults, *words, env={**this.env, "PAUSE": "0.02"}) as job:
            (done,) = job.wait_for(_DONE, timeout=oracle.LONG)
            (this.folder / "end").touch()
            assert job.wait(oracle.LONG) == 0, job.both
        assert f"seed {seed}: all recovered; the run ended with exit code 0" in job.err, job.both
        oracle.check(this.folder, count)
        times = injected(job.err)
        assert len(times) == int(done[2]) == this.faults, job.both
        seconds = oracle.delays(this.folder, times, count)
        return RoundResult(this.faults, int(done[1]), seconds, oracle.slow(job.err, (at for at, _ in times), seconds))

    return run_round
