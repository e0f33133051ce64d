"""One option of the command line, as a row of the table."""

from __future__ import annotations

from typing import Literal, NamedTuple

from phalanx.cli.options.values import ValueKind

Origin = Literal["torchrun", "torchrun 2.15", "torch.distributed.launch", "phalanx"]


class Option(NamedTuple):
    section: str
    name: str  # the long spelling with dashes; the one with underscores goes without saying
    help: str
    kind: ValueKind | None = None  # None: a flag
    default: str | None = None  # as it would be typed
    short: str = ""
    aliases: tuple[str, ...] = ()  # phalanx's other spellings of an option of torchrun
    origin: Origin = "torchrun"
    pet: bool = True  # the default is taken from PET_<NAME>, as torchrun does
    repeated: bool = False
    attached: tuple[str, ...] = ()  # values that a flag takes behind `=` only
    no_effect: str = ""  # why there is nothing left for it to do
    only: str = ""  # the one verb that knows it

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}" if self.pet and self.origin.startswith("torchrun") else ""

    @property
    def torchrun_spellings(self) -> tuple[str, ...]:
        """What torchrun itself knows this option as."""
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, _underscored(self.name)))))

    @property
    def spellings(self) -> tuple[str, ...]:
        own = (spelling for alias in self.aliases for spelling in (alias, _underscored(alias)))
        return tuple(dict.fromkeys((*self.torchrun_spellings, *own)))

    @property
    def shown(self) -> tuple[str, ...]:
        """The spellings to show to people: short ones first, none with underscores."""
        names = (name for name in (self.short, *self.aliases, self.name) if name)
        return tuple(sorted(names, key=lambda name: name.startswith("--")))


def _underscored(name: str) -> str:
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
