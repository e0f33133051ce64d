"""The output of ranks on other nodes, on the console of the leader."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.placement import Seat
from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.control.leader.roster import RankTable
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.noise import Noise
from phalanx.launcher.output.filters import Std
from phalanx.launcher.plan import Plan


class RemoteOutput:
    """Shows the output of ranks that other nodes send."""

    def __init__(self, console: Console, members: Members) -> None:
        self._console = console
        self._members = members
        self._tails: dict[tuple[int, int], LogTail] = {}  # by rank and stream

    def ranks_assigned(self, plan: Plan, ranks: Mapping[int, RankTable]) -> None:
        """Set the prefixes of all ranks. A rank may have moved to another node, so all streams end."""
        for tail in self._tails.values():
            tail.end()
        self._tails.clear()
        prefixes = {}
        if any(plan.output.prefix_template(local) is not None for local in range(_local_ranks(ranks))):
            for member, table in ranks.items():
                for placement in table.placements:
                    prefix = plan.line_prefix(Seat(placement, plan.seats[0].slot), self._members.host(member))
                    if prefix is not None:
                        prefixes[placement.rank] = prefix
        self._console.settle(sum(len(table.placements) for table in ranks.values()), prefixes)

    def show(self, member: int, log: messages.Log, *, filter_noise: bool) -> None:
        """Show a piece of output. `filter_noise`: drop messages that torch prints when a group is cut."""
        key = (log.rank, log.stream)
        tail = self._tails.get(key)
        if tail is None:
            tail = self._tails[key] = self._console.attach(log.rank, Std(log.stream), None, 0, live=False)
        if tail.noise is None and filter_noise:
            tail.noise = Noise()
        if log.skipped:
            host = self._members.host(member)
            tail.unkept(f"… {log.skipped} bytes are left out here; all of it is in the log on {host}\n".encode())
        if log.data:
            tail.unkept(log.data)
        if log.ended:
            tail.end()
            del self._tails[key]


def _local_ranks(ranks: Mapping[int, RankTable]) -> int:
    """Return the most ranks that a node has."""
    first = (table.placements[0] for table in ranks.values() if table.placements)
    return max((placement.local_world_size for placement in first), default=0)
