"""Runs on every node, one rank per node: python -m phalanx.doctor.survey OUTFILE

Checks run in order of their requirements, the least demanding first (a store that all ranks reach), so that earlier
results explain later failures. All data is exchanged through the store as JSON. Rank 0 always writes OUTFILE.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import variables
from phalanx.doctor import links, machine, pairs, result
from phalanx.doctor.checks import clock, names, network, reach, versions
from phalanx.doctor.checks.clock import Offset
from phalanx.doctor.checks.names import NameLookup
from phalanx.doctor.checks.reach import Echo, Reach
from phalanx.doctor.finding import Finding
from phalanx.doctor.machine import MachineFacts
from phalanx.doctor.pairs import Collective, HostPair
from phalanx.doctor.result import Result

logger = logging.getLogger(__name__)

_LIMIT = 60.0
_GRACE = 5.0
_PINGS = 16
_UNTRIED = Finding(
    "links",
    "yellow",
    "nothing was measured, because not every node reaches every other",
    "",
    "let them reach each other first, then phalanx doctor again",
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class SurveyHello:
    """The first message of a rank to the others."""

    host: str
    machine: MachineFacts
    port: int
    nonce: str
    device: int = -1
    gpu: str = ""  # UUID of the device that this rank uses


@dataclass(frozen=True)
class SurveyView:
    """What one node observes about the others."""

    lookups: tuple[NameLookup, ...] = ()
    tries: tuple[Reach, ...] = ()
    offset: Offset | None = None


@dataclass(frozen=True)
class MeasuredPair:
    """The measurements of one rank, or the error."""

    pairs: tuple[HostPair, ...] = ()
    collectives: tuple[Collective, ...] = ()
    trouble: str = ""
    waited: bool = False  # the error is that of other ranks


class SurveyMeeting:
    """The ranks of the survey, and the store through which they exchange data."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank = int(environ["RANK"])
        self.size = int(environ["WORLD_SIZE"])
        self._address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = self.connect(master=self.rank == 0 and not agent)

    def connect(self, *, master: bool = False) -> Any:
        """Return a separate connection to the store: a blocking call blocks all threads that share a connection."""
        host, port = self._address
        return dist.TCPStore(host, port, self.size, master, timedelta(seconds=_LIMIT), wait_for_workers=False)

    def exchange(self, what: str, mine: object, kind: type[_T], limit: float = _LIMIT) -> list[_T | None]:
        """Return the values of all ranks in rank order; None: it did not arrive in time."""
        self._store.set(f"doctor/{what}/{self.rank}", msgspec.json.encode(mine))
        deadline = time.monotonic() + limit
        found: list[_T | None] = []
        for rank in range(self.size):
            key = f"doctor/{what}/{rank}"
            left = max(0.01, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
                found.append(msgspec.json.decode(self._store.get(key), type=kind))
            except (RuntimeError, msgspec.MsgspecError):
                found.append(None)
        return found

    def attempt(self, what: str, work: Callable[[Any], MeasuredPair], limit: float) -> MeasuredPair:
        """Run `work` in a thread, for at most `limit` seconds or until another rank gives up."""
        done: list[MeasuredPair] = []

        def try_it() -> None:
            try:
                done.append(work(self.connect()))
            except Exception as error:  # any error of torch or of the network is a finding
                logger.debug("%s failed", what, exc_info=True)
                done.append(MeasuredPair(trouble=_first_line(error)))

        thread = threading.Thread(target=try_it, daemon=True)
        thread.start()
        deadline = time.monotonic() + limit
        broken = f"doctor/broken/{what}"
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
            if thread.is_alive() and deadline - time.monotonic() > _GRACE and self._store.check([broken]):
                deadline = time.monotonic() + _GRACE
        if not done:
            given_up = self._store.check([broken])
            trouble = "others had given up" if given_up else f"it did not end in {limit:.0f} s"
            done.append(MeasuredPair(trouble=trouble, waited=given_up))
        if done[0].trouble:
            self._store.set(broken, str(self.rank))
        return done[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the survey as one rank of a run."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.doctor.survey")
    parser.add_argument("outfile", help="-: none")
    parser.add_argument("--print", action="store_true", help="also print the result")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    environ = environment()
    meeting = SurveyMeeting(environ)

    def publish(found: Result) -> None:
        if meeting.rank == 0 and options.outfile != "-":
            result.write(found, options.outfile)

    found = survey(meeting, environ, publish, quick=options.quick)
    publish(found)
    if meeting.rank == 0 and options.print:
        sys.stdout.write(result.MARK + result.encode(found).decode() + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def survey(
    meeting: SurveyMeeting, environ: Mapping[str, str], publish: Callable[[Result], None], *, quick: bool = False
) -> Result:
    """Run all checks. Every rank calls it and gets the same result. `publish`: called before the riskiest step."""
    echo = Echo()
    folder = _runs(environ.get(variables.RUN_FOLDER, "."))
    device, gpu = links.gpu(int(environ.get("LOCAL_RANK", "0")))
    mine = SurveyHello(socket.gethostname(), machine.read(environ, folder), echo.port, echo.nonce.hex(), device, gpu)
    hellos = meeting.exchange("hello", mine, SurveyHello)
    called = call([None if hello is None else hello.host for hello in hellos])
    present = {rank: hello for rank, hello in enumerate(hellos) if hello is not None}
    view = look(meeting.rank, called, present)
    views = meeting.exchange("view", view, SurveyView)
    echo.close()
    if quick or len(present) < meeting.size:
        return summarise(called, present, views, [])
    if not reach.complete([one for view in views if view is not None for one in view.tries]):
        # Measuring would only wait for a minute and report less.
        found = summarise(called, present, views, [])
        return replace(found, between=(*found.between, _UNTRIED))
    machines = [hello.machine.id for hello in present.values()]
    plan = pairs.rounds(meeting.size)
    limit = _LIMIT + 2 * len(plan)

    def over_gloo(store: Any) -> MeasuredPair:
        links.open_group(store, meeting.rank, meeting.size, _LIMIT)
        measured = links.measure_pairs(meeting.rank, called, machines, plan)
        together = links.all_reduce(meeting.rank, meeting.size, "gloo", "cpu") if meeting.size > 1 else []
        return MeasuredPair(tuple(measured), tuple(together))

    gloo = meeting.exchange("gloo", meeting.attempt("gloo", over_gloo, limit), MeasuredPair, _GRACE * 2)
    found = summarise(called, present, views, gloo)
    if any(one is None or one.trouble for one in gloo):
        return found
    gpus = [hello.gpu for hello in present.values()]
    if not all(gpus) or len(set(gpus)) < len(gpus):
        links.close_group()
        return found  # NCCL needs one GPU per rank

    # A broken NCCL can kill the process. Publish the results so far before it runs.
    unfinished = MeasuredPair(trouble="it ended the process")
    publish(summarise(called, present, views, gloo, [unfinished] * meeting.size))

    def over_nccl(store: Any) -> MeasuredPair:
        del store
        return MeasuredPair(collectives=tuple(links.all_reduce_nccl(meeting.rank, meeting.size, device, _LIMIT)))

    nccl = meeting.exchange("nccl", meeting.attempt("nccl", over_nccl, _LIMIT + _GRACE), MeasuredPair, _GRACE * 2)
    if not any(one is None or one.trouble for one in nccl):
        links.close_group()
    return summarise(called, present, views, gloo, nccl)


def _runs(folder: str) -> str:
    """Return the directory of runs, derived from the directory of this run."""
    runs, middle, _ = folder.rpartition("/runs/")
    return f"{runs}/runs" if middle else folder


def call(hosts: Sequence[str | None]) -> list[str]:
    """Return one name per rank: its host, with the rank if hosts repeat."""
    return [
        f"rank {rank}" if host is None else host if hosts.count(host) == 1 else f"{host} (rank {rank})"
        for rank, host in enumerate(hosts)
    ]


def look(rank: int, called: Sequence[str], present: Mapping[int, SurveyHello]) -> SurveyView:
    """Try to reach all other ranks in parallel, and return the results."""
    me = present.get(rank)
    others = {peer: hello for peer, hello in present.items() if peer != rank}
    elsewhere = {peer: hello for peer, hello in others.items() if me is None or hello.machine.id != me.machine.id}
    with ThreadPoolExecutor(max_workers=16) as pool:
        lookups = [pool.submit(_lookup, called[rank], called[peer], hello.host) for peer, hello in elsewhere.items()]
        tries = [
            pool.submit(_try, called[rank], called[peer], address, hello)
            for peer, hello in others.items()
            for address in _addresses(hello, remote=peer in elsewhere)
        ]
        seen = tuple(one.result() for one in tries)
        known = tuple(one.result() for one in lookups)
    return SurveyView(known, seen, _offset(rank, called, seen, present))


def _lookup(node: str, peer: str, host: str) -> NameLookup:
    return NameLookup(node, peer, names.read(host))


def _addresses(hello: SurveyHello, *, remote: bool) -> tuple[str, ...]:
    return hello.machine.network.addresses[:6] if remote else ("127.0.0.1",)


def _try(node: str, peer: str, address: str, hello: SurveyHello) -> Reach:
    return Reach(node, peer, address, reach.ask(address, hello.port, bytes.fromhex(hello.nonce))[0])


def _offset(
    rank: int, called: Sequence[str], tries: Sequence[Reach], present: Mapping[int, SurveyHello]
) -> Offset | None:
    """Measure the clock offset to the first rank. Call it after the other attempts, which would disturb it."""
    first = present.get(0)
    if rank == 0 or first is None:
        return Offset(0.0, 0.0) if rank == 0 else None
    for one in tries:
        if one.peer == called[0] and not one.trouble:
            return clock.best(reach.ask(one.address, first.port, bytes.fromhex(first.nonce), times=_PINGS)[1])
    return None


def summarise(
    called: Sequence[str],
    present: Mapping[int, SurveyHello],
    views: Sequence[SurveyView | None],
    gloo: Sequence[MeasuredPair | None],
    nccl: Sequence[MeasuredPair | None] = (),
) -> Result:
    """Turn the facts of all ranks into findings. Ranks on one machine are judged as one."""
    nodes = {hello.machine.id: rank for rank, hello in sorted(present.items(), reverse=True)}
    firsts = sorted(nodes.values())
    seen = [view for view in views if view is not None]
    hosts = [present[rank].host for rank in firsts]
    machines = {
        called[rank] if hosts.count(host) > 1 else host: present[rank].machine
        for rank, host in zip(firsts, hosts, strict=True)
    }
    measured = [one for one in (*gloo, *nccl) if one is not None]
    by_pair = sorted(
        (pair for one in measured for pair in one.pairs),
        key=lambda pair: (called.index(pair.one), called.index(pair.other)),
    )
    collectives = [one for group in (gloo, nccl) for one in (group[0].collectives if group and group[0] else ())]
    offsets = {called[rank]: view.offset for rank, view in enumerate(views) if view and view.offset and rank in firsts}
    return Result(
        nodes=tuple(called),
        machines=tuple(finding for node, facts in machines.items() for finding in machine.judge(facts, node)),
        between=(
            *_missing(called, present),
            *versions.compare({node: facts.versions for node, facts in machines.items()}),
            *network.compare({node: facts.network for node, facts in machines.items()}),
            *names.compare(
                [sight for view in seen for sight in view.lookups],
                {called[rank]: hello.machine.network.addresses for rank, hello in present.items()},
            ),
            *reach.judge([one for view in seen for one in view.tries]),
            *clock.judge(offsets),
            *_troubles(called, "gloo", gloo),
            *_troubles(called, "nccl", nccl),
            *pairs.judge(by_pair),
            *pairs.judge_collectives(collectives),
        ),
        pairs=tuple(by_pair),
        collectives=tuple(collectives),
    )


def _missing(called: Sequence[str], present: Mapping[int, SurveyHello]) -> list[Finding]:
    return [
        Finding("nodes", "red", f"{name} did not answer in {_LIMIT:.0f} s", "its checks hang, or it was ended")
        for rank, name in enumerate(called)
        if rank not in present
    ]


def _troubles(called: Sequence[str], backend: str, measured: Sequence[MeasuredPair | None]) -> list[Finding]:
    """Return one finding per backend that failed."""
    failures = {
        called[rank]: "no answer" if one is None else one.trouble
        for rank, one in enumerate(measured)
        if one is None or (one.trouble and not one.waited)
    }
    if not failures:
        return []
    return [
        Finding(
            "all_reduce",
            "red",
            f"the ranks cannot work together over {backend}: "
            + "; ".join(f"{node}: {trouble}" for node, trouble in failures.items()),
            ""
            if backend == "nccl"
            else "gloo uses the address that the host name resolves to, unless GLOO_SOCKET_IFNAME is set",
            "NCCL_DEBUG=INFO phalanx run …" if backend == "nccl" else "GLOO_SOCKET_IFNAME=NAME phalanx run …",
        )
    ]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # gloo messages begin with a source location of the machine that built it.
    return re.sub(r"^\[\S*\] ", "", lines[0] if lines else type(error).__name__)[:300]


if __name__ == "__main__":
    # Use the default action: a Python handler would not run while the store or gloo blocks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    # Exit without joining threads: one may still wait for a node that does not answer.
    os._exit(code)
