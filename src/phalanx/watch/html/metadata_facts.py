"""The metadata of a run in its report: commit, versions, machine, hyperparameters. Pure."""

from __future__ import annotations

import json

from phalanx.contract.run_metadata import GitState, Machine, RunMetadata
from phalanx.watch.charts import formatting
from phalanx.watch.html import masking
from phalanx.watch.html.markup import Html, table


def pairs(metadata: RunMetadata | None) -> list[tuple[str, str]]:
    """Return names and texts for a list of facts. An empty text means unknown."""
    if metadata is None:
        return []
    return [
        ("commit", _commit(metadata.git)),
        ("versions", ", ".join(f"{name} {version}" for name, version in metadata.versions.items())),
        ("machine", _machine(metadata.machine)),
        ("not recorded", "; ".join(metadata.notes)),
    ]


def hyperparameters(metadata: RunMetadata | None) -> Html | None:
    """Return a table of the hyperparameters. None: there are none."""
    if metadata is None or not metadata.hyperparameters:
        return None
    rows = [
        (name, masking.value_of(name, value if isinstance(value, str) else json.dumps(value)))
        for name, value in metadata.hyperparameters.items()
    ]
    return table(("hyperparameter", "value"), rows)


def _commit(git: GitState | None) -> str:
    if git is None:
        return ""
    branch = f" ({git.branch})" if git.branch else ""
    return f"{git.commit or 'none yet'}{branch}{', with uncommitted changes' if git.dirty else ''}"


def _machine(machine: Machine | None) -> str:
    if machine is None:
        return ""
    gpus: dict[str, int] = {}
    for gpu in machine.gpus:
        gpus[gpu.name] = gpus.get(gpu.name, 0) + 1
    parts = [
        f"{machine.cpus} CPUs ({machine.cpu})" if machine.cpu else f"{machine.cpus} CPUs",
        formatting.size(machine.memory),
        *(f"{number} × {name}" for name, number in gpus.items()),
        f"driver {machine.driver}" if machine.driver else "",
        machine.system,
    ]
    return ", ".join(filter(None, parts))
