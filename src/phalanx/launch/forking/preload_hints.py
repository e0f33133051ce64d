"""What a fork server should import for a script: guessed from its text, and learned from its earlier runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.forkserver import paths
from phalanx.launch.command import Command
from phalanx.launch.forking import script_environment

# Building an optimizer, wrapping or compiling a model each import this, slowly, in every rank.
_TRAINING = re.compile(
    r"\boptim\b|\bcompile\b|DistributedDataParallel|fully_shard|FSDP|Trainer\b|[Ll]ightning|[Aa]ccelerat"
)
_DYNAMO = "torch._dynamo"
_WITH_US = re.compile(r"^\s*(import|from) phalanx\b", re.MULTILINE)
_OURS = (*paths.TRAINING, "psutil", "encodings.idna")  # what it takes to join, too

# Known to start no thread, no process and no device when imported, and to read nothing that differs between ranks.
_SAFE = frozenset(
    """
    torch torchvision torchdata numpy scipy pandas PIL yaml sympy mpmath networkx jinja2 markupsafe packaging fsspec
    safetensors einops filelock typing_extensions phalanx psutil msgspec
    """.split()  # noqa: SIM905
)
_UNSAFE = ("torch._inductor", "torch.utils.tensorboard", "torch.testing", "torch.cuda.tunable", "torch._dynamo.test")


@dataclass(frozen=True)
class PreloadHints:
    """Where a script's lesson lies, and what is known so far."""

    path: str
    modules: tuple[str, ...] = ()  # welcome, not required
    variables: Mapping[str, str | None] = field(default_factory=dict)  # that the script sets before it imports torch
    varying: tuple[str, ...] = ()  # the same, but not to one value: no import before the fork can know it
    seen: bool = False  # in an earlier run; else these variables are a guess
    script: str = ""  # a digest of its text: what is known about variables holds for that text alone

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the fork server's imports are to see."""
        merged = {**environ, **self.variables}
        return {name: value for name, value in merged.items() if value is not None}

    def refuse(self) -> None:
        """What was learned made the fork server unsafe to fork: do not learn it again."""
        with contextlib.suppress(OSError), open(f"{self.path}.refused", "w"):
            pass

    def learned(self, ranks: Sequence[Mapping[str, str | None]]) -> PreloadHints:
        """After ranks have imported torch with other values than were assumed: theirs, and which have more than one."""
        values: dict[str, set[str | None]] = {}
        for variables in [*([self.variables] if self.seen else []), *ranks]:
            for name, value in variables.items():
                values.setdefault(name, set()).add(value)
        several = {name for name, found in values.items() if len(found) > 1}
        known = {**self.variables, **{name: value for variables in ranks for name, value in variables.items()}}
        return replace(self, variables=known, varying=tuple(sorted({*self.varying, *several})), seen=True)

    def keep(self) -> None:
        """For the next run."""
        record = {"script": self.script, "variables": dict(self.variables), "varying": self.varying}
        with contextlib.suppress(OSError):
            with open(f"{self.path}.variables.part", "w") as file:
                json.dump(record, file)
            os.replace(f"{self.path}.variables.part", f"{self.path}.variables")


def recall(command: Command, base: str, environ: Mapping[str, str]) -> PreloadHints:
    """What its text suggests, and what an earlier run has shown."""
    source = _source(command)
    folder = os.path.join(base, "lessons")
    name = f"{command.python}\0{command.kind}\0{source or command.target}"
    key = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:24]
    path = os.path.join(folder, f"{key}.json")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    text = _read(source)
    sets = script_environment.read(source, command.path0, environ)
    lesson = _variables(PreloadHints(path, variables=sets.before, script=hashlib.sha256(text.encode()).hexdigest()))
    if os.path.exists(f"{path}.refused") or sets.later:  # each of these is read when one of those is imported
        return lesson
    learned: list[str] = []
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        learned = [name for name in json.load(file) if isinstance(name, str) and _is_safe(name)]
    guessed = [name for name in guess(text) if name not in _OURS or not _shadowed(command.path0)]
    return replace(lesson, modules=tuple(dict.fromkeys([*guessed, *learned])))


def _variables(lesson: PreloadHints) -> PreloadHints:
    """With what an earlier run of the same text has shown."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        with open(f"{lesson.path}.variables") as file:
            record = json.load(file)
        if record["script"] == lesson.script:
            variables = {
                str(name): None if value is None else str(value) for name, value in record["variables"].items()
            }
            return replace(lesson, variables=variables, varying=tuple(map(str, record["varying"])), seen=True)
    return lesson


def guess(text: str) -> tuple[str, ...]:
    """From a script's text alone: does it train, and with us?"""
    return (*([_DYNAMO] if _TRAINING.search(text) else []), *(_OURS if _WITH_US.search(text) else ()))


def _shadowed(path0: str | None) -> bool:
    """Whether `import phalanx` is of something of the user's own beside the script."""
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
