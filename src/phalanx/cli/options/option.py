"""The declaration of one command line option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from phalanx.cli.options.values import ValueKind

Origin = Literal["torchrun", "torchrun 2.15", "torch.distributed.launch", "phalanx"]


class Option(NamedTuple):
    """One option: how it is spelled, parsed and documented, and what it sets.

    Flat, because it is a row of table.py, in which most columns keep their defaults.
    """

    section: str
    name: str  # the long spelling with dashes; underscores are accepted too
    help: str
    kind: ValueKind | None = None  # None: a flag
    default: str | None = None  # as it would be typed
    short: str = ""
    aliases: tuple[str, ...] = ()  # phalanx's additional spellings of a torchrun option
    origin: Origin = "torchrun"
    pet: bool = True  # the default is taken from PET_<NAME>, as in torchrun
    fallback: str = ""  # another environment variable for the default
    attached: tuple[str, ...] = ()  # values that a flag accepts after `=` only
    no_effect: str = ""  # why the option has no effect
    only: str = ""  # the only verb that accepts it; empty: all
    field: str = ""  # the field of RunOptions that it sets, as `group.name`
    exports: str = ""  # the environment variable of the workers that it sets
    convert: Callable[[Any], Any] | None = None  # converts the parsed value, or None, to the value of the field
    brief: str = ""  # one line for `--help`, if the first sentence of `help` does not fit

    @property
    def dest(self) -> str:
        """Return the name of the parsed value: `--log-dir` is `log_dir`."""
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """Return the PET_ variable that gives the default, or an empty string."""
        return f"PET_{self.dest.upper()}" if self.pet and self.origin.startswith("torchrun") else ""

    @property
    def torchrun_spellings(self) -> tuple[str, ...]:
        """Return the names that torchrun itself accepts."""
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, _underscored(self.name)))))

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all accepted names."""
        own = (spelling for alias in self.aliases for spelling in (alias, _underscored(alias)))
        return tuple(dict.fromkeys((*self.torchrun_spellings, *own)))

    @property
    def shown(self) -> tuple[str, ...]:
        """Return the names for help and documentation: short ones first, none with underscores."""
        names = (name for name in (self.short, *self.aliases, self.name) if name)
        return tuple(sorted(names, key=lambda name: name.startswith("--")))

    def field_value(self, value: Any) -> Any:
        """Return the value of the field or exported variable for a parsed value."""
        return value if self.convert is None else self.convert(value)


def _underscored(name: str) -> str:
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
