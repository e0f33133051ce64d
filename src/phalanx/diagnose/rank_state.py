"""The state of each rank: where it is, what it does, which collective it waits in, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import CallEvidence, Evidence, Frame, GroupEvidence, Rank
from phalanx.diagnose.frames import Act

PATIENCE = 2.0  # seconds at one place, at least, before it is worth a word
SEVERAL = 3.0  # times the usual step, likewise
LONGER = 10.0  # times the limit, for those that compute or do what takes its time
UNHEARD = 3.0  # seconds without a sign of a process whose Python is free to give one
SPINS = 0.7  # cores: it computes
COMPUTES = 0.1  # cores: now and then
RESTS = 0.05  # cores: it does not
MOVES = 1e5  # bytes a second: it reads or writes
STREAMS = 1e6  # likewise, whatever it is at: a data set is read, or a checkpoint written, by code that nobody knows
MEETINGS = ("join", "new group")  # where everybody has to come, without a number
_LONG = frozenset({"compile", "checkpoint", "import"})
_Memo = dict[tuple[str, int, str, frozenset[int]], frozenset[int]]


@dataclass(frozen=True)
class RankState:
    """What a rank is doing, derived from its evidence."""

    rank: Rank
    act: Act
    place: Frame | None  # in the user's code, or else the innermost there is
    call: CallEvidence | None  # it waits in
    stuck: bool  # long enough at one place to be asked about it
    unheard: float = UNHEARD  # seconds without a sign after which Python's lock counts as held

    @property
    def number(self) -> int:
        """The rank."""
        return self.rank.rank

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of its main thread."""
        return frames.main_frames(self.rank)

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self.rank.ended is not None or (self.rank.process is not None and self.rank.process.state in "ZX")

    @property
    def leaving(self) -> bool:
        """Whether it has ended, or is about to end, with success."""
        return self.rank.ended == 0 or (self.rank.ended is None and self.act.what == "leaving")

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped by a signal or a debugger."""
        return not self.gone and self.rank.process is not None and self.rank.process.state in "Tt"

    @property
    def unseen(self) -> bool:
        """Whether there is no evidence about it."""
        return not (self.rank.threads or self.rank.process or self.rank.calls or self.gone)

    @property
    def cpu(self) -> float:
        """The cores that it uses."""
        return self.rank.process.cpu if self.rank.process is not None else 0.0

    @property
    def spins(self) -> bool:
        """Whether it runs without waiting."""
        return self.rank.process is not None and self.rank.process.state == "R" and self.cpu >= SPINS

    @property
    def works(self) -> bool:
        """Whether it computes, at least now and then."""
        return self.rank.busy or self.spins or self.cpu >= COMPUTES

    @property
    def held(self) -> bool:
        """Whether Python's lock is held: the process does not answer and is not stopped."""
        return self.rank.silent >= self.unheard and not (self.gone or self.stopped) and self.rank.process is not None

    @cached_property
    def long(self) -> str:
        """What it does, if that may take long: compile, checkpoint, import."""
        if self.rank.phase in _LONG:
            return self.rank.phase
        for phase, test in (("checkpoint", frames.in_checkpoint), ("compile", frames.in_compiler)):
            if test(self.frames):
                return phase
        return "import" if frames.in_import(self.frames) else ""

    @property
    def moves(self) -> bool:
        """Whether it is slow but not stuck: it computes at changing places, or does I/O."""
        process = self.rank.process
        if self.rank.busy or self.long in ("compile", "import"):  # others may compile for it
            return True
        if self.act.what in ("subprocess", "loader") and self._others_work:
            return True
        if process is None or (not self.long and self.call is not None):
            return False
        if process.read + process.written >= (MOVES if self.long else STREAMS):
            return True
        return bool(self.long) and process.cpu > RESTS

    @property
    def proceeds(self) -> bool:
        """Whether it compiles or writes a checkpoint, and the kernel confirms it."""
        if self.long == "compile":
            return self.works or self._others_work
        return self.long == "checkpoint" and self.moves

    @property
    def _others_work(self) -> bool:
        """Whether its child processes compute and none of them is dead."""
        children = self.rank.process.children if self.rank.process is not None else ()
        states = {word for child in children for word in child.split()[1:2]}
        return "R" in states and not states & {"Z", "X"}

    @property
    def bucket(self) -> bool:
        """Whether the collective is called by DDP in the backward pass."""
        return self.call is not None and bucket(self.call, self.frames)


def bucket(call: CallEvidence, stack: tuple[Frame, ...] = ()) -> bool:
    """Return whether a call is the all_reduce of a gradient bucket."""
    return call.op.startswith("all_reduce") and frames.in_backward(call.site or stack)


def site(state: RankState, call: CallEvidence) -> Frame | None:
    """Return where a call was made in user code."""
    found = frames.own(call.site)
    return found if found is not None or call is not state.call else state.place


def trail(state: RankState, call: CallEvidence) -> tuple[Frame, ...]:
    """Return all user frames of a call, the innermost first."""
    stack = call.site or (state.frames if call is state.call else ())
    return tuple(frame for frame in stack if frames.mine(frame))


def state_of(evidence: Evidence, rank: Rank) -> RankState:
    """Return the state of a rank."""
    stack = frames.main_frames(rank)
    act = frames.act(stack, rank.process)
    if not act.shown and (rank.device or rank.gpu is not None):
        act = frames.reads_gpu(stack) or act
    usual = rank.usual if 0 < rank.usual < 1e6 else 0.0
    patience = min(PATIENCE, evidence.limit)  # with a shorter --stall-timeout the others have not stood longer either
    stuck = max(rank.since, evidence.waited) >= max(patience, SEVERAL * usual)
    place = frames.own(stack) or (stack[0] if stack else None)
    unheard = min(UNHEARD, max(evidence.limit, 1.0))  # an alarm for a silent rank comes after the limit
    bare = RankState(rank, act, place, None, stuck, unheard)
    return RankState(rank, act, place, _waits_in(bare), stuck, unheard)


def _waits_in(state: RankState) -> CallEvidence | None:
    rank, act, stack = state.rank, state.act, state.frames
    if state.gone or state.stopped or rank.busy or (state.held and state.cpu >= SPINS):
        return None
    if frames.in_data(stack) and act.what not in ("collective", "message"):
        return None
    undone = [call for call in rank.calls if not call.done]
    if act.what == "work" and unstarted(rank) is None:
        return undone[-1] if undone else None
    if act.shown and act.what in ("collective", "message") and unstarted(rank) is None:
        wanted = [call for call in undone if (call.op in ("send", "recv")) == (act.what == "message")]
        return wanted[-1] if wanted else _seen(rank, act)
    if not undone:
        return None
    if frames.in_work(stack):  # however it waits: MPI spins
        return undone[-1]
    if act.shown and act.what not in ("backward", "cuda"):
        return None
    if "nccl" in backend(rank, undone[-1].group):
        return next(iter(_queued(rank)), None) if unstarted(rank) is None else None
    # A wait for gloo sleeps in a lock. What computes, or sleeps elsewhere, has merely left it under way.
    if state.spins or act.what not in ("nothing", "lock", "backward", "cuda"):
        return None
    return undone[-1]


def _queued(rank: Rank) -> list[CallEvidence]:
    """Return the first unfinished call: NCCL runs calls in order, and the process runs ahead of its GPU.

    torch does not record the end of messages that are called as one batch.
    """
    found: list[CallEvidence] = []
    for call in rank.calls:
        if call.done:
            found = [each for each in found if each.group != call.group]
        elif "nccl" in backend(rank, call.group):
            found.append(call)
    return found


def unstarted(rank: Rank) -> CallEvidence | None:
    """Return the first collective in the GPU queue if its kernel has not started.

    Known only if torch records when kernels start.
    """
    head = next(iter(_queued(rank)), None)
    return head if head is not None and head.seq > 0 and head.started is False else None


def _seen(rank: Rank, act: Act) -> CallEvidence:
    """Return the call that the stack alone shows."""
    group = rank.groups[0] if rank.groups else None
    op = act.name.removeprefix("i") if act.what == "message" else act.name
    return CallEvidence(group=group.name if group else "", seq=0, op=op or "a collective")


def backend(rank: Rank, group: str) -> str:
    """Return the backend of a group of a rank; empty if it is unknown."""
    return next((each.backend for each in rank.groups if each.name == group), "")


@dataclass(frozen=True)
class Field:
    """All ranks, and who waits for whom."""

    evidence: Evidence
    states: dict[int, RankState]
    awaits: dict[int, frozenset[int]] = field(default_factory=dict)  # waiting rank -> ranks that have not come

    def of(self, ranks: Iterable[int]) -> list[RankState]:
        """Return the states of these ranks, in order."""
        return [self.states[rank] for rank in sorted(ranks) if rank in self.states]

    def waiting_for(self, ranks: Iterable[int]) -> list[int]:
        """Return who waits for these ranks, directly or through others."""
        reached = set(ranks)
        found: set[int] = set()
        while True:
            more = {rank for rank, missing in self.awaits.items() if rank not in found and missing & reached}
            if not more:
                return sorted(found - set(ranks))
            found |= more
            reached |= more

    def wait_for(self, ranks: Sequence[int]) -> str:
        """Return e.g. "; the other 3 wait for it in all_reduce #214 (DDP bucket 1, 6.5 MB)"."""
        waiting = self.of(self.waiting_for(ranks))
        if not waiting:
            return ""
        first = next((each for each in waiting if each.call is not None), waiting[0])
        numbers = [each.number for each in waiting]
        whom = words.verb(ranks, "it", "them")
        return (
            f"; {words.others(numbers, self.evidence, ranks)} {words.verb(numbers, 'waits', 'wait')} for {whom} in "
            f"{described(first)}"
        )


def timed(evidence: Evidence) -> Evidence:
    """Drop kernel start times unless the kernel of another rank has started."""
    started = {_place(call) for rank in evidence.ranks for call in rank.calls if call.started}
    if all(call.started is not False or _place(call) in started for rank in evidence.ranks for call in rank.calls):
        return evidence
    ranks = (
        replace(rank, calls=tuple(_untimed(call) if _place(call) not in started else call for call in rank.calls))
        for rank in evidence.ranks
    )
    return replace(evidence, ranks=tuple(ranks))


def _place(call: CallEvidence) -> tuple[str, str, int]:
    return call.group, call.backend, call.seq


def _untimed(call: CallEvidence) -> CallEvidence:
    return call if call.started is None else replace(call, started=None)


def survey(evidence: Evidence) -> Field:
    """Return the states of all ranks, and who waits for whom."""
    evidence = timed(evidence)
    states = {rank.rank: state_of(evidence, rank) for rank in evidence.ranks}
    awaits: dict[int, frozenset[int]] = {}
    memo: _Memo = {}  # most ranks wait in the same one
    for state in states.values():
        missing = _missing(state, states, evidence, memo)
        if missing is not None:
            awaits[state.number] = missing - {state.number}
    return Field(evidence, states, awaits)


def _missing(
    state: RankState,
    states: dict[int, RankState],
    evidence: Evidence,
    memo: _Memo,
) -> frozenset[int] | None:
    call = state.call
    if not state.stuck:  # however slow its steps are, who is stopped does not come
        if call is None or call.op in ("send", "recv"):
            return None
        members = members_of(state, states)
        return frozenset(rank for rank in members if states[rank].stopped) or None
    if call is None:
        if state.act.what not in MEETINGS or state.gone or state.stopped:
            return None
        everybody = set(states) | set(range(evidence.world_size))
        here = {
            each.number
            for each in states.values()
            if each.act.what == state.act.what and not (each.gone or each.stopped)
        }
        past = {each.number for each in states.values() if each.act.what != "join" and each.rank.groups}
        if state.act.what == "join" and past:  # who has a group has joined
            return frozenset(everybody - here - past) or None
        return frozenset(everybody - here)
    if call.op in ("send", "recv"):
        peer = states.get(call.peer) if call.peer is not None else None
        return frozenset() if peer is None or meet(state, peer) else frozenset({peer.number})
    members = members_of(state, states)
    key = (call.group, call.seq, f"{'' if call.seq > 0 else call.op} {call.started}", members)
    if key not in memo:
        memo[key] = frozenset(rank for rank in members if _absent(states[rank], call))
    return memo[key]


def members_of(state: RankState, states: dict[int, RankState]) -> frozenset[int]:
    """Return the ranks of the group of a call."""
    call = state.call
    group = next((each for each in state.rank.groups if call is not None and each.name == call.group), None)
    return frozenset(states) & frozenset(group.ranks) if group is not None and group.ranks else frozenset(states)


def _absent(state: RankState, call: CallEvidence) -> bool:
    if state.stopped or state.gone:  # what it has called, it cannot go on with
        return not any(each.done and (each.group, each.seq) == (call.group, call.seq) for each in state.rank.calls)
    if call.seq > 0:
        reached = newest(state.rank, call.group)
        if reached is not None:
            return reached < call.seq or (bool(call.started) and _not_started(state.rank, call))
    own = state.call
    return own is None or own.group != call.group or (call.seq <= 0 and own.op != call.op)


def _not_started(rank: Rank, call: CallEvidence) -> bool:
    """Return whether its GPU has not reached the collective that other GPUs are in."""
    head = unstarted(rank)
    return head is not None and (head.group, head.backend) == (call.group, call.backend) and head.seq <= call.seq


def newest(rank: Rank, name: str) -> int | None:
    """Return the number of the newest collective that a rank has called in a group."""
    group: GroupEvidence | None = next((each for each in rank.groups if each.name == name), None)
    called = [call.seq for call in rank.calls if call.group == name and call.seq > 0]
    if group is not None and group.enqueued >= 0:
        called.append(group.enqueued)
    return max(called, default=None)


def meet(one: RankState, other: RankState) -> bool:
    """Return whether two calls are a send and its receive."""
    a, b = one.call, other.call
    if a is None or b is None or {a.op, b.op} != {"send", "recv"}:
        return False
    if b.peer not in (None, one.number):
        return False
    return a.tag is None or b.tag is None or a.tag == b.tag


def described(state: RankState) -> str:
    """Return e.g. "all_reduce #214 (DDP, 6.5 MB) at train.py:52"."""
    call = state.call
    if call is None:
        if state.act.what in MEETINGS:
            name = "init_process_group" if state.act.what == "join" else "new_group"
            return f"{name}{words.at(state.place)}"
        if state.act.what == "leaving":
            name = "destroy_process_group" if state.act.name == "destroy_process_group" else "the end of its script"
            return f"{name}{words.at(state.place)}"
        if not state.act.words and state.place is not None and not state.works:
            return words.at(state.place).strip()
        return f"{state.act.words or 'at work'}{words.at(state.place)}"
    if call.op in ("send", "recv"):
        peer = "" if call.peer is None else f" {'to' if call.op == 'send' else 'from'} rank {call.peer}"
        tag = f" (tag {call.tag})" if call.tag else ""
        return f"{call.op}{peer}{tag}{words.at(site(state, call))}"
    return f"{named(state, call)}{words.at(site(state, call))}"


def being(state: RankState) -> str:
    """Return e.g. "in all_reduce #214 at train.py:52" or "sleeping at train.py:33"."""
    inside = state.call is not None or state.act.what in (*MEETINGS, "leaving")
    return f"{'in ' if inside else ''}{described(state)}"


def named(state: RankState, call: CallEvidence) -> str:
    """Return e.g. "all_reduce #214 (DDP bucket 1, 6.5 MB)"."""
    about = []
    if bucket(call, state.frames if call is state.call else ()):
        number = _bucket_number(state, call)
        about.append("DDP" if number is None else f"DDP bucket {number}")
    if words.size(call):
        about.append(words.quantity(words.size(call)))
    return words.numbered(call) + (f" ({', '.join(about)})" if about else "")


def _bucket_number(state: RankState, call: CallEvidence) -> int | None:
    """Return the number of the bucket since the last collective that was none."""
    before = [each for each in state.rank.calls if each.group == call.group and each.seq < call.seq]
    seen = {call.shapes}
    for count, each in enumerate(reversed(before)):
        if not bucket(each):
            return count if each.site or not each.op.startswith("all_reduce") else None
        if each.shapes in seen:
            return None
        seen.add(each.shapes)
    return None
