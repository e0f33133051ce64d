"""The services that an agent offers to workers and to other commands during the run."""

from __future__ import annotations

from phalanx.contract.variables import OFF, SNAPSHOT_EVERY
from phalanx.launcher.agent.snapshot_memory import SnapshotMemory
from phalanx.launcher.debug.sessions import DebugSessions
from phalanx.launcher.ipc.control_messages import AttachQuery
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.viewers.dashboard import Dashboard
from phalanx.launcher.viewers.event_server import EventServer
from phalanx.launcher.workers.probes import StatusBoard
from phalanx.launcher.workers.store_peers import StorePeers
from phalanx.launcher.workers.watched import WatchContext, WatchedAgent


class NodeServices:
    """Opens the services of a node together, and closes them in order. Needs a running event loop."""

    def __init__(
        self, agent: WatchedAgent, links: NodeLinks, rpc: NodeRpc, *, folder: RunFolder, console: Console
    ) -> None:
        plan = agent.plan
        rendezvous = plan.rendezvous
        self._snapshot_memory = _snapshot_memory(agent)
        self.store_peers = StorePeers(links, rpc)
        self.board = StatusBoard(checks=plan.hang.check_collectives)
        self.control_socket = ControlSocket(folder)
        self.debugging = DebugSessions(
            agent,
            links,
            rpc,
            console=console,
            folder=folder,
            trusted=rendezvous is None or bool(rendezvous.token.key),
            attach_from="leader" if rendezvous is None else rendezvous.attach_from,
        )
        self.control_socket.on(AttachQuery, self.debugging.attach)
        self.watch_context = WatchContext(agent, links, rpc, self.control_socket, folder)
        self._event_server = EventServer(self.watch_context)
        self.dashboard = Dashboard(plan, folder, console)

    @property
    def memory_address(self) -> str:
        """Return the address of the snapshot memory. Empty: there is none."""
        return self._snapshot_memory.name if self._snapshot_memory is not None else ""

    async def close(self, code: int, seconds: float) -> None:
        """Send viewers the result of the run, wait for those that this agent started, and close everything."""
        self._event_server.end(code, seconds)
        await self.dashboard.end()
        if self._snapshot_memory is not None:
            self._snapshot_memory.close()
        for service in (self.debugging, self.control_socket, self._event_server, self.store_peers, self.board):
            service.close()


def _snapshot_memory(agent: WatchedAgent) -> SnapshotMemory | None:
    """Return the memory for snapshots, if the user requested them or workers may be replaced."""
    every = agent.plan.environ.get(SNAPSHOT_EVERY, "")
    if every in OFF or not (every or _may_recover(agent.plan)):
        return None

    def is_worker(pid: int) -> bool:
        return agent.attempt is not None and agent.attempt.workers.with_pid(pid) is not None

    return SnapshotMemory(is_worker, requested=bool(every))


def _may_recover(plan: Plan) -> bool:
    return plan.recovery.policy.most != 0 or (plan.rendezvous is not None and plan.rendezvous.elastic)
