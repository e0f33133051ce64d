"""What does it cost a training to be looked at? Steps in short windows, with an onlooker and without, in turns."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.bench import onlookers
from phalanx.bench.launch import rotated
from phalanx.bench.onlookers import LOOKERS, LostError, Onlooker, Watched
from phalanx.bench.pairs import more
from phalanx.bench.results import Target

LIMIT = 0.01  # of a step
LABELS = {"off": "nobody", "screen": "screen", "page": "page", "again": "nobody, again"}


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    width: int  # of a layer
    batch: int


CASES = {
    case.name: case
    for case in (
        Case("one", 1, 192, 16),  # a rank fewer than most machines have cores: room for who looks
        Case("short", 2, 192, 16),
        Case("long", 2, 1024, 64),
    )
}


@dataclass(frozen=True)
class Pace:
    rounds: int
    seconds: float  # of a window
    settle: float  # before it


@dataclass(frozen=True)
class Window:
    """Some seconds of a training, and who looked meanwhile."""

    case: str
    round: int
    who: str  # of LOOKERS
    step: float  # seconds
    computing: float  # seconds of all ranks' cores, a step
    agent: float  # cores that it kept busy: a second of computing in a second is 1
    onlooker: float
    sent: float  # bytes a second, to the terminal or the browser


@dataclass(frozen=True)
class Cost:
    case: str
    ranks: int
    who: str
    milliseconds: float = 0.0  # a step
    more: float = 0.0  # than while nobody looks: 0.01 is a hundredth
    error: float = 0.0  # what that may be off by, in 19 of 20 runs
    computing: float = 0.0  # the same of the ranks' CPU time
    computing_error: float = 0.0
    agent: float = 0.0  # cores kept busy
    onlooker: float = 0.0
    sent: float = 0.0
    failure: str = ""


@dataclass
class Seen:
    """What was measured of one case."""

    case: Case
    windows: list[Window] = field(default_factory=list)
    opened: float | None = None  # seconds until the run's own page answers for the first time
    failure: str = ""


def measure(case: Case, pace: Pace, inherited: Mapping[str, str]) -> Seen:
    seen = Seen(case)
    try:
        with onlookers.watched(case.ranks, case.width, case.batch, inherited) as run:
            onlookers.look([], pace.settle)
            for number in range(pace.rounds):
                for who in rotated(tuple(LOOKERS), number):
                    step, computing, *shares = _window(run, who, pace)
                    seen.windows.append(Window(case.name, number, who, step, computing, *shares))
            seen.opened = round(run.opened(), 3)
    except LostError as error:
        seen.failure = str(error)
    return seen


def _window(run: Watched, who: str, pace: Pace) -> tuple[float, ...]:
    """As Window has them."""
    lookers: list[Onlooker] = []
    with contextlib.ExitStack() as stack:
        for make in LOOKERS[who]:
            lookers.append(make(run))
            stack.callback(lookers[-1].close)
        onlookers.until_seen(lookers)
        onlookers.look(lookers, pace.settle)  # to start and to draw all for the first time is not what is measured
        before, begin = _spent(run, lookers), run.progress()
        onlookers.look(lookers, pace.seconds)
        after, end = _spent(run, lookers), run.progress()
    run.check()
    steps = end.step - begin.step
    if not steps:
        raise LostError(f"no step in {pace.seconds} s")
    shares = ((new - old) / pace.seconds for old, new in zip(before, after, strict=True))
    return (end.time - begin.time) / steps, (end.cpu - begin.cpu) / steps, *shares


def _spent(run: Watched, lookers: Sequence[Onlooker]) -> tuple[float, float, float]:
    """Until now: CPU seconds of the agent, of who looks, and bytes that were sent."""
    own = sum(onlookers.computed(looker.pid) for looker in lookers)
    return onlookers.computed(run.pid), own, sum(looker.seen for looker in lookers)


def costs(seen: Seen) -> list[Cost]:
    """Each window beside that of the same round in which nobody looked."""
    case, windows, failure = seen.case, seen.windows, seen.failure
    alone = {window.round: window for window in windows if window.who == "off"}
    found = []
    for who in LOOKERS:
        own = [window for window in windows if window.who == who and window.round in alone]
        if not own:
            found.append(Cost(case.name, case.ranks, who, failure=failure or "no window"))
            continue
        middle = [
            statistics.median(numbers)
            for numbers in zip(*((w.step * 1000, w.agent, w.onlooker, w.sent) for w in own), strict=True)
        ]
        numbers = (
            *more([(window.step, alone[window.round].step) for window in own]),
            *more([(window.computing, alone[window.round].computing) for window in own]),
        )
        shares = (round(middle[1], 5), round(middle[2], 5), round(middle[3]))
        found.append(Cost(case.name, case.ranks, who, round(middle[0], 4), *numbers, *shares, failure))
    return found


def targets(found: Sequence[Cost], cores: int) -> list[Target]:
    judged = []
    for cost in found:
        if cost.who not in ("screen", "page"):
            continue
        others = {other.who: other for other in found if other.case == cost.case}
        judged += [target(cost, others.get("again")), computing(cost, others["off"], cores)]
    return judged


def target(cost: Cost, again: Cost | None) -> Target:
    ranks = "1 rank" if cost.ranks == 1 else f"{cost.ranks} ranks"
    what = f"a step of {cost.milliseconds:.2f} ms, {ranks}, {cost.who}: at most {LIMIT:.0%} longer"
    if cost.failure:
        return Target(what, cost.failure, None)
    text = f"{cost.more:+.2%} ± {cost.error:.2%}"
    if again is not None and abs(again.more) > LIMIT:
        text += f". But nobody, again, is {again.more:+.2%}: this machine is too busy to tell"
        return Target(what, text, None)
    if cost.error > LIMIT and cost.more - cost.error <= LIMIT:
        return Target(what, f"{text}. This machine is too busy to tell, or the rounds too few", None)
    return Target(what, text, cost.more <= LIMIT)


def computing(cost: Cost, off: Cost, cores: int) -> Target:
    """What the kernel has counted, which is certain. Where ranks leave no core free, it is what they go without."""
    what = f"the same, {cost.who}: at most {LIMIT:.0%} of the {cores} cores"
    if cost.failure:
        return Target(what, cost.failure, None)
    extra = cost.agent - off.agent
    share = (cost.onlooker + extra) / cores
    text = f"{share:.2%} ({cost.who} {cost.onlooker:.2%} of a core, agent {extra:+.2%})"
    return Target(what, text, share <= LIMIT)


def measured(cases: Sequence[Case], pace: Pace, inherited: Mapping[str, str]) -> list[Seen]:
    found = []
    for case in cases:
        found.append(measure(case, pace, inherited))
        text = f"{pace.rounds} rounds of {len(LOOKERS)} windows of {pace.seconds} s"
        sys.stderr.write(f"{case.name}: {found[-1].failure or text}\n")
    return found
