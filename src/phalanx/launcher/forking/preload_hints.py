"""The modules that a fork server should import for a script: guessed from its text, learned from earlier runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.forkserver import paths
from phalanx.launcher.command import Command
from phalanx.launcher.forking import script_environment

# Creating an optimizer, wrapping or compiling a model each import this, slowly, in every rank.
_TRAINING = re.compile(
    r"\boptim\b|\bcompile\b|DistributedDataParallel|fully_shard|FSDP|Trainer\b|[Ll]ightning|[Aa]ccelerat"
)
_DYNAMO = "torch._dynamo"
_WITH_US = re.compile(r"^[ \t]*(?:from[ \t]+|import\b[^#\n]*(?<![\w.]))phalanx\b", re.MULTILINE)
_OURS = (*paths.TRAINING, "psutil", "encodings.idna")  # includes what joining needs

# Known to start no thread, process or device on import, and to read nothing that differs between ranks.
_SAFE = frozenset(
    """
    torch torchvision torchdata numpy scipy pandas PIL yaml sympy mpmath networkx jinja2 markupsafe packaging fsspec
    safetensors einops filelock typing_extensions phalanx psutil msgspec
    """.split()  # noqa: SIM905
)
_UNSAFE = ("torch._inductor", "torch.utils.tensorboard", "torch.testing", "torch.cuda.tunable", "torch._dynamo.test")


@dataclass(frozen=True)
class PreloadHints:
    """What is known about a script, and the file that keeps it."""

    path: str
    modules: tuple[str, ...] = ()  # useful, but not required
    variables: Mapping[str, str | None] = field(
        default_factory=dict
    )  # set by the script before it imports torch; None: unset
    varying: tuple[
        str, ...
    ] = ()  # the same, but with different values per rank: no import before the fork can know them
    seen: bool = False  # the variables are from an earlier run, rather than guessed
    script: str = ""  # digest of its text, for which the variables were learned

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the imports of the fork server."""
        merged = {**environ, **self.variables}
        return {name: value for name, value in merged.items() if value is not None}

    def refuse(self) -> None:
        """Record that the learned modules made the fork server unsafe to fork."""
        with contextlib.suppress(OSError), open(f"{self.path}.refused", "w"):
            pass

    def learned(self, ranks: Sequence[Mapping[str, str | None]]) -> PreloadHints:
        """Return hints with the values that ranks had when they imported torch, and which of them vary."""
        values: dict[str, set[str | None]] = {}
        for variables in [*([self.variables] if self.seen else []), *ranks]:
            for name, value in variables.items():
                values.setdefault(name, set()).add(value)
        several = {name for name, found in values.items() if len(found) > 1}
        known = {**self.variables, **{name: value for variables in ranks for name, value in variables.items()}}
        return replace(self, variables=known, varying=tuple(sorted({*self.varying, *several})), seen=True)

    def save(self) -> None:
        """Save the variables for the next run."""
        record = {"script": self.script, "variables": dict(self.variables), "varying": self.varying}
        with contextlib.suppress(OSError):
            with open(f"{self.path}.variables.part", "w") as file:
                json.dump(record, file)
            os.replace(f"{self.path}.variables.part", f"{self.path}.variables")


def load(command: Command, base: str, environ: Mapping[str, str]) -> PreloadHints:
    """Return the hints for a command, from its text and earlier runs."""
    source = _source(command)
    folder = os.path.join(base, "hints")
    name = f"{command.python}\0{command.kind}\0{source or command.target}"
    key = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:24]
    path = os.path.join(folder, f"{key}.json")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    text = _read(source)
    sets = script_environment.read(source, command.path0, environ)
    hints = _variables(PreloadHints(path, variables=sets.before, script=hashlib.sha256(text.encode()).hexdigest()))
    if (
        os.path.exists(f"{path}.refused") or sets.later
    ):  # modules would read these variables before the script sets them
        return hints
    learned: list[str] = []
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        learned = [name for name in json.load(file) if isinstance(name, str) and _is_safe(name)]
    guessed = [name for name in guess(text) if name not in _OURS or not _shadowed(command.path0)]
    return replace(hints, modules=tuple(dict.fromkeys([*guessed, *learned])))


def _variables(hints: PreloadHints) -> PreloadHints:
    """Add the variables learned in an earlier run of the same text."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        with open(f"{hints.path}.variables") as file:
            record = json.load(file)
        if record["script"] == hints.script:
            variables = {
                str(name): None if value is None else str(value) for name, value in record["variables"].items()
            }
            return replace(hints, variables=variables, varying=tuple(map(str, record["varying"])), seen=True)
    return hints


def guess(text: str) -> tuple[str, ...]:
    """Guess modules from the text of a script: does it train, and does it use phalanx?"""
    return (*([_DYNAMO] if _TRAINING.search(text) else []), *(_OURS if _WITH_US.search(text) else ()))


def _shadowed(path0: str | None) -> bool:
    """Return whether `import phalanx` would import a file of the user beside the script."""
    own = os.path.dirname(paths.ROOT)
    found = [os.path.join(path0 or "", name) for name in ("phalanx", "phalanx.py")]
    return any(os.path.exists(path) and os.path.realpath(path) != os.path.realpath(own) for path in found)


def _is_safe(name: str) -> bool:
    return name.partition(".")[0] in _SAFE and not name.startswith(_UNSAFE)


def _source(command: Command) -> str:
    if command.kind in ("script", "path"):
        path = os.path.realpath(command.target)
        return os.path.join(path, "__main__.py") if os.path.isdir(path) else path
    if command.kind == "module":
        stem = os.path.join(os.getcwd(), *command.target.split("."))
        for candidate in (f"{stem}.py", os.path.join(stem, "__main__.py")):
            if os.path.exists(candidate):
                return candidate
    return ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)
    return ""
