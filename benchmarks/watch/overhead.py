"""What does a viewer cost a training? Steps in short windows, with and without a viewer, in turn."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common.processes import ProcessLostError, cpu_seconds
from benchmarks.common.ratios import relative_difference, rotated
from benchmarks.common.targets import Target
from benchmarks.watch import viewers
from benchmarks.watch.viewers import VIEWERS, ViewerProcess, WatchedRun

LIMIT = 0.01  # of a step
LABELS = {"off": "none", "screen": "screen", "page": "page", "again": "none, again"}


@dataclass(frozen=True)
class WatchCase:
    """A training: its ranks and its model."""

    name: str
    ranks: int
    width: int  # of a layer
    batch: int


CASES = {
    case.name: case
    for case in (
        WatchCase("one", 1, 192, 16),  # leaves a core to the viewer on most machines
        WatchCase("short", 2, 192, 16),
        WatchCase("long", 2, 1024, 64),
    )
}


@dataclass(frozen=True)
class WindowSettings:
    """How many windows, and how long they are."""

    rounds: int
    seconds: float  # per window
    settle: float  # seconds before a window


@dataclass(frozen=True)
class WatchWindow:
    """A period of a training with one viewer, or none."""

    case: str
    round: int
    viewer: str  # a key of VIEWERS
    step: float  # seconds
    computing: float  # CPU seconds of all ranks per step
    agent: float  # CPU time of the agent per second
    viewer_cpu: float  # CPU time of the viewer per second
    sent: float  # bytes per second to the terminal or the browser


@dataclass(frozen=True)
class ViewerCost:
    """What a viewer costs in one case: medians."""

    case: str
    ranks: int
    viewer: str
    milliseconds: float = 0.0  # per step
    more: float = 0.0  # time per step than without a viewer: 0.01 is a hundredth
    error: float = 0.0  # half of its 95 % confidence interval
    computing: float = 0.0  # the same for the CPU time of the ranks
    computing_error: float = 0.0
    agent: float = 0.0  # CPU time per second
    viewer_cpu: float = 0.0
    sent: float = 0.0
    failure: str = ""


@dataclass
class WatchResult:
    """All windows of one case."""

    case: WatchCase
    windows: list[WatchWindow] = field(default_factory=list)
    opened: float | None = None  # seconds until the page of the run answers for the first time
    failure: str = ""


def measure(case: WatchCase, settings: WindowSettings, inherited: Mapping[str, str]) -> WatchResult:
    """Run all windows of one case in one training."""
    result = WatchResult(case)
    try:
        with viewers.watched(case.ranks, case.width, case.batch, inherited) as run:
            viewers.read_for([], settings.settle)
            for number in range(settings.rounds):
                for viewer in rotated(tuple(VIEWERS), number):
                    step, computing, *shares = _window(run, viewer, settings)
                    result.windows.append(WatchWindow(case.name, number, viewer, step, computing, *shares))
            result.opened = round(run.opened(), 3)
    except ProcessLostError as error:
        result.failure = str(error)
    return result


def _window(run: WatchedRun, viewer: str, settings: WindowSettings) -> tuple[float, ...]:
    """Measure one window; return the numbers of a WatchWindow."""
    running: list[ViewerProcess] = []
    with contextlib.ExitStack() as stack:
        for make in VIEWERS[viewer]:
            running.append(make(run))
            stack.callback(running[-1].close)
        viewers.wait_until_shown(running)
        viewers.read_for(running, settings.settle)  # the start of the viewer is not measured
        before, begin = _usage(run, running), run.progress()
        viewers.read_for(running, settings.seconds)
        after, end = _usage(run, running), run.progress()
    run.check()
    steps = end.step - begin.step
    if not steps:
        raise ProcessLostError(f"no step in {settings.seconds} s")
    shares = ((new - old) / settings.seconds for old, new in zip(before, after, strict=True))
    return (end.time - begin.time) / steps, (end.cpu - begin.cpu) / steps, *shares


def _usage(run: WatchedRun, running: Sequence[ViewerProcess]) -> tuple[float, float, float]:
    """Return the CPU seconds of the agent and of the viewers, and the bytes sent so far."""
    own = sum(cpu_seconds(viewer.pid) for viewer in running)
    return cpu_seconds(run.pid), own, sum(viewer.seen for viewer in running)


def costs(result: WatchResult) -> list[ViewerCost]:
    """Compare each window with the one of the same round without a viewer."""
    case, windows, failure = result.case, result.windows, result.failure
    alone = {window.round: window for window in windows if window.viewer == "off"}
    found = []
    for viewer in VIEWERS:
        own = [window for window in windows if window.viewer == viewer and window.round in alone]
        if not own:
            found.append(ViewerCost(case.name, case.ranks, viewer, failure=failure or "no window"))
            continue
        middle = [
            statistics.median(numbers)
            for numbers in zip(*((w.step * 1000, w.agent, w.viewer_cpu, w.sent) for w in own), strict=True)
        ]
        numbers = (
            *relative_difference([(window.step, alone[window.round].step) for window in own]),
            *relative_difference([(window.computing, alone[window.round].computing) for window in own]),
        )
        shares = (round(middle[1], 5), round(middle[2], 5), round(middle[3]))
        found.append(ViewerCost(case.name, case.ranks, viewer, round(middle[0], 4), *numbers, *shares, failure))
    return found


def targets(found: Sequence[ViewerCost], cores: int) -> list[Target]:
    """Judge both targets for each viewer and case."""
    judged = []
    for cost in found:
        if cost.viewer not in ("screen", "page"):
            continue
        others = {other.viewer: other for other in found if other.case == cost.case}
        judged += [target(cost, others.get("again")), cpu_target(cost, others["off"], cores)]
    return judged


def target(cost: ViewerCost, again: ViewerCost | None) -> Target:
    """Judge how much longer a step takes with a viewer. `again` is a second measurement without one."""
    ranks = "1 rank" if cost.ranks == 1 else f"{cost.ranks} ranks"
    what = f"a step of {cost.milliseconds:.2f} ms, {ranks}, {cost.viewer}: at most {LIMIT:.0%} longer"
    if cost.failure:
        return Target(what, cost.failure, None)
    text = f"{cost.more:+.2%} ± {cost.error:.2%}"
    if again is not None and abs(again.more) > LIMIT:
        text += f". Two measurements without a viewer differ by {again.more:+.2%}: too much noise to tell"
        return Target(what, text, None)
    if cost.error > LIMIT and cost.more - cost.error <= LIMIT:
        return Target(what, f"{text}. Too much noise to tell: the machine is busy, or there are too few rounds", None)
    return Target(what, text, cost.more <= LIMIT)


def cpu_target(cost: ViewerCost, off: ViewerCost, cores: int) -> Target:
    """Judge the CPU time that a viewer takes, which the kernel counts exactly."""
    what = f"the same, {cost.viewer}: at most {LIMIT:.0%} of the {cores} cores"
    if cost.failure:
        return Target(what, cost.failure, None)
    extra = cost.agent - off.agent
    share = (cost.viewer_cpu + extra) / cores
    text = f"{share:.2%} ({cost.viewer} {cost.viewer_cpu:.2%} of a core, agent {extra:+.2%})"
    return Target(what, text, share <= LIMIT)


def measure_all(
    cases: Sequence[WatchCase], settings: WindowSettings, inherited: Mapping[str, str]
) -> list[WatchResult]:
    """Measure all cases, one after the other."""
    found = []
    for case in cases:
        found.append(measure(case, settings, inherited))
        text = f"{settings.rounds} rounds of {len(VIEWERS)} windows of {settings.seconds} s"
        sys.stderr.write(f"{case.name}: {found[-1].failure or text}\n")
    return found
