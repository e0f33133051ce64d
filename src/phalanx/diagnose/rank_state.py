"""The state of each rank: where it is, what it does, and which collective it waits in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from phalanx.diagnose import frames
from phalanx.diagnose.evidence import CallEvidence, Evidence, Frame, Rank
from phalanx.diagnose.frames import Act

PATIENCE = 2.0  # minimum seconds at one place before it is reported
SEVERAL = 3.0  # likewise, in usual steps
LONGER = 10.0  # times the limit, for ranks that compute, or do something that may take long
SILENT_AFTER = 3.0  # seconds without a status update after which the GIL counts as held
SPINS = 0.7  # cores: it computes without waiting
COMPUTES = 0.1  # cores: it computes occasionally
RESTS = 0.05  # cores: it does not compute
MOVES = 1e5  # bytes per second: it reads or writes
STREAMS = 1e6  # bytes per second that count as progress in any code: it may read a data set or write a checkpoint
WAITS = ("collective", "join")  # phases in which a rank waits for others
MEETINGS = ("join", "new group")  # every rank must call these, and they have no sequence number
_LONG = frozenset({"compile", "checkpoint", "import"})


@dataclass(frozen=True)
class RankState:
    """What a rank is doing, derived from its evidence."""

    rank: Rank
    act: Act
    place: Frame | None  # in user code, else the innermost frame
    call: CallEvidence | None  # the call in which it waits
    stuck: bool  # it has been at one place long enough to be reported
    silent_after: float = SILENT_AFTER  # seconds without a status update after which the GIL counts as held

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
        """Whether it computes, at least occasionally."""
        return self.rank.busy or self.spins or self.cpu >= COMPUTES

    @property
    def held(self) -> bool:
        """Whether the GIL is held: the process does not answer and is not stopped."""
        return (
            self.rank.silent >= self.silent_after and not (self.gone or self.stopped) and self.rank.process is not None
        )

    @cached_property
    def long(self) -> str:
        """The activity that may take long, or an empty string: compile, checkpoint, import."""
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
        if self.rank.busy or self.long in ("compile", "import"):  # child processes may compile for it
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
        """Whether it compiles or writes a checkpoint, and the kernel confirms that."""
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


def only_late(evidence: Evidence, state: RankState) -> bool:
    """Return whether a rank only answered late on a busy host: it waited for others at its last status update."""
    rank = state.rank
    known = rank.threads or rank.calls or rank.process is None or state.gone or state.stopped
    return not known and rank.phase in WAITS and rank.silent < evidence.limit


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
    patience = min(PATIENCE, evidence.limit)  # with a shorter --stall-timeout, no rank has been at one place for longer
    stuck = max(rank.since, evidence.waited) >= max(patience, SEVERAL * usual)
    place = frames.own(stack) or (stack[0] if stack else None)
    silent_after = min(SILENT_AFTER, max(evidence.limit, 1.0))  # the alarm for a silent rank comes after the limit
    bare = RankState(rank, act, place, None, stuck, silent_after)
    return RankState(rank, act, place, _waits_in(bare), stuck, silent_after)


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
    if frames.in_work(stack):  # MPI spins while it waits
        return undone[-1]
    if act.shown and act.what not in ("backward", "cuda"):
        return None
    if "nccl" in backend(rank, undone[-1].group):
        return next(iter(_queued(rank)), None) if unstarted(rank) is None else None
    # A wait for gloo sleeps in a lock. A rank that computes, or sleeps elsewhere, only has the collective pending.
    if state.spins or act.what not in ("nothing", "lock", "backward", "cuda"):
        return None
    return undone[-1]


def _queued(rank: Rank) -> list[CallEvidence]:
    """Return the unfinished calls in order: NCCL runs calls in order, and the process runs ahead of its GPU.

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
    """Return the call that only the stack shows."""
    group = rank.groups[0] if rank.groups else None
    op = act.name.removeprefix("i") if act.what == "message" else act.name
    return CallEvidence(group=group.name if group else "", seq=0, op=op or "a collective")


def backend(rank: Rank, group: str) -> str:
    """Return the backend of a group on a rank; empty if unknown."""
    return next((each.backend for each in rank.groups if each.name == group), "")
