"""Evidence -> Verdicts: the most certain and most to blame first; none, where nothing can be said to be wrong."""

from __future__ import annotations

from phalanx.diagnose import words
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rank_state import Field, survey
from phalanx.diagnose.rules import blame, deadlock, desync, gpu, network, process, rendezvous
from phalanx.diagnose.rules.divergence import partings
from phalanx.diagnose.verdict import Verdict

_OUT_OF_STEP = ("uneven data", "skipped collective")


def diagnose(evidence: Evidence) -> list[Verdict]:
    """What is wrong. Nothing while somebody has a debugger open: then all that stands still does so on purpose."""
    if any(rank.debugged for rank in evidence.ranks):
        return []
    field = survey(evidence)
    parted = partings(field)
    found = list(process.nodes(field))
    found += [desync.judge(field, parting) for parting in parted]  # before those who died of it
    found += [*process.verdicts(field), *rendezvous.verdicts(field), *deadlock.verdicts(field)]
    accused = {rank for verdict in found for rank in verdict.ranks}
    passed = any(parting.passed for parting in parted)  # then ranks that are out of step are so because of that
    found += [each for each in blame.verdicts(field, accused) if not (passed and each.kind in _OUT_OF_STEP)]
    if not any(verdict.kind in ("node", "exited", "stopped", "gpu lost", "deadlock", "address") for verdict in found):
        found += network.verdicts(field, {parting.group for parting in parted})
    if not found:
        found += blame.everybody(field)
    return gpu.supported(evidence, sorted(found, key=lambda verdict: not verdict.certain))


def remarks(evidence: Evidence) -> list[str]:
    """What stands still or takes long with good reason: no verdict, but worth a line."""
    debugged = [rank.rank for rank in evidence.ranks if rank.debugged]
    if debugged:
        return [f"a debugger is open in {words.who(debugged)}: whatever waits now waits for it"]
    field = survey(evidence)
    return [_remark(field, rank) for rank in sorted(blame.roots(field)) if _is_slow(field, rank)][:8]


def _is_slow(field: Field, rank: int) -> bool:
    standing = field.standings.get(rank)
    return standing is not None and not (standing.gone or standing.stopped) and blame.slow(field, standing)


def _remark(field: Field, rank: int) -> str:
    standing = field.standings[rank]
    doing = {"compile": "compiles", "checkpoint": "writes or reads a checkpoint", "import": "imports"}.get(
        standing.long, "computes"
    )
    idle = f", while its GPU is idle{gpu.use(standing.rank.gpu)}" if gpu.idle(standing.rank.gpu) else ""
    return f"rank {rank} {doing}{words.at(standing.place)}{idle}: slow, and not stuck{field.wait_for([rank])}"
