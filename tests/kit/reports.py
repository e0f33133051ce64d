"""Runs tests/e2e/scripts/report.py under a launcher, and compares two of its reports field by field.

    torch = observe(TORCHRUN, case, work)
    ours = observe((*PHALANX, "run"), case, work)
    assert differences(torch, ours, case) == []

Both runs get the same paths and the same environment, so that only the launcher differs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.forkserver.debug import debugger
from phalanx.forkserver.imports import preload
from phalanx.forkserver.probe import probe
from tests.kit.cli import TORCHRUN, Env, Result, environment, run, terminal
from tests.kit.torchrun import Torchrun

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e", "scripts")

Report = dict[str, Any]
SHOWN = re.compile(r"rank \d+ writes to \w+")

# field -> why the two may differ
ALLOWED = {
    "chance": "random numbers; that they differ from rank to rank is tested by itself",
    "modules": "a fork has more imported than the script asked for; that none is missing is tested by itself",
    "ancestors": "the launchers themselves; used to see that a warm fork server was",
    "env": "compared by what the launcher changed, see below",
}

# Standard output and error may be any of these: phalanx reads them itself to log them and to prefix ranks, where
# torchrun uses a file or /dev/null. A script can distinguish a terminal from them, but not one from another.
NO_TERMINAL = {"file", "pipe", "/dev/null"}

# variable -> why the two may differ
ALLOWED_ENV = {
    "MASTER_PORT": "a free port, another one each time",
    "MASTER_ADDR": "torchrun takes the host's name, which may not resolve",
    "TORCHELASTIC_RUN_ID": "a random id",
    "TORCHELASTIC_ERROR_FILE": "lies in the folder of the run, whose name is random",
    "PHALANX_RUN": "ours: the id of the run",
    "PHALANX_RUN_FOLDER": "ours: where its files lie",
    "PHALANX_TOPOLOGY": "ours: which ranks share a node",
    "PHALANX_AGENT": "ours: where a worker that can regroup reaches its agent",
    "PHALANX_MEMORY": "ours: where a worker asks for memory that outlives it",
}


@dataclass(frozen=True)
class Case:
    """The words after the launcher's name. `{work}` stands for a folder that only this case has."""

    name: str
    options: tuple[str, ...] = ("--nproc-per-node", "1")
    before: tuple[str, ...] = ()  # words before the launcher: nice, sh -c …
    script: tuple[str, ...] = ("report.py",)
    args: tuple[str, ...] = ()
    ranks: int = 1
    cwd: str = SCRIPTS
    env: Mapping[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()  # variables that are set in this case, and must be equal
    only: tuple[str, ...] = ()  # fields to compare, if torchrun itself does not run the script like python
    torch: bool = True  # False: the script does not import torch, which would not change the result
    in_terminal: bool = False
    ways: tuple[str, ...] = ("cold",)  # ways to start workers that are compared; each costs a run


@dataclass(frozen=True)
class Observed:
    reports: dict[int, Report]
    result: Result
    env: dict[str, str]  # of the launcher
    ended: dict[int, str]  # what ran at the end of each rank
    logs: dict[str, str]


def observe(
    launcher: Sequence[str], case: Case, work: str, *, env: Env | None = None, imported: Torchrun | None = None
) -> Observed:
    """Run the script and return its report. `imported`: use a forked torchrun, if its own start is not part of the
    case.
    """
    out = f"{work}/out"
    os.makedirs(out)

    def filled(words: Sequence[str]) -> list[str]:
        return [word.replace("{work}", work) for word in words]

    typed = [*filled(case.options), *filled(case.script), "--out", out, *case.args]
    if not case.torch:
        typed.append("--without-torch")
    words = [*case.before, *launcher, *typed]
    cwd = case.cwd.replace("{work}", work)
    env = {**(env or {}), **case.env}
    if tuple(launcher) == TORCHRUN:
        env["TMPDIR"] = tmp = f"{work}/tmp"  # it leaves its log folders there
        os.makedirs(tmp)
    try:
        if case.in_terminal:
            result = _in_terminal(words, env, cwd)
            env["TERM"] = "xterm-256color"
        elif imported is not None and not case.before:
            result = imported(*typed, env=env, cwd=cwd, timeout=120)
        else:
            result = run(words, env=env, cwd=cwd, timeout=120)
        assert result.code == 0, f"{' '.join(words)}: exit code {result.code}\n{result.out}{result.err}"
        return Observed(
            reports={rank: json.loads(_text(f"{out}/{rank}.json")) for rank in range(case.ranks)},
            result=result,
            env=environment(env),
            ended={rank: _text(f"{out}/{rank}.atexit") for rank in range(case.ranks)},
            logs=dict(_logs(f"{work}/logs")),
        )
    finally:
        shutil.rmtree(out)
        for left in ("logs", "tmp"):
            shutil.rmtree(f"{work}/{left}", ignore_errors=True)


def _in_terminal(words: Sequence[str], env: Mapping[str, str], cwd: str) -> Result:
    with terminal(words=words, env=env, cwd=cwd) as job:
        code = job.wait(120)
        return Result(code, job.out, "", 0)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _logs(folder: str) -> Iterator[tuple[str, str]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = f"{root}/{name}"
            inside = os.path.relpath(path, folder).split("/", 1)  # the first is the folder of the run
            yield inside[-1], _text(path)


def changes(report: Report, launcher: Mapping[str, str]) -> dict[str, str | None]:
    """Return the launcher's changes of the environment; None for a variable that it removed."""
    env = report["env"]
    return {name: env.get(name) for name in env.keys() | launcher.keys() if env.get(name) != launcher.get(name)}


def differences(theirs: Observed, ours: Observed, case: Case, *, warm: bool = False) -> list[str]:
    """Return a line for each difference between torchrun's worker and ours."""
    if warm:
        ours = replace(ours, reports={rank: _without_warmth(report) for rank, report in ours.reports.items()})
    found = [f"rank {rank}, {line}" for rank in range(case.ranks) for line in _of_rank(theirs, ours, rank, case)]
    for stream in ("out", "err"):
        shown = [SHOWN.findall(getattr(seen.result, stream)) for seen in (theirs, ours)]
        found += _unequal(f"shown on std{stream}", *map(sorted, shown))
    for name, text in theirs.logs.items():
        found += _unequal(f"log {name}", text, ours.logs.get(name, "no such file"))
    return found


def oddities(ours: Observed, case: Case) -> list[str]:
    """Check what must hold for our worker alone, because it cannot be equal."""
    found = []
    for name in ours.reports[0]["chance"]:
        values = [report["chance"][name] for report in ours.reports.values()]
        if len(set(values)) < case.ranks:
            found.append(f"{name} is the same in two ranks: {values}")
    for rank, report in ours.reports.items():
        env = report["env"]
        if not env["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json"):
            found.append(f"rank {rank}, TORCHELASTIC_ERROR_FILE: {env['TORCHELASTIC_ERROR_FILE']}")
        if not 0 < int(env["MASTER_PORT"]) < 65536:
            found.append(f"rank {rank}, MASTER_PORT: {env['MASTER_PORT']}")
        with socket.socket() as here:
            here.bind((env["MASTER_ADDR"], 0))  # fails unless it is an address of this machine
    return found


def _of_rank(theirs: Observed, ours: Observed, rank: int, case: Case) -> Iterator[str]:
    torch, phalanx = (_even(seen.reports[rank]) for seen in (theirs, ours))
    for name in sorted(torch.keys() | phalanx.keys()):
        if name in ALLOWED or (case.only and name not in case.only):
            continue
        if case.in_terminal and rank and name in ("fd kinds", "streams"):
            continue  # only rank 0 has the terminal: output of others is read, and shown with a prefix
        yield from _unequal(name, torch.get(name, "nothing"), phalanx.get(name, "nothing"))
    allowed = ALLOWED_ENV.keys() - set(case.exact)
    torch_env, phalanx_env = changes(torch, theirs.env), changes(phalanx, ours.env)
    for name in sorted((torch_env.keys() | phalanx_env.keys()) - allowed):
        values = [env.get(name, "as it was") for env in (torch_env, phalanx_env)]
        yield from _unequal(f"variable {name}", *values)
    if not case.only and (missing := set(torch["modules"]) - set(phalanx["modules"])):
        yield f"not imported: {sorted(missing)}"
    yield from _unequal("end", theirs.ended[rank], ours.ended[rank])


def _without_warmth(report: Report) -> Report:
    """Remove the differences that are allowed in a worker of a warm fork server, each with its reason."""
    words, frames = list(report["cmdline"]), list(report["frames"])
    # The memory of the command line has spare space, which not every kernel allows to shrink.
    while words[-2:] == ["", ""]:
        words.pop()
    # The script was not known when the interpreter was started, so Python itself does not run it.
    if frames[-1:] == ["<module> in warm_main.py"]:
        frames.pop()
    even = report | {"cmdline": words, "frames": frames}
    # torch._dynamo is imported, and sympy with it.
    if filters := report.get("warnings filters"):
        even["warnings filters"] = [entry for entry in filters if "sympy" not in entry]
    return even


def _without_probe(report: Report) -> Report:
    """Remove what a worker's probe needs: a thread, two signals, and descriptors with high numbers.

    Descriptors that torch's import leaves open have high numbers, too.
    """
    high = min(report["limits"]["RLIMIT_NOFILE"][0], 4096) - preload.RESERVED
    fds = [row for row in report["other fds"] if int(row.split()[0]) < high]
    if fds == report["other fds"]:
        return report
    ours = 1 << probe.SIGNAL - 1 | 1 << debugger.SIGNAL - 1
    caught = int(report["kernel signals"]["SigCgt"], 16) & ~ours
    signals = report["kernel signals"] | {"SigCgt": f"{caught:016x}"}
    return report | {"other fds": fds, "native threads": report["native threads"] - 1, "kernel signals": signals}


def _even(report: Report) -> Report:
    report = _without_probe(report)
    # Finds modules that were imported before the fork.
    importers = [kind for kind in report["path of importers"] if kind != "Preloaded"]
    report = report | {"path of importers": importers}
    stdin, *written = report["fd kinds"]
    return report | {"fd kinds": [stdin, *("no terminal" if kind in NO_TERMINAL else kind for kind in written)]}


def _unequal(name: str, torch: Any, phalanx: Any) -> Iterator[str]:
    if torch == phalanx:
        return
    if isinstance(torch, dict) and isinstance(phalanx, dict):
        for key in sorted(torch.keys() | phalanx.keys()):
            yield from _unequal(f"{name}[{key}]", torch.get(key, "nothing"), phalanx.get(key, "nothing"))
    elif isinstance(torch, list) and isinstance(phalanx, list) and len(torch) == len(phalanx):
        for place, (one, other) in enumerate(zip(torch, phalanx, strict=True)):
            yield from _unequal(f"{name}[{place}]", one, other)
    else:
        yield f"{name}:\n    torchrun {_short(torch)}\n    phalanx  {_short(phalanx)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 1000 else f"{text[:900]} … ({len(text)} characters)"
