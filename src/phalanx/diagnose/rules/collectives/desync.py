"""Explains why ranks are in different collectives: another operation, other contents, one too many or too few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from phalanx.diagnose import frames, words
from phalanx.diagnose.description import described, named
from phalanx.diagnose.evidence import CallEvidence, Frame
from phalanx.diagnose.history import Shift
from phalanx.diagnose.rank_state import RankState, bucket, site, trail
from phalanx.diagnose.rules.collectives.divergence import Divergence, alike, expected, guard, past, ways
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph

SAME = "all ranks of a group have to call the same collectives in the same order"
UNEVEN = "as many batches on all ranks: DistributedSampler(drop_last=True), or `with model.join():` around the loop"


@dataclass(frozen=True)
class _Case:
    """Two calls with the same number: by the first odd rank, and by the first other rank."""

    graph: WaitGraph
    divergence: Divergence

    @property
    def state(self) -> RankState:
        return self.divergence.odd[0][0]

    @property
    def call(self) -> CallEvidence:
        return self.divergence.odd[0][1]

    @property
    def other(self) -> RankState:
        return self.divergence.rest[0][0]

    @property
    def beside(self) -> CallEvidence:
        return self.divergence.rest[0][1]

    @property
    def here(self) -> Frame | None:
        return site(self.state, self.call)

    @property
    def there(self) -> Frame | None:
        return site(self.other, self.beside)

    @cached_property
    def ways(self) -> tuple[Frame, Frame] | None:
        return ways(trail(self.state, self.call), trail(self.other, self.beside))

    @cached_property
    def guard(self) -> Frame | None:
        return next((found for pair in self.divergence.odd if (found := guard(*pair)) is not None), None)

    @cached_property
    def their_guard(self) -> Frame | None:
        return next((found for pair in self.divergence.rest if (found := guard(*pair)) is not None), None)

    @cached_property
    def strange(self) -> bool:
        """Whether the others are right, judging by earlier iterations of the loop."""
        usual = expected(past(self.other, self.divergence))
        return usual is not None and alike(usual, self.beside) and not alike(usual, self.call)

    @cached_property
    def again(self) -> bool:
        """Whether the call is part of the loop: it was called before."""
        return any(alike(each, self.call) for each in past(self.other, self.divergence))

    @property
    def who(self) -> str:
        return words.who(self.divergence.ranks)

    @property
    def them(self) -> str:
        return words.others(self.divergence.others, self.graph.evidence, self.divergence.ranks)

    @property
    def they_are(self) -> str:
        return f"{self.them} {words.verb(self.divergence.others, 'is', 'are')}"

    @property
    def mine(self) -> str:
        if self.here is None and self.state.place is not None:  # it has continued since
            return f"{words.numbered(self.call)} (by now {described(self.state)})"
        return f"{words.numbered(self.call)}{words.at(self.here)}"

    @property
    def theirs(self) -> str:
        return f"{named(self.other, self.beside)}{words.at(self.there)}"

    def verdict(self, kind: str, text: str, fix: str = SAME, place: Frame | None = None) -> Verdict:
        pairs = (*self.divergence.odd[:8], *self.divergence.rest[:1])
        details = [f"{words.who([state.number])}: {_what(state, call)}" for state, call in pairs]
        if self.ways is not None and self.ways != (self.here, self.there):
            one, other = map(words.place, self.ways)
            details.append(f"the ranks diverge at {one} ({self.who}) and {other} ({self.them})")
        details += _aftermath(self.divergence)
        place = place or self.here or self.state.place
        return Verdict(kind=kind, ranks=self.divergence.ranks, text=text, details=tuple(details), place=place, fix=fix)


def judge(graph: WaitGraph, divergence: Divergence) -> Verdict:
    """Return why ranks are in different collectives."""
    case = _Case(graph, divergence)
    same_place = case.here is not None and case.here == case.there
    if case.call.op == case.beside.op and same_place:
        return _differs(case)
    found = next(filter(None, (test(case) for test in _TESTS[divergence.shift])), None)
    if found is not None:
        return found
    return _operation(case) if case.call.op != case.beside.op else _differs(case)


def _evaluation(case: _Case) -> Verdict | None:
    alone = frames.in_model(case.call.site or case.state.frames)
    if not alone or case.call.op != "broadcast" or frames.in_model(case.beside.site or case.other.frames):
        return None
    runs = words.verb(case.divergence.ranks, "runs", "run")
    asked = next((frame for frame in case.state.frames if frame.guard), None)
    return case.verdict(
        "evaluation",
        f"{case.who} alone {runs} the forward of a DDP model{words.inside(asked or case.state.place)}, which "
        f"broadcasts its buffers ({words.numbered(case.call)}); {case.they_are} in {case.theirs}",
        "evaluate with model.module(...), or on all ranks",
    )


def _uneven(case: _Case) -> Verdict | None:
    asked = case.guard is not None or case.their_guard is not None
    left = case.state.leaving and case.divergence.newest
    if asked or not (left or _left_loop(case)):
        return None
    return case.verdict(
        "uneven data",
        f"{case.who} left the loop earlier than the others, to {case.mine}, while {case.they_are} still in "
        f"{case.theirs}: uneven data",
        UNEVEN,
    )


def _left_loop(case: _Case) -> bool:
    """Return a verdict if this rank has left a loop that the others are in."""
    if case.ways is None:
        return False
    mine, theirs = case.ways
    if mine.line < theirs.line:
        return False
    stack = trail(case.other, case.beside)
    if any(frame.loop for frame in stack[: stack.index(theirs)]):
        return True
    if theirs.loop:
        return mine.loop != theirs.loop
    return case.call.op == "barrier" and case.strange and not mine.source


def _unused(case: _Case) -> Verdict | None:
    """Return a verdict if the others wait for a bucket of the backward pass that this rank does not have."""
    reduces = bucket(case.beside, case.other.frames) and not bucket(case.call, case.state.frames)
    if not (reduces and case.strange and case.again):
        return None
    before = [call for call in past(case.state, case.divergence) if call.seq == case.divergence.seq - 1]
    if any(call.site and not bucket(call) for call in before):
        return None
    return case.verdict(
        "unused parameters",
        f"{case.who} did not reduce a DDP bucket that the others wait for in {case.theirs}: parameters got no gradient "
        f"there; it continued to {case.mine}",
        "DistributedDataParallel(..., find_unused_parameters=True), or the same branches of the model on all ranks",
    )


def _skipped(case: _Case) -> Verdict | None:
    if case.guard is not None or not (case.their_guard is not None or (case.strange and case.again)):
        return None
    return _left_out(case)


def _left_out(case: _Case) -> Verdict:
    return case.verdict(
        "skipped collective",
        f"{case.who} skipped a collective that {case.them} called{words.inside(case.their_guard or case.there)}: "
        f"{named(case.other, case.beside)}; {case.who} continued to {case.mine}",
    )


def _extra(case: _Case) -> Verdict | None:
    """Return a verdict if one side calls one more collective."""
    if case.their_guard is not None:
        return None
    if case.guard is None and not (case.strange and case.call.op == case.beside.op):
        return None
    return _added(case)


def _added(case: _Case) -> Verdict:
    return case.verdict(
        "skipped collective",
        f"{case.who} called one more collective than the others, {words.numbered(case.call)}"
        f"{words.inside(case.guard or case.here)}; {case.they_are} in {case.theirs}",
        place=case.guard,
    )


def _operation(case: _Case) -> Verdict:
    return case.verdict(
        "wrong operation",
        f"{case.who} called {case.call.op}{words.at(case.here)} where {case.them} called {case.beside.op}"
        f"{words.at(case.there)} (#{case.call.seq})",
    )


def _differs(case: _Case) -> Verdict:
    """Return a verdict if both call the same operation with different contents."""
    call, beside = case.call, case.beside
    where = f" in {words.numbered(call)}{words.at(case.here or case.there)}"
    has, have = words.verb(case.divergence.ranks, "has", "have"), words.verb(case.divergence.others, "has", "have")

    def sentence(what: str, mine: object, theirs: object) -> str:
        return f"{what} differ{where}: {case.who} {has} {mine}, {case.them} {have} {theirs}"

    if call.dtypes and beside.dtypes and call.dtypes[0] != beside.dtypes[0]:
        text = sentence("dtypes", call.dtypes[0], beside.dtypes[0])
        return case.verdict("dtypes differ", text, "cast to one dtype before the collective")
    if words.elements(call.shapes) != words.elements(beside.shapes):
        text = f"shapes differ{where}: {_shapes(case.divergence)}, {case.them} {have} {words.shapes(beside)}"
        return case.verdict("shapes differ", text, "pad to one shape, or drop the last batch (drop_last=True)")
    if None not in (call.root, beside.root) and call.root != beside.root:
        text = sentence("roots", f"root {call.root}", f"root {beside.root}")
        return case.verdict("roots differ", text, "the same root on all ranks")
    text = sentence("reductions", call.reduction or "none", beside.reduction or "none")
    return case.verdict("reductions differ", text, "the same reduction on all ranks")


# Chosen by what the records show after the difference. Empty: they show nothing, and the code around the calls decides.
_TESTS: dict[Shift, tuple[Callable[[_Case], Verdict | None], ...]] = {
    "": (_evaluation, _uneven, _unused, _skipped, _extra),
    "replaced": (),
    "added": (_evaluation, _added),
    "skipped": (_unused, _left_out),
}


def _aftermath(divergence: Divergence) -> list[str]:
    """Return what a difference that ranks have already passed means for later results."""
    if not divergence.passed:
        return []
    found = []
    if all(call.done for _, call in (*divergence.odd, *divergence.rest)):
        checked = "NCCL does not compare what ranks call: " if "nccl" in divergence.backend else ""
        found.append(f"{checked}all ranks continued, with wrong results since collective {divergence.seq}")
    if divergence.overwritten:
        have = words.verb(divergence.overwritten, "has", "have")
        found.append(f"{words.who(divergence.overwritten)} no longer {have} a record of it")
    if divergence.begin > 1 and divergence.seq == divergence.begin:
        found.append(
            f"collectives before {divergence.begin} are no longer recorded: the first difference may be older "
            "(TORCH_FR_BUFFER_SIZE)"
        )
    return found


def _shapes(divergence: Divergence) -> str:
    """Return e.g. "rank 3 has [10]", one part per shape."""
    by_shape: dict[str, list[int]] = {}
    for state, call in divergence.odd:
        by_shape.setdefault(words.shapes(call), []).append(state.number)
    parts = [f"{words.who(ranks)} {words.verb(ranks, 'has', 'have')} {shape}" for shape, ranks in by_shape.items()]
    return ", ".join(parts[:4]) + (" ..." if len(parts) > 4 else "")


def _what(state: RankState, call: CallEvidence) -> str:
    about = [words.numbered(call), *([words.shapes(call)] if call.shapes else []), *call.dtypes[:1], call.reduction]
    return " ".join(filter(None, about)) + words.inside(site(state, call))
