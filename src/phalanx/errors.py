"""Every exception of phalanx.

    PhalanxError
    ├── UsageError          what the user typed cannot be done: exit code 2, no traceback
    │   ├── OptionError     an option, or its value
    │   ├── ScriptError     the script or module to run
    │   ├── DeviceError     devices or slots that are not there
    │   ├── PortError       an address or port that cannot be had
    │   └── TokenError      the secret that lets nodes in
    ├── LaunchError         what was asked is sound, but this machine could not start it: exit code 1
    │   ├── JoinError       the nodes did not come together
    │   └── RankError       a rank of `phalanx.spawn` failed
    └── CheckpointError     a checkpoint could not be written, is not what was written, or does not fit

A message has the same three parts everywhere: what was seen, details a line each, and what to type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PhalanxError(Exception):
    """What was seen (`what`), what is known about it (`details`), what to type (`fix`)."""

    exit_code = 1

    def __init__(self, what: str, *, details: tuple[str, ...] | list[str] = (), fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.details = tuple(details)
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.details)]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class UsageError(PhalanxError):
    exit_code = 2


class OptionError(UsageError):
    pass


class ScriptError(UsageError):
    pass


class DeviceError(UsageError):
    pass


class PortError(UsageError):
    pass


class TokenError(UsageError):
    pass


class LaunchError(PhalanxError):
    pass


class JoinError(LaunchError):
    """The nodes did not come together. `by_host`: the error of each host, if it is about single hosts."""

    def __init__(
        self,
        what: str,
        *,
        details: tuple[str, ...] | list[str] = (),
        fix: str = "",
        by_host: Mapping[str, JoinError] | None = None,
    ) -> None:
        super().__init__(what, details=details, fix=fix)
        self.by_host = dict(by_host or {})


class RankError(LaunchError):
    """A rank failed: `rank`, its `traceback` as text; the exception itself, where it could be sent, is the cause."""

    def __init__(
        self, what: str, *, rank: int, traceback: str = "", details: Sequence[str] = (), fix: str = ""
    ) -> None:
        super().__init__(what, details=[*traceback.rstrip().splitlines(), *details], fix=fix)
        self.rank = rank
        self.traceback = traceback


class CheckpointError(PhalanxError):
    pass
