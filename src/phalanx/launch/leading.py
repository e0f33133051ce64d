"""Node 0 among several: calls the roll, starts everybody, orders the causes of a failure, and ends it for all."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.cluster.placement import Seat
from phalanx.contract import line as words
from phalanx.control import interfaces, messages, roster
from phalanx.control.leader import Calling, Leader, Timing
from phalanx.control.roster import Seating
from phalanx.errors import LaunchError
from phalanx.launch import cause, port
from phalanx.launch.attempt import Fall
from phalanx.launch.company import Orders, Report, Supervised, Verdict, record_failure
from phalanx.launch.console import Console
from phalanx.launch.feed import Feed
from phalanx.launch.filters import Std
from phalanx.launch.gathering import Gathering
from phalanx.launch.plan import Plan
from phalanx.launch.recoveries import Recoveries
from phalanx.launch.relay import Relay
from phalanx.launch.runfolder import RunFolder
from phalanx.launch.seats import arrival_of, seats_of
from phalanx.recover.decision import Way


class Leading:
    relay: Relay | None = None

    def __init__(
        self, plan: Plan, gathering: Gathering, folder: RunFolder, console: Console, sockets: Sequence[socket.socket]
    ) -> None:
        self._plan = plan
        self._gathering = gathering
        self._folder = folder
        self._console = console
        self._sockets = sockets
        self._supervised: Supervised | None = None
        self._leader: Leader | None = None
        self._store: socket.socket | None = None
        self._seats: dict[int, Seating] = {}
        self._feeds: dict[tuple[int, int], Feed] = {}
        self._overs: dict[int, messages.Over] = {}
        self._attempt = 0
        self._everybody = asyncio.Event()  # has reported the end of this attempt, or is gone
        self._trouble: Verdict | None = None  # it ends, and not because of a worker
        self._troubled = 0.0  # when
        self._stopping = False
        self._signal: signal.Signals | None = None
        self._ended = False
        self._running = False  # an attempt, here
        self._recoveries = Recoveries(plan.budget, folder)
        self._abilities: dict[int, tuple[bool, bool]] = {}  # of every member: called, ended

    def meet(self, supervised: Supervised) -> None:
        self._supervised = supervised

    # -- coming together

    async def join(self) -> None:
        gathering = self._gathering
        self._leader = Leader(
            gathering.token,
            arrival_of(self._plan, gathering),
            expected=gathering.expected,
            run=self._folder.name,
            ears=self,
            promised=gathering.promised,
            timing=Timing(lost_after=gathering.lost_after),
            calling=Calling(gathering.noun, gathering.names, gathering.managed),
        )
        await self._leader.open(self._sockets)
        if gathering.meeting is not None:
            from phalanx.control.meeting import Place

            addresses = tuple(str(sock.getsockname()[0]) for sock in self._sockets)
            gathering.meeting.announce(Place(addresses, self._sockets[0].getsockname()[1]))
        await self._leader.roll_call(gathering.join_timeout)
        self._seats = roster.seat(self._leader.roster.members)

    def _own(self) -> Leader:
        if self._leader is None:
            raise LaunchError("the roll call has not begun")
        return self._leader

    async def orders(self) -> Orders | Verdict:
        if self._trouble is not None:
            return self._trouble
        address = self._listen()
        self._settle_console()
        return self._begin(0, address)

    def _listen(self) -> str:
        """The store's socket, on the address that everybody has reached us by, and no other."""
        reached = Counter(guest.reached for guest in self._own().guests.values())
        if len(reached) == 1:
            address = next(iter(reached))
            self._store = port.listen(address, 0)
            return address
        # They came by several ways. The store has one socket, so it has to be all of them.
        self._store = port.listen("::" if any(":" in address for address in reached) else "0.0.0.0", 0)  # noqa: S104
        return reached.most_common(1)[0][0]

    def _begin(self, attempt: int, address: str) -> Orders:
        leader, store = self._own(), self._store
        if store is None:
            raise LaunchError("there is no store")
        self._attempt, self._stopping, self._running = attempt, False, True
        self._overs.clear()
        self._abilities = dict.fromkeys(self._seats, (False, False))
        self._everybody.clear()
        port_ = int(store.getsockname()[1])
        world = World(
            size=sum(len(seating.ranks) for seating in self._seats.values()),
            nodes=len({seating.node for seating in self._seats.values()}),
            topology=roster.world(self._seats),
        )
        for id_ in list(leader.guests):
            leader.send(id_, _start(self._seats[id_], world, attempt, port_))
        own = _start(self._seats[leader.id], world, attempt, port_)
        self._plan = self._plan.seated(
            seats_of(self._plan, own),
            world_size=own.world_size,
            nodes=own.nodes,
            topology=own.topology,
            master=(address, port_),
            interface=interfaces.owner(address, interfaces.survey()),
        )
        return Orders(attempt, self._plan, store)

    def _settle_console(self) -> None:
        prefixes = {}
        members = self._own().roster.members
        for id_, seating in self._seats.items():
            for rank, local in zip(seating.ranks, seating.local_ranks, strict=True):
                seat = Seat(rank, seating.node, local, seating.local_world_size, self._plan.seats[0].slot)
                prefix = self._plan.showing.prefix(seat, members[id_].host)
                if prefix is not None:
                    prefixes[rank] = prefix
        self._console.settle(sum(len(seating.ranks) for seating in self._seats.values()), prefixes)

    # -- what members say

    def heard(self, member: int, message: messages.FromMember) -> None:
        match message:
            case messages.Log():
                self._log(member, message)
            case messages.Failing():
                self._member_failing(member, message)
            case messages.Able():
                self._abilities[member] = (message.called, message.ended)
            case messages.Progress():
                self._going(message.generation, message.step, message.before)
            case messages.Signalled():
                number = signal.Signals(message.signal)
                if self._signal is None:
                    self.note(f"{self._name(member)} received {number.name}")
                if self._signal is None or number == signal.SIGKILL:
                    self.signalled(number)  # for the others
                if self._supervised is not None:
                    self._supervised.end(number, f"{number.name} received by {self._name(member)}")
            case messages.Over():
                if message.attempt == self._attempt:
                    self._overs[member] = message
                    if message.trouble:
                        self._give_up(Verdict(128 + signal.SIGKILL, f"{self._name(member)}: {message.trouble}"))
                    self._count()
            case messages.Note():
                self.note(f"{self._name(member)}: {message.text}")
            case messages.Leaving():
                # Before the start it may come again. Later its ranks are missing, whatever it says.
                if self._own().roster.complete and not self._ended:
                    text = message.text or "it has left the run"
                    self._give_up(Verdict(message.code or 1, f"{self._name(member)}: {text}"))
                self._count()

    def lost(self, member: int, why: str) -> None:
        self._give_up(Verdict(1, f"{self._name(member)} is lost: {why}"))
        self._count()

    def note(self, text: str) -> None:
        if self._supervised is not None:
            self._supervised.note(text)

    def waiting(self, text: str) -> None:
        if self._supervised is not None:
            self._supervised.waiting(text)

    def _name(self, member: int) -> str:
        return self._own().name(member)

    def _give_up(self, verdict: Verdict) -> None:
        if self._trouble is None:
            self._trouble, self._troubled = verdict, time.time()
        self._stop_all(verdict.text.splitlines()[0], self._plan.ending.failure_grace)

    def _stop_all(self, reason: str, grace: float, *, beside: int | None = None) -> None:
        self._stopping = True
        leader = self._own()
        stop = messages.Stop(signal=signal.SIGTERM, reason=reason, grace=grace)
        for id_ in list(leader.guests):
            if id_ != beside:
                leader.send(id_, stop)
        if self._supervised is not None and self._running:
            self._supervised.stop(signal.SIGTERM, reason, grace)

    def _count(self) -> None:
        if all(id_ in self._overs for id_ in self._own().guests):
            self._everybody.set()

    def _log(self, member: int, log: messages.Log) -> None:
        if member not in self._seats or log.rank not in self._seats[member].ranks:
            return
        feed = self._feeds.get((log.rank, log.stream))
        if feed is None:
            feed = self._console.attach(log.rank, Std(log.stream), None, 0, live=False)
            self._feeds[log.rank, log.stream] = feed
        if log.skipped:
            host = self._own().roster.members[member].host
            feed.unkept(f"… {log.skipped} bytes are left out here; all of it is in the log on {host}\n".encode())
        if log.data:
            feed.unkept(log.data)
        if log.ended:
            feed.end()
            del self._feeds[log.rank, log.stream]

    # -- how it ends

    async def settled(self) -> None:
        self._running = False
        self._count()
        await self._everybody.wait()

    def last(self, *, failed: bool) -> bool:
        failed = failed or any(over.failed for over in self._overs.values())
        return not failed or self._trouble is not None or self._recoveries.way is not Way.RESTART

    def failing(self, fall: Fall) -> None:
        self._fell(fall)

    def _member_failing(self, member: int, told: messages.Failing) -> None:
        guests = self._own().guests
        at = told.time - (guests[member].skew if member in guests else 0.0)
        reason = f"{told.reason} on {self._name(member)}"
        self._fell(Fall(told.rank, reason, told.place, at, told.lived, told.step), beside=member)

    def _fell(self, fall: Fall, beside: int | None = None) -> None:
        if self._stopping or self._supervised is None:
            return
        # One script runs everywhere: if some can regroup, those that have not said so yet can too.
        called, ended = (any(flags) for flags in zip(*self._abilities.values(), strict=True))
        if self._recoveries.decide(fall, able=called and not ended) is not Way.REGROUP:
            stopped = beside if not self._can(beside) else None  # it has stopped its workers by itself
            self._stop_all(fall.reason, self._plan.ending.failure_grace, beside=stopped)
            return
        generation = self._recoveries.generation
        self._own().broadcast(messages.Regroup(attempt=self._attempt, generation=generation, why=fall.reason))
        self._supervised.regroup(generation, fall.reason)

    def _can(self, member: int | None) -> bool:
        return member is not None and self._abilities.get(member) == (True, False)

    def able(self, called: bool, ended: bool) -> None:
        self._abilities[self._own().id] = (called, ended)

    def going(self, message: words.Going) -> None:
        self._going(message.generation, message.step, message.before)

    def _going(self, generation: int, step: int, before: int) -> None:
        text = self._recoveries.going(generation, step, before)
        if text:
            self.note(text)

    def signalled(self, number: signal.Signals) -> None:
        ending = self._plan.ending
        self._signal = self._signal or number
        grace = 0.0 if number == signal.SIGKILL else ending.grace
        if self._leader is not None:
            stop = messages.Stop(signal=number, reason=f"{number.name} received at node 0", grace=grace, ends=True)
            self._leader.broadcast(stop)

    def passed(self, number: signal.Signals) -> None:
        # A scheduler tells all of its tasks by itself.
        if self._leader is not None and self._gathering.task is None:
            self._leader.broadcast(messages.Pass(signal=number))

    async def concluded(self, report: Report) -> Orders | Verdict:
        if report.trouble and self._trouble is None:
            self._trouble, self._troubled = Verdict(128 + signal.SIGKILL, report.trouble), time.time()
        if self._signal is not None:
            return Verdict(128 + self._signal)
        deaths, blocks = self._deaths(report)
        failed = len(report.deaths) + sum(over.failed for over in self._overs.values())
        death = cause.first_cause(deaths)
        # A node that is lost makes every other rank fail; a rank that failed by itself before that is the reason.
        if self._trouble is not None and (death is None or cause.follows(death, self._troubled)):
            return self._trouble
        absent = self._seats.keys() - self._own().guests.keys() - {self._own().id}
        if not failed and not absent - self._overs.keys():
            return Verdict(0, self._recoveries.summary())
        if death is None:
            return Verdict(1)
        record_failure(self._folder, death, report.attempt)
        if self._recoveries.way is not Way.RESTART or self._trouble is not None or absent:
            return Verdict(death.exit_code, self._recoveries.last_words(blocks[death.rank]))
        self.note(f"{blocks[death.rank]}\nphalanx: {self._recoveries.again()}")
        return self._begin(report.attempt + 1, self._plan.master_addr)

    def _deaths(self, report: Report) -> tuple[list[cause.Death], dict[int, str]]:
        """The first of every node, by our own clock; and what their nodes tell about them."""
        own = cause.first_cause(report.deaths)
        deaths = [own] if own is not None else []
        blocks = {death.rank: report.block for death in deaths}
        guests = self._own().guests
        for member, over in self._overs.items():
            if over.first is not None:
                skew = guests[member].skew if member in guests else 0.0
                deaths.append(_death(over.first, skew))
                blocks[over.first.rank] = f"{over.first.block}\n  on {self._name(member)}"
        return deaths, blocks

    async def close(self, code: int, text: str) -> None:
        self._ended = True
        if self._leader is not None:
            self._leader.broadcast(messages.End(code=code, text=text[: 1 << 15]))
            await self._leader.close()
        if self._gathering.meeting is not None:
            self._gathering.meeting.close()
        if self._store is not None:
            self._store.close()
        for sock in self._sockets:
            sock.close()


class World(NamedTuple):
    """What all members are told alike."""

    size: int
    nodes: int
    topology: str


def _start(seating: Seating, world: World, attempt: int, store_port: int) -> messages.Start:
    return messages.Start(
        attempt=attempt,
        world_size=world.size,
        node=seating.node,
        nodes=world.nodes,
        ranks=seating.ranks,
        local_ranks=seating.local_ranks,
        local_world_size=seating.local_world_size,
        topology=world.topology,
        store_port=store_port,
    )


def _death(casualty: messages.Casualty, skew: float) -> cause.Death:
    return cause.Death(
        rank=casualty.rank,
        code=casualty.code,
        time=casualty.time - skew,
        stopped=casualty.stopped,
        device=casualty.device,
        error=casualty.error,
        stderr=casualty.stderr,
        memory=casualty.memory,
        skew=skew,
    )
