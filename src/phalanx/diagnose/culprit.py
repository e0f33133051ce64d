"""A rank that waits for nobody, while others wait for it: what keeps it, by what its main thread does."""

from __future__ import annotations

from collections.abc import Container, Iterator

from phalanx.diagnose import data, words
from phalanx.diagnose.evidence import Gpu
from phalanx.diagnose.frames import What
from phalanx.diagnose.process import left, lost_nodes, wait_for
from phalanx.diagnose.standing import LONGER, Field, Standing, described
from phalanx.diagnose.verdict import Verdict

_BUSY_GPU = 0.95
_ALONE = frozenset({"lock", "input", "subprocess", "file", "socket", "store", "loader"})  # a wait that nobody shares

# What it does -> the kind, and the sentence after "rank 2".
_KEPT: dict[What, tuple[str, str, str]] = {
    "lock": ("lock", "is {words}", "py-spy dump, or phalanx attach, shows who holds it"),
    "input": ("input", "is {words}", "no rank has a terminal to read from: give it the answer on the command line"),
    "sleep": ("sleep", "is {words}", ""),
    "subprocess": ("subprocess", "is {words}", "give it a timeout"),
    "file": ("file", "is {words}", ""),
    "socket": ("socket", "is {words}", "give it a timeout"),
    "store": ("store", "is {words} that nobody has set", "every key that is waited for has to be set by some rank"),
}


def verdicts(field: Field, accused: Container[int]) -> Iterator[Verdict]:
    yield from _never_came(field)
    away = {node.node for node in lost_nodes(field.evidence)}
    for standing in field.of(roots(field)):
        if standing.number in accused or standing.rank.node in away:
            continue
        found = _judge(field, standing)
        if found is not None:
            yield found


def roots(field: Field) -> set[int]:
    """Who keeps the others. Where nobody waits for anybody, those who stand still alone."""
    awaited = {rank for missing in field.awaits.values() for rank in missing}
    if awaited:
        return awaited - set(field.awaits)
    return {
        each.number
        for each in field.standings.values()
        if each.stuck and each.number not in field.awaits and not each.gone
        and (each.act.what in _ALONE or overdue(field, each))
    }  # fmt: skip


def overdue(field: Field, standing: Standing) -> bool:
    """Even what computes, or writes a checkpoint, has taken too long."""
    limit = max(field.evidence.limit, 5 * standing.rank.usual)
    return max(standing.rank.since, field.evidence.waited) >= LONGER * limit


def slow(field: Field, standing: Standing) -> bool:
    return standing.moves and not overdue(field, standing)


def _judge(field: Field, standing: Standing) -> Verdict | None:
    if slow(field, standing) or not standing.stuck or standing.act.what == "debugger":
        return None
    if standing.leaving and (found := left(field, standing)) is not None:
        return found
    joining = [each for each in field.of(field.waiting_for([standing.number])) if each.call is None]
    if joining and len(joining) == len(field.waiting_for([standing.number])):
        return _late(field, standing, joining)
    if standing.gone:
        return None
    if standing.unseen:
        note = f": {standing.rank.note}" if standing.rank.note else ""
        return _verdict(field, standing, "unknown", f"gives no sign of itself{note}")
    if (found := data.verdict(field, standing)) is not None:
        return found
    return _kept(field, standing)


def _kept(field: Field, standing: Standing) -> Verdict:
    act, process, gpu = standing.act, standing.rank.process, standing.rank.gpu
    if standing.long == "checkpoint":
        doing = f" ({act.words})" if act.words else ""
        return _verdict(field, standing, "checkpoint", f"is writing or reading a checkpoint{doing}")
    if standing.long:
        doing = {"compile": "compiling", "import": "importing"}[standing.long]
        return _verdict(field, standing, standing.long, f"has been {doing} for {_time(field, standing)}")
    if act.what in _KEPT:
        kind, text, fix = _KEPT[act.what]
        children = process.children if process is not None and act.what == "subprocess" else ()
        what = text.format(words=act.words)
        return _verdict(
            field, standing, kind, what, fix=fix, details=tuple(f"process {child}" for child in children[:4])
        )
    if act.what == "cuda" or (gpu is not None and gpu.use >= _BUSY_GPU and not standing.rank.busy):
        return _verdict(field, standing, "gpu", f"waits for its GPU{_use(gpu)}: a kernel does not end")
    if standing.spins or standing.rank.busy:
        return _verdict(field, standing, "loop", "loops, or computes for very long,")
    return _verdict(field, standing, "stands", f"has stood for {_time(field, standing)}")


def _verdict(
    field: Field, standing: Standing, kind: str, what: str, *, fix: str = "", details: tuple[str, ...] = ()
) -> Verdict:
    source = standing.place.source if standing.place is not None else ""
    return Verdict(
        kind=kind,
        ranks=(standing.number,),
        text=f"rank {standing.number} {what}{words.at(standing.place)}{wait_for(field, standing)}",
        details=(*details, *((f"its line: {source}",) if source else ())),
        place=standing.place,
        fix=fix,
        certain=False,
    )


def _time(field: Field, standing: Standing) -> str:
    return words.duration(max(standing.rank.since, field.evidence.waited))


def _use(gpu: Gpu | None) -> str:
    return "" if gpu is None else f" (GPU {gpu.index}, {gpu.use:.0%} in use)"


def _late(field: Field, standing: Standing, joining: list[Standing]) -> Verdict:
    """Where everybody has to come, it has not."""
    where = "init_process_group" if joining[0].act.what == "join" else "new_group"
    ended = standing.rank.ended
    doing = words.exit_text(ended) if ended is not None else f"is {described(standing)}"
    if standing.unseen:
        doing = standing.rank.note or "gives no sign of itself"
    them = words.others([each.number for each in joining], field.evidence, [standing.number])
    return Verdict(
        kind="join",
        ranks=(standing.number,),
        text=f"rank {standing.number} has not come to {where}: it {doing}; {them} "
        f"{words.verb([each.number for each in joining], 'waits', 'wait')} for it{words.at(joining[0].place)}",
        place=standing.place,
        certain=ended is not None,
    )


def _never_came(field: Field) -> Iterator[Verdict]:
    """Ranks of which nothing at all is known."""
    joining = [each for each in field.of(field.awaits) if each.act.what == "join" and each.call is None]
    missing = sorted({rank for each in joining for rank in field.awaits[each.number]} - set(field.standings))
    if not missing:
        return
    here = [each.number for each in joining]
    yield Verdict(
        kind="join",
        ranks=tuple(missing),
        text=f"{words.who(missing)} of {field.evidence.world_size} {words.verb(missing, 'has', 'have')} never come: "
        f"{words.who(here)} {words.verb(here, 'waits', 'wait')} in {described(joining[0])}",
        place=joining[0].place,
    )
