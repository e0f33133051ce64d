"""The run itself ends, and the same command continues from the checkpoints: Ctrl-C, SIGTERM, SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.chaos import oracle
from tests.chaos.campaign import Round, RoundResult
from tests.kit.cli import Handle, alive, descendants, start, until

PAUSE = 0.02
EVERY = 4  # steps between checkpoints


def words(this: Round) -> tuple[str, ...]:
    kept = ("--checkpoints", str(this.folder / "kept"), "--checkpoint-every", str(EVERY))
    return ("run", "-g", "2", "--cpu", *kept, oracle.SCRIPT, str(this.folder), "[]")


def ended(end: Callable[[Round, Handle], float], codes: set[int], *, early: bool) -> Callable[[Round], RoundResult]:
    """Run a training that is ended several times by `end`, which returns the time, and finally runs to its end.

    `early`: it may happen before the first step, too, and the seconds to the end of the run count. Otherwise those to
    the first new committed step count.
    """

    def run_round(this: Round) -> RoundResult:
        at: list[float] = []  # when it was ended, and when it was over
        over: list[float] = []
        env = {**this.env, "PAUSE": str(PAUSE)}
        for _ in range(this.faults):
            # Beyond the last checkpoint, so that another one is written.
            aim = committed(this) + EVERY + this.chance.randrange(1, 3 * EVERY)
            with start(*words(this), env=env) as job:
                if not early:
                    reach(this, aim)
                at.append(end(this, job))
                code = job.wait(oracle.LONG / 4)
                over.append(time.time())
                assert code in codes or (early and _python_only(code, job.both)), f"exit code {code}\n{job.both}"
        aim = committed(this) + 1
        with start(*words(this), env=env) as job:
            reach(this, aim)
            (this.folder / "end").touch()
            assert job.wait(oracle.LONG) == 0, job.both
        oracle.check(this.folder, 2)
        seconds = [0.0] * this.faults if early else oracle.delays(this.folder, [(end, True) for end in over], 2)
        seconds = [took + end - begin for took, begin, end in zip(seconds, at, over, strict=True)]
        return RoundResult(this.faults, this.faults, seconds)

    return run_round


def _python_only(code: int, text: str) -> bool:
    """Return whether Ctrl-C came while Python itself was starting: it ends like this, before any line of phalanx."""
    return code in (1, -signal.SIGINT) and "phalanx: " not in text and "/phalanx/cli/" not in text


def reach(this: Round, step: int) -> None:
    until(lambda: committed(this) >= step, oracle.LONG / 4, f"step {step}")


def committed(this: Round) -> int:
    """Return the last step that any rank has committed."""
    return max((commit.step for commit in oracle.read(this.folder)[1]), default=0)


def interrupt(this: Round, job: Handle) -> float:
    """Press Ctrl-C, which every foreground process of the terminal gets; sometimes twice."""
    time.sleep(this.chance.uniform(0.0, 2.5))  # the random moment is the point
    at = time.time()
    for _ in range(this.chance.choice((1, 1, 1, 2))):
        os.killpg(job.pid, signal.SIGINT)
    return at


def terminate(_: Round, job: Handle) -> float:
    at = time.time()
    job.signal(signal.SIGTERM)
    return at


def kill(_: Round, job: Handle) -> float:
    """Send SIGKILL to the agent: its ranks end with it."""
    family = descendants(job.pid)
    at = time.time()
    job.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, family)), oracle.LONG / 4, "the ranks to end with their agent")
    return at
