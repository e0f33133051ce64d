"""What a scheduler reports about this process: its task, or the allocated nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.contract.ranks.placement import MAX_RANKS, PartialPlacement
from phalanx.errors import UsageError

_MOST_DIGITS = 10  # no number of a scheduler is larger

BY_HAND = "on every node: phalanx run -n NODES -i NODE_ID --master HOST:PORT …"


@dataclass(frozen=True)
class SchedulerTask:
    """This process as a task of a scheduler."""

    source: str  # "Slurm", "Open MPI", "MPICH" or "Intel MPI", for messages
    job: str  # the same in all tasks of the job (and step) and in no other; safe as a file name; "": no name
    placement: PartialPlacement
    hosts: tuple[str, ...] = ()  # by node rank, if known
    variables: Mapping[str, str] = field(default_factory=dict)  # the variables that were read, for messages

    @property
    def one_a_node(self) -> bool | None:
        """True: each task has its own node. False: each task is one rank. None: unknown."""
        placement = self.placement
        if placement.node_count is not None:
            return placement.node_count == placement.world_size  # every node has a task
        if self.local_tasks > 1:
            return False
        # It is alone on this node. It cannot know whether the others are alone on theirs.
        return True if placement.world_size == 1 else None

    @property
    def local_tasks(self) -> int:
        """The number of tasks on this node, as far as is known."""
        return self.placement.local_world_size or 1


@dataclass(frozen=True)
class Allocation:
    """Nodes of a scheduler on which no tasks run yet."""

    source: str
    job: str
    hosts: tuple[str, ...]
    tasks: tuple[int, ...] = ()  # requested per node; empty: unknown
    here: str | None = None  # the node of this process, if it is one of them
    variables: Mapping[str, str] = field(default_factory=dict)


class Variables:
    """Reads the variables of a source, records which were read, and rejects incomplete ones."""

    def __init__(self, source: str, environ: Mapping[str, str], *, fix: str) -> None:
        self.source = source
        self.environ = environ
        self.fix = fix
        self.found: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """Return the first of these variables that is not empty."""
        for name in names:
            if value := self.environ.get(name, "").strip():
                self.found[name] = value
                return value
        return None

    def needed(self, *names: str) -> str:
        """Return the first of these variables that is set. Raises UsageError."""
        value = self.text(*names)
        if value is None:
            raise self.refuse(f"{names[0]} is not set" if len(names) == 1 else f"none of {', '.join(names)} is set")
        return value

    def number(self, *names: str, least: int = 0, below: int | None = None) -> int:
        """Return the first of these variables as a number, at least `least` and less than `below`."""
        value = self.needed(*names)
        name = next(name for name in names if name in self.found)
        # int() would accept "+1", "1_0" and digits of other scripts.
        if not re.fullmatch(r"\d+", value, re.ASCII):
            raise self.refuse(f"{name}={value!r} is not a number", f"expected a whole number from {least} on")
        number = int(value) if len(value) <= _MOST_DIGITS else None
        if number is None or number < least or (below is not None and number >= below):
            span = f"from {least} on" if below is None else f"from {least} to {below - 1}"
            raise self.refuse(f"{name}={value} cannot be", f"expected {span}")
        return number

    def size(self, *names: str, below: int | None = None) -> int:
        """Return the first of these variables as a number of ranks or nodes."""
        return self.number(*names, least=1, below=MAX_RANKS + 1 if below is None else below)

    def index(self, *names: str, below: int | None = None) -> int:
        """Return the first of these variables as the number of a rank or a node, counted from 0."""
        return self.number(*names, below=MAX_RANKS if below is None else below)

    def refuse(self, what: str, *details: str, fix: str = "") -> UsageError:
        """Return an error about contradictory variables."""
        seen = " ".join(f"{name}={value}" for name, value in self.found.items())
        return UsageError(
            f"{self.source} says where this process runs, but {what}.",
            details=[*details, *([f"seen: {seen}"] if seen else [])],
            fix=fix or self.fix,
        )


def file_name(*parts: str) -> str:
    """Return a name for a job that any file system accepts."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(part for part in parts if part))[:200]
