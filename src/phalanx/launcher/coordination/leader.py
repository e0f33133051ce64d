"""The coordinator of node 0: waits for the nodes, assigns ranks, decides about failures, and ends the run for all.

In an elastic run (`-n 1:4`, `--spares`) it assigns ranks again each time that a node joins or leaves. A node that joins
later starts its workers as spares; once they have imported everything, the group regroups with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from phalanx.cluster.placement import Seat
from phalanx.contract import events, worker_messages
from phalanx.control import interfaces, messages, roster
from phalanx.control.leader import Leader, Timing
from phalanx.control.member import STEADILY, Endpoint, answers
from phalanx.control.rendezvous_status import MemberNames
from phalanx.control.roster import RankTable
from phalanx.errors import LaunchError
from phalanx.launcher.agent.preemption import Preemption
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.coordination import port
from phalanx.launcher.coordination.actions import (
    AcceptLoss,
    Action,
    EndRun,
    HaltWorkers,
    HoldWorkers,
    RegroupPlan,
    StopWorkers,
)
from phalanx.launcher.coordination.coordinator import AgentView, AttemptReport, RunResult, StartAttempt, record_failure
from phalanx.launcher.coordination.rank_assignment import assign_seats, node_info
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.output.console import Console
from phalanx.launcher.output.filters import Std
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.output.log_tail import LogTail
from phalanx.launcher.output.noise import Noise
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.recover.decision import RecoveryAction


@dataclass(frozen=True)
class TakeoverState:
    """What is known of a run whose leader is lost."""

    leader: int  # number of the lost leader
    why: str
    size: int  # members, with the lost leader
    attempt: int
    generation: int
    readiness: tuple[bool, bool, bool]
    worked: frozenset[int]  # members that had ranks
    others: frozenset[int]  # members that should join the new leader
    quorum: int  # with fewer members, the old leader may still run with the rest


_PROGRESS_INTERVAL = 0.5  # seconds between two events about who has joined
_PLAIN_AFTER = 10.0  # seconds without a connection of a worker: the script cannot regroup


class LeaderCoordinator:
    """Waits for the members, assigns ranks, and decides for all nodes."""

    log_forwarder: LogForwarder | None = None
    leads = True
    skew = 0.0

    def __init__(
        self,
        plan: Plan,
        rendezvous: RendezvousConfig,
        folder: RunFolder,
        console: Console,
        sockets: Sequence[socket.socket],
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._folder = folder
        self._console = console
        self._sockets = sockets
        self._agent: AgentView | None = None
        self._leader: Leader | None = None
        self._store: socket.socket | None = None
        self._tables: dict[int, RankTable] = {}
        self._feeds: dict[tuple[int, int], LogTail] = {}
        self._reports: dict[int, messages.Over] = {}
        self._attempt = 0
        self._all_ended = asyncio.Event()  # all members have reported the end of this attempt, or are gone
        self._trouble: RunResult | None = None  # the run ends, and no worker is the cause
        self._trouble_time = 0.0  # when that happened
        self._stopping = False
        self._signal: signal.Signals | None = None
        self._ended = False
        self._running = False  # an attempt runs on this node
        self._recoveries = Recoveries(plan.recovery.policy, folder)
        self._readiness: dict[int, tuple[bool, bool]] = {}  # of each member: called, ended
        self._began = 0.0  # when this attempt began
        self._idle: set[int] = set()  # members without ranks whose workers are not started
        self._preparing: set[int] = set()  # members whose workers start as spares
        self._ready: set[int] = set()  # members whose spare workers have all connected
        self._leaving: set[int] = set()
        self._hold_timer: asyncio.TimerHandle | None = None  # ends the run if too few nodes are left for too long
        self._changed = asyncio.Event()  # a node has joined
        self._nodes_changed = False  # all ranks restart, because nodes joined or left
        self._liveness_checks: set[asyncio.Task[None]] = set()  # of members whose connection has closed
        self._last_joined: tuple[str, ...] = ()  # who had joined at the last event
        self._last_progress = -_PROGRESS_INTERVAL  # when that was written
        self._preemption = Preemption(plan, folder, self)

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent = agent

    # -- rendezvous

    async def join(self) -> None:
        """Open the control port and wait for the members. Raises JoinError."""
        rendezvous = self._rendezvous
        self._leader = Leader(
            rendezvous.token,
            node_info(self._plan, rendezvous),
            expected=rendezvous.expected,
            run=self._folder.name,
            events=self,
            promised=rendezvous.promised,
            timing=Timing(
                node_timeout=rendezvous.node_timeout, last_call=rendezvous.last_call if rendezvous.elastic else 0.0
            ),
            names=MemberNames(rendezvous.noun, rendezvous.names, rendezvous.managed),
            least=rendezvous.least,
            spares=rendezvous.spares,
        )
        await self._leader.open(self._sockets)
        if rendezvous.leader_file is not None:
            from phalanx.control.leader_file import LeaderFilePath

            addresses = tuple(str(sock.getsockname()[0]) for sock in self._sockets)
            rendezvous.leader_file.announce(LeaderFilePath(addresses, self._sockets[0].getsockname()[1]))
        await self._leader.wait_for_members(rendezvous.join_timeout)

    async def take_over(self, state: TakeoverState, patience: float) -> None:
        """Lead in place of a lost leader: wait for the others, then regroup, restart or hold."""
        rendezvous = self._rendezvous
        self._attempt, self._running, self._began = state.attempt, True, time.monotonic()
        self._recoveries.generation = state.generation
        door = int(self._sockets[0].getsockname()[1])
        leader = self._leader = Leader(
            rendezvous.token,
            node_info(self._plan, rendezvous, door=door),
            expected=rendezvous.expected,
            run=self._folder.name,
            events=self,
            promised=rendezvous.promised,
            timing=Timing(node_timeout=rendezvous.node_timeout),
            names=MemberNames(rendezvous.noun, rendezvous.names, rendezvous.managed),
            least=rendezvous.least,
            spares=rendezvous.spares,
        )
        members = state.others | {leader.id}
        self._readiness = {leader.id: state.readiness[:2]}
        self._tables = dict.fromkeys(members & state.worked, RankTable())
        self._preparing = set(members - state.worked)
        if state.readiness[2]:
            self._prepared(leader.id)
        await leader.open(self._sockets)
        await leader.gather(state.others, patience)
        here = {leader.id} | (leader.guests.keys() & state.others)
        for waiting in (self._preparing, self._ready):
            waiting.intersection_update(here)
        for id_ in state.others - here:
            self._tables.pop(id_, None)
            self._readiness.pop(id_, None)
        for id_ in list(leader.guests):
            self._take_in(id_)
        if len(here) < state.quorum:
            self._give_up(
                RunResult(
                    1,
                    f"node {state.leader} is silent, and {len(here)} of {state.size} nodes are here: it may still run "
                    "with the others; stopping to prevent split-brain",
                )
            )
            return
        address = self._listen()
        self._plan = replace(self._plan, group=replace(self._plan.group, master_addr=address))
        where = ", ".join(str(Endpoint(*sock.getsockname()[:2])) for sock in self._sockets)
        self.note(f"this node leads now; others join at {where}")
        called, ended = self._overall_readiness()
        self._preemption.regroup_ready(called, ended)  # workers reported it to the lost leader
        text = f"node {state.leader} is lost: {state.why}"
        failure = WorkerFailure(0, text, "", time.time(), 0.0, None)
        self._recoveries.nodes_changed(
            failure, RecoveryAction.REGROUP if called and not ended else RecoveryAction.RESTART
        )
        if not called or ended:
            self._nodes_changed = True
            self._act(self._stop_all(text))
        elif len(self._tables) + len(self._ready) >= self._least:
            self._act(self._regroup(text))
        else:
            self._act(self._hold(text))
        self._prepare()

    def _own(self) -> Leader:
        """Return the control server. Raises LaunchError before `join`."""
        if self._leader is None:
            raise LaunchError("the rendezvous has not begun")
        return self._leader

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Start the first attempt, once enough nodes are there."""
        return await self._next_attempt(0)  # nodes may have left since they joined

    def _listen(self) -> str:
        """Open the store's socket on the address that all members have used, and return that address."""
        reached = Counter(guest.reached for guest in self._own().guests.values())
        if not reached:  # no other node has joined yet, and one may use any address
            reached.update(str(sock.getsockname()[0]) for sock in self._sockets)
        if len(reached) == 1:
            address = next(iter(reached))
            self._store = port.listen(address, 0)
            return address
        # Members use several addresses. The store has one socket, so it listens on all of them.
        self._store = port.listen("::" if any(":" in address for address in reached) else "0.0.0.0", 0)  # noqa: S104
        return reached.most_common(1)[0][0]

    def _begin(self, attempt: int, address: str) -> StartAttempt:
        leader = self._own()
        self._attempt, self._stopping, self._running, self._began = attempt, False, True, time.monotonic()
        self._reports.clear()
        self._all_ended.clear()
        self._preparing.clear()
        self._ready.clear()
        self._assign_ranks(leader.roster.members.keys() - self._leaving)
        self._readiness = dict.fromkeys(self._tables, (False, False))
        self._idle = set(leader.guests) - self._tables.keys() - self._leaving
        generation = self._recoveries.generation
        for id_ in list(leader.guests):
            if id_ in self._tables:
                leader.send(id_, messages.Start(attempt=attempt, place=self._start_ranks(id_), generation=generation))
        self._plan = self._own_plan(address)
        self._send_peer_list()
        self._grow_later()
        return StartAttempt(attempt, self._plan, self._store, generation)

    def _assign_ranks(self, members: Collection[int]) -> None:
        """Decide which of these members work, and assign their ranks."""
        leader = self._own()
        known = {id_: leader.roster.members[id_] for id_ in members}
        self._tables = roster.seat(roster.working(known, self._tables.keys() | {leader.id}, leader.roster.expected))
        for feed in self._feeds.values():  # a rank may have moved to another node
            feed.end()
        self._feeds.clear()
        self._settle_console()

    def _start_ranks(self, member: int) -> messages.StartRanks:
        """Return the placements of the workers of a member."""
        store = self._store
        if store is None:
            raise LaunchError("there is no store")
        table = self._tables.get(member)
        if spare := table is None:
            table = roster.spare_table(self._own().roster.members[member].slots, self._tables)
        return messages.StartRanks(
            placements=table.placements,
            topology=roster.world(self._tables),
            store_port=int(store.getsockname()[1]),
            spare=spare,
        )

    def _own_plan(self, address: str) -> Plan:
        own = self._start_ranks(self._own().id)
        return self._plan.seated(
            assign_seats(self._plan, own),
            topology=own.topology,
            master=(address, own.store_port),
            interface=interfaces.owner(address, interfaces.survey()),
            spare=own.spare,
        )

    def _settle_console(self) -> None:
        prefixes = {}
        members = self._own().roster.members
        for id_, table in self._tables.items():
            for placement in table.placements:
                prefix = self._plan.line_prefix(Seat(placement, self._plan.seats[0].slot), members[id_].host)
                if prefix is not None:
                    prefixes[placement.rank] = prefix
        self._console.settle(sum(len(table.ranks) for table in self._tables.values()), prefixes)

    # -- messages of members

    def heard(self, member: int, message: messages.FromMember) -> None:
        """Handle a message of a member."""
        match message:
            case messages.Log():
                self._log(member, message)
            case messages.Failing():
                self._member_worker_failed(member, message)
            case messages.RegroupReady():
                self._member_ready(member, message)
            case messages.NodeHaltAck():
                ack = worker_messages.HaltAck(message.step, message.generation, message.stuck)
                self.halt_message(message.rank, ack)
            case messages.NodeHalted():
                self.halt_message(0, worker_messages.HaltedAt(message.step))
            case messages.Signalled() if message.preempt and self._preempted_at(member, message):
                pass
            case messages.ProgressMessage():
                self._first_step(message.generation, message.step, message.before)
            case messages.Signalled():
                number = signal.Signals(message.signal)
                if self._rendezvous.elastic and number == signal.SIGTERM:  # it leaves, and the others continue
                    self._leaving.add(member)
                    self._remove_member(member, f"{self._name(member)} leaves ({number.name})")
                    return
                if self._signal is None:
                    self.note(f"{self._name(member)} received {number.name}")
                if self._signal is None or number == signal.SIGKILL:
                    self.signal_received(number)  # stops the others
                self._act(EndRun(number, f"{number.name} received by {self._name(member)}"))
            case messages.Over():
                if message.attempt == self._attempt:
                    self._reports[member] = message
                    if member not in self._tables:  # its spare workers have ended
                        self._preparing.discard(member)
                        self._ready.discard(member)
                    elif message.trouble and not self._restarts:
                        self._give_up(RunResult(128 + signal.SIGKILL, f"{self._name(member)}: {message.trouble}"))
                    self._check_all_ended()
            case messages.NoteMessage():
                self.note(f"{self._name(member)}: {message.text}")
            case messages.RpcFrame():
                if self._agent is not None:
                    self._agent.receive_rpc(member, message)
            case messages.Leaving():
                # Before the start it may join again. Later its ranks are missing.
                text = f"{self._name(member)}: {message.text or 'it has left the run'}"
                if self._rendezvous.elastic:
                    self._remove_member(member, text)
                elif self._own().roster.complete and not self._ended:
                    self._give_up(RunResult(message.code or 1, text))
                self._leaving.discard(member)
                self._check_all_ended()

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each connected follower."""
        if self._leader is None:
            return {}
        own, guests = self._leader.id, self._leader.guests
        return {id_: table.ranks for id_, table in self._tables.items() if id_ != own and id_ in guests}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to a member."""
        if to is not None:
            self._own().send(to, frame)

    def address(self, member: int) -> str:
        """Return the address of a member as seen from here. Empty if it is not connected."""
        guest = self._own().guests.get(member)
        return guest.address if guest is not None else ""

    def lost(self, member: int, why: str, *, silent: bool) -> None:
        """Handle the loss of a member: end the run or, if it is elastic, continue without it."""
        text = f"{self._name(member)} is lost: {why}"
        self._leaving.discard(member)
        if not self._rendezvous.elastic:
            self._give_up(RunResult(1, text))
            self._check_all_ended()
        elif silent:
            self._member_lost(member, text, silent=True)
        else:
            check = asyncio.get_running_loop().create_task(self._check_liveness(member, text))
            self._liveness_checks.add(check)
            check.add_done_callback(self._liveness_checks.discard)

    async def _check_liveness(self, member: int, text: str) -> None:
        """Handle a closed connection. A member that still answers is alive, and has dropped this node."""
        address, door = self._own().doors.get(member, ("", 0))
        lives = bool(door) and await answers(Endpoint(address, door), steadily=STEADILY)
        self._member_lost(member, text, silent=lives)

    def _member_lost(self, member: int, text: str, *, silent: bool) -> None:
        if silent and 2 * self._own().audible < len(self._own().roster.members):
            # The others may continue without this node: prevent split-brain.
            cut_off = "this node is cut off from most of the others, which may continue without it"
            self._give_up(RunResult(1, f"{text}\n  {cut_off}"))
        else:
            self._remove_member(member, text)
        self._check_all_ended()

    # -- nodes that join and leave

    def joined(self, member: int) -> None:
        """Handle a member that joined during the run."""
        self._leaving.discard(member)  # the member that had this number before
        self._changed.set()
        self.note(f"{self._name(member)} has come")
        self._send_peer_list()
        if self._running and not self._stopping:
            self._take_in(member)
            self._prepare()
            self._grow()
            self._grow_later()

    def _take_in(self, member: int) -> None:
        """Take in a new member, or one of another leader, perhaps with workers that wait for a group."""
        engaged = self._own().roster.members[member].engaged
        if engaged is not None and engaged.attempt == self._attempt:
            self._recoveries.generation = max(self._recoveries.generation, engaged.generation)
            if member in self._tables:
                self._readiness.setdefault(member, (engaged.called, engaged.ended))  # what it reported later stays
                return
            if not engaged.ended:
                self._preparing.add(member)
                if engaged.ready:
                    self._prepared(member)
                return
        for group in (self._tables, self._readiness):
            group.pop(member, None)
        for waiting in (self._preparing, self._ready):
            waiting.discard(member)
        self._idle.add(member)
        if engaged is not None:  # its workers belong to an attempt that is over
            grace = self._plan.shutdown.failure_timeout
            self._own().send(
                member, messages.Stop(signal=signal.SIGTERM, reason="the others have continued", grace=grace)
            )

    def _member_ready(self, member: int, ready: messages.RegroupReady) -> None:
        if member in self._tables:
            self._readiness[member] = (ready.called, ready.ended)
            self._preemption.regroup_ready(*self._overall_readiness())
            self._prepare()
        elif member in self._preparing and ready.ready:
            self._prepared(member)
            self._grow()

    def _prepared(self, member: int) -> None:
        if member in self._preparing:
            self._preparing.discard(member)
            self._ready.add(member)

    def _overall_readiness(self) -> tuple[bool, bool]:
        """Return whether the ranks can regroup, and whether some have finished.

        One script runs on all nodes: if some workers can regroup, those that have not connected yet can too.
        """
        called, ended = (any(flags) for flags in zip(*self._readiness.values(), strict=True))
        return called, ended

    def _prepare(self) -> None:
        """Start the workers of nodes without ranks as spares, if the script can regroup."""
        called, ended = self._overall_readiness()
        if not called or ended or self._stopping or self._preemption.begun:
            return
        for member in self._idle & self._own().guests.keys():
            self._idle.discard(member)
            self._preparing.add(member)
            generation = self._recoveries.generation
            start = messages.Start(attempt=self._attempt, place=self._start_ranks(member), generation=generation)
            self._own().send(member, start)

    def _grow(self) -> None:
        """Regroup with the nodes that are ready, if there is room."""
        room = self._own().roster.expected - len(self._tables)
        called, ended = self._overall_readiness()
        if room <= 0 or ended or self._stopping or not called or not self._ready or self._store is None:
            return
        if self._preemption.begun:
            return
        if len(self._tables) + len(self._ready) < self._least:
            return
        who = ", ".join(self._name(member) for member in sorted(self._ready)[:room])
        self._recoveries.nodes_changed(self._no_fault(f"{who} joined"), RecoveryAction.REGROUP, kind="node-joined")
        self._act(self._regroup(f"{who} joined"))

    def _grow_later(self) -> None:
        """Schedule a restart with the new nodes, for a script that cannot regroup."""
        if self._idle and self._own().roster.expected > len(self._tables):
            wait = max(0.0, self._began + _PLAIN_AFTER - time.monotonic())
            asyncio.get_running_loop().call_later(wait, self._grow_by_restart, self._attempt)

    def _grow_by_restart(self, attempt: int) -> None:
        """Restart with the new nodes, if the script still has not shown that it can regroup."""
        joined = self._idle & self._own().guests.keys()
        room = self._own().roster.expected - len(self._tables)
        if attempt != self._attempt or not joined or room <= 0 or self._stopping or any(self._overall_readiness()):
            return
        who = ", ".join(self._name(member) for member in sorted(joined)[:room])
        self._recoveries.nodes_changed(self._no_fault(f"{who} joined"), RecoveryAction.RESTART, kind="node-joined")
        self._nodes_changed = True
        self._act(self._stop_all(f"{who} joined"))

    @property
    def _least(self) -> int:
        return self._own().roster.least or self._own().roster.expected

    def _remove_member(self, member: int, text: str) -> None:
        """Remove a node. The others regroup or restart without it, or hold if they are too few."""
        leader = self._own()
        leader.roster.remove(member)
        self._reports.pop(member, None)
        self._readiness.pop(member, None)
        for waiting in (self._idle, self._preparing, self._ready):
            waiting.discard(member)
        gone = self._tables.pop(member, None)
        if self._ended:
            return
        self._send_peer_list()
        if gone is None or not self._running or self._stopping or self._signal is not None:
            self.note(text)
            return
        called, ended = self._overall_readiness()
        if ended or self._preemption.halted:  # some ranks have finished: the others end by themselves
            self.note(text)
            return
        failure = WorkerFailure(gone.ranks[0], text, "", time.time(), time.monotonic() - self._began, None)
        enough = len(self._tables) + len(self._ready) >= self._least
        self._recoveries.nodes_changed(failure, RecoveryAction.REGROUP if called else RecoveryAction.RESTART)
        if not called:
            self._nodes_changed = True
            self.note(text)
            self._act(self._stop_all(text))
        elif enough:
            self._act(self._regroup(text))
        else:
            self._act(self._hold(text))

    def _no_fault(self, text: str) -> WorkerFailure:
        return WorkerFailure(0, text, "", time.time(), 0.0, None)

    def _hold(self, text: str) -> HoldWorkers:
        """Let the members that are left keep their state in memory and wait; return the same for this node."""
        patience = self._rendezvous.join_timeout
        why = (
            f"{text}\n  {len(self._tables)} of at least {self._least} {self._rendezvous.noun}s are left: "
            f"waiting {patience:.0f} s (--join-timeout) for another"
        )
        self.note(why)
        self._own().broadcast(messages.Hold(attempt=self._attempt, why=text))
        if self._hold_timer is None:
            verdict = RunResult(1, f"{text}\n  and no other has joined within {patience:.0f} s (--join-timeout)")
            self._hold_timer = asyncio.get_running_loop().call_later(patience, self._give_up, verdict)
        return HoldWorkers(text)

    def _regroup(self, why: str, *, halt: bool = False) -> RegroupPlan:
        """Tell all members to regroup; return the same for this node."""
        leader, halt = self._own(), halt or self._preemption.begun
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        self._assign_ranks(self._tables.keys() | self._ready)
        for member in self._tables.keys() - self._readiness.keys():
            self._readiness[member] = (True, False)
        self._ready -= self._tables.keys()
        generation = self._recoveries.generation
        for id_ in list(leader.guests):
            if id_ in self._tables:
                place = self._start_ranks(id_)
                regroup = messages.Regroup(
                    attempt=self._attempt, generation=generation, why=why[:4096], place=place, halt=halt
                )
                leader.send(id_, regroup)
        self._plan = self._own_plan(self._plan.group.master_addr)
        self._send_peer_list()
        return RegroupPlan(generation, why, self._plan, self._store, halt)

    def _send_peer_list(self) -> None:
        if self._rendezvous.elastic:
            self._own().broadcast(self._own().peer_list(self._tables.keys()))

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line through the agent."""
        if self._agent is not None:
            self._agent.note(text, repeats=repeats)

    def waiting(self, text: str) -> None:
        """Show what this node waits for."""
        if self._agent is not None:
            self._agent.waiting(text)

    def gathering(self, here: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Write to the run folder who has joined and who is missing."""
        now = time.monotonic()
        if here != self._last_joined and (not text or now - self._last_progress >= _PROGRESS_INTERVAL):
            self._last_joined, self._last_progress = here, now
            text = text.partition(" (")[0]  # without the waiting time, which changes
            self._folder.event(
                events.RendezvousProgress(time=time.time(), expected=expected, joined=here, missing=missing, text=text)
            )

    def _name(self, member: int) -> str:
        return self._own().name(member)

    def _give_up(self, verdict: RunResult) -> None:
        if self._trouble is None:
            self._trouble, self._trouble_time = verdict, time.time()
        self._changed.set()
        self._act(self._stop_all(verdict.text.splitlines()[0]))

    def fail(self, text: str) -> None:
        """End the run, because this node cannot lead."""
        self._give_up(RunResult(1, text))

    def _stop_all(self, reason: str, *, skip: int | None = None) -> StopWorkers | None:
        """Stop the workers of all members but `skip`; return the same for this node, if it has begun."""
        self._stopping = True
        leader, grace = self._own(), self._plan.shutdown.failure_timeout
        stop = messages.Stop(signal=signal.SIGTERM, reason=reason, grace=grace)
        for id_ in list(leader.guests):
            if id_ != skip:
                leader.send(id_, stop)
        return StopWorkers(signal.SIGTERM, reason, grace) if self._running else None

    def _act(self, action: Action | None) -> None:
        if self._agent is not None and action is not None:
            self._agent.perform(action)

    def _check_all_ended(self) -> None:
        if not all(id_ in self._reports for id_ in self._own().guests if id_ in self._tables):
            return
        if not self._running:
            self._all_ended.set()
        elif self._tables and self._own().id not in self._tables:
            # The workers of this node are spares, and all ranks have ended.
            self._act(StopWorkers(signal.SIGTERM, "every rank has ended", self._plan.shutdown.failure_timeout))

    def _log(self, member: int, log: messages.Log) -> None:
        if member not in self._tables or log.rank not in self._tables[member].ranks:
            return
        feed = self._feeds.get((log.rank, log.stream))
        if feed is None:
            feed = self._console.attach(log.rank, Std(log.stream), None, 0, live=False)
            self._feeds[log.rank, log.stream] = feed
        if feed.noise is None and self._readiness and self._overall_readiness()[0]:
            feed.noise = Noise()
        if log.skipped:
            host = self._own().roster.members[member].host
            feed.unkept(f"… {log.skipped} bytes are left out here; all of it is in the log on {host}\n".encode())
        if log.data:
            feed.unkept(log.data)
        if log.ended:
            feed.end()
            del self._feeds[log.rank, log.stream]

    # -- the end of an attempt

    async def wait_for_others(self) -> None:
        """Wait until all members have reported the end of this attempt, or are gone."""
        self._running = False
        self._check_all_ended()
        await self._all_ended.wait()
        while self._liveness_checks:
            await asyncio.wait(self._liveness_checks)

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return whether no restart follows."""
        if self._nodes_changed and self._trouble is None:
            return False
        failed = failed or any(over.failed or over.trouble for over in self._reports.values())
        return not failed or self._trouble is not None or not self._restarts

    @property
    def _restarts(self) -> bool:
        """Return whether all ranks are started again. Not after a preemption: the next run resumes the checkpoint."""
        return self._recoveries.latest_action is RecoveryAction.RESTART and not self._preemption.begun

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Decide for all nodes about a failure on this node."""
        return self._decide(failure)

    def _member_worker_failed(self, member: int, message: messages.Failing) -> None:
        if member not in self._tables:  # a spare node, or one that leaves
            return
        guests = self._own().guests
        at = message.time - (guests[member].skew if member in guests else 0.0)
        reason = f"{message.reason} on {self._name(member)}"
        failure = WorkerFailure(
            message.rank, reason, message.place, at, message.lived, message.step, generation=message.generation
        )
        self._act(self._decide(failure, sender=member))

    def _decide(self, failure: WorkerFailure, sender: int | None = None) -> Action | None:
        """Decide for all nodes about a failure here, or on the member `sender`; return what this node does."""
        if self._stopping:
            return None
        if self._preemption.halted:  # a checkpoint is on disk; it may have been the last worker of its node
            if sender is None:
                return AcceptLoss()
            stop = messages.Stop(
                signal=signal.SIGTERM, reason=failure.reason, grace=self._plan.shutdown.failure_timeout
            )
            self._own().send(sender, stop)
            return None
        if self._store is None:  # this node takes over, and a regroup follows
            return None
        called, ended = self._overall_readiness()
        if self._recoveries.decide(failure, can_regroup=called and not ended) is not RecoveryAction.REGROUP:
            stopped = sender if not self._can_regroup(sender) else None  # that member has stopped its workers already
            return self._stop_all(failure.reason, skip=stopped)
        if self._hold_timer is None:
            return self._regroup(failure.reason)
        return None  # it is replaced when enough nodes have joined

    def _can_regroup(self, member: int | None) -> bool:
        return member is not None and self._readiness.get(member) == (True, False)

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        """Record the readiness of this node, as for any member."""
        self._member_ready(self._own().id, messages.RegroupReady(called=called, ended=ended, ready=ready))

    # -- preemption

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message to the preemption."""
        self._preemption.receive(rank, message, self._recoveries.generation)

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption of all nodes."""
        return self._running and self._preemption.begin(number, self._plan.group.world_size)

    def _preempted_at(self, member: int, message: messages.Signalled) -> bool:
        """Begin a preemption for a member that received a signal. Return whether nothing else must be done about it."""
        number = signal.Signals(message.signal)
        if self._signal is None and not self._preemption.begun:
            self.note(f"{self._name(member)} received {number.name}")
        return (self._signal is None and self.preempt(number)) or number not in self._plan.shutdown.signals

    def halt(self, step: int | None) -> None:
        """Have all workers report their step, or halt at `step`."""
        self._own().broadcast(messages.HaltAll(step=step))
        self._act(HaltWorkers(step))

    def regroup_and_halt(self, why: str) -> None:
        """Have all workers regroup and write a checkpoint, if they can regroup."""
        if self._overall_readiness() == (True, False):
            self._recoveries.next_generation()
            self._act(self._regroup(why, halt=True))

    def stop(self, reason: str) -> None:
        """Stop the workers of all nodes."""
        self._act(self._stop_all(reason))

    def end_run(self, number: signal.Signals, reason: str) -> None:
        """End the run on all nodes, as by a signal of the user."""
        self.signal_received(number)
        self._act(EndRun(number, reason))

    # -- signals

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Print how long the recovery took."""
        self._first_step(message.generation, message.step, message.before)

    def _first_step(self, generation: int, step: int, before: int) -> None:
        text = self._recoveries.first_step(generation, step, before)
        if text:
            self.note(text, repeats=True)

    def signal_received(self, number: signal.Signals) -> None:
        """Stop the run on all members."""
        shutdown = self._plan.shutdown
        self._signal = self._signal or number
        self._changed.set()
        grace = 0.0 if number == signal.SIGKILL else shutdown.stop_timeout
        if self._leader is not None:
            stop = messages.Stop(signal=number, reason=f"{number.name} received at node 0", grace=grace, ends=True)
            self._leader.broadcast(stop)

    def forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal to all members. Under a scheduler they have received it already."""
        # A scheduler signals all of its tasks itself.
        if self._leader is not None and self._rendezvous.task is None:
            self._leader.broadcast(messages.ForwardSignal(signal=number))

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Compare the failures of all nodes, and return a restart or the result of the run."""
        self._preemption.close()
        troubles = [report.trouble, *(over.trouble for over in self._reports.values())]
        trouble = next(filter(None, troubles), "")
        if trouble and self._restarts and self._trouble is None:
            self._nodes_changed = True
            self.note(trouble)
        elif report.trouble and self._trouble is None:
            self._trouble, self._trouble_time = RunResult(128 + signal.SIGKILL, report.trouble), time.time()
        if self._signal is not None:
            return RunResult(128 + self._signal)
        if self._preemption.halted:
            return RunResult(os.EX_TEMPFAIL, self._preemption.final_text(self._recoveries.summary()))
        deaths, blocks = self._deaths(report)
        failed = len(report.deaths) + sum(over.failed for over in self._reports.values())
        death = root_cause.first_cause(deaths)
        # The loss of a node makes all other ranks fail. A rank that failed before that is the cause.
        if self._trouble is not None and (death is None or root_cause.follows(death, self._trouble_time)):
            return self._trouble
        if self._nodes_changed:
            self._nodes_changed = False
            self.note(self._recoveries.restarting(), repeats=True)
            return await self._next_attempt(report.attempt + 1)
        absent = self._tables.keys() - self._own().guests.keys() - {self._own().id}
        if not failed and not absent - self._reports.keys():
            for member, over in self._reports.items():
                if over.left:
                    self.note(f"{self._name(member)}: {over.left}")
            return RunResult(0, self._recoveries.summary())
        if death is None:
            return RunResult(1)
        record_failure(self._folder, death, report.attempt)
        if not self._restarts or self._trouble is not None or absent:
            return RunResult(death.exit_code, self._recoveries.final_text(blocks[death.rank]))
        self.note(f"{blocks[death.rank]}\nphalanx: {self._recoveries.restarting()}", repeats=True)
        return await self._next_attempt(report.attempt + 1)

    async def _next_attempt(self, attempt: int) -> StartAttempt | RunResult:
        """Start an attempt with the nodes that are there, once they are enough."""
        leader, patience = self._own(), self._rendezvous.join_timeout
        until = time.monotonic() + patience
        while not leader.roster.enough or self._trouble is not None:
            if self._signal is not None:
                return RunResult(128 + self._signal)
            if self._trouble is not None:
                return self._trouble
            here = f"{len(leader.roster.members)} of at least {self._least} {self._rendezvous.noun}s are here"
            if time.monotonic() >= until:
                return RunResult(1, f"{here}, and no other has joined within {patience:.0f} s (--join-timeout)")
            self.waiting(f"{here}, waiting for others ({until - time.monotonic():.0f} s)")
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)
        if self._agent is not None:
            self._agent.waiting(None)
        return self._begin(attempt, self._listen() if self._store is None else self._plan.group.master_addr)

    def _deaths(self, report: AttemptReport) -> tuple[list[root_cause.ProcessFailure], dict[int, str]]:
        """Return the first failure of each node, by this node's clock, and the message about each."""
        own = root_cause.first_cause(report.deaths)
        deaths = [own] if own is not None else []
        others = report.failed + sum(over.by_themselves for over in self._reports.values()) - 1
        blocks = {death.rank: root_cause.counted(report.block, others) for death in deaths}
        guests = self._own().guests
        for member, over in self._reports.items():
            if over.first is not None:
                skew = guests[member].skew if member in guests else 0.0
                deaths.append(_death(over.first, skew))
                blocks[over.first.rank] = f"{root_cause.counted(over.first.block, others)}\n  on {self._name(member)}"
        return deaths, blocks

    def announce_result(self, code: int, text: str) -> None:
        """Send the result to all members."""
        self._ended = True
        if self._leader is not None:
            self._leader.broadcast(messages.EndMessage(code=code, text=text[: 1 << 15]))

    async def close(self, code: int, text: str) -> None:
        """Send the result to all members, and close all connections and sockets."""
        self.announce_result(code, text)
        if self._leader is not None:
            await self._leader.close()
        if self._rendezvous.leader_file is not None:
            self._rendezvous.leader_file.close()
        if self._store is not None:
            self._store.close()
        for sock in self._sockets:
            sock.close()


def _death(report: messages.FailureReport, skew: float) -> root_cause.ProcessFailure:
    return root_cause.ProcessFailure(
        rank=report.rank,
        code=report.code,
        time=report.time - skew,
        stopped=report.stopped,
        device=report.device,
        error=report.error,
        stderr=report.stderr,
        memory=report.memory,
        skew=skew,
        blame=report.blame,
    )
