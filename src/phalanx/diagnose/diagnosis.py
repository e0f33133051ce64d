"""Evidence -> verdicts. Certain verdicts come first, then those most to blame. Empty if nothing is known to be
wrong.
"""

from __future__ import annotations

from phalanx.diagnose import words
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rules import blame, gpu, network, process, rendezvous
from phalanx.diagnose.rules.collectives import deadlock, desync
from phalanx.diagnose.rules.collectives.divergence import divergences
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph, survey

_BETWEEN = ("network", "join", "no progress")  # in these kinds ranks wait for each other, and no rank is to blame
_OUT_OF_STEP = ("uneven data", "skipped collective")


def diagnose(evidence: Evidence) -> list[Verdict]:
    """Return what is wrong. The list is empty while a debugger is open, because ranks are then paused on purpose."""
    if any(rank.debugged for rank in evidence.ranks):
        return []
    graph = survey(evidence)
    diverged = divergences(graph)
    found = list(process.nodes(graph))
    found += [desync.judge(graph, divergence) for divergence in diverged]  # listed before ranks that died because of it
    found += [*process.verdicts(graph), *rendezvous.verdicts(graph), *deadlock.verdicts(graph)]
    accused = {rank for verdict in found for rank in verdict.ranks}
    passed = any(divergence.passed for divergence in diverged)  # the cause of any rank that is out of step
    found += [each for each in blame.verdicts(graph, accused) if not (passed and each.kind in _OUT_OF_STEP)]
    if not any(verdict.kind in ("node", "exited", "stopped", "gpu lost", "deadlock", "address") for verdict in found):
        found += network.verdicts(graph, {divergence.group for divergence in diverged})
    if not found:
        found += blame.all_ranks(graph)
    if found and all(verdict.kind in _BETWEEN for verdict in found):
        parted = network.partition(evidence)
        found = [parted] if parted is not None else found
    return gpu.supported(evidence, sorted(found, key=lambda verdict: not verdict.certain))


def remarks(evidence: Evidence) -> list[str]:
    """Return lines about ranks that take long for a good reason."""
    debugged = [rank.rank for rank in evidence.ranks if rank.debugged]
    if debugged:
        return [f"a debugger is open in {words.who(debugged)}: whatever waits now waits for it"]
    graph = survey(evidence)
    return [_remark(graph, rank) for rank in sorted(blame.roots(graph)) if _is_slow(graph, rank)][:8]


def _is_slow(graph: WaitGraph, rank: int) -> bool:
    state = graph.states.get(rank)
    return state is not None and not (state.gone or state.stopped) and blame.slow(graph, state)


def _remark(graph: WaitGraph, rank: int) -> str:
    state = graph.states[rank]
    doing = {"compile": "compiles", "checkpoint": "writes or reads a checkpoint", "import": "imports"}.get(
        state.long, "computes"
    )
    idle = f", while its GPU is idle{gpu.use(state.rank.gpu)}" if gpu.idle(state.rank.gpu) else ""
    return f"rank {rank} {doing}{words.at(state.place)}{idle}: slow, and not stuck{graph.wait_for([rank])}"
